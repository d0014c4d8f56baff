"""Batches of bags that implementations tend to get wrong, for tests and for timing on devices.

A case is ids and lengths; width, pooling and weights are crossed with it where it is used.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of bags.

    Attributes:
      num_rows: V.
      ids: int32[N]; some are no rows in some cases.
      lengths: int32[B]; slots past their sum belong to no bag.
    """

    num_rows: int
    ids: np.ndarray
    lengths: np.ndarray

    def weights(self) -> np.ndarray:
        """float32[N], of both signs, zeros among them."""
        weights = np.random.default_rng(self.ids.shape[0]).normal(size=self.ids.shape).astype(np.float32)
        weights[::5] = 0
        return weights

    def table(self, dim: int) -> np.ndarray:
        """float32[V, dim]."""
        return np.random.default_rng(self.num_rows).normal(size=(self.num_rows, dim)).astype(np.float32)


def _case(num_rows: int, lengths: list[int], *, ids: list[int] | None = None, unused: int = 0) -> Case:
    count = sum(lengths) + unused
    drawn = np.random.default_rng(count).integers(0, num_rows, count) if ids is None else np.array(ids)
    return Case(num_rows, drawn.astype(np.int32), np.array(lengths, np.int32))


CASES = {
    "empty bags": _case(7, [2, 0, 3, 1, 0], ids=[4, 4, 0, 6, 4, 2]),
    "only empty bags": _case(3, [0, 0, 0], unused=2),
    "bags that use few slots": _case(11, [1, 2], unused=9),
    "duplicates": _case(3, [4, 4, 1], ids=[1, 1, 1, 1, 1, 2, 1, 2, 1]),
    "no rows among the ids": _case(5, [3, 2, 2], ids=[-1, 4, 5, -(2**31), 2**31 - 1, 0, 3]),
    "one bag": _case(9, [6]),
    "one row": _case(1, [1, 0, 3]),
    "one id each": _case(50, [1] * 37),
    # Longer than what is held at a time: chunks of ids, rings of copies, runs of gradients.
    "large pooling": _case(40, [3, 0, 1100, 1, 70, 0], unused=5),
    "long bags": _case(12, [0, 100, 40], unused=1),
    "many bags": _case(300, [3, 1, 0, 2, 5] * 60),
}
"""By what is special about them."""
