"""By XLA: two passes over an array, one for the scales and one for the codes, in bytes at once.

On a CPU the speed is that of memory as long as loops become vector instructions. XLA's do where the innermost
dimension lies together in memory and is neither sliced nor stacked, which forms the code below:

  - the largest of 32 values: halves are compared element by element down to four, and only these are reduced;
  - codes that share a byte or a word are shifted by a constant array and summed; words become bytes by a bitcast.

Along other axes than the last one the innermost dimension is another, and everything is a vector anyway.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.mx import reference, tiles
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed, pack_bits, unpack_bits
from scalejax.numerics.quantize import QuantizeCall
from scalejax.numerics.scales import ScaleRule


@functools.partial(jax.jit, static_argnums=3)
def quantize(x: jax.Array, key: jax.Array | None, tensor_scale: jax.Array | None, call: QuantizeCall) -> Packed:
    """`api.quantize_blocks`."""
    format, axis, rule, rounding = call
    chance = None if key is None else blocks.split(jax.random.bits(key, x.shape, jnp.uint32), format, axis)
    bits = blocks.split(float32.float_bits(x), format, axis)
    if format.scale == "e4m3" and tensor_scale is None:
        tensor_scale = blocks.tensor_scale_of(bits, format, axis=axis + 1)
    if rule is not None and tiles.has_short_way(format, rounding):
        exponent = _block_exponents(bits, format, axis, rule)
        sub_largest = jnp.max(bits & float32.MAGNITUDE, axis=axis + 2, keepdims=True)
        encoded = tiles.encode_exponents(bits, sub_largest, exponent, format, rule)
    else:
        encoded = blocks.encode_blocks(
            bits, format, axis=axis + 1, rule=rule, rounding=rounding, chance=chance, tensor_scale=tensor_scale
        )
    return Packed(
        codes=pack(_merged(encoded.codes, axis), format.element.bits, axis),
        scales=blocks.joined(encoded.scales, axis),
        sub_scales=None
        if encoded.sub_scales is None
        else pack(_merged(encoded.sub_scales.astype(jnp.int32), axis), format.d2, axis),
        tensor_scale=tensor_scale,
        format=format,
        axis=axis - x.ndim,
        length=x.shape[axis],
    )


@functools.partial(jax.jit, static_argnums=1)
def dequantize(packed: Packed, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`api.dequantize_blocks`."""
    format, axis = packed.format, packed.axis + packed.codes.ndim
    subs = format.k1 // format.k2
    codes = unpack(packed.codes, format.element.bits, axis)
    sub_scales = None if packed.sub_scales is None else unpack(packed.sub_scales, format.d2, axis).astype(jnp.uint8)
    encoded = blocks.EncodedBlocks(
        blocks.apart(codes, subs, format.k2, axis),
        blocks.apart(packed.scales, 1, 1, axis),
        None if sub_scales is None else blocks.apart(sub_scales, subs, 1, axis),
    )
    decoded = blocks.joined(blocks.decode_blocks(encoded, format, packed.tensor_scale), axis)
    return float32.to_dtype(lax.slice_in_dim(decoded, 0, packed.length, axis=axis), dtype)


@jax.jit
def matmul(x: jax.Array, weights: Packed) -> jax.Array:
    """float32[M, N] of x [M, K], operands in the dtype of x."""
    return reference.product(x, dequantize(weights, x.dtype), weights.axis)


def tensor_scale_of(x: jax.Array, format: BlockFormat, axis: int) -> jax.Array:
    """float32[]: the scale of a whole array in NVFP4; the axis is not negative."""
    return blocks.tensor_scale_of(blocks.split(float32.float_bits(x), format, axis), format, axis=axis + 1)


def pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Streams of bits of blocks: int32[..., blocks, n, ...], n along axis + 1 -> uint8[..., blocks n bits / 8, ...].

    The blocks stay apart until the end: what XLA computes once for a block it computes for every byte where they do
    not.
    """
    leading, count, size = codes.shape[:axis], codes.shape[axis], codes.shape[axis + 1]
    trailing = codes.shape[axis + 2 :]
    group, taken = tiles.group_of(bits)
    if bits > 8 or size % group or (group * bits > 32 and trailing):
        return pack_bits(codes.reshape(*leading, count * size, *trailing), bits, axis=axis)
    if bits == 8:
        made = codes.astype(jnp.uint8)
    else:
        apart = codes.reshape(*leading, count, size // group, group, *trailing)
        words = tiles.words(apart, bits, axis + 2)
        if taken == 1:
            made = words[0].astype(jnp.uint8)
        elif trailing:
            made = jnp.stack([(words[0] >> (8 * i)).astype(jnp.uint8) for i in range(taken)], axis=axis + 2)
        else:
            made = [lax.bitcast_convert_type(word, jnp.uint8) for word in words]
            made = jnp.concatenate(made, axis=-1)[..., :taken]
    return made.reshape(*leading, count * size * bits // 8, *trailing)


def unpack(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """`packing.unpack_bits`: int32 codes."""
    group, size = tiles.group_of(bits)
    if size > 1 or bits > 8:
        return unpack_bits(packed, bits, axis=axis)
    wide = packed.astype(jnp.int32)
    if bits == 8:
        return wide
    apart = jnp.repeat(jnp.expand_dims(wide, axis + 1), group, axis + 1)
    apart = (apart >> bits * lax.broadcasted_iota(jnp.int32, apart.shape, axis + 1)) & ((1 << bits) - 1)
    return apart.reshape(*packed.shape[:axis], packed.shape[axis] * group, *packed.shape[axis + 1 :])


def _block_exponents(bits: jax.Array, format: BlockFormat, axis: int, rule: ScaleRule) -> jax.Array:
    """int32[..., 1, 1, ...] of int32[..., k1 / k2, k2, ...]."""
    magnitudes = bits & float32.MAGNITUDE
    if axis < bits.ndim - 3:
        largest = jnp.max(magnitudes, axis=(axis + 1, axis + 2), keepdims=True)
        return tiles.block_exponent(largest, format, rule)
    while magnitudes.shape[-1] % 8 == 0:
        half = magnitudes.shape[-1] // 2
        magnitudes = jnp.maximum(magnitudes[..., :half], magnitudes[..., half:])
    # The reduction comes last: its result is written to memory once, and all codes of a block read it.
    return jnp.max(tiles.block_exponent(magnitudes, format, rule), axis=(axis + 1, axis + 2), keepdims=True)


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """[..., blocks, a, b, ...] -> [..., blocks, a b, ...]."""
    return x.reshape(*x.shape[: axis + 1], x.shape[axis + 1] * x.shape[axis + 2], *x.shape[axis + 3 :])
