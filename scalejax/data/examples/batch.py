"""The host form of one batch of examples."""

import dataclasses

import numpy as np

from scalejax.data.examples.jagged import KeyedJagged


@dataclasses.dataclass(frozen=True)
class ClickBatch:
    """Examples as NumPy arrays; B examples, D dense columns, T labels.

    Attributes:
      features: Categorical ids, `KeyedJagged` over B examples.
      dense: float32[B, D].
      labels: float32[B, T], each 0 or 1.
      weights: float32[B]; 0 marks a padding example, which counts nowhere.
      groups: int64[B] group of each example for grouped metrics, or None.
    """

    features: KeyedJagged
    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]
