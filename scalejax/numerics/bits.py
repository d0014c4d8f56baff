"""Floating point as integers: how every number format here computes, so that all hardware gives the same bits.

    value = (-1)^sign * significand * 2^(exponent - 23),    2^23 <= significand < 2^24

exp2, log2 and pow are inexact on accelerators, division is on some, and TPUs and XLA's CPU threads take subnormal
values for zero. Shifts, additions, products and comparisons of int32 are exact everywhere, also inside Pallas kernels.
The functions below take and give arrays of any shape, gather nothing and keep no state.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.errors import UserError

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, Int32

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
NAN = 0x7FC00000
# The exponent of zero: below that of every float32, whatever scale is subtracted from it.
ZERO_EXPONENT = -276


def check_dtype(dtype: jax.typing.DTypeLike) -> None:
    """Refuses what is not float32, bfloat16 or float16: the dtypes of arrays that formats are made of.

    Raises:
      UserError: says what to do.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        what = "Cast it" if dtype == jnp.float64 else "Formats hold real numbers; cast it"
        raise UserError(f"quantize: x must be float32, bfloat16 or float16; got {dtype.name}. {what} to float32 first.")


def float_bits(values: "Float[Array, '*shape']") -> "Int32[Array, '*shape']":
    """float32, bfloat16 or float16 [...] -> int32[...], the bits of the same values in float32.

    Raises:
      UserError: another dtype.
    """
    dtype = jnp.dtype(values.dtype)
    check_dtype(dtype)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(values, jnp.int32)
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32) << 16
    return from_float16(lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32))


def largest(values: "Float[Array, '*shape']", axes: tuple[int, ...], *, keepdims: bool = False) -> jax.Array:
    """float32: the largest magnitude along axes, 0 of nothing; NaN where there is a NaN.

    XLA's CPU threads lose NaN in maxima of floats along all but short axes (jaxlib 0.10 to 0.12, whatever its flags for
    fast maxima say); those of integers they keep.

    Raises:
      UserError: another dtype than those of `float_bits`.
    """
    found = jnp.max(float_bits(values) & MAGNITUDE, axis=axes, keepdims=keepdims, initial=0)
    return lax.bitcast_convert_type(found, jnp.float32)


def largest_of_rows(values: "Float32[Array, 'rows n']") -> "Int32[Array, 'rows']":
    """int32[rows], bits of the largest magnitude of each row, 0 of nothing; those of a NaN where there is one.

    As `largest` along one axis, which long rows take seven times as long for: maxima of integers over 32 neighbours
    become vector instructions on a CPU, over whole rows they do not.
    """
    magnitudes = lax.bitcast_convert_type(values, jnp.int32) & MAGNITUDE
    padding = -values.shape[1] % 32
    if padding:
        magnitudes = jnp.pad(magnitudes, ((0, 0), (0, padding)))
    some = jnp.max(magnitudes.reshape(values.shape[0], -1, 32), axis=2)
    # Something between the two, lest they become one.
    return jnp.max(jnp.minimum(some, NAN), axis=1, initial=0)


def from_float16(half: "Int32[Array, '*shape']") -> "Int32[Array, '*shape']":
    """Bits of float16, int32[...] -> those of the same values in float32, int32[...]."""
    field, fraction, sign = (half >> 10) & 0x1F, half & 0x3FF, (half >> 15) << 31
    # An integer times 2^-24, exact and far from float32's own subnormals.
    small = lax.bitcast_convert_type(fraction.astype(jnp.float32) * 2.0**-24, jnp.int32)
    exponent = jnp.where(field == 31, 255, field + 112)
    return sign | jnp.where(field == 0, small, (exponent << 23) | (fraction << 13))


def parts(bits: "Int32[Array, '*shape']") -> tuple["Int32[Array, '*shape']", "Int32[Array, '*shape']"]:
    """Bits of float32, int32[...] -> (significand int32[...] in [2^23, 2^24), exponent int32[...]).

    Subnormal numbers are normalised. Zero gets 2^23 and ZERO_EXPONENT; NaN and infinities an exponent of 128.
    """
    magnitude = bits & MAGNITUDE
    # The conversion of an integer finds the highest bit of a subnormal number without leaving the normal ones.
    small = lax.bitcast_convert_type((magnitude & 0x7FFFFF).astype(jnp.float32), jnp.int32)
    normal = magnitude > 0x7FFFFF
    word = jnp.where(normal, magnitude, small)
    exponent = (word >> 23) - jnp.where(normal, 127, -ZERO_EXPONENT)
    return (word & 0x7FFFFF) | 0x800000, exponent


def compose(count: "Int32[Array, '*shape']", exponent: "Int32[Array, '*shape']") -> "Int32[Array, '*shape']":
    """Bits of the float32 count * 2^exponent: int32[...] below 2^24, int32[...] -> int32[...].

    Subnormal results are exact for exponents of -149 and more; what lies beyond float32 is an infinity.
    """
    word = lax.bitcast_convert_type(count.astype(jnp.float32), jnp.int32)
    normal = (word >> 23) + exponent
    small = count << jnp.clip(exponent + 149, 0, 23)
    shifted = word + (exponent << 23)
    return jnp.where(count == 0, 0, jnp.where(normal >= 255, INFINITY, jnp.where(normal >= 1, shifted, small)))


def to_dtype(bits: "Int32[Array, '*shape']", dtype: jax.typing.DTypeLike) -> "Float[Array, '*shape']":
    """Bits of float32, int32[...] -> float32, bfloat16 or float16 [...], to nearest, ties to even, subnormals kept.

    Raises:
      UserError: another dtype.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.bfloat16:
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        word = jnp.where((bits & MAGNITUDE) > INFINITY, bits | 0x400000, rounded) >> 16
        return lax.bitcast_convert_type((word & 0xFFFF).astype(jnp.uint16), jnp.bfloat16)
    if dtype == jnp.float16:
        values = lax.bitcast_convert_type(bits, jnp.float32)
        usual = lax.bitcast_convert_type(values.astype(jnp.float16), jnp.uint16).astype(jnp.int32)
        # Below 2^-14 a float16 is an integer times 2^-24, which a float32 next to 2^23 is rounded to.
        small = lax.bitcast_convert_type(jnp.abs(values) * 2.0**24 + 2.0**23, jnp.int32) & 0x7FFFFF
        subnormal = (bits & MAGNITUDE) < 0x38800000
        half = jnp.where(subnormal, small | ((bits >> 16) & 0x8000), usual)
        return lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.float16)
    raise UserError(f"dtype must be float32, bfloat16 or float16; got {dtype.name}. Convert the float32 result.")


def quotient(numerator: jax.Array, divisor: jax.Array, digits: int) -> tuple[jax.Array, jax.Array]:
    """floor(2^(digits - 1) numerator / divisor) and whether a remainder is left.

    Up to 14 digits at a time: a float32 quotient, however it was rounded, is off by one at most, and the remainder,
    which fits int32 though the products on its way do not, says so.

    Args:
      numerator: int32[...], 0 <= numerator < 2 divisor.
      divisor: int32[...], positive, below 2^29.
      digits: at most 27.

    Returns:
      int32[...], below 2^digits, and bool[...].
    """
    first = min(digits, 14)
    count, rest = _divided(numerator, divisor, first - 1)
    if digits > first:
        more, rest = _divided(rest, divisor, digits - first)
        count = (count << (digits - first)) | more
    return count, rest != 0


def _divided(numerator: jax.Array, divisor: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    """floor(2^shift numerator / divisor), below 2^15, and the remainder."""
    estimate = (numerator.astype(jnp.float32) / divisor.astype(jnp.float32) * 2.0**shift).astype(jnp.int32)
    rest = (numerator << shift) - estimate * divisor  # modulo 2^32; between -divisor and 2 divisor
    above, below = rest < 0, rest >= divisor
    count = estimate + below.astype(jnp.int32) - above.astype(jnp.int32)
    return count, jnp.where(above, rest + divisor, jnp.where(below, rest - divisor, rest))
