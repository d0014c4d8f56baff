"""What a checkpoint holds: the state as named, mesh-free arrays, and the host values beside them."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from scalejax.parallel.embedding.tracking import Rows, touched_rows
from scalejax.train import state as states
from scalejax.train.metrics import HostSums, Lifetime
from scalejax.train.program import Program
from scalejax.train.protocols import DataSet
from scalejax.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class HostState:
    """What a run knows on the host between two steps.

    Attributes:
      examples: Global example counter: the position in the training stream.
      lifetime: Metric sums of all windows so far.
      progressive: Metric sums of all days scored so far, before they were trained.
    """

    examples: int = 0
    lifetime: Lifetime = Lifetime()
    progressive: Lifetime = Lifetime()

    def after(self, examples: int) -> "HostState":
        """One step later."""
        return dataclasses.replace(self, examples=self.examples + examples)

    def with_window(self, sums: HostSums) -> "HostState":
        """With one more window of training metrics."""
        return dataclasses.replace(self, lifetime=self.lifetime.add(sums))

    def with_day(self, sums: HostSums) -> "HostState":
        """With one more day of progressive validation."""
        return dataclasses.replace(self, progressive=self.progressive.add(sums))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, exactly."""
        return {
            "examples": self.examples,
            "lifetime": self.lifetime.to_dict(),
            "progressive": self.progressive.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HostState":
        """The inverse of `to_dict`."""
        return cls(
            values["examples"], Lifetime.from_dict(values["lifetime"]), Lifetime.from_dict(values["progressive"])
        )


def to_stored(program: Program, state: TrainState) -> dict[str, Any]:
    """The state as arrays that know no mesh: tables unpadded and unstacked, under their own names."""
    return {**states.to_stored(state), "tables": program.collection.to_stored(state.tables)}


def to_delta(program: Program, state: TrainState, since: int) -> tuple[dict[str, Any], Iterator[Rows]]:
    """What has changed of `to_stored` after an update: (all but the tracked tables, touched rows of these)."""
    rest = {**states.to_stored(state), "tables": program.collection.untracked_to_stored(state.tables)}
    return rest, touched_rows(program.collection, state.tables, since)


def abstract_stored(program: Program) -> dict[str, Any]:
    """What `to_stored` gives, as shapes, dtypes and the shardings of this program's mesh."""
    return {**states.to_stored(program.abstract_state()), "tables": program.collection.abstract_stored()}


def from_stored(program: Program, stored: dict[str, Any]) -> TrainState:
    """The state on this program's mesh."""
    return states.from_stored(stored, program.abstract_state(), program.collection.from_stored(stored["tables"]))


def identity(program: Program, data: DataSet) -> dict[str, str]:
    """What a checkpoint must share with the run that restores it; meshes, rules and batch sizes may differ."""
    experiment = program.experiment
    model = repr((experiment.model, program.task.schema, experiment.precision.params))
    maps = {"id_maps": repr(experiment.id_maps)} if experiment.id_maps else {}
    return maps | {
        "model": f"{type(experiment.model).__name__} {hashlib.sha256(model.encode()).hexdigest()[:16]}",
        "optimizer": f"{type(experiment.optimizer).__name__} / {type(experiment.row_optimizer).__name__}",
        "data": data.fingerprint(),
    }
