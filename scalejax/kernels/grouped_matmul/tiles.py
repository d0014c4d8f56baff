"""Sizes of tiles by chip. None has been tuned on a chip: they follow from the sizes of the memories."""

import dataclasses
from typing import TypeVar

_Sizes = TypeVar("_Sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTiles:
    """Sizes of one step of the TPU kernels.

    Attributes:
      rows: Rows of a tile of values of 16 bits; a multiple of 32.
      columns: Columns of a tile of a result; a multiple of 128.
      depth_bytes: What a row of an operand may take along the axis that is summed over; where all of that axis fits,
        the weights of a group stay in vector memory from one tile of its rows to the next.
      chunk: Values of 16 bits along that axis that a turn of a loop takes; a multiple of 256. Where rows are summed
        over, a turn takes half as many.
      vmem_bytes: Vector memory that a kernel may use.
    """

    rows: int
    columns: int
    depth_bytes: int
    chunk: int
    vmem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes of one program of a GPU kernel.

    Attributes:
      rows: Rows of a tile of the result; a power of two, >= 16.
      columns: Its columns; a power of two, >= 16.
      depth: Values of the axis that is summed over, at a time; a power of two, >= 16.
      warps: Warps of 32 threads that share a program.
      stages: Tiles in flight from memory.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSizes:
    """Sizes for values of 16 bits; those of 32 get half the depth.

    Attributes:
      one: Kernels that hold one sum.
      two: Kernels that hold two tiles of numbers of hidden units, of gate and of up.
      together: Tiles of rows that take turns over all columns, so that both operands stay in the second-level cache.
    """

    one: GpuTiles
    two: GpuTiles
    together: int


# By jax's name of the device (`jax.Device.device_kind`); "" is for chips that are not listed.
TPU = {
    "TPU v5 lite": TpuTiles(rows=512, columns=512, depth_bytes=8192, chunk=512, vmem_bytes=64 * 2**20),
    "TPU v5": TpuTiles(rows=512, columns=512, depth_bytes=8192, chunk=512, vmem_bytes=64 * 2**20),
    "TPU v6 lite": TpuTiles(rows=512, columns=512, depth_bytes=8192, chunk=512, vmem_bytes=64 * 2**20),
    "TPU7x": TpuTiles(rows=512, columns=512, depth_bytes=4096, chunk=512, vmem_bytes=48 * 2**20),
    "": TpuTiles(rows=256, columns=512, depth_bytes=2048, chunk=512, vmem_bytes=32 * 2**20),
}
_HOPPER = GpuSizes(
    one=GpuTiles(rows=128, columns=128, depth=64, warps=8, stages=3),
    two=GpuTiles(rows=128, columns=64, depth=64, warps=8, stages=3),
    together=16,
)
GPU = {"NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "": _HOPPER}


def of_device(sizes: dict[str, _Sizes], device_kind: str) -> _Sizes:
    """The sizes of the longest name that `device_kind` starts with."""
    return sizes[max((name for name in sizes if device_kind.startswith(name)), key=len)]
