"""How evenly the tokens of a model went to its experts."""

import dataclasses
from typing import TYPE_CHECKING, Generic

import jax
import numpy as np

from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UseSums(Generic[Total]):
    """Sums over tokens: pairs on the devices, float64 on the host.

    Attributes:
      load: [L, n], choices of each expert.
      tokens: [], tokens times layers.
      entropy: [], of the scores of tokens, in nats.
      dropped: [], choices that found no place.
      unseen: [], tokens that no expert saw, times layers.
      once: [], tokens that one expert saw, times layers.
    """

    load: Total
    tokens: Total
    entropy: Total
    dropped: Total
    unseen: Total
    once: Total


SUMS = tuple(field.name for field in dataclasses.fields(UseSums))
"""Names of these sums, which the loss has as "experts/NAME"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertUse(MetricBase):
    """Largest load, unused experts, entropy of the router, dropped choices.

    Attributes:
      layers: L.
      experts: n, of a layer.
      k: Choices of a token.
      group: The modality of the experts, where there are several; in the names of values, as "dropped/text".
    """

    layers: int
    experts: int
    k: int
    group: str = ""

    @property
    def values(self) -> tuple[Value, ...]:
        found = (
            Value(
                name="expert_load_max", title="largest load of an expert", unit="1 = all alike; largest of all layers"
            ),
            Value(name="experts_unused", title="experts without a token", unit="of all layers", shown="table"),
            Value(name="router_entropy", title="entropy of the router", unit="nats a token"),
            Value(name="dropped", title="dropped choices", unit="share", shown="table"),
            Value(name="tokens_unseen", title="tokens that no expert saw", unit="share", shown="table"),
            Value(name="tokens_seen_once", title="tokens that one expert saw", unit="share", shown="table"),
        )
        if not self.group:
            return found
        return tuple(
            dataclasses.replace(value, name=f"{value.name}/{self.group}", title=f"{value.title}, {self.group}")
            for value in found
        )

    def zeros(self) -> UseSums[Pair]:
        return UseSums(pair_zeros(self.layers, self.experts), *(pair_zeros() for _ in SUMS[1:]))

    def update(self, sums: UseSums[Pair], loss: "Loss", batch: "Batch") -> UseSums[Pair]:
        del batch
        prefix = f"{self.group}/experts" if self.group else "experts"
        found = {name: loss.sums[f"{prefix}/{name}"] for name in SUMS}
        return UseSums(**{name: add(getattr(sums, name), value) for name, value in found.items()})

    def compute(self, sums: UseSums[np.ndarray]) -> dict[str, float]:
        tokens = float(sums.tokens)
        mean = sums.load.mean(1, keepdims=True)
        values = {
            "expert_load_max": float((sums.load / np.maximum(mean, 1e-30)).max()) if tokens else float("nan"),
            "experts_unused": float((sums.load == 0).sum()),
            "router_entropy": ratio(sums.entropy, tokens),
            "dropped": ratio(sums.dropped, tokens * self.k),
            "tokens_unseen": ratio(sums.unseen, tokens),
            "tokens_seen_once": ratio(sums.once, tokens),
        }
        return {f"{name}/{self.group}" if self.group else name: value for name, value in values.items()}
