"""Dropout with an explicit key."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def dropout(
    x: "Float[Array, '*batch features']", rate: float, key: jax.Array | None
) -> "Float[Array, '*batch features']":
    """Zeroes each element with probability `rate` and divides the others by 1 - rate; key=None returns x.

    Random bits are the largest cost of dropout on a CPU, so one 32-bit draw serves two elements: the rate is rounded
    to a multiple of 2^-16 and the survivors are scaled by the rounded rate, which keeps the mean unbiased.

    Args:
      x: float[..., N].
      rate: In [0, 1).
      key: PRNG key, or None.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate must lie in [0, 1); got {rate}.")
    dropped = round(rate * 65536)  # of 65,536 values
    if key is None or dropped == 0:
        return x
    pairs = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 2)), jnp.uint32)
    draws = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return jnp.where(draws >= jnp.uint16(dropped), x * (65536 / (65536 - dropped)), jnp.zeros_like(x))
