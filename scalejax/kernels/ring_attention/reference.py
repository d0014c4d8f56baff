"""The definition: keys and values of all devices gathered, then attention."""

import functools

import jax
from jax import lax

from scalejax.kernels.flash_attention import flash_attention


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    axis: str,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """As `api.ring_attention`."""
    gather = functools.partial(lax.all_gather, axis_name=axis, axis=1, tiled=True)
    return flash_attention(
        q,
        gather(k),
        gather(v),
        query_positions=query_positions,
        key_positions=gather(key_positions),
        window=window,
        scale=scale,
        implementation="reference",
    )
