"""The host form of jagged categorical features."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class KeyedJagged:
    """Ids of F features over B examples, stored feature after feature.

        feature   example 0   example 1   example 2
        "genre"   [3, 7]      []          [1]
        "user"    [12]        [5]         [12]

        values = [3, 7, 1, 12, 5, 12]      lengths = [[2, 0, 1], [1, 1, 1]]

    Attributes:
      keys: Names of the F features.
      values: int[N], all ids of the first feature, then of the second, each in example order.
      lengths: int32[F, B], ids per feature and example.
      weights: float32[N], one per id, or None (all ones).
    """

    keys: tuple[str, ...]
    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None
