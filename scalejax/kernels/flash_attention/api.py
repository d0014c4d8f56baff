"""softmax(q k^T scale) v under a causal mask, segments and an offset, in plain jax.numpy."""

import jax
import jax.numpy as jnp


def flash_attention(q, k, v, *, segment_ids=None, query_offset=None, implementation=None):
    """Returns (out [B, S, H, D], log-sum-exp float32[B, H, S])."""
    del implementation
    b, s, h, d = q.shape
    t, groups = k.shape[1], k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    rows = q.reshape(b, s, groups, h // groups, d)
    scores = jnp.einsum("bskgd,btkd->bkgst", rows, k, preferred_element_type=wide) * d**-0.5
    offset = jnp.zeros((b,), jnp.int32) if query_offset is None else jnp.broadcast_to(query_offset, (b,))
    at = offset[:, None] + jnp.arange(s)[None, :]
    seen = jnp.arange(t)[None, None, :] <= at[:, :, None]
    if segment_ids is not None:
        seen &= segment_ids[:, :, None] == segment_ids[:, None, :]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, d)
    return out.astype(q.dtype), lse.reshape(b, h, s)
