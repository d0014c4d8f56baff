"""Embedding tables and their optimizers as data.

The optimizers are *row* optimizers: a step touches exactly the rows that the batch looked up. A row that occurs
several times gets one update with the sum of its gradients ("exact" in FBGEMM's vocabulary), so that the result equals
the same optimizer on the full table for SGD and the AdaGrad family.
"""

import dataclasses
from typing import Literal

Pooling = Literal["sum", "mean", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """w -= lr * g."""

    learning_rate: float = 0.01
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad:
    """v += g^2;  w -= lr * g / (sqrt(v) + eps).  State: float32[rows, dim]."""

    learning_rate: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """v += mean(g^2);  w -= lr * g / (sqrt(v) + eps).  State: float32[rows].

    Source: the row-wise form of FBGEMM and TorchRec (EXACT_ROWWISE_ADAGRAD).
    """

    learning_rate: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0


RowOptimizer = Sgd | Adagrad | RowwiseAdagrad
"""`weight_decay` is L2: weight_decay * w is added to the gradient of the rows that are touched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table.

    Attributes:
      name: Unique in a collection.
      rows: Number of rows; ids of its features lie in [0, rows).
      dim: Width of a row.
      features: Names of the features that look rows up here (several features may share a table).
      pooling: How the rows of one example become one vector: "sum" or "mean" (zeros for an empty bag), or "none" for
        fixed-length features: the rows in order, [B, length, dim].
      dtype: Dtype of the rows at rest.
      optimizer: The row optimizer.
      init_scale: Rows start uniform in [-init_scale, init_scale]; None = 1/sqrt(rows), the DLRM convention.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling = "sum"
    dtype: str = "float32"
    optimizer: RowOptimizer = RowwiseAdagrad()
    init_scale: float | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise ValueError(
                f"TableConfig {self.name!r}: rows and dim must be at least 1; got {self.rows}, {self.dim}."
            )
        if not self.features:
            raise ValueError(f"TableConfig {self.name!r}: features must name at least one feature; got none.")
        if self.pooling not in ("sum", "mean", "none"):
            raise ValueError(f"TableConfig {self.name!r}: pooling must be sum, mean or none; got {self.pooling!r}.")
