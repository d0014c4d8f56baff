"""`scalejax train`: from a recipe to a run folder."""

import contextlib
import enum
import pathlib
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.configs.own_table import TableRecipe
    from scalejax.train.experiment import Experiment


class Resume(enum.StrEnum):
    """What to do with checkpoints in the run folder."""

    auto = "auto"
    never = "never"
    must = "must"
    stretch = "stretch"


class Log(enum.StrEnum):
    """How a run says how far it is."""

    text = "text"
    json = "json"


def train(
    recipe: options.Recipe,
    sets: options.Sets = None,
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="A table of your own for dcnv2, wukong, dlrm, dhen or logistic: CSV or TSV (.gz, .zst), Parquet, "
            "Arrow. What its columns are is inferred, shown, and written into the run folder as a recipe.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="COLUMN", help="With --data: the column of two values that is predicted."),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            "--positive", metavar="VALUE", help="With --data: which of them is predicted. Default: the greater."
        ),
    ] = None,
    weight: Annotated[
        str | None, typer.Option("--weight", metavar="COLUMN", help="With --data: weights of the examples.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="COLUMN",
            help="With --data: split by its order, the newest for the test. Default: at random.",
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", metavar="COLUMN", help="With --data: not for the model to see; may be repeated."),
    ] = None,
    workdir: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--workdir",
            metavar="DIR",
            help="Run folder. Default: a new one, runs/RECIPE-001 and so on.",
        ),
    ] = None,
    resume: Annotated[
        Resume,
        typer.Option(
            "--resume",
            help="auto: from the newest checkpoint if there is one; never: refuse a folder with one; must: refuse one "
            "without; stretch: auto, and other steps than before may stretch the schedule of the learning rate.",
        ),
    ] = Resume.auto,
    log: Annotated[
        Log,
        typer.Option(
            "--log",
            help="text: a bar in a terminal, else a line each log_every steps; json: one JSON object a line, and all "
            "else on standard error.",
        ),
    ] = Log.text,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
    peer_timeout: Annotated[
        float,
        typer.Option("--peer-timeout", metavar="SECONDS", help="Several processes: silence after which one is gone."),
    ] = 30,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="WHEN",
            help="Save and end, with status 75, --grace before this time (2026-11-24T18:30) or in so many seconds. "
            "Default: the end of the Slurm job.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", help="After SIGTERM, SIGINT or --deadline: how long it may take to save."
        ),
    ] = 30,
) -> None:
    """Train a recipe into a run folder."""
    environment.prepare(cpu_devices=cpu_devices)
    from scalejax.train import preemption

    sets = sets or []
    fields = {"label": label, "positive": positive, "weight": weight, "time": time, "leave_out": tuple(leave_out or ())}
    job = {"cpu_devices": cpu_devices, "coordinator": coordinator, "processes": processes, "process_id": process_id}
    again = ["scalejax", "train", recipe, *(f"--set={s}" for s in sets)]
    told = {"log": log.value, "grace": grace, "peer_timeout": peer_timeout}
    usual = {"log": "text", "grace": 30, "peer_timeout": 30}
    said = {name: value for name, value in told.items() if value != usual[name]}
    again += _words({"data": data} | fields | job | said | {"workdir": workdir})
    ends = preemption.deadline(deadline, grace)
    with preemption.Preemption(deadline=ends, grace_s=grace, again=shlex.join(again)) as heard:
        from scalejax.configs import discovery, origin, own_table, serialization

        own, all_sets = None if data is None else _on_table(recipe, data, fields, sets), sets
        if own is not None:
            recipe, all_sets = own.recipe, list(own.sets)
        elif words := _words(fields):
            raise UserError(f"{words[0].replace('=', ' ', 1)}: goes with --data FILE. Add it.")
        resolved = origin.resolve(recipe, all_sets, workdir)
        experiment = resolved.experiment
        record = {**serialization.record(recipe, resolved.sets, experiment), **resolved.record}

        from scalejax.train import distributed, loop, run_folder
        from scalejax.train.reports import console as closing
        from scalejax.train.reports import progress as progresses
        from scalejax.train.reports import report

        distributed.initialize(coordinator, processes, process_id, peer_timeout_s=peer_timeout)
        _check_memory(experiment)
        primary = distributed.is_primary()
        name = discovery.find(recipe).slug
        folder = run_folder.choose(workdir, name, resume.value)
        console = output.console(stderr=log is Log.json) if primary else None
        progress = progresses.shown_on(console)
        if own is not None and console is not None:
            console.print(own.shown())
        if console is not None:
            for remark in resolved.remarks:
                console.print(remark, markup=False, highlight=False, soft_wrap=True)
        if workdir is None:
            heard.again += " " + shlex.quote(f"--workdir={folder}")
        try:
            with output.native_output_to_stderr() if log is Log.json else contextlib.nullcontext(sys.stdout) as stdout:
                if primary and log is Log.json:
                    progress = progresses.JsonLines(stdout)
                summary = loop.train(
                    experiment,
                    workdir=folder,
                    resume=resume.value,
                    recipe=name,
                    record=record,
                    console=console,
                    progress=progress,
                    preemption=heard,
                )
                progress.done(summary)
        except UserError:
            if primary and workdir is None:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only if it is empty: a run that could not begin leaves nothing behind
            raise
        finally:
            if own is not None and primary and folder.is_dir():
                own.write(folder / own_table.FILE)
    if console is not None and log is Log.text:
        console.print(closing.closing_table(summary, report.read_described(folder)))
        _print_next(folder, recipe, sets, cpu_devices, experiment, summary)


def _words(options: Mapping[str, object]) -> list[str]:
    """Options as they are typed, those that were given."""
    lists = {name: value if isinstance(value, tuple) else (value,) for name, value in options.items()}
    return [f"--{name.replace('_', '-')}={one}" for name, values in lists.items() for one in values if one is not None]


def _on_table(recipe: str, path: pathlib.Path, fields: Mapping[str, object], sets: list[str]) -> "TableRecipe":
    from scalejax.configs import own_table

    if fields["label"] is None:
        raise UserError(f"--data {path}: --label COLUMN has to say which column is to be predicted. Add it.")
    return own_table.resolve(recipe, {"path": str(path), **fields}, sets)


def _check_memory(experiment: "Experiment") -> None:
    """Refuses a language model that cannot fit, before anything is read or compiled."""
    from scalejax.parallel.mesh import make_mesh
    from scalejax.plan.arithmetic import estimate
    from scalejax.plan.arithmetic.decoders import DecoderConfig
    from scalejax.train import phases

    for phase in phases.resolved(experiment):
        if isinstance(phase.experiment.model, DecoderConfig):
            estimate.check_fits(phase.experiment, make_mesh(phase.experiment.placement.mesh))


def _print_next(
    folder: pathlib.Path,
    recipe: str,
    sets: Sequence[str],
    cpu_devices: int | None,
    experiment: "Experiment",
    summary: Mapping[str, object],
) -> None:
    from scalejax.configs import discovery, own_table
    from scalejax.plan import topology
    from scalejax.train.reports import report
    from scalejax.train.trackers.tensorboard import TensorBoard

    own = [] if discovery.is_bundled(recipe) else ["--recipe", recipe]  # the user's code is run when the user names it
    devices = [] if cpu_devices is None else ["--cpu-devices", str(cpu_devices)]
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(pathlib.Path.cwd())
    print(f"\nRun folder: {folder}\nReport:     {folder / 'report.html'}")
    commands: dict[tuple[str, ...], str] = {}
    if (table := folder / own_table.FILE).is_file():
        commands["scalejax", "train", str(table)] = "what was made of your columns, to edit"
        recipe = str(table)  # which says all that --data and its options said
    commands |= {
        ("scalejax", *(argument.format(run=folder) for argument in arguments), *own): what
        for *arguments, what in report.read_advice(folder)
    }
    commands["scalejax", "eval", str(folder), *own, *devices] = "score the newest checkpoint again"
    best = summary.get("best_step", summary["steps"])
    if best != summary["steps"] and (folder / "checkpoints" / str(best)).is_dir():
        commands["scalejax", "eval", str(folder), *own, *devices, "--step", str(best)] = "score the best one"
    notes = []
    if not any(isinstance(tracker, TensorBoard) for tracker in experiment.trackers):
        pass
    elif shutil.which("tensorboard") is None:
        notes.append(f"pip install tensorboard, and tensorboard --logdir {shlex.quote(str(folder))} shows curves")
    else:
        commands["tensorboard", "--logdir", str(folder)] = "curves, beside those of other runs"
    if experiment.placement.mesh is not None:
        try:
            topology.check_libtpu()
        except UserError:
            notes.append("pip install 'scalejax[plan]', and scalejax plan compiles the same recipe for a TPU, here")
        else:
            # A mesh, or a plan of tables, of the devices here is none of a TPU slice.
            here = ("placement.mesh", "tables.sharding")
            same = [f"--set={text}" for text in sets if not text.strip().startswith(here)]
            planned = ("scalejax", "plan", recipe, "--topology", "v5e:2x2", *same)
            commands[planned] = "the same recipe on a TPU, compiled here"
    output.print_next(commands, notes=notes)
