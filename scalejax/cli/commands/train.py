"""`scalejax train`: from a recipe to a run folder."""

import contextlib
import enum
import pathlib
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment
    from scalejax.train.preemption import Preemption


class Resume(enum.StrEnum):
    """What to do with checkpoints in the run folder."""

    auto = "auto"
    never = "never"
    must = "must"


def train(
    recipe: options.Recipe,
    sets: options.Sets = None,
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

    given = {"cpu-devices": cpu_devices, "coordinator": coordinator, "processes": processes, "process-id": process_id}
    again = ["scalejax", "train", recipe, *(f"--set={s}" for s in sets or [])]
    again += [f"--{name}={value}" for name, value in given.items() if value is not None]
    again += [] if workdir is None else [f"--workdir={workdir}"]
    ends = preemption.deadline(deadline, grace)
    with preemption.Preemption(deadline=ends, grace_s=grace, again=shlex.join(again)) as heard:
        _train(recipe, sets, workdir, resume, (coordinator, processes, process_id), peer_timeout, heard)


def _train(
    recipe: str,
    sets: list[str] | None,
    workdir: pathlib.Path | None,
    resume: Resume,
    job: tuple[str | None, int | None, int | None],
    peer_timeout: float,
    preemption: "Preemption",
) -> None:
    from scalejax import configs
    from scalejax.configs import discovery, serialization

    sets = sets or []
    experiment = configs.load(recipe, sets)
    record = serialization.record(recipe, sets, experiment)

    from scalejax.train import distributed, loop, run_folder
    from scalejax.train.reports import console as closing
    from scalejax.train.reports import report

    distributed.initialize(*job, peer_timeout_s=peer_timeout)
    _check_memory(experiment)
    primary = distributed.is_primary()
    name = discovery.find(recipe).slug
    folder = run_folder.choose(workdir, name, resume.value)
    console = output.console() if primary else None
    if workdir is None:
        preemption.again += " " + shlex.quote(f"--workdir={folder}")
    try:
        summary = loop.train(
            experiment,
            workdir=folder,
            resume=resume.value,
            recipe=name,
            record=record,
            console=console,
            preemption=preemption,
        )
    except UserError:
        if primary and workdir is None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty: a run that could not begin leaves nothing behind
        raise
    if console is not None:
        console.print(closing.closing_table(summary, report.read_described(folder)))
        _print_next(folder, recipe, experiment)


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


def _print_next(folder: pathlib.Path, recipe: str, experiment: "Experiment") -> None:
    from scalejax.configs import discovery
    from scalejax.train.reports import report

    own = [] if discovery.is_bundled(recipe) else ["--recipe", recipe]  # the user's code is run when the user names it
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(pathlib.Path.cwd())
    commands = {
        **{
            shlex.join(["scalejax", *(argument.format(run=folder) for argument in arguments), *own]): what
            for *arguments, what in report.read_advice(folder)
        },
        shlex.join(["scalejax", "eval", str(folder), *own]): "score the newest checkpoint again",
        shlex.join(["tensorboard", "--logdir", str(folder)]): "curves, beside those of other runs",
        **(
            {}
            if experiment.placement.mesh is None
            else {shlex.join(["scalejax", "plan", recipe, "--topology", "v5e:2x2"]): _PLANNED}
        ),
    }
    print(f"\nRun folder: {folder}\nReport:     {folder / 'report.html'}\nNext:")
    width = max(map(len, commands))
    for command, what in commands.items():
        print(f"  {command:<{width}}  {what}")
