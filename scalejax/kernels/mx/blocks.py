"""Sizes of tiles by chip. None has been tuned on a chip: they follow from the sizes of the memories."""

import dataclasses
from typing import TypeVar

_Sizes = TypeVar("_Sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTiles:
    """Sizes of one step of the TPU kernels.

    Attributes:
      columns: Columns of a tile whose blocks lie along the rows; a multiple of 128.
      rows: Rows of x in a product; a multiple of 16.
      vmem_bytes: Vector memory that a kernel may use.
    """

    columns: int
    rows: int
    vmem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes of one program of the GPU kernels.

    Attributes:
      elements: Values that a program quantizes or decodes; a power of two.
      warps: Warps of 32 threads that share a program.
      rows: Most rows of x in a product; a power of two, >= 16.
      columns: Columns of the weights in a product; a power of two, >= 16.
      depth: Values of the axis that is summed over, at a time; a power of two.
      stages: Tiles in flight from memory.
      programs: Products of fewer tiles are cut along the axis that is summed over, to keep the chip busy.
    """

    elements: int
    warps: int
    rows: int
    columns: int
    depth: int
    stages: int
    programs: int


# By jax's name of the device (`jax.Device.device_kind`); "" is for chips that are not listed.
TPU = {
    "TPU v5 lite": TpuTiles(columns=128, rows=256, vmem_bytes=64 * 2**20),
    "TPU v5": TpuTiles(columns=128, rows=256, vmem_bytes=64 * 2**20),
    "TPU v6 lite": TpuTiles(columns=128, rows=256, vmem_bytes=64 * 2**20),
    "TPU7x": TpuTiles(columns=128, rows=256, vmem_bytes=48 * 2**20),
    "": TpuTiles(columns=128, rows=256, vmem_bytes=32 * 2**20),
}
_HOPPER = GpuTiles(elements=2048, warps=4, rows=64, columns=64, depth=128, stages=4, programs=4 * 132)
GPU = {"NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "": _HOPPER}


def of_device(sizes: dict[str, _Sizes], device_kind: str) -> _Sizes:
    """The sizes of the longest name that `device_kind` starts with."""
    return sizes[max((name for name in sizes if device_kind.startswith(name)), key=len)]
