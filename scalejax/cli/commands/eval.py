"""`scalejax eval`: score a checkpoint of a run folder on a split."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    pass


def evaluate(
    run_folder: options.RunFolder,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="Split to score. Default: evaluation.final_split of the run."),
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
    text: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="Perplexity of a language model on a file or folder of text; RUN_FOLDER may be a model folder.",
        ),
    ] = None,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--against",
            metavar="FOLDER",
            help="With --text: a second model, such as a quantized one, beside the first.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="With --text: of the text, at most.")] = 16_384,
    json: options.JsonFile = None,
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
) -> None:
    """Score a checkpoint of a run on one split, or a language model on a text."""
    environment.prepare(cpu_devices=cpu_devices)
    if text is not None:
        for name, value in (
            *(("--split", split), ("--batch-size", batch_size), ("--coordinator", coordinator)),
            *(("--processes", processes), ("--process-id", process_id)),
        ):
            if value is not None:
                raise UserError(f"{name} {value}: goes with the data of a run, not with --text. Leave it out.")
        _score_text(run_folder, against, text, tokens, mesh=mesh, step=step, recipe=recipe, json=json)
        return
    for name, value in (("--against", against), ("--json", json)):
        if value is not None:
            raise UserError(f"{name} {value}: goes with --text PATH. Add it.")
    experiment = folders.load_run(run_folder, recipe)
    from scalejax.configs import overrides
    from scalejax.train import distributed, loop, phases
    from scalejax.train.reports import console as closing
    from scalejax.train.reports import report

    distributed.initialize(coordinator, processes, process_id)
    experiment = phases.experiment_at(experiment, run_folder, step)
    experiment = folders.on_mesh(experiment, mesh)
    if batch_size is not None:
        experiment = overrides.apply(experiment, [f"data.batch_size={batch_size}"])
    console = output.console() if distributed.is_primary() else None
    split = split or experiment.evaluation.final_split
    summary = loop.evaluate(experiment, workdir=run_folder, split=split, step=step, console=console)
    if console is not None:
        console.print(closing.closing_table(summary, report.read_described(run_folder)))


def _score_text(
    folder: pathlib.Path,
    against: pathlib.Path | None,
    text: pathlib.Path,
    tokens: int,
    *,
    mesh: str | None,
    step: int | None,
    recipe: str | None,
    json: pathlib.Path | None,
) -> None:
    """Prints what one or two models make of a text."""
    from scalejax.inference import compare, generate, text_rows
    from scalejax.parallel.mesh import MeshShape, make_mesh, parse_mesh

    made = make_mesh(MeshShape(fsdp=1, tensor=-1) if mesh is None else parse_mesh(mesh))
    model = folders.open_model(folder, recipe=recipe, step=step)
    rows = text_rows.read_rows(model, text, tokens)
    first = generate.load(model, made)
    if against is None:
        score = compare.score(first, rows)
        lines = [("tokens predicted", f"{score.tokens:,}"), ("loss", f"{score.loss:.4f}")]
        lines.append(("perplexity", f"{score.perplexity:.4f}"))
        found: Mapping[str, object] = dataclasses.asdict(score) | {"perplexity": score.perplexity}
    else:
        second = generate.load(folders.open_model(against, recipe=None, step=None), made)
        both = compare.compare(first, second, rows)
        lines = [
            ("tokens predicted", f"{both.before.tokens:,}"),
            ("loss", f"{both.before.loss:.4f} -> {both.after.loss:.4f}"),
            ("perplexity", f"{both.before.perplexity:.4f} -> {both.after.perplexity:.4f}"),
            ("KL divergence, nats", f"{both.divergence:.6f}"),
            ("same most probable token", f"{100 * both.agreement:.2f} %"),
        ]
        found = dataclasses.asdict(both)
    for name, value in lines:
        print(f"{name:<26}{value}")
    if json is not None:
        output.write_json(json, found)
