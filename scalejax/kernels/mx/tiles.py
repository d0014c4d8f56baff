"""Codes of values by a shorter way: 20 operations of float32 bits instead of some 40, and the same results.

For scales that are powers of two and ties to even, which is nearly every use. y = |x| / 2^e is made by subtracting e
from the exponent field, subnormal x by converting it as an integer first, so that no step depends on how hardware
treats subnormal numbers. Then one float32 addition rounds:

    u = 2^(b + 23 - m),    b = max(exponent of y, smallest exponent of the element),    m its mantissa bits
    t = y + u              a float32 next to u has steps of 2^(b - m): the low bits of t are y in these steps, rounded
    code = bits(t) - bits(u) + ((b - smallest exponent) << m)

A y that rounds up to the next binade carries into the exponent by itself. Everything else (scales, other kinds of
scales, other roundings) is scalejax.numerics.blocks. Nothing is gathered or sliced: kernels call this on their tiles.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, elements, scales
from scalejax.numerics.blocks import EncodedBlocks
from scalejax.numerics.elements import Element
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule


def has_short_way(format: BlockFormat, rounding: Rounding) -> bool:
    """Whether `encode_exponents` does it; scalejax.numerics.blocks.encode_blocks does everything."""
    single = format.sub_scale == "none" or format.element.max_exponent == 0
    return format.scale == "exponent" and rounding == "ties_to_even" and single


def encode(
    bits: jax.Array,
    format: BlockFormat,
    *,
    axis: int,
    rule: ScaleRule | None,
    rounding: Rounding,
    chance: jax.Array | None = None,
    tensor_scale: jax.Array | None = None,
) -> EncodedBlocks:
    """Quantizes blocks: the arguments and the results of `blocks.encode_blocks`."""
    if rule is None or not has_short_way(format, rounding):
        return blocks.encode_blocks(
            bits, format, axis=axis, rule=rule, rounding=rounding, chance=chance, tensor_scale=tensor_scale
        )
    sub_largest = jnp.max(bits & float32.MAGNITUDE, axis=axis + 1, keepdims=True)
    largest = sub_largest if format.k1 == format.k2 else jnp.max(sub_largest, axis=axis, keepdims=True)
    return encode_exponents(bits, sub_largest, block_exponent(largest, format, rule), format, rule)


def encode_exponents(
    bits: jax.Array, sub_largest: jax.Array, exponent: jax.Array, format: BlockFormat, rule: ScaleRule
) -> EncodedBlocks:
    """Quantizes blocks whose maxima are known, ties to even.

    Args:
      bits: int32[..., k1 / k2, k2, ...], float32 values.
      sub_largest: int32[..., k1 / k2, 1, ...], bits of the largest magnitude of each sub-block.
      exponent: int32[..., 1, 1, ...], `block_exponent` of the largest of a block.
      format: of the blocks.
      rule: for scales.
    """
    low, high = scales.exponent_range(format.d1)
    stored = exponent - low
    # -1, or 0 for the highest code. LLVM makes a branch of a comparison, and no vector instructions of what is inside.
    kept = ((stored + 1) >> format.d1) - 1
    sub_scales = None
    if format.sub_scale == "exponent":
        exponent = jnp.minimum(exponent, high)
        own = scales.scale_exponent(sub_largest, format.element, rule)
        tau = jnp.clip(exponent - own, 0, format.max_microexponent)
        sub_scales, exponent = tau.astype(jnp.uint8), exponent - tau
    return EncodedBlocks(codes(bits, exponent, format.element) & kept, stored.astype(jnp.uint8), sub_scales)


def block_exponent(largest: jax.Array, format: BlockFormat, rule: ScaleRule) -> jax.Array:
    """Exponents of the scales of blocks, within what the format stores: int32 bits of largest magnitudes -> int32.

    One above the highest for what is poisoned, which is stored as NaN. Grows with the magnitude, so that the largest
    exponent is the exponent of the largest.
    """
    element = format.element
    low, high = scales.exponent_range(format.d1)
    if rule != "floor" and element.max_exponent < 1:
        exponent = scales.scale_exponent(largest, element, rule)
    else:
        # Adding what is missing to the threshold carries into the exponent where the fraction reaches it. A subnormal
        # number ends below the lowest scale, whatever its fraction.
        above = (1 << 23) - scales.threshold(element, rule)
        exponent = ((largest + above) >> 23) - (127 + element.max_exponent)
    return jnp.where(largest >= float32.INFINITY, high + 1, jnp.clip(exponent, low, high))


def codes(bits: jax.Array, exponent: jax.Array, element: Element) -> jax.Array:
    """Codes of x / 2^exponent, ties to even, saturated.

    Args:
      bits: int32[...], float32 values.
      exponent: int32 that broadcasts, -149 to 127.
      element: of the codes.

    Returns:
      int32[...]; anything for NaN and infinities.
    """
    mantissa, lowest = element.mantissa_bits, 127 + element.min_exponent
    magnitude = bits & float32.MAGNITUDE
    # A subnormal number is an integer times 2^-149, and nothing at all beside a scale of 1 or more.
    from_integer = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    subnormal = from_integer - ((149 + jnp.minimum(exponent, 0)) << 23)
    y = jnp.where(magnitude < 1 << 23, subnormal, magnitude - (exponent << 23))
    y = jnp.clip(y, 0, int(np.float32(element.max).view(np.int32)))
    binade = jnp.maximum(y & float32.INFINITY, lowest << 23)
    unit = binade + ((23 - mantissa) << 23)
    total = lax.bitcast_convert_type(y, jnp.float32) + lax.bitcast_convert_type(unit, jnp.float32)
    count = lax.bitcast_convert_type(total, jnp.int32) - unit
    return elements.with_sign(count + (binade >> (23 - mantissa)) - (lowest << mantissa), bits < 0, element)


def streams(format: BlockFormat) -> list[tuple[int, int]]:
    """(elements that share a code or a second scale, bits of it) of codes and second scales."""
    codes = (1, format.element.bits)
    return [codes] if format.sub_scale == "none" else [codes, (format.k2, format.d2)]


def words(values: jax.Array, bits: int, axis: int) -> list[jax.Array]:
    """The stream of values of `bits` bits along an axis, the first lowest, in words of 32 bits: int32[...] each.

    The axis holds as many as fill whole bytes: 8 / gcd(bits, 8).
    """
    count = values.shape[axis]
    place = lax.broadcasted_iota(jnp.int32, values.shape, axis)
    if count * bits <= 32:
        return [jnp.sum(values << bits * place, axis=axis, dtype=jnp.int32)]
    half = count // 2
    shifted = values << bits * (place & (half - 1))
    low = jnp.sum(jnp.where(place < half, shifted, 0), axis=axis, dtype=jnp.int32)
    high = jnp.sum(jnp.where(place < half, 0, shifted), axis=axis, dtype=jnp.int32)
    return [low | high << (bits * half), high >> (32 - bits * half)]


def group_of(bits: int) -> tuple[int, int]:
    """The fewest codes of `bits` bits that fill whole bytes, and how many bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def from_bytes(parts: list[jax.Array], bits: int, place: int) -> jax.Array:
    """Code number `place` of a group, int32[...], from the group's bytes, int32[...] each."""
    code = None
    for i, part in enumerate(parts):
        shift = 8 * i - bits * place
        if -8 < shift < bits:
            moved = part << shift if shift >= 0 else part >> -shift
            code = moved if code is None else code | moved
    assert code is not None
    return code & ((1 << bits) - 1)


def lacks_products(format: BlockFormat) -> str | None:
    """What `decode_for_product` lacks of a format, or None."""
    exponents = format.scale == "exponent" and format.d1 == 8
    if not exponents and format.scale != "e4m3":
        return f"decodes scales of kind e4m3, and exponents of 8 bits, in its products; got {format.name}."
    if format.sub_scale != "none" and format.k1 // format.k2 * format.d2 != 8:
        return f"wants the second scales of a block in one byte, as MX9 has them; got {format.name}."
    return None


def decode_for_product(
    codes: jax.Array, scales: jax.Array, taus: jax.Array | None, format: BlockFormat, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Values of codes, in fewer operations than `blocks.decode_blocks`; those below 2^-126 may come out as zeros.

    Args:
      codes: int32[...].
      scales: int32 that broadcasts, as they are stored.
      taus: int32 that broadcasts, microexponents, or None.
      format: that `lacks_products` has nothing against; the scale of a tensor is left out.
      dtype: float32 or bfloat16 of the result.

    Returns:
      `dtype`[...]; NaN where the scale is.
    """
    magnitude, negative = elements.split_sign(codes, format.element)
    values = _magnitudes(magnitude, format.element)
    values = jnp.where(negative, -values, values)
    if format.scale == "e4m3":
        own, negative = elements.split_sign(scales, elements.E4M3)
        factor = _magnitudes(own, elements.E4M3)
        factor = jnp.where(negative, -factor, factor)
    else:
        exponent = scales if taus is None else jnp.maximum(jnp.where(scales == 255, 255, scales - taus), 0)
        if format.element.max_exponent > 0:
            # 2^-127 is a subnormal number, and its products with elements of 2 and more need not be: half of 2^-126.
            values = values * jnp.where(exponent == 0, 0.5, 1.0).astype(jnp.float32)
            exponent = jnp.maximum(exponent, 1)
        factor = jnp.where(exponent == 255, jnp.nan, lax.bitcast_convert_type(exponent << 23, jnp.float32))
    return (values * factor).astype(dtype)


def lacks_blocks(format: BlockFormat, sizes: str | None) -> str | None:
    """Which part of quantizing and decoding kernels lack, or None.

    Args:
      format: of the blocks.
      sizes: what they lack of k1 and k2, or None.
    """
    if format.scale == "float32":
        return f"has formats with scales of 8 bits; got {format.name} with float32 scales."
    if format.element.bits > 8:
        return f"has elements of at most 8 bits; got {format.name}."
    if sizes is not None:
        return f"{sizes}; got {format.name}."
    for count, bits in ((format.k1, format.element.bits), (format.k1 // format.k2, format.d2)):
        if bits and count % group_of(bits)[0]:
            return f"wants the codes of a block to fill whole bytes; got {format.name}."
    return None


def _magnitudes(codes: jax.Array, element: Element) -> jax.Array:
    """float32 of codes without signs. With an exponent below the lowest, 2 z - 2^lowest takes the hidden bit away."""
    lowest = element.min_exponent
    z = lax.bitcast_convert_type((codes << (23 - element.mantissa_bits)) + ((126 + lowest) << 23), jnp.float32)
    values = jnp.minimum(z, z + z - 2.0**lowest)
    if element.specials != "none":
        values = jnp.where(codes > element.max_code, jnp.nan, values)
    if element.specials == "infinity and nan":
        values = jnp.where(codes == element.max_code + 1, jnp.inf, values)
    return values
