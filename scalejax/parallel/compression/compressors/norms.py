"""The largest magnitude of each row, its length, and whether it is finite."""

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax.numerics import bits as float32

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float32, Int32


def magnitude_groups(x: "Float32[Array, 'rows n']", size: int) -> "Int32[Array, 'rows groups {size}']":
    """int32[rows, ceil(n / size), size], bits of magnitudes, ordered like them; NaN is an infinity, the end zeros."""
    bits = jnp.minimum(jax.lax.bitcast_convert_type(x, jnp.int32) & float32.MAGNITUDE, float32.INFINITY)
    padding = -x.shape[1] % size
    if padding:
        bits = jnp.pad(bits, ((0, 0), (0, padding)))
    return bits.reshape(x.shape[0], -1, size)


def finite(x: "Float32[Array, 'rows n']") -> "Bool[Array, 'rows']":
    """bool[rows]: whether all values of a row are numbers."""
    return float32.largest_of_rows(x) < float32.INFINITY


def norm(x: "Float32[Array, 'rows n']", kind: Literal["max", "l2"]) -> "Float32[Array, 'rows']":
    """float32[rows]: the largest magnitude or the Euclidean length of each row; NaN where that is not finite."""
    largest = float32.largest_of_rows(x)
    value = jax.lax.bitcast_convert_type(largest, jnp.float32)
    if kind == "l2":
        # Under a power of two near the largest, so that no square overflows and few vanish.
        exponent = jnp.clip((254 << 23) - (largest & float32.INFINITY), 1 << 23, 253 << 23)
        factor = jax.lax.bitcast_convert_type(exponent, jnp.float32)
        value = jnp.sqrt(jnp.sum(jnp.square(x * factor[:, None]), axis=1)) / factor
    return jnp.where(jnp.isfinite(value), value, jnp.nan)
