"""Block sizes as data, by chip where they differ by chip.

Those of CPUs were measured on a busy machine (`XLA`); those of TPUs and GPUs were not tuned on a chip: they follow from
the sizes of the memories, and are compiled for each chip in the tests.
"""

import dataclasses
from typing import TypeVar

_Blocks = TypeVar("_Blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaChunks:
    """Sizes of the form in XLA.

    Attributes:
      queries: Most queries of a chunk.
      keys: Keys of a chunk where a row has so many; more, where queries are few.
      scores: Scores that are held at a time (4 bytes each), where one unit does not have more.
    """

    queries: int
    keys: int
    scores: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Sizes of one step of the TPU kernels.

    Attributes:
      queries: Queries of a block; a multiple of 128.
      keys: Keys of a block; a multiple of 128.
      vmem_bytes: Vector memory that a kernel may use: a step holds a few arrays of queries * keys float32.
    """

    queries: int
    keys: int
    vmem_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes of one program of a GPU kernel, for heads of 128 values of 16 bits; wider ones get smaller blocks.

    Attributes:
      queries: Queries of a block; a power of two, >= 16.
      keys: Keys of a block; a power of two, >= 16.
      warps: Warps of 32 threads that share a program.
      stages: Blocks in flight from memory.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """Sizes of the three GPU kernels."""

    forward: GpuTiles
    query_gradient: GpuTiles
    key_gradients: GpuTiles


XLA = XlaChunks(queries=256, keys=256, scores=2**18)
"""Of nine sizes from 64 x 256 to 512 x 512 about the fastest: with gradients 1.3 to 1.5 times as fast as 256 x 512 in
steps of 2^20 scores, B S H K D = 2 1024 8 2 64 and 1 1024 8 2 128, CPU seconds on a busy EPYC, 2 threads, 2026-11-21.
"""


# By jax's name of the device (`jax.Device.device_kind`); "" is for chips that are not listed.
TPU = {
    "TPU v5 lite": TpuBlocks(queries=512, keys=1024, vmem_bytes=64 * 2**20),
    "TPU v5": TpuBlocks(queries=512, keys=1024, vmem_bytes=64 * 2**20),
    "TPU v6 lite": TpuBlocks(queries=512, keys=1024, vmem_bytes=64 * 2**20),
    "TPU7x": TpuBlocks(queries=512, keys=1024, vmem_bytes=48 * 2**20),
    "": TpuBlocks(queries=512, keys=512, vmem_bytes=32 * 2**20),
}
SPLASH = 512
"""Most queries and most keys of a block of jax's splash attention."""

_HOPPER = GpuBlocks(
    forward=GpuTiles(queries=128, keys=128, warps=8, stages=2),
    query_gradient=GpuTiles(queries=128, keys=64, warps=8, stages=2),
    key_gradients=GpuTiles(queries=64, keys=128, warps=8, stages=2),
)
GPU = {"NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "": _HOPPER}


def of_device(sizes: dict[str, _Blocks], device_kind: str) -> _Blocks:
    """The sizes of the longest name that `device_kind` starts with."""
    return sizes[max((name for name in sizes if device_kind.startswith(name)), key=len)]
