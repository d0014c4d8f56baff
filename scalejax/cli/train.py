"""`scalejax train`: from a recipe to a run folder."""

import enum
import json
import pathlib
import shlex
from typing import Annotated

import typer

from scalejax.cli import environment, options, output


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
) -> None:
    """Train a recipe into a run folder."""
    environment.prepare(cpu_devices=cpu_devices)
    from scalejax import configs
    from scalejax.configs import discovery, serialization

    sets = sets or []
    experiment = configs.load(recipe, sets)
    record = serialization.record(recipe, sets, experiment)

    from scalejax.train import console as closing
    from scalejax.train import distributed, loop, run_folder

    distributed.initialize(coordinator, processes, process_id)
    import jax

    workdir = run_folder.choose(workdir, discovery.find(recipe).slug, resume.value)
    console = output.console() if jax.process_index() == 0 else None
    try:
        summary = loop.train(
            experiment, workdir=workdir, resume=resume.value, recipe=json.dumps(record), console=console
        )
    except KeyboardInterrupt as error:
        if console is not None:
            again = shlex.join(["scalejax", "train", recipe, *(f"--set={s}" for s in sets), f"--workdir={workdir}"])
            print(f"Interrupted. Resume with: {again}")
        raise typer.Exit(130) from error
    if console is not None:
        console.print(closing.closing_table(summary))
        next_commands = (
            shlex.join(["scalejax", "eval", str(workdir)]),
            f"open {shlex.quote(str(workdir / 'report.html'))}",
            shlex.join(["tensorboard", "--logdir", str(workdir)]),
            shlex.join(["scalejax", "plan", recipe, "--topology", "v5e:2x2"]),
        )
        print(f"Run folder: {workdir}\nNext:")
        for command in next_commands:
            print(f"  {command}")
