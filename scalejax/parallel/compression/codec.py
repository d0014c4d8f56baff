"""Block formats on the wire: arrays of floating point as bytes, for exchanges between devices.

    data = encode(x, "bdr_mx9")                  # float[..., n] -> uint8[..., encoded_bytes(n, "bdr_mx9")]
    decode(data, "bdr_mx9", length=n)            # to the bit what quantize.cast(x, "bdr_mx9", axis=-1, tail="pad") is

Blocks lie along the last axis, and every vector [n] begins one: as long as a vector lies on one device, or travels to
one, so do its blocks. The last block of a vector is filled up with zeros, which change no scale; the filling does not
travel. The bytes of a vector are

    scales | second scales, where the format has them | codes

each of them a stream of bits in whole bytes (`numerics.packing.pack`): a byte or a float32 a block, d2 bits for k2
values, and the bits of the element for each number.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax.errors import UserError
from scalejax.numerics import formats, packing
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import dequantize, quantize
from scalejax.parallel.compression.wire_formats import WireFormat

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, UInt8


def encoded_bytes(count: int, format: WireFormat) -> int:
    """Bytes of a vector of `count` values: 1.125 a number for MX9 if its blocks of 16 are full."""
    return sum(_sizes(count, formats.find(format)))


def encode(x: "Float[Array, '*rows n']", format: WireFormat) -> "UInt8[Array, '*rows bytes']":
    """float[..., n] -> uint8[..., encoded_bytes(n, format)].

    Args:
      x: float32, bfloat16 or float16. A block with NaN or an infinity decodes to NaN.
      format: Of the blocks along the last axis; ties to even, scales by the format's own rule.

    Raises:
      UserError: another dtype.
    """
    found = formats.find(format)
    packed = packing.pack(quantize(x, found, axis=-1, tail="pad"))
    scales = packed.scales
    if found.scale == "float32":
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(*x.shape[:-1], 4 * scales.shape[-1])
    parts = (scales, packed.sub_scales, packed.codes)
    sizes = _sizes(x.shape[-1], found)
    return jnp.concatenate(
        [part[..., :size] for part, size in zip(parts, sizes, strict=True) if part is not None], axis=-1
    )


def decode(
    data: "UInt8[Array, '*rows bytes']", format: WireFormat, *, length: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> "Float[Array, '*rows {length}']":
    """uint8[..., encoded_bytes(length, format)] -> float[..., length].

    Args:
      data: What `encode` gave.
      format: The same.
      length: n.
      dtype: float32, or bfloat16 or float16, rounded from it.

    Raises:
      UserError: other bytes than `length` values have in this format.
    """
    found = formats.find(format)
    if data.dtype != jnp.uint8 or data.shape[-1:] != (encoded_bytes(length, format),):
        raise UserError(
            f"decode: {length} values in {format} are uint8[..., {encoded_bytes(length, format)}]; got "
            f"{data.dtype.name}{list(data.shape)}. Name the format and the length that they were encoded with."
        )
    blocks = math.ceil(length / found.k1)
    scale_bytes, sub_bytes, code_bytes = _sizes(length, found)
    scales = data[..., :scale_bytes]
    if found.scale == "float32":
        scales = jax.lax.bitcast_convert_type(scales.reshape(*data.shape[:-1], blocks, 4), jnp.float32)
    subs = data[..., scale_bytes : scale_bytes + sub_bytes]
    packed = Packed(
        codes=_filled(data[..., scale_bytes + sub_bytes :], blocks * found.k1 * found.element.bits // 8 - code_bytes),
        scales=scales,
        sub_scales=_filled(subs, blocks * (found.k1 // found.k2) * found.d2 // 8 - sub_bytes) if sub_bytes else None,
        tensor_scale=None,
        format=found,
        axis=-1,
        length=length,
    )
    return dequantize(packing.unpack(packed), dtype)


def _sizes(count: int, format: BlockFormat) -> tuple[int, int, int]:
    """Bytes of scales, second scales and codes."""
    scales = math.ceil(count / format.k1) * (4 if format.scale == "float32" else 1)
    subs = math.ceil(math.ceil(count / format.k2) * format.d2 / 8)
    return scales, subs, math.ceil(count * format.element.bits / 8)


def _filled(x: jax.Array, missing: int) -> jax.Array:
    """Zeros behind the last axis: codes of zero."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
