"""Quantized arrays as bytes.

Codes become a stream of bits along the block axis, the first code in the lowest bits of the first byte:

    2 bits   c3 c2 c1 c0                            4 codes, 1 byte
    4 bits   c1 c0                                  2 codes, 1 byte: low nibble first
    6 bits   c1[1:0] c0 | c2[3:0] c1[5:2] | c3 c2[5:4]         4 codes, 3 bytes
    3 and 5 bits (MX4, MX6)                         8 codes, 3 and 5 bytes

Two layouts:

    pack         codes, second scales and scales as arrays of their own, as OCP hardware and checkpoints keep them
    pack_blocks  one array; a block is its scale byte, its second scales as a stream of bits, its codes:

        bdr_mx9   E + 127 | 8 microexponents, pair j in bit j | 16 codes of 8 bits: sign above 7 bits     18 bytes
        bdr_mx6   the same                                    | 16 codes of 5 bits                        12 bytes
        bdr_mx4   the same                                    | 16 codes of 3 bits                         8 bytes
        mxfp4     E8M0                                        | 32 codes of 4 bits                        17 bytes

Static shifts of static slices: nothing is gathered.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax.errors import UserError
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantize import Quantized

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32, Integer, UInt8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "sub_scales", "tensor_scale"),
    meta_fields=("format", "axis", "length"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A Quantized array with its codes and second scales in bytes; the other attributes are those of Quantized.

    Attributes:
      codes: uint8, element.bits / 8 bytes an entry along the block axis.
      scales: as in Quantized.
      sub_scales: uint8, d2 / 8 bytes for k2 entries, or None.
      tensor_scale: float32[] or None.
      format: of the blocks.
      axis: of the blocks, counted from the end.
      length: of the block axis before packing, without padding.
    """

    codes: jax.Array
    scales: jax.Array
    sub_scales: jax.Array | None
    tensor_scale: jax.Array | None
    format: BlockFormat
    axis: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.codes, self.scales, self.sub_scales, self.tensor_scale)
        return sum(array.size * array.dtype.itemsize for array in arrays if array is not None)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def pack_bits(codes: "Integer[Array, '...']", bits: int, *, axis: int) -> "UInt8[Array, '...']":
    """Integers of `bits` bits, [..., n, ...] -> uint8[..., n bits / 8, ...], a stream along `axis`.

    Of negative integers these are the lowest bits, two's complement.

    Raises:
      UserError: the stream does not fill whole bytes, or the codes are no integers.
    """
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise UserError(f"pack_bits: codes must be integers; got {codes.dtype}. Pass those that quantize gave.")
    axis = _axis("pack_bits", codes, axis)
    group, _ = _group(bits)
    _check_whole(codes.shape[axis], group, bits)
    return _regrouped(codes, bits, 8, axis=axis).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def unpack_bits(packed: "UInt8[Array, '...']", bits: int, *, axis: int) -> "Int32[Array, '...']":
    """uint8[..., n bits / 8, ...] -> int32[..., n, ...]: what pack_bits was given.

    Raises:
      UserError: the bytes are no whole number of codes, or of another dtype.
    """
    if packed.dtype != jnp.uint8:
        raise UserError(f"unpack_bits: bytes must be uint8; got {packed.dtype}. View them as that.")
    axis = _axis("unpack_bits", packed, axis)
    group, size = _group(bits)
    if packed.shape[axis] % size:
        raise UserError(
            f"unpack_bits: {group} codes of {bits} bits take {size} bytes; got {packed.shape[axis]} bytes along axis "
            f"{axis}. Pass what pack_bits gave, along the same axis."
        )
    return _regrouped(packed, 8, bits, axis=axis)


def _regrouped(words: jax.Array, given: int, wanted: int, *, axis: int) -> jax.Array:
    """The stream of bits of words of `given` bits, least first, as int32 words of `wanted` bits."""
    together = math.lcm(given, wanted)
    group, size = together // given, together // wanted
    count = words.shape[axis] // group
    apart = words.astype(jnp.int32).reshape(*words.shape[:axis], count, group, *words.shape[axis + 1 :])
    # A bit too many would be one of the neighbour's.
    parts = [jax.lax.index_in_dim(apart, i, axis + 1, keepdims=False) & ((1 << given) - 1) for i in range(group)]
    made = []
    for j in range(size):
        word = jnp.zeros_like(parts[0])
        for i, part in enumerate(parts):
            shift = given * i - wanted * j
            if -given < shift < wanted:
                word |= part << shift if shift >= 0 else part >> -shift
        made.append(word & ((1 << wanted) - 1))
    return jnp.stack(made, axis + 1).reshape(*words.shape[:axis], count * size, *words.shape[axis + 1 :])


@jax.jit
def pack(quantized: Quantized) -> Packed:
    """Codes, second scales and scales as arrays of their own.

    Raises:
      UserError: the codes or second scales of a block axis do not fill whole bytes.
    """
    format, axis = quantized.format, quantized.axis
    return Packed(
        codes=pack_bits(quantized.codes, format.element.bits, axis=axis),
        scales=quantized.scales,
        sub_scales=None if quantized.sub_scales is None else pack_bits(quantized.sub_scales, format.d2, axis=axis),
        tensor_scale=quantized.tensor_scale,
        format=format,
        axis=axis,
        length=quantized.length,
    )


@jax.jit
def unpack(packed: Packed) -> Quantized:
    """The inverse of `pack`."""
    format, axis = packed.format, packed.axis
    codes = unpack_bits(packed.codes, format.element.bits, axis=axis)
    return Quantized(
        codes=codes.astype(_code_dtype(format)),
        scales=packed.scales,
        sub_scales=None
        if packed.sub_scales is None
        else unpack_bits(packed.sub_scales, format.d2, axis=axis).astype(jnp.uint8),
        tensor_scale=packed.tensor_scale,
        format=format,
        axis=axis,
        length=packed.length,
    )


def block_bytes(format: str | BlockFormat) -> int:
    """Of a block in pack_blocks: 18, 12 and 8 for MX9, MX6 and MX4.

    Raises:
      UserError: its scale is a float32, or its codes do not fill whole bytes.
    """
    format = formats.find(format)
    if format.scale == "float32":
        raise UserError(f"pack_blocks: {format.name} has float32 scales, which do not fit a byte. Use pack.")
    for count, bits in ((format.k1, format.element.bits), (format.k1 // format.k2, format.d2)):
        if count * bits % 8:
            raise UserError(
                f"pack_blocks: {count} times {bits} bits of {format.name} do not fill whole bytes. Take a k1 for which "
                "they do, such as a multiple of 8 k2."
            )
    return 1 + (format.k1 * format.element.bits + format.k1 // format.k2 * format.d2) // 8


@jax.jit
def pack_blocks(quantized: Quantized) -> "UInt8[Array, '...']":
    """One array of bytes, blocks one after another along the block axis: scale, second scales, codes.

    Returns:
      uint8, block_bytes(format) for k1 entries. The tensor scale of NVFP4 is not in it.

    Raises:
      UserError: see block_bytes.
    """
    format = quantized.format
    size = block_bytes(format)
    axis = quantized.axis + quantized.codes.ndim
    packed = pack(quantized)
    pieces = (
        [packed.scales, packed.codes]
        if packed.sub_scales is None
        else [
            packed.scales,
            packed.sub_scales,
            packed.codes,
        ]
    )
    count = packed.scales.shape[axis]
    apart = [p.reshape(*p.shape[:axis], count, p.shape[axis] // max(count, 1), *p.shape[axis + 1 :]) for p in pieces]
    joined = jnp.concatenate(apart, axis + 1)
    return joined.reshape(*joined.shape[:axis], count * size, *joined.shape[axis + 2 :])


@functools.partial(jax.jit, static_argnames=("format", "axis", "length"))
def unpack_blocks(
    data: "UInt8[Array, '...']",
    format: str | BlockFormat,
    *,
    axis: int,
    length: int,
    tensor_scale: "Float32[Array, ''] | None" = None,
) -> Quantized:
    """The inverse of `pack_blocks`.

    Args:
      data: uint8, from pack_blocks.
      format: the same.
      axis: of the blocks.
      length: of that axis, without padding.
      tensor_scale: the one of NVFP4.

    Raises:
      UserError: the number of bytes is not that of `length` entries in this format.
    """
    format = formats.find(format)
    size = block_bytes(format)
    axis = _axis("unpack_blocks", data, axis)
    count = data.shape[axis] // size
    if data.dtype != jnp.uint8 or data.shape[axis] % size or count != math.ceil(length / format.k1):
        raise UserError(
            f"unpack_blocks: {length} entries of {format.name} take {math.ceil(length / format.k1)} blocks of {size} "
            f"bytes; got {data.dtype}{list(data.shape)} with blocks along axis {axis}. Was it packed in another format?"
        )
    if format.scale == "e4m3" and tensor_scale is None:
        raise UserError(
            f"tensor_scale: {format.name} has one, which pack_blocks leaves out; got None. Pass Quantized.tensor_scale."
        )
    if format.scale != "e4m3" and tensor_scale is not None:
        raise UserError(f"tensor_scale: {format.name} has none. Leave it out.")
    apart = data.reshape(*data.shape[:axis], count, size, *data.shape[axis + 1 :])
    subs = format.k1 // format.k2 * format.d2 // 8

    def piece(start: int, stop: int) -> jax.Array:
        part = jax.lax.slice_in_dim(apart, start, stop, axis=axis + 1)
        return part.reshape(*data.shape[:axis], count * (stop - start), *data.shape[axis + 1 :])

    return unpack(
        Packed(
            codes=piece(1 + subs, size),
            scales=piece(0, 1),
            sub_scales=piece(1, 1 + subs) if subs else None,
            tensor_scale=tensor_scale,
            format=format,
            axis=axis - data.ndim,
            length=length,
        )
    )


def _axis(op: str, array: jax.Array, axis: int) -> int:
    """Counted from the front."""
    if not -array.ndim <= axis < array.ndim:
        raise UserError(f"{op}: the array has {array.ndim} axes; got axis {axis}. Name one of them.")
    return axis % array.ndim


def _group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes."""
    if not 1 <= bits <= 16:
        raise UserError(f"bits: codes have 1 to 16 bits; got {bits}.")
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _check_whole(count: int, group: int, bits: int) -> None:
    if count % group:
        raise UserError(
            f"pack_bits: codes of {bits} bits fill whole bytes in groups of {group}; got {count}. Pad the axis."
        )


def _code_dtype(format: BlockFormat):
    return jnp.uint8 if format.element.bits <= 8 else jnp.uint16
