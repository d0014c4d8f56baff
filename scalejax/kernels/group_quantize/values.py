"""What every implementation does to a value, in operations whose bits are the same on every platform.

No division, which some platforms round otherwise, and no product that meets a sum before it is rounded: compilers make
one operation of the two where they can, and others do not.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics import bits as float32
from scalejax.numerics.stochastic import hash_bits

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32, UInt32

TRANSFORM = 32
"""Values that a Hadamard transform mixes."""

HALVES = (1, 2, 4, 8, 16)
"""Distances of the pairs that its stages add and subtract."""

_FRACTION = 24
"""Bits of the fraction of a level: 127 and a fraction fill an int32."""
NAN = 0x7FC00000
"""Bits of the usual NaN."""


def top_level(bits: int) -> int:
    """The largest level: 7 of 4 bits, 127 of 8."""
    return 2 ** (bits - 1) - 1


def magnitude(x: "Float32[Array, '*shape']") -> "Int32[Array, '*shape']":
    """int32[...], bits ordered like |x|; those of NaN are above all."""
    return lax.bitcast_convert_type(x, jnp.int32) & float32.MAGNITUDE


def scale_and_factor(
    largest: "Int32[Array, '*shape']", bits: int
) -> tuple["Float32[Array, '*shape']", "Float32[Array, '*shape']"]:
    """(scales, what makes levels of values) of groups.

    Args:
      largest: int32[...], bits of the largest magnitudes.
      bits: 4 or 8.
    """
    top = top_level(bits)
    value = lax.bitcast_convert_type(largest, jnp.float32)
    # A subnormal scale is 0 on some devices, and its inverse is infinite: such a group is one of zeros.
    zero = value < top * float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(zero, 0, value * jnp.float32(1 / top))
    # top / value by Newton's iteration for the inverse of the significand, from 12 % off to the last bit in three.
    significand = (largest & 0x7FFFFF) | 0x3F800000
    one_to_two = lax.bitcast_convert_type(significand, jnp.float32)
    inverse = lax.bitcast_convert_type(0x7EF311C7 - significand, jnp.float32)
    for _ in range(3):
        inverse = inverse * (2 - rounded(one_to_two * inverse))
    exponent = (largest & float32.INFINITY) - (127 << 23)
    factor = lax.bitcast_convert_type(lax.bitcast_convert_type(inverse * top, jnp.int32) - exponent, jnp.float32)
    finite = largest < float32.INFINITY
    return jnp.where(finite, scale, jnp.nan), jnp.where(zero | ~finite, 0, factor)


def chance(seed: "UInt32[Array, '']", place: "UInt32[Array, '*shape']") -> "Int32[Array, '*shape']":
    """int32[...] in [0, 2^24), by place: no more than one round of the hash a value, the seed is mixed once."""
    return (hash_bits(seed, place) >> 8).astype(jnp.int32)


def level(
    x: "Float32[Array, '*shape']",
    factor: "Float32[Array, '*shape']",
    bits: int,
    drawn: "Int32[Array, '*shape'] | None",
) -> "Int32[Array, '*shape']":
    """int32[...], levels of values; 0 where a group held NaN or infinities.

    Args:
      x: float32[...].
      factor: float32 that broadcasts, of `scale_and_factor`.
      bits: 4 or 8.
      drawn: int32[...], of `chance`; None rounds to nearest, ties to even.
    """
    most = top_level(bits) << _FRACTION
    fixed = jnp.clip((x * factor * 2.0**_FRACTION).astype(jnp.int32), -most, most)
    if drawn is None:
        drawn = (1 << (_FRACTION - 1)) - 1 + ((fixed >> _FRACTION) & 1)
    return (fixed + drawn) >> _FRACTION


def value(level: "Int32[Array, '*shape']", scale: "Float32[Array, '*shape']") -> "Float32[Array, '*shape']":
    """float32[...] of levels and the scales of their groups."""
    return rounded(level.astype(jnp.float32) * scale)


def in_bytes(level: "Int32[Array, '*groups 2 half']") -> "Int32[Array, '*groups half']":
    """int32[..., half], 0 to 255: the levels of the first half of a group in the low halves of bytes."""
    # A sum: XLA joins it with no reshape behind it, which on a CPU would make a loop over single bytes of the whole.
    return jnp.sum((level & 15) << 4 * lax.broadcasted_iota(jnp.int32, level.shape, level.ndim - 2), axis=-2)


def from_bytes(codes: "Int32[Array, '*groups half']") -> "Int32[Array, '*groups 2 half']":
    """int32[..., 2, half], the inverse of `in_bytes`."""
    both = jnp.broadcast_to(codes[..., None, :], (*codes.shape[:-1], 2, codes.shape[-1]))
    return signed(both >> 4 * lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 2), 4)


def signed(code: "Int32[Array, '*shape']", bits: int) -> "Int32[Array, '*shape']":
    """int32[...], what the lowest bits are as a signed number."""
    return (code << (32 - bits)) >> (32 - bits)


def rounded(product: "Float32[Array, '*shape']") -> "Float32[Array, '*shape']":
    """The same, which no compiler merges with a sum: it cannot know that no NaN but the usual one occurs."""
    return lax.bitcast_convert_type(jnp.minimum(lax.bitcast_convert_type(product, jnp.int32), NAN), jnp.float32)


def mixed_seed(seed: jax.Array) -> jax.Array:
    """uint32[] of uint32[2]."""
    return hash_bits(seed[0], seed[1])
