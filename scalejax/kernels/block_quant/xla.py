"""Row-wise quantization in XLA, to the bit of FBGEMM's definition on CPUs.

Three things would cost bits. XLA turns a division by a constant into a product with its inverse: scales are divided as
integers instead. XLA's threads on CPUs take subnormal float32 for zero: the smallest and the largest of a row are found
among integers, and small ranges are formed far from the subnormal numbers. LLVM contracts a product and a sum into one
rounding where it can, and so not in every program: a product with a float32 scale is the sum of two exact halves.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics import bits as floats
from scalejax.numerics.packing import pack_bits, unpack_bits

_RAISED = 64
"""Binades by which small rows are raised before max - min is formed."""
_SMALL = (127 - 30) << 23
"""Bits of 2^-30: rows whose largest magnitude is below it are raised."""
_EPSILON = 1e-8
"""FBGEMM's, in the 8-bit encoder with float32 scales."""


@functools.partial(jax.jit, static_argnames=("bits", "scale_dtype"))
def quantize(table: jax.Array, bits: int, scale_dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32[V, D] -> (packed codes uint8[V, ceil(D bits / 8)], scales [V], biases [V] in scale_dtype)."""
    low, high, broken = extremes(table)
    scales, biases = parameters(low, high, bits, scale_dtype)
    scales, biases = (jnp.where(broken, jnp.nan, x).astype(scale_dtype) for x in (scales, biases))
    return packed(encode(table, low, high, scales, biases, bits), bits), scales, biases


def extremes(table: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32[V, D] -> bits of the least and the largest number of each row, int32[V], and whether it has a NaN."""
    words = floats.float_bits(table)
    ordered = words ^ ((words >> 31) & floats.MAGNITUDE)  # integers in the order of the values; its own inverse
    low, high = ordered.min(axis=1), ordered.max(axis=1)
    low, high = (x ^ ((x >> 31) & floats.MAGNITUDE) for x in (low, high))
    return low, high, ((words & floats.MAGNITUDE) > floats.INFINITY).any(axis=1)


def parameters(low: jax.Array, high: jax.Array, bits: int, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
    """Scales and biases [V] in scale_dtype of the ranges between float32 values given as bits, int32[V]."""
    if scale_dtype == "float32":
        return _as_float(_fraction(*_difference(high, low), bits)), _as_float(low)
    biases = floats.to_dtype(low, jnp.float16)
    # A subnormal range has the scale 0 in float16, and so has a range of zero.
    span = floats.float_bits(_as_float(high) - biases.astype(jnp.float32))
    significand, exponent = floats.parts(span)
    fraction = _fraction(significand, exponent, span & floats.MAGNITUDE, bits) | (span & ~floats.MAGNITUDE)
    scales = floats.to_dtype(fraction, jnp.float16)
    return jnp.where(scales == 0, jnp.ones_like(scales), scales), biases


def encode(
    table: jax.Array, low: jax.Array, high: jax.Array, scales: jax.Array, biases: jax.Array, bits: int
) -> jax.Array:
    """Codes int32[V, D] of float32[V, D]; zero where there is no code."""
    if scales.dtype == jnp.float32:
        bottom = _as_float(low)
        inverse = jnp.float32(255) / (_as_float(high) - bottom + jnp.float32(_EPSILON))
    else:
        bottom, inverse = biases.astype(jnp.float32), jnp.float32(1) / scales.astype(jnp.float32)
    steps = lax.round((table - bottom[:, None]) * inverse[:, None], lax.RoundingMethod.TO_NEAREST_EVEN)
    steps = jnp.where(jnp.isfinite(steps), steps, jnp.zeros_like(steps))
    return jnp.clip(steps, 0, (1 << bits) - 1).astype(jnp.int32)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """int32[V, D] -> uint8[V, ceil(D bits / 8)]; bits past the last code are zero."""
    return pack_bits(jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % (8 // bits)))), bits, axis=1)


def dequantize(codes: jax.Array, scales: jax.Array, biases: jax.Array, bits: int, dim: int) -> jax.Array:
    """uint8[V, ceil(D bits / 8)], [V], [V] -> float32[V, D]."""
    return decode(codes if bits == 8 else unpack_bits(codes, bits, axis=1)[:, :dim], scales, biases)


def decode(codes: jax.Array, scales: jax.Array, biases: jax.Array) -> jax.Array:
    """Integers [V, D], one a code, [V], [V] -> float32[V, D]; gathers nothing, kernels call it on their tiles."""
    return scaled(codes, [part[:, None] for part in scale_parts(scales)], biases.astype(jnp.float32)[:, None])


def scale_parts(scales: jax.Array) -> list[jax.Array]:
    """float32[V] each, which add up to the scales and have exact products with codes."""
    if scales.dtype != jnp.float32:
        return [scales.astype(jnp.float32)]  # 8 digits times 11
    upper = _as_float(floats.float_bits(scales) & ~0xFFF)  # 12 digits: times 8 they fit float32
    return [upper, jnp.where(jnp.isfinite(scales), scales - upper, jnp.zeros_like(scales))]


def scaled(codes: jax.Array, parts: Sequence[jax.Array], biases: jax.Array) -> jax.Array:
    """float32: codes * (sum of the parts) + biases, of shapes that broadcast; the sum of products is rounded once."""
    numbers = codes.astype(jnp.float32)
    products = numbers * parts[0]
    for part in parts[1:]:
        products = products + numbers * part
    return products + biases


def _as_float(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float32)


def _difference(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32(high - low) >= 0 as (significand, exponent, bits); of small rows the bits are those of the raised one."""
    small = jnp.maximum(high & floats.MAGNITUDE, low & floats.MAGNITUDE) < _SMALL

    def raised(words: jax.Array) -> jax.Array:
        significand, exponent = floats.parts(words)
        magnitude = floats.compose(significand, jnp.maximum(exponent - 23 + _RAISED, -149))
        magnitude = jnp.where((words & floats.MAGNITUDE) == 0, 0, magnitude)
        return _as_float(jnp.where(small, magnitude | (words & ~floats.MAGNITUDE), words))

    span = floats.float_bits(raised(high) - raised(low)) & floats.MAGNITUDE
    significand, exponent = floats.parts(span)
    return significand, exponent - jnp.where(small, _RAISED, 0), span


def _fraction(significand: jax.Array, exponent: jax.Array, span: jax.Array, bits: int) -> jax.Array:
    """Bits of float32(range / (2^bits - 1)), rounded to nearest, ties to even.

    Args:
      significand, exponent: int32[V], of the range, see `numerics.bits`.
      span: int32[V], bits that say whether it is zero, infinite or NaN.
      bits: 8, 4 or 2.
    """
    divisor = jnp.uint32((1 << bits) - 1)
    # The significand has 24 bits, with 8 more 32; the quotient then has 24, or 25.
    quotient, rest = _divmod(significand.astype(jnp.uint32) << bits, divisor)
    wide = quotient >= 1 << 24
    rest = jnp.where(wide, (quotient & 1) * divisor + rest, rest)
    count = _rounded(jnp.where(wide, quotient >> 1, quotient), rest, jnp.where(wide, 2 * divisor, divisor))
    usual = floats.compose(count, jnp.maximum(exponent - 23 - bits + wide.astype(jnp.int32), -149))
    # Below 2^-126 the bits of a float32 are its multiple of 2^-149.
    shift = exponent + 126
    grains = jnp.where(shift >= 0, significand << jnp.clip(shift, 0, 7), significand >> jnp.clip(-shift, 0, 31))
    quotient, rest = _divmod(grains.astype(jnp.uint32), divisor)
    subnormal = (exponent < -126 + bits) & (quotient < 1 << 23)
    words = jnp.where(subnormal, _rounded(quotient, rest, divisor), usual)
    return jnp.where((span == 0) | (span >= floats.INFINITY), span, words)


def _divmod(number: jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array]:
    quotient = number // divisor
    return quotient, number - quotient * divisor


def _rounded(quotient: jax.Array, rest: jax.Array, divisor: jax.Array) -> jax.Array:
    """int32: quotient + rest / divisor to nearest, ties to even."""
    up = (2 * rest > divisor) | ((2 * rest == divisor) & (quotient & 1 == 1))
    return (quotient + up.astype(jnp.uint32)).astype(jnp.int32)
