"""Shapes and axes that implementations tend to get wrong, for tests and for checks on devices."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An array and the axis of its blocks.

    Attributes:
      shape: of the array.
      axis: of the blocks.
      dtype: by name.
    """

    shape: tuple[int, ...]
    axis: int
    dtype: str = "float32"


CASES = {
    "last axis": Case(shape=(5, 64), axis=-1),
    "first axis": Case(shape=(96, 40), axis=0),
    "an axis between others": Case(shape=(3, 64, 7), axis=1, dtype="bfloat16"),
    "one axis": Case(shape=(160,), axis=0, dtype="float16"),
    "tail on the last axis": Case(shape=(2, 3, 77), axis=2),
    "tail on the first axis": Case(shape=(45, 6), axis=-2, dtype="bfloat16"),
    "shorter than a block": Case(shape=(3, 5), axis=1),
    "no multiples of a tile": Case(shape=(70, 1120), axis=1),
    "no multiples of a tile, first axis": Case(shape=(1120, 150), axis=0),
}
"""By what is special about them."""

PRODUCTS = {
    "one row": (1, 64, 48),
    "eight rows": (8, 256, 130),
    "several tiles": (40, 1120, 150),
}
"""(M, K, N) of products."""
