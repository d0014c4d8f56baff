"""Codes and scales of blocks: the arithmetic of every format, on arrays whose blocks have dimensions of their own.

    x [..., k1 / k2, k2, ...]  <->  codes of the same shape,
                                    scales [..., 1, 1, ...], second scales [..., k1 / k2, 1, ...]

Pure functions of integers, which gather nothing: scalejax.numerics.quantize brings whole arrays into this form, a
kernel its tile. Definitions, with a the largest magnitude of a block, a_j that of sub-block j, and R(a) the exponent
that the scale rule gives (scalejax.numerics.scales), clamped to the d1 bits:

    exponent            x / 2^R(a)
    exponent, exponent  x / 2^(R(a) - tau_j),  tau_j = min(R(a) - R(a_j), 2^d2 - 1); the most where all are zeros
    float32             x / s,                 s = float32(a / max)
    float32, integer    x / float32(q_j s),    b = float32(a / (2^d2 - 1)), q_j = round(a_j / b), s = float32(b / max)
    e4m3                x / (s g),             s = E4M3(a / (max g)), g = float32(a_tensor / (448 max))

rounded to the element once, from the exact quotient; what lies beyond its largest number becomes that. Scales are
rounded to nearest, ties to even, whatever the rounding of elements. float32 scales end at the power of two below which
products with an element would be subnormal numbers. A block that holds NaN or an infinity is poisoned: its scale is
NaN, its codes are 0, and all of it decodes to NaN. Its neighbours are unharmed, also under NVFP4, whose g leaves
poisoned blocks out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics import bits as float32
from scalejax.numerics import elements, scales
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule

E4M3_NAN = 0x7F
"""The code, under either sign."""


class EncodedBlocks(NamedTuple):
    """Blocks as codes and scales, the result of `encode_blocks`.

    Attributes:
      codes: int32[..., k1 / k2, k2, ...].
      scales: uint8[..., 1, 1, ...] ("exponent": biased, "e4m3": its code) or float32.
      sub_scales: uint8[..., k1 / k2, 1, ...] or None.
    """

    codes: jax.Array
    scales: jax.Array
    sub_scales: jax.Array | None


def encode_blocks(
    bits: jax.Array,
    format: BlockFormat,
    *,
    axis: int,
    rule: ScaleRule | None,
    rounding: Rounding,
    chance: jax.Array | None = None,
    tensor_scale: jax.Array | None = None,
) -> EncodedBlocks:
    """Quantizes blocks.

    Args:
      bits: int32[..., k1 / k2, k2, ...], float32 values.
      format: of the blocks.
      axis: of the dimension k1 / k2, not negative; the next one is k2.
      rule: for scales of kind "exponent", else None.
      rounding: of the elements.
      chance: uint32 like `bits` for stochastic rounding.
      tensor_scale: float32[] or what broadcasts, for scales of kind "e4m3"; see tensor_scale_of. Blocks under one that
        is not positive, normal and finite are poisoned.
    """
    element = format.element
    sub_largest = jnp.max(bits & float32.MAGNITUDE, axis=axis + 1, keepdims=True)
    largest = jnp.max(sub_largest, axis=axis, keepdims=True)
    poisoned = largest >= float32.INFINITY
    sub_scales = None
    if format.scale == "exponent":
        assert rule is not None
        low, high = scales.exponent_range(format.d1)
        exponent = jnp.clip(scales.scale_exponent(largest, element, rule), low, high)
        stored = scales.store_exponent(exponent, poisoned, format.d1)
        if format.sub_scale == "exponent":
            own = scales.scale_exponent(sub_largest, element, rule)
            tau = jnp.clip(exponent - own, 0, format.max_microexponent)
            sub_scales, exponent = tau.astype(jnp.uint8), exponent - tau
        codes = elements.encode(bits, exponent, element, rounding, chance)
    elif format.scale == "float32":
        # A wrong scale for poisoned blocks does no harm; an overflow on the way would.
        largest = jnp.where(poisoned, 0, largest)
        if format.sub_scale == "integer":
            top = (1 << format.d2) - 1
            part = scales.float_scale(largest, top, 0, _lowest_exponent(format) + element.max_exponent + 1)
            significand, exponent = float32.parts(part)
            level = elements.unsigned(format.d2)
            steps = elements.encode_ratio(sub_largest, significand, exponent, level, "ties_to_even")
            steps = jnp.where(poisoned, 0, steps)
            sub_scales = steps.astype(jnp.uint8)
            scale = scales.float_scale(part, element.max_count, element.max_exponent - element.mantissa_bits, -126)
            # A product of normal numbers, or zero.
            step = steps.astype(jnp.float32) * lax.bitcast_convert_type(scale, jnp.float32)
            significand, exponent = float32.parts(lax.bitcast_convert_type(step, jnp.int32))
            significand = jnp.where(steps == 0, 0, significand)
            codes = elements.encode_ratio(bits, significand, exponent, element, rounding, chance)
        else:
            scale = scales.float_scale(
                largest, element.max_count, element.max_exponent - element.mantissa_bits, _lowest_exponent(format)
            )
            significand, exponent = float32.parts(scale)
            codes = elements.encode_ratio(bits, significand, exponent, element, rounding, chance)
        stored = lax.bitcast_convert_type(jnp.where(poisoned, float32.NAN, scale), jnp.float32)
    else:
        assert tensor_scale is not None
        whole = lax.bitcast_convert_type(tensor_scale, jnp.int32)
        # Values would decode to zeros under a zero or a subnormal g, and with the other sign under a negative one.
        poisoned = poisoned | (whole <= 0x7FFFFF) | (whole >= float32.INFINITY)
        significand, exponent = float32.parts(whole)
        top = element.max_count  # 3 for E2M1, whose largest number is 6
        own = elements.encode_ratio(
            jnp.where(poisoned, 0, largest),
            significand * top,
            exponent + element.max_exponent,
            elements.E4M3,
            "ties_to_even",
            extra_bits=top.bit_length() - 1,
        )
        stored = jnp.where(poisoned, E4M3_NAN, own).astype(jnp.uint8)
        step = elements.decode(own, jnp.zeros_like(own), elements.E4M3)
        step_significand, step_exponent = float32.parts(step)
        divisor = jnp.where(step == 0, 0, (step_significand >> 20) * significand)
        codes = elements.encode_ratio(bits, divisor, step_exponent + exponent, element, rounding, chance, extra_bits=3)
    return EncodedBlocks(jnp.where(poisoned, 0, codes), stored, sub_scales)


def encode_under(
    bits: jax.Array,
    scales_of: EncodedBlocks,
    format: BlockFormat,
    *,
    rounding: Rounding,
    tensor_scale: jax.Array | None = None,
) -> jax.Array:
    """Codes of values under scales that are there already, such as those of calibration.

    Args:
      bits: int32[..., k1 / k2, k2, ...], float32 values; those that the scales are too small for saturate. A dimension
        k2 of 1 is one number of each sub-block.
      scales_of: scales and second scales, which broadcast against `bits`; its codes are not looked at.
      format: of the blocks.
      rounding: of the elements, not "stochastic".
      tensor_scale: float32[] for scales of kind "e4m3".

    Returns:
      int32 like `bits`; 0 where the scale is NaN.
    """
    element = format.element
    if format.scale == "exponent":
        exponent, poisoned = scales.load_exponent(scales_of.scales, format.d1)
        if scales_of.sub_scales is not None:
            exponent = exponent - scales_of.sub_scales.astype(jnp.int32)
        codes = elements.encode(bits, exponent, element, rounding)
    elif format.scale == "float32":
        scale = scales_of.scales
        poisoned = jnp.isnan(scale)
        steps = None if scales_of.sub_scales is None else scales_of.sub_scales
        if steps is not None:
            scale = steps.astype(jnp.float32) * scale
        significand, exponent = float32.parts(lax.bitcast_convert_type(scale, jnp.int32))
        significand = jnp.where(poisoned if steps is None else poisoned | (steps == 0), 0, significand)
        codes = elements.encode_ratio(bits, significand, exponent, element, rounding)
    else:
        assert tensor_scale is not None
        own = scales_of.scales.astype(jnp.int32)
        poisoned = own & E4M3_NAN == E4M3_NAN
        whole_significand, whole_exponent = float32.parts(lax.bitcast_convert_type(tensor_scale, jnp.int32))
        step = elements.decode(jnp.where(poisoned, 0, own), jnp.zeros_like(own), elements.E4M3)
        significand, exponent = float32.parts(step)
        divisor = jnp.where(step == 0, 0, (significand >> 20) * whole_significand)
        codes = elements.encode_ratio(bits, divisor, exponent + whole_exponent, element, rounding, extra_bits=3)
    return jnp.where(poisoned, 0, codes)


def _lowest_exponent(format: BlockFormat) -> int:
    """Of a float32 scale, so that its product with the smallest element is a normal number."""
    return -126 - min(format.element.step_exponent, 0)


def tensor_scale_of(bits: jax.Array, format: BlockFormat, *, axis: int) -> jax.Array:
    """float32[]: g of NVFP4, from the largest magnitude of all blocks that are not poisoned; as in encode_blocks.

    Where an array is distributed, take the maximum over its parts: g of the whole is the largest g of a part.
    """
    largest = jnp.max(bits & float32.MAGNITUDE, axis=(axis, axis + 1))
    largest = jnp.max(jnp.where(largest >= float32.INFINITY, 0, largest), initial=0)
    element, scale = format.element, elements.E4M3
    lowest = -126 - scale.step_exponent - min(element.step_exponent, 0)
    g = scales.float_scale(
        largest,
        element.max_count * scale.max_count,
        element.max_exponent - element.mantissa_bits + scale.max_exponent - scale.mantissa_bits,
        lowest,
    )
    return lax.bitcast_convert_type(g, jnp.float32)


def decode_blocks(encoded: EncodedBlocks, format: BlockFormat, tensor_scale: jax.Array | None = None) -> jax.Array:
    """int32[..., k1 / k2, k2, ...], bits of the float32 values that codes and scales stand for.

    Exact for scales of kind "exponent", also among subnormal numbers, and an infinity beyond float32 (rules that round
    the exponent up reach 2^128 for the last values below it). For the others one float32 rounding, of the product with
    the float32 scale; next to the largest float32 it may round to an infinity.
    """
    element = format.element
    if format.scale == "exponent":
        exponent, poisoned = scales.load_exponent(encoded.scales, format.d1)
        if encoded.sub_scales is not None:
            exponent = exponent - encoded.sub_scales.astype(jnp.int32)
        return jnp.where(poisoned, float32.NAN, elements.decode(encoded.codes, exponent, element))
    none = jnp.zeros_like(encoded.codes)
    values = lax.bitcast_convert_type(elements.decode(encoded.codes, none, element), jnp.float32)
    if format.scale == "float32":
        scale = encoded.scales
        if encoded.sub_scales is not None:
            scale = encoded.sub_scales.astype(jnp.float32) * scale
        values = values * scale
    else:
        assert tensor_scale is not None
        code = encoded.scales.astype(jnp.int32)
        step = elements.decode(code, jnp.zeros_like(code), elements.E4M3)
        values = values * lax.bitcast_convert_type(step, jnp.float32) * tensor_scale
    return lax.bitcast_convert_type(values, jnp.int32)


def split(x: jax.Array, format: BlockFormat, axis: int) -> jax.Array:
    """[..., length, ...] -> [..., blocks, k1 / k2, k2, ...], padded with zeros."""
    padding = -x.shape[axis] % format.k1
    if padding:
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)])
    return apart(x, format.k1 // format.k2, format.k2, axis)


def apart(x: jax.Array, subs: int, size: int, axis: int) -> jax.Array:
    """[..., blocks a b, ...] -> [..., blocks, a, b, ...]."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // (subs * size), subs, size, *x.shape[axis + 1 :])


def joined(x: jax.Array, axis: int) -> jax.Array:
    """[..., blocks, a, b, ...] -> [..., blocks a b, ...]."""
    merged = x.shape[axis] * x.shape[axis + 1] * x.shape[axis + 2]
    return x.reshape(*x.shape[:axis], merged, *x.shape[axis + 3 :])
