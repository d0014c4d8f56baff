"""The mean of the loss, by its sums."""

import dataclasses
import math
from typing import TYPE_CHECKING, Generic, Literal

import jax
import numpy as np

from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums(Generic[Total]):
    """Sum of losses and of weights: pairs on the devices, float64[] on the host."""

    loss: Total
    weight: Total


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanLoss(MetricBase):
    """loss = sum of losses / sum of weights.

    Attributes:
      unit: What the weights count: "targets" of a language model, "nodes", "images".
      of: "nats": the loss is a negative log-likelihood a target, and e to its power, the perplexity, is given too.
      sum: Name in `Loss.sums` of what is averaged where the loss that is trained has further terms; None = the loss.
    """

    unit: str = "examples"
    of: Literal["a loss", "nats"] = "a loss"
    sum: str | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        loss = Value(name="loss", title="loss", unit=f"mean over {self.unit}, lower is better", better="low")
        if self.of == "a loss":
            return (loss,)
        loss = dataclasses.replace(loss, unit="nats a target, lower is better")
        return (
            loss,
            Value(name="perplexity", title="perplexity", better="low", shown="table"),
            Value(name="bits", title="bits a target", better="low", shown="table"),
        )

    @property
    def counts(self) -> tuple[str, str]:
        return ("weight", self.unit)

    def zeros(self) -> LossSums[Pair]:
        return LossSums(pair_zeros(), pair_zeros())

    def update(self, sums: LossSums[Pair], loss: "Loss", batch: "Batch") -> LossSums[Pair]:
        del batch
        total = loss.sum if self.sum is None else loss.sums[self.sum]
        return LossSums(add(sums.loss, total), add(sums.weight, loss.weight))

    def compute(self, sums: LossSums[np.ndarray]) -> dict[str, float]:
        mean = ratio(sums.loss, sums.weight)
        found = {"loss": mean, "weight": float(sums.weight)}
        if self.of == "nats":
            with np.errstate(over="ignore"):
                found |= {"perplexity": float(np.exp(mean)), "bits": mean / math.log(2)}
        return found
