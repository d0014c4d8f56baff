"""`scalejax train`: from a recipe to a run folder."""

import contextlib
import enum
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

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


def train(
    recipe: options.Recipe,
    sets: options.Sets = None,
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="A table of your own for dcnv2, wukong, dlrm or logistic: CSV or TSV (.gz, .zst), Parquet, Arrow. "
            "What its columns are is inferred, shown, and written into the run folder as a recipe.",
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
            "without.",
        ),
    ] = Resume.auto,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
) -> None:
    """Train a recipe into a run folder."""
    environment.prepare(cpu_devices=cpu_devices)
    from scalejax import configs
    from scalejax.configs import discovery, own_table, serialization

    sets = sets or []
    fields = {"label": label, "positive": positive, "weight": weight, "time": time, "leave_out": tuple(leave_out or ())}
    own = None if data is None else _on_table(recipe, data, fields, sets)
    if own is not None:
        recipe, sets = own.recipe, list(own.sets)
    elif given := [name for name, value in fields.items() if value]:
        raise UserError(f"--{given[0].replace('_', '-')} {fields[given[0]]}: goes with --data FILE. Add it.")
    experiment = configs.load(recipe, sets)
    record = serialization.record(recipe, sets, experiment)

    from scalejax.train import distributed, loop, run_folder
    from scalejax.train.reports import console as closing
    from scalejax.train.reports import report

    distributed.initialize(coordinator, processes, process_id)
    _check_memory(experiment)
    primary = distributed.is_primary()
    name = discovery.find(recipe).slug
    folder = run_folder.choose(workdir, name, resume.value)
    console = output.console() if primary else None
    if own is not None and console is not None:
        console.print(own.shown())
    try:
        summary = loop.train(
            experiment, workdir=folder, resume=resume.value, recipe=name, record=record, console=console
        )
    except KeyboardInterrupt as error:
        if primary:
            again = shlex.join(["scalejax", "train", recipe, *(f"--set={s}" for s in sets), f"--workdir={folder}"])
            print(f"Interrupted. Resume with: {again}", file=sys.stderr)
        raise typer.Exit(130) from error
    except UserError:
        if primary and workdir is None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty: a run that could not begin leaves nothing behind
        raise
    if console is not None:
        console.print(closing.closing_table(summary, report.read_described(folder)))
        if own is not None:
            own.write(folder / own_table.FILE)
        _print_next(folder, recipe, experiment, summary)


def _on_table(recipe: str, path: pathlib.Path, fields: dict[str, Any], sets: list[str]) -> "TableRecipe":
    from scalejax.configs import own_table

    if fields["label"] is None:
        raise UserError(f"--data {path}: --label COLUMN has to say which column is to be predicted. Add it.")
    return own_table.resolve(recipe, {"path": str(path)} | fields, sets)


def _check_memory(experiment: "Experiment") -> None:
    """Refuses a language model that cannot fit, before anything is read or compiled."""
    from scalejax.parallel.mesh import make_mesh
    from scalejax.plan.arithmetic import estimate
    from scalejax.plan.arithmetic.decoders import DecoderConfig
    from scalejax.train import phases

    for phase in phases.resolved(experiment):
        if isinstance(phase.experiment.model, DecoderConfig):
            estimate.check_fits(phase.experiment, make_mesh(phase.experiment.placement.mesh))


_PLANNED = "the same recipe on a TPU, compiled here"


def _print_next(folder: pathlib.Path, recipe: str, experiment: "Experiment", summary: dict[str, Any]) -> None:
    from scalejax.configs import discovery, own_table
    from scalejax.train.reports import report

    own = [] if discovery.is_bundled(recipe) else ["--recipe", recipe]  # the user's code is run when the user names it
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(pathlib.Path.cwd())
    best = summary.get("best_step", summary["steps"])
    step = ["--step", str(best)] if best != summary["steps"] else []
    table = [str(folder / own_table.FILE)] if (folder / own_table.FILE).is_file() else []
    commands = {
        **{shlex.join(["scalejax", "train", file]): "what was made of your columns, to edit" for file in table},
        **{
            shlex.join(["scalejax", *(argument.format(run=folder) for argument in arguments), *own]): what
            for *arguments, what in report.read_advice(folder)
        },
        shlex.join(["scalejax", "eval", str(folder), *own]): "score the newest checkpoint again",
        **({shlex.join(["scalejax", "eval", str(folder), *own, *step]): "score the best one"} if step else {}),
        shlex.join(["tensorboard", "--logdir", str(folder)]): "curves, beside those of other runs",
        **(
            {}
            if experiment.placement.mesh is None
            else {shlex.join(["scalejax", "plan", *(table or [recipe]), "--topology", "v5e:2x2"]): _PLANNED}
        ),
    }
    print(f"\nRun folder: {folder}\nReport:     {folder / 'report.html'}\nNext:")
    width = max(map(len, commands))
    for command, what in commands.items():
        print(f"  {command:<{width}}  {what}")
