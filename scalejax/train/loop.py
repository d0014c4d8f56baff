"""The train loop: restore or begin, then step, log, evaluate, save.

Nothing in the loop waits for the step it has just dispatched. The order within a step is fixed, because it is what
makes a killed run go on to the same bits: score the days that the next batch begins, step, write the window, write the
evaluation, then save. Whatever checkpoint survives, every line up to its step is in `metrics.jsonl`.
"""

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from scalejax.errors import UserError
from scalejax.parallel.embedding.plan import PlanRefused, ShardingPlan
from scalejax.parallel.mesh import make_mesh
from scalejax.train import console as consoles
from scalejax.train import distributed, evaluation, metrics, report, run_folder, scoring, snapshot, summary
from scalejax.train import program as programs
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.convert import Prefetch
from scalejax.train.events import EventWriter
from scalejax.train.experiment import Experiment
from scalejax.train.pipeline import Pipeline
from scalejax.train.program import Program
from scalejax.train.protocols import DataSet
from scalejax.train.run_folder import Resume, RunFolder
from scalejax.train.snapshot import HostState
from scalejax.train.state import TrainState
from scalejax.train.timing import StepTimer, peak_memory


def train(
    experiment: Experiment,
    *,
    workdir: pathlib.Path | None = None,
    resume: Resume = "auto",
    recipe: str = "run",
    record: dict[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains an experiment into a run folder.

    Args:
      experiment: The run.
      workdir: Run folder; None = a new one, runs/RECIPE-NNN.
      resume: What to do with checkpoints in the run folder, see `RunFolder.resume_step`.
      recipe: Name of the recipe, for titles and the folder's name.
      record: What to write as `experiment.json`; None = the name and the fields' text.
      console: Where progress is shown; None = nowhere.

    Returns:
      The closing summary: what `summary.json` holds, and "run_folder".

    Raises:
      UserError: bad input, named with what to do.
    """
    data = experiment.data.build()
    _check_splits(data, eval_split=experiment.eval_split, final_split=experiment.final_split)
    program = programs.build(experiment, data.schema, make_mesh(experiment.mesh))
    timer = StepTimer(in_flight=program.in_flight - 1)
    with (
        RunFolder(run_folder.choose(workdir, recipe, resume)) as folder,
        Checkpointer(folder.checkpoints, experiment.checkpoints, snapshot.identity(program, data)) as checkpoints,
    ):
        start = folder.resume_step(resume, checkpoints.latest(), steps=experiment.steps)
        with timer.phase("compile"):
            state, host = _begin(program) if start is None else _restore(program, checkpoints, start)
        environment = run_folder.environment_record(_mesh_sizes(program))
        folder.begin(record or {"recipe": recipe, "experiment": repr(experiment)}, environment, start)
        with EventWriter(folder.path, process_index=jax.process_index(), step=start or 0) as events:
            run = _Run(program, data, checkpoints, events, timer, console)
            state, host = run.steps(state, host, start or 0)
            closing = run.close(state, host)
            closing |= _what_ran(program, recipe, environment)
            if distributed.is_primary():
                folder.write_summary(closing)
                report.write_report(folder.path)
    return closing | {"run_folder": str(folder.path)}


def evaluate(
    experiment: Experiment,
    *,
    workdir: pathlib.Path,
    split: str = "test",
    step: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Scores a checkpoint of a run folder on a split; writes nothing.

    A checkpoint holds tables without their sharding plan. So where the mesh is not the one that the plan was made for,
    tables are dealt out row by row instead, and the console says so.

    Args:
      experiment: The run's experiment; mesh and batch size may differ from those it was trained with.
      workdir: Run folder.
      split: "train", "validation" or "test".
      step: Checkpoint; None = the newest.
      console: Where progress is shown; None = nowhere.

    Raises:
      UserError: no such checkpoint, another model or other data, a damaged file.
    """
    data = experiment.data.build()
    _check_splits(data, split=split)
    program = _build_to_score(experiment, data, console)
    identity = snapshot.identity(program, data)
    with Checkpointer(pathlib.Path(workdir) / "checkpoints", experiment.checkpoints, identity) as checkpoints:
        state, host = _restore(program, checkpoints, step)
    if console is not None:
        console.print(f"Scoring {data.num_examples(split):,} examples of split {split!r} at step {int(state.step)}")
    scores = scoring.score(program, state, _eval_batches(data, split))
    values = scores.measure(program.task.schema.labels, intervals="bootstrap")
    return {"recipe": str(workdir), "steps": int(state.step), "examples": host.examples} | summary.of_evaluation(
        split, values
    )


_LIFETIME = ("logloss", "ne", "calibration")
"""Metrics that a window's record also holds for the whole run so far."""


class _Run:
    """What the steps of one run share."""

    def __init__(
        self,
        program: Program,
        data: DataSet,
        checkpoints: Checkpointer,
        events: EventWriter,
        timer: StepTimer,
        console: Console | None,
    ) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.checkpoints, self.events, self.timer = checkpoints, events, timer
        self.names = program.task.schema.labels
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self.console = console

    def steps(self, state: TrainState, host: HostState, start: int) -> tuple[TrainState, HostState]:
        """Runs the steps after `start`."""
        experiment, program, timer = self.experiment, self.program, self.timer
        size = experiment.data.batch_size
        batches = self.data.train_batches(
            start_example=host.examples, process_index=jax.process_index(), process_count=jax.process_count()
        )
        with _progress(self.console, experiment.steps, start) as show, Prefetch(batches, program) as prefetched:
            pipeline = Pipeline(program, prefetched, experiment.steps - start)
            for step in range(start + 1, experiment.steps + 1):
                if experiment.validation == "progressive":
                    host = self._score_days(state, host, step)
                with timer.phase("data_wait"):
                    pipeline.take()
                with timer.phase("compile" if step == start + 1 else "dispatch"):
                    state, loss = pipeline.step(state)
                    if step == start + 1:
                        loss.block_until_ready()
                timer.step_done(examples=size, output=loss)
                host = host.after(size)
                last = step == experiment.steps
                if last or step % experiment.log_every == 0:
                    state, host, fields = self._log(state, host, step)
                    show(step, fields)
                scored = None
                if last or (experiment.eval_every and step % experiment.eval_every == 0):
                    with timer.phase("evaluation"):
                        scored = self._evaluate(state, step, experiment.eval_split)
                if last or (experiment.checkpoints.every and step % experiment.checkpoints.every == 0):
                    with timer.phase("checkpoint"):
                        self._save(state, host, step, scored)
                    pipeline.drain()
        return state, host

    def close(self, state: TrainState, host: HostState) -> dict[str, Any]:
        """Scores the final split, with intervals, and adds up the run."""
        experiment, split = self.experiment, self.experiment.final_split
        closing: dict[str, Any] = {"steps": experiment.steps, "examples": host.examples}
        with self.timer.phase("evaluation"):
            scores = scoring.score(self.program, state, _eval_batches(self.data, split))
            values = scores.measure(self.names, intervals="bootstrap")
        with self.timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.checkpoints.wait()
        with self.timer.phase("evaluation"):
            self.events.evaluation(experiment.steps, split, values)
            if distributed.is_primary():
                evaluation.save_diagrams(
                    self.checkpoints.folder.parent,
                    split,
                    scores.probabilities,
                    scores.labels,
                    scores.weights,
                    names=self.names,
                )
        closing |= summary.of_evaluation(split, values)
        if host.progressive.sums is not None:
            closing |= summary.of_evaluation("progressive", metrics.compute(host.progressive.sums, self.names))
        return closing | self.timer.summary() | peak_memory(self.program.mesh.local_mesh.devices.flat)

    def _log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, dict[str, str]]:
        """Writes the window that ends here; here and before a save training waits for the device."""
        spilled, of_maps = self._check(state, step)
        state, sums = self.program.take_metrics(state)
        with self.timer.phase("blocked"):
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
        self.events.window(step, record | so_far)
        timing = self.timer.window()
        self.events.timing(step, timing)
        shown = consoles.progress_fields(
            samples_per_s=timing["samples_per_s"],
            logloss=_first(values, "logloss"),
            auc=_first(values, "auc_hist"),
        )
        return state, host, shown

    def _check(self, state: TrainState, step: int) -> tuple[int, dict[str, int]]:
        """Nothing that is not finite, and no lookup that went wrong, is ever logged or saved.

        Returns:
          Ids that found no room in an exchange since training began, 0 unless they may be any; and the counters of the
          id maps since then, "id_hits/TABLE" and so on.
        """
        with self.timer.phase("blocked"):
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

    def _evaluate(self, state: TrainState, step: int, split: str) -> dict[str, float]:
        scores = scoring.score(self.program, state, _eval_batches(self.data, split))
        values = scores.measure(self.names)
        self.events.evaluation(step, split, values)
        return values

    def _score_days(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Scores every day that begins in the batch of this step, before anything of that batch is trained."""
        for name, first, stop in self.data.days():
            if host.examples <= first < host.examples + self.experiment.data.batch_size:
                with self.timer.phase("evaluation"):
                    batches = self.data.range_batches(
                        first, stop, process_index=jax.process_index(), process_count=jax.process_count()
                    )
                    scores = scoring.score(self.program, state, batches)
                    sums = metrics.of_scores(scores.logits, scores.labels, scores.weights)
                    host = host.with_day(sums)
                    self.events.evaluation(step - 1, name, metrics.compute(sums, self.names) | scores.counted())
        return host

    def _save(self, state: TrainState, host: HostState, step: int, scored: dict[str, float] | None) -> None:
        self._check(state, step)
        self.events.sync()
        best = self.experiment.checkpoints.best_metric
        kept = None if scored is None else {best: _first(scored, best)}
        updates = int(np.asarray(state.tables["updates"])) if self.experiment.checkpoints.full_every else None
        since = self.checkpoints.base_updates(step)
        if updates is None or since is None:
            self.checkpoints.save(step, snapshot.to_stored(self.program, state), host.to_dict(), kept, updates=updates)
            return
        tree, rows = snapshot.to_delta(self.program, state, since)
        abstract = snapshot.abstract_stored(self.program)
        self.checkpoints.save_delta(step, tree, rows, host.to_dict(), kept, abstract_tree=abstract, updates=updates)


def _check_splits(data: DataSet, **splits: str) -> None:
    """Before anything is trained for scores that cannot be had."""
    for field, split in splits.items():
        if data.num_examples(split) == 0:
            raise UserError(
                f"{field}: split {split!r} has no examples, and it is scored. Give it a share of the data "
                "(--set data.split...), or name another split."
            )


def _build_to_score(experiment: Experiment, data: DataSet, console: Console | None) -> Program:
    mesh = make_mesh(experiment.mesh)
    try:
        return programs.build(experiment, data.schema, mesh)
    except PlanRefused as refused:
        if console is not None:
            why = str(refused).split(". ")[0].removesuffix(".")
            console.print(
                f"Scoring without the run's sharding plan, with every table dealt out row by row: {why}.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return programs.build(dataclasses.replace(experiment, sharding=ShardingPlan()), data.schema, mesh)


def _begin(program: Program) -> tuple[TrainState, HostState]:
    return program.init(), HostState()


def _restore(program: Program, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
    program.collection.check_fits()
    stored, host = checkpoints.restore(step, snapshot.abstract_stored(program))
    return snapshot.from_stored(program, stored), HostState.from_dict(host)


def _eval_batches(data: DataSet, split: str) -> Iterator[Any]:
    return data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count())


def _mesh_sizes(program: Program) -> dict[str, int]:
    return {axis: size for axis, size in program.mesh.shape.items() if size > 1} or {"devices": 1}


def _what_ran(program: Program, recipe: str, environment: dict[str, Any]) -> dict[str, Any]:
    dense = sum(int(np.prod(p.shape)) for p in program.model.params.values())
    tables = sum(table.rows * table.dim for table in program.collection.tables)
    devices = environment["devices"]
    return {
        "recipe": recipe,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{devices['count']} x {devices['kind']}",
        "mesh": " ".join(f"{axis}={size}" for axis, size in _mesh_sizes(program).items()),
        "dense_parameters": dense,
        "table_parameters": tables,
        "flops_per_example": program.task.flops_per_example(),
    }


def _first(values: dict[str, float], name: str) -> float:
    """A metric of the first task: "auc", or "auc/click" where there are several."""
    return next(value for key, value in values.items() if key == name or key.startswith(name + "/"))


@contextlib.contextmanager
def _progress(console: Console | None, steps: int, start: int) -> Iterator[Any]:
    """A function (step, fields) that moves the progress line."""
    if console is None:
        yield lambda step, fields: None
        return
    with Progress(*consoles.progress_columns(), console=console) as progress:
        fields: dict[str, Any] = consoles.progress_fields()
        task = progress.add_task("train", total=steps, completed=start, **fields)
        yield lambda step, fields: progress.update(task, completed=step, **fields)
