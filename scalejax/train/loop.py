"""The train loop: restore or begin, then step, log, evaluate, save.

Nothing in the loop waits for the step it has just dispatched. The order within a step is fixed, because it is what
makes a killed run go on to the same bits: score the days that the next batch begins, step, write the window, save,
write the evaluation and add it to the checkpoint. A save is due by steps, by the clock, or because the run is asked to
end, for which all processes agree on a step (`peers`). Whatever checkpoint survives, the windows up to its step are in
`metrics.jsonl`, and an evaluation that it lacks is made again.

What a step computes is `step.Program`, and what is written between steps `run.Run`; neither knows a model.
"""

import contextlib
import dataclasses
import datetime
import functools
import inspect
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import grain  # noqa: F401  # pyright: ignore[reportUnusedImport] (here, before a bar is drawn: see `train`)
import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from scalejax.errors import UserError
from scalejax.parallel.mesh import make_mesh
from scalejax.train import architecture, disk, distributed, peers, phases, run_folder
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Experiment
from scalejax.train.metrics.evaluation import Picture, save_picture
from scalejax.train.metrics.protocol import Described, Metric
from scalejax.train.preemption import Preemption
from scalejax.train.protocols import DataSet
from scalejax.train.reports import progress as progresses
from scalejax.train.reports import report, summary
from scalejax.train.reports.events import EventWriter
from scalejax.train.reports.records import Records
from scalejax.train.reports.timing import StepTimer
from scalejax.train.run_folder import Resume, RunFolder
from scalejax.train.runs.run import Run
from scalejax.train.runs.run_state import HostState
from scalejax.train.state import TrainState
from scalejax.train.trackers.protocol import Tracker

_NOTHING = contextlib.nullcontext()


def train(
    experiment: Experiment,
    *,
    workdir: pathlib.Path | None = None,
    resume: Resume = "auto",
    recipe: str = "run",
    record: Mapping[str, object] | None = None,
    console: Console | None = None,
    progress: progresses.Progress | None = None,
    preemption: Preemption | None = None,
) -> dict[str, Any]:
    """Trains an experiment into a run folder.

    Args:
      experiment: The run.
      workdir: Run folder; None = a new one, runs/RECIPE-NNN.
      resume: What to do with checkpoints in the run folder, see `RunFolder.resume_step`.
      recipe: Name of the recipe, for titles and the folder's name.
      record: What to write as `experiment.json`; None = the name and the fields' text.
      console: Where remarks are printed and progress is shown; None = nowhere.
      progress: How progress is shown; None = on the console.
      preemption: What hears that the run must end, entered by the caller, who thereby says what signals do; None =
        nothing: KeyboardInterrupt ends the run where it stands, as in any program, and it goes on from its newest
        checkpoint.

    Returns:
      The closing summary: what `summary.json` holds, and "run_folder".

    Raises:
      UserError: bad input, named with what to do.
      TemporaryFailure: it was asked to end, and all that was trained is saved.
    """
    trackers = distributed.together(lambda: _trackers(experiment))
    # A terminal's bar is drawn by a thread, whose own imports fail while another thread imports grain: etils'
    # `lazy_imports` replaces `builtins.__import__` for that time. Hence grain is imported with this module.
    progress = progresses.shown_on(console) if progress is None else progress
    preemption = preemption or Preemption()
    if jax.process_count() > peers.job.count:
        raise UserError(
            "Several processes agree on when to save by way of scalejax.train.distributed.initialize. Call it in the "
            "place of jax.distributed.initialize."
        )
    runs = _bind(experiment, console)
    # One less: the timer waits behind a dispatch, and the next step is queued before it does so again.
    timer = StepTimer(in_flight=runs[0].in_flight - 1)
    with (
        RunFolder(run_folder.choose(workdir, recipe, resume)) as folder,
        _checkpointer(folder.checkpoints, runs[0]) as checkpoints,
    ):
        preemption.watch(lambda: checkpoints.complete)
        start = folder.resume_step(resume, checkpoints.latest(), steps=experiment.total_steps)
        if start is not None and resume in ("auto", "stretch"):
            start = _back_to_intact(checkpoints, start, console)
        record = record or {"recipe": recipe, "experiment": repr(experiment)}
        if start is not None:
            if resume != "stretch":
                distributed.on_primary(functools.partial(_check_schedules, folder.path, experiment, start))
            finished = distributed.on_primary(functools.partial(_finished, folder.path, record, start))
            if finished is not None:
                if console is not None:
                    more = f"Its summary stays as it is; more steps than {start:,} would train it on."
                    console.print(
                        f"{folder.path} is a finished run. {more}", markup=False, highlight=False, soft_wrap=True
                    )
                return {**finished, "run_folder": str(folder.path)}
        # A run that was killed between a save and the evaluation after it makes up for that evaluation first.
        unscored = start is not None and checkpoints.metrics(start) is None
        # A phase that ended at this very step is gone back to only where its evaluation is missing.
        run, *later = [r for r in runs[:-1] if (start or 0) < r.phase.stop + unscored] + runs[-1:]
        with timer.phase("compile" if start is None else "handover"), progress.compiling("state"):
            state, host = _state_of(run, runs, checkpoints, start, console)
        environment = run_folder.environment_record(_mesh_sizes(run), run.compiler_options)
        # Not before the restore has succeeded: it cuts the records back, and nobody could write them again.
        folder.begin(record, environment, start)
        timer.goes_on_from(run_folder.read_lines(folder.path / "timing.jsonl"))
        if distributed.is_primary():
            advice = [[*arguments, what] for arguments, what in runs[-1].program.task.advice().items()]
            folder.write_measures(_described(runs).to_dict() | {"advice": advice})
            for bound in runs:
                _keep_data(folder.path, bound.data)
        with (
            _events(folder.path, start or 0, trackers) as events,
            progress.begin(experiment.total_steps, start or 0),
        ):
            records = Records(checkpoints, events, timer, progress)
            run.attach(records)
            if start is not None and unscored and run.scores_at(start):
                with timer.phase("evaluation"):
                    host = run.evaluate(state, host, start, saved=True)
            state, host = _steps(run, records, state, host, start or 0, preemption)
            compiled = [run.program] if (start or 0) < run.phase.stop else []
            for following in later:
                # Otherwise the states of two phases would be in memory at once.
                del state
                run.end()
                run = following
                with timer.phase("handover"), progress.compiling("state"):
                    state, host = _state_of(run, runs, checkpoints, run.phase.start, console)
                run.attach(records)
                anew = all(run.program is not program for program in compiled)
                state, host = _steps(run, records, state, host, run.phase.start, preemption, compiles=anew)
                compiled.append(run.program)
            closing = run.close(state, host)
            closing |= _what_ran(run, recipe, environment)
            if damaged := checkpoints.damaged():
                closing["damaged_checkpoints"] = ", ".join(damaged)
            if distributed.is_primary():
                if len(runs) > 1:
                    splits = {r.phase.name: r.experiment.evaluation.split for r in runs}
                    files = report.read_run(folder.path)
                    closing["phases"] = summary.of_phases(splits, files.windows, files.evaluations, files.timing)
                folder.write_summary(closing)
                files = report.read_run(folder.path)
                report.write(files)
                for svg, name, _ in files.predictions:
                    events.picture(int(state.step), name, svg)
    return closing | {"run_folder": str(folder.path)}


def _finished(folder: pathlib.Path, record: Mapping[str, object], start: int) -> dict[str, Any] | None:
    """The summary of a run that has ended at its newest checkpoint and is asked for nothing else; else None."""
    if not (folder / "summary.json").is_file() or not (folder / "experiment.json").is_file():
        return None
    closing = disk.read_json(folder / "summary.json")
    changes = run_folder.differences(disk.read_json(folder / "experiment.json"), disk.finite(record))
    return closing if closing.get("steps") == start and not changes else None


def _check_schedules(folder: pathlib.Path, experiment: Experiment, start: int) -> None:
    """Refuses other steps than before where a schedule over all steps would jump; a run in phases says its own."""
    before = disk.read_json(folder / "experiment.json") if (folder / "experiment.json").is_file() else {}
    fields = architecture.fields_of(before.get("experiment"))
    steps = fields.get("steps")
    if experiment.phases or not isinstance(steps, int) or steps == experiment.steps:
        return
    for path in ("optimizer.learning_rate", "tables.schedule"):
        part, name = path.split(".")
        schedule = getattr(getattr(experiment, part), name)
        if architecture.plain(architecture.fields_of(fields.get(part)).get(name)) != architecture.plain(schedule):
            continue  # which the user has changed
        was, now = (float(np.asarray(schedule.build(count)(start))) for count in (steps, experiment.steps))
        if not math.isclose(was, now, rel_tol=1e-5):
            raise UserError(
                f"steps={experiment.steps}: {folder} has been trained for {start} of {steps} steps, and {path} is a "
                f"schedule over all of them: stretched it is {now:.3g} after step {start}, where it was {was:.3g}. Add "
                f"--resume stretch if that is what you want; or begin another run with it: --set init={folder} "
                "--workdir ANOTHER."
            )


def _trackers(experiment: Experiment) -> list[Tracker]:
    return [config.build() for config in experiment.trackers] if distributed.is_primary() else []


def _events(folder: pathlib.Path, step: int, trackers: list[Tracker]) -> EventWriter:
    return distributed.together(
        lambda: EventWriter(folder, process_index=jax.process_index(), step=step, trackers=trackers)
    )


def _bind(experiment: Experiment, console: Console | None) -> list[Run]:
    """Every phase of a run, bound before the first begins, so that a mistake in the last costs no training."""
    runs: list[Run] = []
    for phase in phases.resolved(experiment):
        own = phase.experiment
        built = [run.data for run in runs if run.experiment.data == own.data]
        data = built[0] if built else _build_data(own, console)
        wanted = {"evaluation.split": own.evaluation.split, "evaluation.final_split": own.evaluation.final_split}
        _check_splits(data, wanted)
        # Phases that are alike but in their place share what is compiled.
        like = [
            run.program for run in runs if run.experiment == own and run.phase.optimizer_from == phase.optimizer_from
        ]
        run = Run(like[0], data, phase) if like else Run.bind(own, data, make_mesh(own.placement.mesh), phase)
        _ = run.program.remarks  # which refuses a mesh without the levels that its exchange asks for
        if runs:
            run.kept(runs[-1], runs[:-1])
            run.room = runs[0].room  # whose size is in the shapes of what phases that are alike share
        runs.append(run)
    return runs


def _state_of(
    run: Run, runs: list[Run], checkpoints: Checkpointer, start: int | None, console: Console | None
) -> tuple[TrainState, HostState]:
    """The state with which a phase begins or goes on, and what the host knows; `start` is that of a checkpoint."""
    number = runs.index(run)
    if start is None:
        _become(checkpoints, run)
        state = run.begin()
    elif number and start == run.phase.start:
        _become(checkpoints, runs[number - 1])
        state = run.follow(runs[number - 1], checkpoints, runs[: number - 1])
        _become(checkpoints, run)
    else:
        _become(checkpoints, run)
        state = run.restore(checkpoints, start)
    if console is not None:
        for remark in (*getattr(run.data, "remarks", ()), *run.program.remarks, *run.remarks):
            console.print(remark, markup=False, highlight=False, soft_wrap=True)
    return state


def _described(runs: list[Run]) -> Described:
    """What a run measures in all of its phases."""
    found: list[Metric] = []
    for metric in (metric for run in runs for metric in run.program.metrics.values()):
        found += [] if metric in found else [metric]
    return Described.of(tuple(found))


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
    tables are sharded by rows instead, and the console says so.

    Args:
      experiment: The run's experiment; mesh and batch size may differ from those it was trained with.
      workdir: Run folder.
      split: "train", "validation" or "test".
      step: Checkpoint; None = the newest.
      console: Where progress is shown; None = nowhere.

    Raises:
      UserError: no such checkpoint, another model or other data, a damaged file.
    """
    workdir = pathlib.Path(workdir)
    experiment = phases.experiment_at(experiment, workdir, step)
    data = _build_data(experiment, console)
    _check_splits(data, {"split": split})
    run = Run.bind_to_score(experiment, data, make_mesh(experiment.placement.mesh), console)
    state, examples = run.open_to_score(workdir, step)
    found = int(state.step)
    if console is not None:
        console.print(f"Scoring {data.num_examples(split):,} examples of split {split!r} at step {found}")
    return {"recipe": str(workdir), "steps": found, "examples": examples} | run.score(state, split)


def _checkpointer(folder: pathlib.Path, run: Run) -> Checkpointer:
    return Checkpointer(folder, run.experiment.checkpoints, run.identity(), full_every=run.experiment.tables.full_every)


def _back_to_intact(checkpoints: Checkpointer, newest: int, console: Console | None) -> int:
    """The step to go on from, where the newest checkpoint may be damaged."""
    start = checkpoints.back_to_intact()
    if start != newest and console is not None:
        console.print(
            f"The checkpoint of step {newest} is damaged: going on from step {start}, the newest intact one. Kept in "
            f"{checkpoints.folder}: {', '.join(checkpoints.damaged())}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return start


def _become(checkpoints: Checkpointer, run: Run) -> None:
    """From here on the checkpoints are those of this phase."""
    policy = dataclasses.replace(run.experiment.checkpoints, best_metric=run.best.name)
    better = "high" if run.best.better == "high" else "low"
    checkpoints.become(policy, run.identity(), better=better, frozen=run.frozen, pinned=run.phase.pinned)


def _steps(
    run: Run,
    records: Records,
    state: TrainState,
    host: HostState,
    start: int,
    preemption: Preemption,
    *,
    compiles: bool = True,
) -> tuple[TrainState, HostState]:
    """Runs the steps of a phase after `start`; its first step `compiles` unless a phase before has run its program."""
    experiment, stop = run.experiment, run.phase.stop
    timer, every, progress = records.timer, experiment.checkpoints.every, records.progress
    # A save drains this pipeline, and the numbers change: then a run that is asked to end does so at the next one.
    any_step = experiment.tables.pipeline != "stale"
    saved_at, ending = time.monotonic(), False
    with run.feed(host, stop - start, start + 1) as feed:
        planned = bool(every and start % every == 0)  # a save by the clock must not decide where a run ends
        for step in range(start + 1, stop + 1):
            if planned and run.ends_early(host, step - 1):
                break
            host = run.before_step(state, host, step)
            with timer.phase("data_wait"):
                examples = feed.take()
            first = compiles and step == start + 1
            with timer.phase("compile" if first else "dispatch"), progress.compiling("step") if first else _NOTHING:
                state, loss = feed.step(state)
                preemption.trained = step
                if first:
                    # Waited for, so that the first execution counts as compiling and in no step time.
                    loss.block_until_ready()
            timer.step_done(examples=examples, output=loss, amounts=feed.amounts)
            host = host.after(examples, feed.amounts.get("flops", 0.0))
            last = step == stop
            if last or step % experiment.log_every == 0:
                state, host, window = run.log(state, host, step)
                progress.window(step, run.phase.name, float(loss), window)
            # One process looks at its clock and asks all: their clocks would say so at different steps.
            if distributed.is_primary() and time.monotonic() - saved_at >= experiment.save_seconds:
                peers.job.ask(peers.SAVE)
                saved_at = time.monotonic()
            asked = peers.job.reached(step)
            ending = ending or asked == peers.END
            planned = last or bool(every and step % every == 0)
            saved = planned or bool(asked and any_step)
            if saved:
                with timer.phase("checkpoint"):
                    preemption.leaving = ending
                    run.save(state, host, step)
                    if ending:
                        records.checkpoints.wait()
                        raise preemption.ended(step)
                saved_at = time.monotonic()
            if run.scores_at(step):
                with timer.phase("evaluation"):
                    host = run.evaluate(state, host, step, saved)
            if saved:
                # A run that begins at this checkpoint has fetched nothing ahead, and must come to the same bits.
                feed.drain()
    return state, host


def _build_data(experiment: Experiment, console: Console | None) -> DataSet[object]:
    """Opens the data; shows how far it is where that takes long and the data say so (a `progress` of `build`)."""
    build = experiment.data.build
    if console is None or "progress" not in inspect.signature(build).parameters:
        return build()
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True) as progress:
        task = progress.add_task("reading text", total=None)
        return build(progress=lambda done, total: progress.update(task, completed=done, total=total))  # pyright: ignore[reportCallIssue]


def _keep_data(folder: pathlib.Path, data: DataSet[object]) -> None:
    """Puts what the data want kept with a run into its folder: `files()`, and `pictures()` for its report."""
    for name, content in getattr(data, "files", dict)().items():
        disk.write_atomically(folder / name, content)
    for split, name, caption, svg in getattr(data, "pictures", tuple)():
        save_picture(folder, Picture(split=split, name=name, caption=caption, svg=svg))


def _check_splits(data: DataSet[object], splits: dict[str, str]) -> None:
    """Before anything is trained for scores that cannot be had."""
    for field, split in splits.items():
        if data.num_examples(split) == 0:
            raise UserError(
                f"{field}: split {split!r} has no examples, and it is scored. Give it a share of the data "
                "(--set data.split...), or name another split."
            )


def _mesh_sizes(run: Run) -> dict[str, int]:
    return {axis: size for axis, size in run.mesh.shape.items() if size > 1} or {"devices": 1}


def _what_ran(run: Run, recipe: str, environment: Mapping[str, Any]) -> dict[str, object]:
    devices = environment["devices"]
    return {
        "recipe": recipe,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{devices['count']} x {devices['kind']}",
        "mesh": " ".join(f"{axis}={size}" for axis, size in _mesh_sizes(run).items()),
        **run.describe(),
    }
