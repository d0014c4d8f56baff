"""`scalejax precision`: how narrow the tables and operators of a click model can be within a budget of quality."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.inference.recommendation.calibration import Inputs, Limits
    from scalejax.inference.recommendation.click_model import ServedModel
    from scalejax.train.experiment import Experiment

Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Which checkpoint. Default: the newest.")]
Examples = Annotated[
    int,
    typer.Option(
        "--examples", metavar="N", min=1, help="Of the validation split: to calibrate on and to compare with."
    ),
]


def find(
    run_folder: options.RunFolder,
    budget: Annotated[
        float,
        typer.Option(
            "--budget", metavar="PERCENT", help="Largest loss of normalised entropy, in percent of that in float32."
        ),
    ] = 0.05,
    objective: Annotated[
        str, typer.Option("--objective", metavar="WHAT", help="What to make small: bytes, or latency on this machine.")
    ] = "bytes",
    tables: Annotated[
        str, typer.Option("--tables", metavar="NAME,...", help="Precisions of tables to try, the widest first.")
    ] = "float32,int8,int4",
    dense: Annotated[
        str, typer.Option("--dense", metavar="NAME,...", help="Precisions of operators to try, the widest first.")
    ] = "float32,float16,int8",
    examples: Examples = 65536,
    save: Annotated[
        pathlib.Path | None,
        typer.Option("--save", metavar="FILE", help="Keep the choice for `scalejax export --precision FILE`."),
    ] = None,
    json: options.JsonFile = None,
    step: Step = None,
    recipe: options.RecipeFile = None,
) -> None:
    """Search a precision for every table and operator of a click model.

    Begins with everything as narrow as it may be and raises what gives back the most quality for its cost, until the
    loss on the validation split is within the budget for sure (95 %); the test split confirms it.
    """
    environment.prepare()
    if not 0 <= budget < float("inf"):
        raise UserError(f"--budget must be at least 0 percent and finite; got {budget}.")
    given = {"tables": _names("tables", tables), "dense_choices": _names("dense", dense)}
    experiment, model = open_run(run_folder, recipe, step)
    from scalejax.inference.recommendation import click_model, lowering, report, search
    from scalejax.inference.recommendation import study as studies

    data = experiment.data.build()
    calibration = click_model.sample(data, experiment.evaluation.split, model.schema, examples)
    held_out = click_model.labelled(data.eval_batches(experiment.evaluation.final_split), model.schema)
    limits = calibrated(model, calibration.inputs)
    study = studies.study(model, limits, calibration, held_out, objective=objective, **given)  # pyright: ignore[reportArgumentType]
    console = output.console()
    found = search.search(
        study, budget=budget / 100, log=lambda line: console.print(line, markup=False, highlight=False)
    )
    lowered = lowering.lower(model, found.precisions, limits)
    measured = report.measure(lowered, held_out, calibration=calibration.inputs[:4])
    quality: dict[str, float] = measured["quality"]
    measured = {"run": str(run_folder)} | report.with_search(measured, found, budget / 100)
    for table in report.tables(measured):
        console.print(table)
    verdict = "within" if quality["gap"] <= budget / 100 else "NOT within"
    served = click_model.Gap(quality["gap"], quality["gap_low"], quality["gap_high"])
    gaps = [f"{g.value:+.4%} (95 %: {g.low:+.4%} to {g.high:+.4%})" for g in (found.gap, served)]
    console.print(
        f"NE gap {gaps[0]} on {len(calibration.labels):,} examples of {experiment.evaluation.split!r}, {gaps[1]} on "
        f"{len(held_out.labels):,} of {experiment.evaluation.final_split!r}: {verdict} {budget:g} %.",
        soft_wrap=True,
    )
    if save is not None:
        found.precisions.save(save)
        out = run_folder.with_name(f"{run_folder.absolute().name}-export")
        command = ["scalejax", "export", str(run_folder), str(out), "--precision", str(save)]
        command += [] if step is None else ["--step", str(step)]
        command += [] if recipe is None else ["--recipe", recipe]
        output.print_next({tuple(command): "the model in these precisions, for serving"})
    if json is not None:
        output.write_json(json, measured)


def open_run(run_folder: pathlib.Path, recipe: str | None, step: int | None) -> "tuple[Experiment, ServedModel]":
    """The experiment of a run of a click model and the model.

    Raises:
      UserError: see `click_model.load` and `folders.load_run`.
    """
    experiment = folders.load_run(run_folder, recipe)
    from scalejax.inference.recommendation import click_model
    from scalejax.train import phases

    experiment = phases.experiment_at(experiment, run_folder, step)
    return experiment, click_model.load(run_folder, experiment, step)


def calibrated(model: "ServedModel", batches: "Sequence[Inputs]") -> "Limits":
    """Ranges of activations from up to eight batches."""
    from scalejax.inference.recommendation import calibration

    return calibration.limits(model, batches[:8])


def _names(option: str, text: str) -> tuple[str, ...]:
    from scalejax.inference.recommendation import precision

    known = precision.TABLES if option == "tables" else precision.DENSE
    found = tuple(part.strip() for part in text.split(","))
    for name in found:
        if name not in known:
            raise UserError(f"--{option} must name some of {', '.join(known)}; got {name!r}.")
    if list(found) != sorted(set(found), key=known.index):
        raise UserError(f"--{option} must go from the widest to the narrowest, each once; got {text}.")
    return found
