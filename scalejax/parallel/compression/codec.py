"""Block formats on the wire: arrays of floating point as bytes, for exchanges between devices.

    data = encode(x, "bdr_mx9")                  # float[..., n] -> uint8[..., encoded_bytes(n, "bdr_mx9")]
    decode(data, "bdr_mx9", length=n)            # to the bit what quantize.cast(x, "bdr_mx9", axis=-1, tail="pad") is

Blocks lie along the last axis, and every vector [n] begins one: as long as a vector lies on one device, or travels to
one, so do its blocks. The last block of a vector is filled up with zeros, which change no scale; the filling does not
travel. The bytes of a vector are

    scales | second scales, where the format has them | codes

each of them a stream of bits in whole bytes (`numerics.packing.pack`): a byte or a float32 a block, d2 bits for k2
values, and the bits of the element for each number.

Stochastic rounding is unbiased unless the largest value of a block saturates. Under a scale
that is the largest magnitude over the largest element (int8, int4, fp8) nothing does. Under a power of two it can by
the rule "floor", which all those formats have by default: it is refused, and scale_rule="rceil" is not.
"""

import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax.errors import UserError
from scalejax.kernels.mx import api
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule, saturates
from scalejax.numerics.stochastic import hash_key

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, UInt8, UInt32


def encoded_bytes(count: int, format: str) -> int:
    """Bytes of a vector of `count` values: 1.125 a number for MX9 if its blocks of 16 are full."""
    return sum(_sizes(count, formats.find(format)))


def encode(
    x: "Float[Array, '*rows n']",
    format: str,
    *,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = "ties_to_even",
    key: "UInt32[Array, '2'] | None" = None,
) -> "UInt8[Array, '*rows bytes']":
    """float[..., n] -> uint8[..., encoded_bytes(n, format)].

    Args:
      x: float32, bfloat16 or float16. A block with NaN or an infinity decodes to NaN.
      format: Of the blocks along the last axis: a `WireFormat`, or any other name of `numerics.formats` but NVFP4.
      scale_rule: Of scales that are powers of two; None = "floor", the format's own. `decode` need not know it.
      rounding: As in `numerics.quantize.quantize`.
      key: uint32[2] for rounding="stochastic", else None; every place of x gets bits of its own from it.

    Raises:
      UserError: another dtype, a format that does not travel, a rule or a key that does not fit, stochastic rounding
        that would be biased.
    """
    found = formats.find(format)
    check_format(found, scale_rule=scale_rule, rounding=rounding)
    packed = api.quantize_blocks(
        x, found, axis=-1, scale_rule=scale_rule, rounding=rounding, key=None if key is None else hash_key(key),
        tail="pad", implementation=implementation(x),
    )  # fmt: skip
    scales = packed.scales
    if found.scale == "float32":
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(*x.shape[:-1], 4 * scales.shape[-1])
    scale_bytes, sub_bytes, code_bytes = _sizes(x.shape[-1], found)
    head = scales[..., :scale_bytes]
    if packed.sub_scales is not None:
        head = jnp.concatenate([head, packed.sub_scales[..., :sub_bytes]], axis=-1)
    # Codes are written into place: of a concatenation with them XLA's CPU loops are no vector instructions.
    room = jnp.pad(head, [(0, 0)] * (x.ndim - 1) + [(0, code_bytes)])
    return jax.lax.dynamic_update_slice_in_dim(room, packed.codes[..., :code_bytes], head.shape[-1], axis=-1)


def decode(
    data: "UInt8[Array, '*rows bytes']", format: str, *, length: int, dtype: jax.typing.DTypeLike = jnp.float32
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
        sub_scales=_filled(subs, blocks * (found.k1 // found.k2) * found.d2 // 8 - sub_bytes) if found.d2 else None,
        tensor_scale=None,
        format=found,
        axis=-1,
        length=length,
    )
    return api.dequantize_blocks(packed, dtype, implementation=implementation(data))


def implementation(x: jax.Array) -> Literal["xla"] | None:
    """For operations of `scalejax.kernels`: None, the kernels of the platform, where compilers take them.

    That is where every axis of the mesh is manual and none is checked.

    Args:
      x: What is encoded or decoded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)
    return None if manual and not jax.typeof(x).manual_axis_type.varying else "xla"


def check_format(format: BlockFormat, *, scale_rule: ScaleRule | None = None, rounding: Rounding) -> None:
    """Refuses what `encode` does.

    Raises:
      UserError: a format with a scale of the whole array, or a rule under which stochastic rounding is biased.
    """
    if format.scale == "e4m3":
        raise UserError(
            f"format: blocks of {format.name} share a float32 with the whole array, which does not travel with them. "
            "Take mxfp4_e2m1 or int4:128."
        )
    if rounding == "stochastic" and format.scale == "exponent" and saturates(format.element, scale_rule or "floor"):
        raise UserError(
            f'rounding="stochastic" is biased for {format.name} under scale_rule="{scale_rule or "floor"}": the '
            'largest value of a block can saturate. Take scale_rule="rceil", or int8:128 or int4:128.'
        )


def _sizes(count: int, format: BlockFormat) -> tuple[int, int, int]:
    """Bytes of scales, second scales and codes."""
    scales = math.ceil(count / format.k1) * (4 if format.scale == "float32" else 1)
    subs = math.ceil(math.ceil(count / format.k2) * format.d2 / 8)
    return scales, subs, math.ceil(count * format.element.bits / 8)


def _filled(x: jax.Array, missing: int) -> jax.Array:
    """Zeros behind the last axis: codes of zero."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
