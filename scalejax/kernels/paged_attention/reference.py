"""The definition: the pages of each row gathered, then attention."""

from typing import Literal

import jax
import jax.numpy as jnp

from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.flash_attention.reference import sum_dtype
from scalejax.kernels.paged_attention.pages import PagedKeys


def attention(
    q: jax.Array,
    keys: PagedKeys,
    query_positions: jax.Array,
    window: int | None,
    scale: float,
    *,
    implementation: Literal["reference", "xla"],
) -> tuple[jax.Array, jax.Array]:
    """As `api.paged_attention`, by the implementation of `flash_attention` of the same name."""
    k, v = keys.layout.apart(keys.pages[keys.table])
    if keys.scales is not None:
        of_key, of_value = keys.layout.apart(keys.scales[keys.table])
        wide = sum_dtype(q.dtype)
        k, v = k.astype(wide) * of_key[..., None], v.astype(wide) * of_value[..., None]
    out, lse = flash_attention(
        q[:, None],
        k.astype(q.dtype),
        v.astype(q.dtype),
        query_positions=query_positions[:, None],
        key_positions=keys.positions_of(keys.table).reshape(q.shape[0], -1),
        window=window,
        scale=scale,
        implementation=implementation,
    )
    return out[:, 0], lse[:, :, 0]


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out float32[B, S, H, D], lse float32[B, S, H]) of S sets of keys -> [B, H, D], [B, H] of all."""
    highest = lse.max(axis=1, keepdims=True)
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)  # where no set has a key for it: -inf - -inf is NaN
    weights = jnp.exp(lse - shift)
    total = weights.sum(axis=1)
    sees_any = total > 0
    out = (out * weights[..., None]).sum(axis=1) / jnp.where(sees_any, total, 1.0)[..., None]
    return out, jnp.where(sees_any, jnp.log(jnp.where(sees_any, total, 1.0)) + shift[:, 0], -jnp.inf)
