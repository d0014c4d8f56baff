"""A run of a click model: windows and evaluations of probabilities, progressive validation, tables in checkpoints."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from scalejax.errors import UserError
from scalejax.parallel.embedding.plan import PlanRefused, ShardingPlan
from scalejax.train import console as consoles
from scalejax.train import distributed, evaluation, metrics, scoring, snapshot, summary
from scalejax.train import program as programs
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.convert import prefetch
from scalejax.train.experiment import Experiment
from scalejax.train.pipeline import Pipeline
from scalejax.train.program import Program
from scalejax.train.protocols import DataSet
from scalejax.train.records import Records
from scalejax.train.snapshot import HostState
from scalejax.train.state import TrainState
from scalejax.train.timing import peak_memory

_LIFETIME = ("logloss", "ne", "calibration")
"""Metrics that a window's record also holds for the whole run so far."""


class ClickRun:
    """Implements `runs.Run`."""

    def __init__(self, program: Program, data: DataSet) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.names = program.task.schema.labels
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self._records: Records | None = None

    @classmethod
    def bind(cls, experiment: Experiment, data: DataSet, mesh: Mesh) -> "ClickRun":
        """Binds an experiment to its data and a mesh.

        Raises:
          UserError: as `program.build`.
        """
        return cls(programs.build(experiment, data.schema, mesh), data)

    @classmethod
    def bind_to_score(cls, experiment: Experiment, data: DataSet, mesh: Mesh, console: Console | None) -> "ClickRun":
        """The same, without the sharding plan where that does not suit the mesh."""
        try:
            return cls.bind(experiment, data, mesh)
        except PlanRefused as refused:
            if console is not None:
                why = str(refused).split(". ")[0].removesuffix(".")
                console.print(
                    f"Scoring without the run's sharding plan, with every table dealt out row by row: {why}.",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            return cls.bind(dataclasses.replace(experiment, sharding=ShardingPlan()), data, mesh)

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def in_flight(self) -> int:
        return self.program.in_flight

    @property
    def compiler_options(self) -> dict[str, Any]:
        return {}

    @property
    def records(self) -> Records:
        assert self._records is not None, "attach() comes first"
        return self._records

    def identity(self) -> dict[str, str]:
        return snapshot.identity(self.program, self.data)

    def begin(self) -> tuple[TrainState, HostState]:
        return self.program.init(), HostState()

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
        self.program.collection.check_fits()
        stored, host = checkpoints.restore(step, snapshot.abstract_stored(self.program))
        return snapshot.from_stored(self.program, stored), HostState.from_dict(host)

    def attach(self, records: Records) -> None:
        self._records = records

    @contextlib.contextmanager
    def feed(self, host: HostState, steps: int) -> Iterator[Pipeline]:
        batches = self.data.train_batches(
            start_example=host.examples, process_index=jax.process_index(), process_count=jax.process_count()
        )
        with prefetch(batches, self.program) as prefetched:
            yield Pipeline(self.program, prefetched, steps)

    def before_step(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Scores every day that begins in the batch of this step, before anything of that batch is trained."""
        if self.experiment.validation != "progressive":
            return host
        for name, first, stop in self.data.days():
            if host.examples <= first < host.examples + self.experiment.data.batch_size:
                with self.records.timer.phase("evaluation"):
                    batches = self.data.range_batches(
                        first, stop, process_index=jax.process_index(), process_count=jax.process_count()
                    )
                    scores = scoring.score(self.program, state, batches)
                    sums = metrics.of_scores(scores.logits, scores.labels, scores.weights)
                    host = host.with_day(sums)
                    values = metrics.compute(sums, self.names) | scores.counted()
                    self.records.events.evaluation(step - 1, name, values)
        return host

    def log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, dict[str, str]]:
        """Writes the window that ends here; here and before a save training waits for the device."""
        spilled, of_maps = self._check(state, step)
        state, sums = self.program.take_metrics(state)
        with self.records.timer.phase("blocked"):
            window = metrics.to_host(sums)
        values = metrics.compute(window, self.names)
        host = host.with_window(window)
        assert host.lifetime.sums is not None
        lifetime = metrics.compute(host.lifetime.sums, self.names)
        rate = float(np.asarray(self.learning_rate(step)))
        record = {"examples_seen": host.examples, "learning_rate": rate, **values}
        if self.experiment.exchange.spill == "count":
            record["spilled_ids"] = spilled
        record |= of_maps
        so_far = {f"lifetime_{key}": x for key, x in lifetime.items() if key.split("/")[0] in _LIFETIME}
        self.records.events.window(step, record | so_far)
        timing = self.records.timer.window()
        self.records.events.timing(step, timing)
        shown = consoles.progress_fields(
            rate=f"{consoles.count(timing['samples_per_s'])} examples/s",
            logloss=_first(values, "logloss"),
            auc=_first(values, "auc_hist"),
        )
        return state, host, shown

    def evaluate(self, state: TrainState, step: int, split: str) -> dict[str, float]:
        scores = scoring.score(self.program, state, self._eval_batches(split))
        values = scores.measure(self.names)
        self.records.events.evaluation(step, split, values)
        return values

    def save(self, state: TrainState, host: HostState, step: int, scored: dict[str, float] | None) -> None:
        self._check(state, step)
        checkpoints = self.records.checkpoints
        self.records.events.sync()
        best = self.experiment.checkpoints.best_metric
        kept = None if scored is None else {best: _first(scored, best)}
        updates = int(np.asarray(state.tables["updates"])) if self.experiment.checkpoints.full_every else None
        since = checkpoints.base_updates(step)
        if updates is None or since is None:
            checkpoints.save(step, snapshot.to_stored(self.program, state), host.to_dict(), kept, updates=updates)
            return
        tree, rows = snapshot.to_delta(self.program, state, since)
        abstract = snapshot.abstract_stored(self.program)
        checkpoints.save_delta(step, tree, rows, host.to_dict(), kept, abstract_tree=abstract, updates=updates)

    def close(self, state: TrainState, host: HostState) -> dict[str, Any]:
        """Scores the final split, with intervals, and adds up the run."""
        experiment, split, timer = self.experiment, self.experiment.final_split, self.records.timer
        closing: dict[str, Any] = {"steps": experiment.steps, "examples": host.examples}
        with timer.phase("evaluation"):
            scores = scoring.score(self.program, state, self._eval_batches(split))
            values = scores.measure(self.names, intervals="bootstrap")
        with timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.records.checkpoints.wait()
        with timer.phase("evaluation"):
            self.records.events.evaluation(experiment.steps, split, values)
            if distributed.is_primary():
                evaluation.save_diagrams(
                    self.records.checkpoints.folder.parent,
                    split,
                    scores.probabilities,
                    scores.labels,
                    scores.weights,
                    names=self.names,
                )
        closing |= summary.of_evaluation(split, values)
        if host.progressive.sums is not None:
            closing |= summary.of_evaluation("progressive", metrics.compute(host.progressive.sums, self.names))
        return closing | timer.summary() | peak_memory(self.mesh.local_mesh.devices.flat)

    def describe(self) -> dict[str, Any]:
        tables = sum(table.rows * table.dim for table in self.program.collection.tables)
        return {
            "dense_parameters": self.program.model.size,
            "table_parameters": tables,
            "flops_per_example": self.program.task.flops_per_example(),
        }

    def score(self, state: TrainState, split: str) -> dict[str, Any]:
        scores = scoring.score(self.program, state, self._eval_batches(split))
        return summary.of_evaluation(split, scores.measure(self.names, intervals="bootstrap"))

    def _eval_batches(self, split: str) -> Iterator[Any]:
        return self.data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count())

    def _check(self, state: TrainState, step: int) -> tuple[int, dict[str, int]]:
        """Nothing that is not finite, and no lookup that went wrong, is ever logged or saved.

        Returns:
          Ids that found no room in an exchange since training began, 0 unless they may be any; and the counters of the
          id maps since then, "id_hits/TABLE" and so on.
        """
        with self.records.timer.phase("blocked"):
            faults = np.asarray(self.program.faults(state))
            counts = jax.device_get(self.program.id_counts(state))
            nonfinite = int(np.asarray(state.metrics.nonfinite).sum())
        self.program.collection.check_faults(faults)
        if nonfinite:
            raise UserError(
                f"The loss of {nonfinite} examples was not finite in the steps up to {step}. Nothing was saved after "
                "the last checkpoint. Lower the learning rates, --set optimizer.learning_rate.peak=... and "
                "--set row_optimizer.learning_rate=..., and start again from it."
            )
        totals = self.program.collection.id_totals(counts)
        counters = {
            f"id_{counter}/{table}": number
            for table, found in totals.items()
            for counter, number in found.items()
            if counter != "misplaced"
        }
        return int(faults[1]), counters


def _first(values: dict[str, float], name: str) -> float:
    """A metric of the first task: "auc", or "auc/click" where there are several."""
    return next(value for key, value in values.items() if key == name or key.startswith(name + "/"))
