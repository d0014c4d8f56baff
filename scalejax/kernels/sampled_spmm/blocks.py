"""Block sizes of the kernels by chip.

None of them has been tuned on a chip; they follow from the sizes of memories and from latency x bandwidth.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Sizes of one step of the TPU kernel.

    Attributes:
      slots: Slots of a step, of 128 rows each: as many copies are in flight while as many rows are summed.
      words: Words of 32 bits of a row that are copied at once; a multiple of 128.
    """

    slots: int
    words: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """Sizes of one program of the GPU kernel.

    Attributes:
      columns: Features that a program sums; a power of two. Programs of one range of features run one after another, so
        that what they gather again and again may stay in the second-level cache (50 MB hold 200,000 nodes of 128
        features of bfloat16).
      elements: Elements of its tile: it takes elements / columns rows at once, at least one.
      warps: Warps of 32 threads that share the tile.
      unroll: Gathered tiles in flight; as many columns are read ahead of them.
    """

    columns: int
    elements: int
    warps: int
    unroll: int


# By jax's name of the device (`jax.Device.device_kind`); "" is for chips that are not listed.
TPU = {"": TpuBlocks(slots=8, words=512)}
GPU = {"": GpuBlocks(columns=128, elements=1024, warps=4, unroll=4)}
