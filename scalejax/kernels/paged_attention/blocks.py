"""Block sizes as data, by chip. None was tuned on a chip: they follow from the sizes of the memories."""

import dataclasses

from scalejax.kernels.flash_attention.blocks import of_device as of_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Sizes of one step of the TPU kernel.

    Attributes:
      rows: Rows of pages, a key or value head of a token each, that a step reads at most.
      splits: Parts of the keys of a row that cores work on side by side.
      vmem_bytes: Vector memory that the kernel may use.
    """

    rows: int
    splits: int
    vmem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """Sizes of the GPU kernel.

    Attributes:
      programs: Programs that fill the chip: rows and heads are cut into splits of their keys until there are so many.
      warps: Warps of 32 threads that share a program.
      stages: Pages in flight from memory.
    """

    programs: int
    warps: int
    stages: int


TPU = {
    "TPU v5 lite": TpuBlocks(rows=2_048, splits=1, vmem_bytes=64 * 2**20),
    "TPU v5": TpuBlocks(rows=2_048, splits=2, vmem_bytes=64 * 2**20),  # two cores that are one device
    "TPU v6 lite": TpuBlocks(rows=2_048, splits=1, vmem_bytes=64 * 2**20),
    "": TpuBlocks(rows=1_024, splits=1, vmem_bytes=32 * 2**20),
}

_HOPPER = GpuBlocks(programs=2 * 132, warps=4, stages=3)
GPU = {"NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "": _HOPPER}
