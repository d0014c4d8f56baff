"""Arrays in blocks by `kernels.mx`, where that is no slower than what XLA makes of `numerics`; the bits are the same.

`quantize` is a `numerics.quantized.products.BlockQuantizer`: training's products and formatted tables have it. It gives
what the kernel packs on GPUs, in formats in which it was no slower (`kernels.gpu_choices`), where compilers take a
kernel (`unpartitioned`). Timed were quantizing and decoding, each by itself: what XLA makes of both in a row was not.
"""

import dataclasses
import functools

import jax

from scalejax import compat
from scalejax.kernels.mx import api
from scalejax.numerics import packing
from scalejax.numerics import quantize as numerics
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import Quantized, Tail
from scalejax.numerics.scales import ScaleRule
from scalejax.parallel.compression import codec


@functools.partial(jax.tree_util.register_dataclass, data_fields=("packed",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class PackedBlocks:
    """A `numerics.quantized.products.Encoded`.

    Attributes:
      packed: Codes and scales.
    """

    packed: Packed

    def decode(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        return dequantize(self.packed, dtype)


def quantize(
    x: jax.Array, format: BlockFormat, /, *, axis: int, scale_rule: ScaleRule | None, tail: Tail
) -> Quantized | PackedBlocks:
    """`numerics.quantize.quantize`, in bytes where a kernel makes them."""
    if not x.size or not _served("quantize_blocks", format, x):
        return numerics.quantize(x, format, axis=axis, scale_rule=scale_rule, tail=tail)
    return PackedBlocks(api.quantize_blocks(x, format, axis=axis, scale_rule=scale_rule, tail=tail))


def dequantize(packed: Packed, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`numerics.quantize.dequantize` of packed codes."""
    if not _served("dequantize_blocks", packed.format, packed.codes):
        return numerics.dequantize(packing.unpack(packed), dtype)
    return api.dequantize_blocks(packed, dtype)


def unpartitioned(x: jax.Array) -> bool:
    """Whether compilers take a kernel here: on one device, or where every axis of the mesh is manual, none checked."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh.size == 1 or codec.implementation(x) is None
    return mesh.abstract_device is not None or jax.device_count() == 1


def _served(op: api.Operation, format: BlockFormat, x: jax.Array) -> bool:
    on_gpu = compat.platform() == "gpu"
    return on_gpu and unpartitioned(x) and api.preferred(op, format) == "pallas_gpu"
