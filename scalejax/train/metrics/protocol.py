"""The protocol of a metric: sums on devices, exact values on the host where sums do not do, names and units.

    sums = metric.update(metric.zeros(), loss, batch)       in the compiled step, window by window
    values = metric.compute(to_host(sums))                  {"accuracy": 0.81}
    values |= metric.exact(collected)                       in evaluations, of outputs gathered on the host

Names, titles, directions and pictures come from the metric alone; windows, evaluations, the best checkpoint, the
summary, the progress line, TensorBoard and the report ask it.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch

Collected = Mapping[str, np.ndarray]
"""Outputs and fields of all examples that count, {name: [N, ...]}, in the order of the file; of `Metric.shows` of the
first ones."""

SHOWN = 24
"""Examples that are at least there of what metrics only draw, if the split has as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One number that a metric gives, and how it is shown.

    Attributes:
      name: Key in records: "ne", or "ne/click" where there are several tasks.
      title: In tables and above curves.
      unit: What it is a number of, under a curve.
      better: Which direction is better; "neither" for counts and rates, by which no checkpoint is kept.
      base: What a trivial model has; None = nothing is known, or `NAME_base` in the record says it.
      window: Key of the same thing in records of training windows, where it is another ("auc_hist" of "auc").
      bound: Key of the largest error of what windows have, drawn as a band.
      shown: "table and curve", "table" alone, or only in "records".
    """

    name: str
    title: str
    unit: str = ""
    better: Literal["low", "high", "neither"] = "neither"
    base: float | None = None
    window: str | None = None
    bound: str | None = None
    shown: Literal["table and curve", "table", "records"] = "table and curve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of numbers that a metric gives of a whole split.

    Attributes:
      name: Key in the summary, like that of a `Value`.
      title: Above the table.
      rows: What a row is one of.
    """

    name: str
    title: str
    rows: str


class Metric(Protocol):
    """A metric; `MetricBase` has what most share."""

    @property
    def values(self) -> tuple[Value, ...]:
        """What it gives; the first is what it is for."""
        ...

    @property
    def grids(self) -> tuple[Grid, ...]:
        """What it gives besides of a split that ends a run."""
        ...

    @property
    def counts(self) -> tuple[str, str]:
        """(key of a record, unit): how much its values are of, ("weight", "targets")."""
        ...

    @property
    def collects(self) -> tuple[str, ...]:
        """Outputs of the loss, or fields of host batches, that `exact` and `keep` want of every example."""
        ...

    @property
    def shows(self) -> tuple[str, ...]:
        """The same that `keep` wants of the first `SHOWN` examples of a split: pictures that it draws."""
        ...

    @property
    def lifetime(self) -> tuple[str, ...]:
        """Names of values that windows also give for the whole run so far, as "lifetime_NAME"."""
        ...

    def zeros(self) -> object:
        """Sums of no examples, a pytree of `sums.Pair`s and integer arrays."""
        ...

    def update(self, sums: Any, loss: "Loss", batch: "Batch") -> object:
        """Adds a batch, inside a compiled step. `loss` is that of the global batch."""
        ...

    def compute(self, sums: Any) -> dict[str, float]:
        """Values of sums on the host (`sums.to_host`)."""
        ...

    def tabulate(self, sums: Any) -> dict[str, np.ndarray]:
        """The numbers of `grids`, [rows, columns] each, of sums on the host."""
        ...

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        """Values of collected outputs, with 95 % intervals as NAME_low and NAME_high if asked; {} where sums do."""
        ...

    def of_collected(self, collected: Collected) -> object:
        """The sums on the host of collected outputs, for `lifetime` values of examples that were scored."""
        ...

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: Any) -> None:
        """Writes into the run folder what reports draw of a scored split, see `evaluation.save_picture`."""
        ...


class MetricBase:
    """The parts of a `Metric` that most share; as it stands it has no sums, for values that only `exact` gives."""

    def zeros(self) -> object:
        return ()

    def update(self, sums: Any, loss: "Loss", batch: "Batch") -> object:
        del loss, batch
        return sums

    def compute(self, sums: Any) -> dict[str, float]:
        del sums
        return {}

    @property
    def grids(self) -> tuple[Grid, ...]:
        return ()

    @property
    def counts(self) -> tuple[str, str]:
        return ("weight", "examples")

    @property
    def collects(self) -> tuple[str, ...]:
        return ()

    @property
    def shows(self) -> tuple[str, ...]:
        return ()

    @property
    def lifetime(self) -> tuple[str, ...]:
        return ()

    def tabulate(self, sums: Any) -> dict[str, np.ndarray]:
        del sums
        return {}

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        del collected, intervals
        return {}

    def of_collected(self, collected: Collected) -> object:
        raise NotImplementedError(f"{type(self).__name__} has no sums of collected outputs.")

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: Any) -> None:
        del folder, split, collected, sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What a run measures, as `measures.json` in its folder keeps it for reports.

    Attributes:
      values: All values of all metrics.
      counts: Of the first metric, see `Metric.counts`.
      grids: Of all metrics.
    """

    values: tuple[Value, ...]
    counts: tuple[str, str]
    grids: tuple[Grid, ...] = ()

    @classmethod
    def of(cls, metrics: tuple[Metric, ...]) -> "Described":
        """What some metrics say of themselves, each name once: phases may measure the same of different models."""
        values = {value.name: value for metric in metrics for value in metric.values}
        grids = {grid.name: grid for metric in metrics for grid in metric.grids}
        return cls(values=tuple(values.values()), counts=metrics[0].counts, grids=tuple(grids.values()))

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        values, grids = ([dataclasses.asdict(one) for one in some] for some in (self.values, self.grids))
        return {"values": values, "counts": list(self.counts), "grids": grids}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Described":
        """The inverse of `to_dict`."""
        first, second = content["counts"]
        return cls(
            values=tuple(Value(**value) for value in content["values"]),
            counts=(first, second),
            grids=tuple(Grid(**grid) for grid in content.get("grids", ())),  # earlier versions wrote none
        )


def names_of(metrics: tuple[Metric, ...]) -> dict[str, Value]:
    """Every value that checkpoints may be kept by, by name, in order."""
    return {value.name: value for metric in metrics for value in metric.values if value.better != "neither"}
