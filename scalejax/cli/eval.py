"""`scalejax eval`: score a checkpoint of a run folder on a split."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalejax.cli import environment, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.experiment import AnyExperiment


def evaluate(
    run_folder: options.RunFolder,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="Split to score. Default: the experiment's final_split."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Checkpoint to score. Default: the newest.")
    ] = None,
    recipe: options.RecipeFile = None,
    mesh: options.MeshSizes = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", metavar="N", min=1, help="Examples per batch over all devices. Default: that of the run."
        ),
    ] = None,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
) -> None:
    """Score a checkpoint of a run on one split."""
    environment.prepare(cpu_devices=cpu_devices)
    experiment = load_run(run_folder, recipe)
    if mesh is not None:
        from scalejax.parallel.mesh import parse_mesh

        experiment = dataclasses.replace(experiment, mesh=parse_mesh(mesh))
    if batch_size is not None:
        from scalejax.configs import overrides

        experiment = overrides.apply(experiment, [f"data.batch_size={batch_size}"])
    from scalejax.train import console as closing
    from scalejax.train import distributed, loop

    distributed.initialize(coordinator, processes, process_id)
    console = output.console() if distributed.is_primary() else None
    split = split or experiment.final_split
    summary = loop.evaluate(experiment, workdir=run_folder, split=split, step=step, console=console)
    if console is not None:
        console.print(closing.closing_table(summary))


def read_record(run_folder: pathlib.Path) -> dict[str, Any]:
    """What `experiment.json` of a run folder says.

    Raises:
      UserError: no such folder, no such file in it, or one that is no record of a run.
    """
    path = run_folder / "experiment.json"
    if not run_folder.is_dir():
        raise UserError(f"RUN_FOLDER {run_folder} does not exist. Give a folder that `scalejax train` wrote.")
    if not path.is_file():
        raise UserError(f"RUN_FOLDER {run_folder} has no experiment.json. Give a folder that `scalejax train` wrote.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}. Give another run folder, or train again.") from error
    if not isinstance(record, dict) or not {"recipe", "sets", "file_sha256", "scalejax", "experiment"} <= record.keys():
        raise UserError(
            f"{path}: is no record of a run (recipe, sets, file_sha256, scalejax, experiment). Train again."
        )
    return record


def load_run(run_folder: pathlib.Path, recipe: str | None) -> "AnyExperiment":
    """The experiment of a run folder, by running its recipe again.

    Raises:
      UserError: not a run folder, or its recipe does not give the same experiment any more.
    """
    from scalejax.configs import serialization

    return serialization.reload(read_record(run_folder), recipe=recipe, where=run_folder)
