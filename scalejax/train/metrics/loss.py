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
      weight: Name there of what it is divided by, and nothing is given where that is 0; None = the weight of the loss.
      name: In records; of a second loss beside "loss" the mean alone is given.
      title: In tables and above curves.
    """

    unit: str = "examples"
    of: Literal["a loss", "nats"] = "a loss"
    sum: str | None = None
    weight: str | None = None
    name: str = "loss"
    title: str = "loss"

    @property
    def values(self) -> tuple[Value, ...]:
        loss = Value(name=self.name, title=self.title, unit=f"mean over {self.unit}, lower is better", better="low")
        if self.of == "nats":
            loss = dataclasses.replace(loss, unit="nats a target, lower is better")
        if self.of == "a loss" or self.name != "loss":
            return (loss,)
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
        weight = loss.weight if self.weight is None else loss.sums[self.weight]
        return LossSums(add(sums.loss, total), add(sums.weight, weight))

    def compute(self, sums: LossSums[np.ndarray]) -> dict[str, float]:
        if self.weight is not None and not sums.weight:
            return {}
        mean = ratio(sums.loss, sums.weight)
        found = {self.name: mean}
        if "/" not in self.name:  # of all targets
            found["weight"] = float(sums.weight)
        if self.of == "nats" and self.name == "loss":
            with np.errstate(over="ignore"):
                found |= {"perplexity": float(np.exp(mean)), "bits": mean / math.log(2)}
        return found
