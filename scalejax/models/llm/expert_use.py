"""How evenly the tokens of a model went to its experts."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Generic

import jax
import numpy as np

from scalejax.train.metrics import evaluation
from scalejax.train.metrics.protocol import Collected, Grid, MetricBase, Value
from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio
from scalejax.train.reports import figures

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UseSums(Generic[Total]):
    """Sums over tokens: pairs on the devices, float64 on the host.

    Attributes:
      load: [L, n], choices of each expert.
      gates: [L, n], the weights of its results, and `gates_squared` their squares; of choices without a place too.
      tokens: [], tokens times layers.
      entropy: [], of the scores of tokens, in nats.
      dropped: [], choices that found no place.
      unseen: [], tokens that no expert saw, times layers.
      once: [], tokens that one expert saw, times layers.
    """

    load: Total
    gates: Total
    gates_squared: Total
    tokens: Total
    entropy: Total
    dropped: Total
    unseen: Total
    once: Total


SUMS = tuple(field.name for field in dataclasses.fields(UseSums))
"""Names of these sums, which the loss has as "experts/NAME"."""

OF_EXPERTS = ("load", "gates", "gates_squared")
"""Those of each expert by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertUse(MetricBase):
    """Largest load, unused experts, spread of gates, entropy of the router, dropped choices.

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
        return _named(
            self.group,
            Value(
                name="expert_load_max", title="largest load of an expert", unit="1 = all alike; largest of all layers"
            ),
            Value(name="experts_unused", title="experts without a token", unit="of all layers", shown="table"),
            Value(
                name="gate_spread",
                title="spread of gates in an expert",
                unit="standard deviation over mean; mean of all experts",
            ),
            Value(name="router_entropy", title="entropy of the router", unit="nats a token"),
            Value(name="dropped", title="dropped choices", unit="share", shown="table"),
            Value(name="tokens_unseen", title="tokens that no expert saw", unit="share", shown="table"),
            Value(name="tokens_seen_once", title="tokens that one expert saw", unit="share", shown="table"),
        )

    @property
    def grids(self) -> tuple[Grid, ...]:
        of = f", {self.group}" if self.group else ""
        return (
            Grid(name=_name(self.group, "gate_mean"), title=f"mean gate of each expert{of}", rows="layer"),
            Grid(name=_name(self.group, "gate_cv"), title=f"spread of its gates over their mean{of}", rows="layer"),
        )

    def zeros(self) -> UseSums[Pair]:
        shapes = {name: (self.layers, self.experts) for name in OF_EXPERTS}
        return UseSums(**{name: pair_zeros(*shapes.get(name, ())) for name in SUMS})

    def update(self, sums: UseSums[Pair], loss: "Loss", batch: "Batch") -> UseSums[Pair]:
        del batch
        found = {name: loss.sums[_sum_name(self.group, name)] for name in SUMS}
        return UseSums(**{name: add(getattr(sums, name), value) for name, value in found.items()})

    def compute(self, sums: UseSums[np.ndarray]) -> dict[str, float]:
        tokens = float(sums.tokens)
        mean = sums.load.mean(1, keepdims=True)
        values = {
            "expert_load_max": float((sums.load / np.maximum(mean, 1e-30)).max()) if tokens else float("nan"),
            "experts_unused": float((sums.load == 0).sum()),
            "gate_spread": _mean_of_known(_gates(sums)[1]),
            "router_entropy": ratio(sums.entropy, tokens),
            "dropped": ratio(sums.dropped, tokens * self.k),
            "tokens_unseen": ratio(sums.unseen, tokens),
            "tokens_seen_once": ratio(sums.once, tokens),
        }
        return {_name(self.group, name): value for name, value in values.items()}

    def tabulate(self, sums: UseSums[np.ndarray]) -> dict[str, np.ndarray]:
        return {grid.name: found for grid, found in zip(self.grids, _gates(sums), strict=True)}

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: UseSums[np.ndarray]) -> None:
        del collected
        load = sums.load / np.maximum(sums.load.mean(1, keepdims=True), 1e-30)
        unused = [f"{expert} of layer {layer}" for layer, expert in np.argwhere(sums.load == 0).tolist()]
        shown = ", ".join(unused[:_NAMED]) + (f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else "")
        of = f" of {self.group}" if self.group else ""
        picture = evaluation.Picture(
            split=split,
            name=f"expert_load{'_' * bool(self.group)}{self.group}",
            caption=f"Tokens of each expert{of} over the mean of its layer; without any: {shown or 'none'}.",
            svg=figures.grid(f"Load of experts{of}", load, "layer", "expert"),
        )
        evaluation.save_picture(folder, picture)


def _gates(sums: UseSums[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the gates of each expert and their standard deviation over it, [L, n]; NaN without a token."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = sums.gates / sums.load
        return mean, np.sqrt(np.maximum(sums.gates_squared / sums.load - mean**2, 0)) / mean


def _mean_of_known(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


_NAMED = 12
"""So many experts without a token are named in a caption."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuessSums(Generic[Total]):
    """Sums over tokens and layers.

    Attributes:
      auxiliary: Binary cross-entropies, mean over experts, in nats.
      guessed: Tokens that auxiliary routers gave to experts.
      hits: Those of them that experts took.
      taken: Tokens that experts took.
      tokens: Tokens.
    """

    auxiliary: Total
    guessed: Total
    hits: Total
    taken: Total
    tokens: Total


GUESSES = ("auxiliary", "guessed", "hits")
"""Names of these sums, which the loss has as "experts/NAME" beside those of `UseSums`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertGuesses(MetricBase):
    """How well auxiliary routers know without later tokens what experts take.

    Attributes:
      experts: n, of a layer.
      group: As of `ExpertUse`.
    """

    experts: int
    group: str = ""

    @property
    def values(self) -> tuple[Value, ...]:
        return _named(
            self.group,
            Value(name="auxiliary_loss", title="loss of auxiliary routers", unit="nats a token and expert"),
            Value(name="auxiliary_precision", title="what they name is taken", unit="share", shown="table"),
            Value(name="auxiliary_recall", title="what is taken they name", unit="share", shown="table"),
        )

    def zeros(self) -> GuessSums[Pair]:
        return GuessSums(*(pair_zeros() for _ in dataclasses.fields(GuessSums)))

    def update(self, sums: GuessSums[Pair], loss: "Loss", batch: "Batch") -> GuessSums[Pair]:
        del batch
        found = {name: loss.sums[_sum_name(self.group, name)] for name in (*GUESSES, "tokens")}
        found["taken"] = loss.sums[_sum_name(self.group, "load")].sum()
        return GuessSums(**{name: add(getattr(sums, name), value) for name, value in found.items()})

    def compute(self, sums: GuessSums[np.ndarray]) -> dict[str, float]:
        share = ratio(sums.taken, float(sums.tokens) * self.experts)
        with np.errstate(divide="ignore", invalid="ignore"):
            base = -(share * np.log(share) + (1 - share) * np.log1p(-share))
        values = {
            "auxiliary_loss": ratio(sums.auxiliary, float(sums.tokens)),
            "auxiliary_loss_base": float(base),
            "auxiliary_precision": ratio(sums.hits, float(sums.guessed)),
            "auxiliary_recall": ratio(sums.hits, float(sums.taken)),
        }
        return {_name(self.group, name): value for name, value in values.items()}


def _name(group: str, name: str) -> str:
    return f"{name}/{group}" if group else name


def _sum_name(group: str, name: str) -> str:
    return f"{group}/experts/{name}" if group else f"experts/{name}"


def _named(group: str, *values: Value) -> tuple[Value, ...]:
    """Values of a group, by its name."""
    if not group:
        return values
    return tuple(
        dataclasses.replace(value, name=_name(group, value.name), title=f"{value.title}, {group}") for value in values
    )
