"""The definition, with all scores of all heads in memory: written to be believed."""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.flash_attention.visibility import Visibility


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * q k^T + mask) v and the logarithm of the softmax's denominator, in float32 or wider.

    A derivative by jax's own rules has no NaN: what is hidden is replaced before and after every function that could
    make one of it.

    Returns:
      out [B, S, H, D] in the dtype of q, lse float32[B, H, S] (float64 for float64).
    """
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    dtype = sum_dtype(q.dtype)
    grouped = q.astype(dtype).reshape(batch, queries, kv_heads, heads // kv_heads, width)
    k, v = k.astype(dtype), v.astype(dtype)

    scores = scale * jnp.einsum("bskgd,btkd->bkgst", grouped, k, precision=lax.Precision.HIGHEST)
    visible = jnp.broadcast_to(mask(visibility, batch, queries, keys)[:, None, None], scores.shape)

    highest = jnp.max(scores, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
    highest = lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - highest, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1)

    out = jnp.einsum("bkgst,btkd->bskgd", weights / total, v, precision=lax.Precision.HIGHEST)
    lse = jnp.where(sees_any, jnp.log(total) + highest, -jnp.inf)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, heads, queries)


def sum_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """What sums are made in: float64 for float64, float32 for everything else."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def mask(visibility: Visibility, batch: int, queries: int, keys: int) -> jax.Array:
    """bool[B, S, T]: whether a query sees a key."""
    query, key = (x[:, None] for x in visibility.positions(queries, keys))
    query = jnp.swapaxes(query, 1, 2)  # B S 1
    visible = jnp.ones((batch, queries, keys), bool)
    if visibility.causal:
        visible = visible & (key <= query)
    if visibility.window is not None:
        visible = visible & (query - key < visibility.window)
    if visibility.query_segments is not None and visibility.key_segments is not None:
        visible = visible & (visibility.query_segments[:, :, None] == visibility.key_segments[:, None, :])
    return visible
