"""Metrics of classes, and of yes or no in several tasks."""

import dataclasses
from typing import TYPE_CHECKING, Generic, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.train.metrics import exact
from scalejax.train.metrics.protocol import Collected, MetricBase, Value
from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AccuracySums(Generic[Total]):
    """Weight of what is right, and of all: pairs on the devices, float64[] on the host."""

    right: Total
    weight: Total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy(MetricBase):
    """Share of the examples whose most probable class is that of the label.

    The loss gives "logits", float[B, C]; the batch has "labels", int32[B], and may have "weights", float[B].

    Attributes:
      unit: What is classified.
    """

    unit: str = "examples"

    @property
    def values(self) -> tuple[Value, ...]:
        unit = f"share of {self.unit} whose class is right"
        return (Value(name="accuracy", title="accuracy", unit=unit, better="high"),)

    def zeros(self) -> AccuracySums[Pair]:
        return AccuracySums(pair_zeros(), pair_zeros())

    def update(self, sums: AccuracySums[Pair], loss: "Loss", batch: "Batch") -> AccuracySums[Pair]:
        right = (loss.outputs["logits"].argmax(-1) == batch["labels"]).astype(jnp.float32)
        weights = batch.fields.get("weights")
        weights = jnp.ones_like(right) if weights is None else weights.astype(jnp.float32)
        return AccuracySums(add(sums.right, (right * weights).sum()), add(sums.weight, weights.sum()))

    def compute(self, sums: AccuracySums[np.ndarray]) -> dict[str, float]:
        return {"accuracy": ratio(sums.right, sums.weight)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAuc(MetricBase):
    """Mean over tasks of the AUC of each task, over the labels that are known: exact, in evaluations.

    The loss gives "logits", float[B, T]; host batches have "labels", int32[B, T], -1 where a label is not known.
    """

    @property
    def collects(self) -> tuple[str, ...]:
        return ("logits", "labels")

    @property
    def values(self) -> tuple[Value, ...]:
        unit = "mean over tasks of the area under the curve"
        return (Value(name="auc", title="AUC", unit=unit, better="high", base=0.5),)

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        del intervals
        return {"auc": exact.mean_auc(collected["labels"], collected["logits"])}
