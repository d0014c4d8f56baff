"""Block sizes by chip.

None of them has been tuned on a chip: they follow from latency x bandwidth and from the sizes of the memories. About
2 microseconds x 1 to 7 TB/s are 2 to 14 MB in flight on a whole GPU; a TPU core keeps tens of row copies in flight,
limited by how fast it issues them, not by where they land.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Sizes of one step of the TPU kernels.

    Attributes:
      ids: Ids in scalar memory at a time; a multiple of 128.
      bags: Bags whose sums are in vector memory at a time; a multiple of 8.
      ring: Row copies in flight in the lookup.
      rows: Rows that are gathered or updated at a time; a multiple of 128.
    """

    ids: int
    bags: int
    ring: int
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """Sizes of one program of the GPU kernels.

    Attributes:
      elements: Elements of the tile of rows that a program holds: it takes elements / D bags or rows at once, at least
        one.
      warps: Warps of 32 threads that share the tile.
      unroll: Tiles loaded before the first of them is added.
      longest: Ids that one program sums at most when it sums gradients; rows with more are cut.
    """

    elements: int
    warps: int
    unroll: int
    longest: int = 64


# By jax's name of the device (`jax.Device.device_kind`); "" is for chips that are not listed.
TPU = {
    "TPU v5 lite": TpuBlocks(ids=512, bags=128, ring=16, rows=256),
    "TPU v5": TpuBlocks(ids=512, bags=128, ring=32, rows=256),
    "TPU v6 lite": TpuBlocks(ids=512, bags=128, ring=32, rows=256),
    "TPU7x": TpuBlocks(ids=512, bags=128, ring=32, rows=256),
    "": TpuBlocks(ids=512, bags=128, ring=16, rows=256),
}
GPU = {
    "NVIDIA H100": GpuBlocks(elements=1024, warps=4, unroll=2),
    "NVIDIA H200": GpuBlocks(elements=1024, warps=4, unroll=2),
    "": GpuBlocks(elements=1024, warps=4, unroll=2),
}

GPU_TABLES = ("float32", "bfloat16", "float16")
"""Dtypes of the tables that the kernels for GPUs take."""
