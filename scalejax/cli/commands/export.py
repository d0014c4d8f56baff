"""`scalejax export`: a trained click model as a folder that jax and numpy alone can score with."""

import pathlib
from typing import Annotated

import typer

from scalejax.cli import environment, options, output
from scalejax.cli.commands import precision as precisions
from scalejax.errors import UserError, check_one_of


def export(
    run_folder: options.RunFolder,
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder to write; must not be there yet.")],
    tables: Annotated[
        str,
        typer.Option(
            "--tables",
            metavar="NAME",
            help="float32, float16, int8, kmeans4, int4, kmeans4_shared, kmeans2, int2 or kmeans2_shared.",
        ),
    ] = "float32",
    dense: Annotated[str, typer.Option("--dense", metavar="NAME", help="float32, float16 or int8.")] = "float32",
    precision: Annotated[
        pathlib.Path | None,
        typer.Option("--precision", metavar="FILE", help="One for each instead, from `scalejax precision --save`."),
    ] = None,
    examples: precisions.Examples = 8192,
    step: precisions.Step = None,
    recipe: options.RecipeFile = None,
    json: options.JsonFile = None,
) -> None:
    """Export a click model: StableHLO, safetensors, a signature.

    OUT/reload.py loads and scores it and needs jax and numpy only. What was written is read back and compared with
    the run's own model before this ends.
    """
    environment.prepare()
    if precision is not None and (tables != "float32" or dense != "float32"):
        raise UserError(f"--precision {precision} names a precision for each; leave --tables and --dense out.")
    if out.exists():
        raise UserError(f"OUT {out} is there already. Give a new folder, or remove it.")
    from scalejax.inference.recommendation import precision as choices

    for name, given, known in (("tables", tables, choices.TABLES), ("dense", dense, choices.DENSE)):
        check_one_of(f"--{name}", given, known)
    experiment, model = precisions.open_run(run_folder, recipe, step)
    from scalejax.inference.recommendation import click_model, lowering, reload, report
    from scalejax.inference.recommendation import export as exports

    chosen = (
        choices.load(precision, model) if precision is not None else choices.uniform(model, tables=tables, dense=dense)  # pyright: ignore[reportArgumentType]
    )
    data = experiment.data.build()
    split = experiment.evaluation.split
    some, total = click_model.sample(data, split, model.schema, examples), data.num_examples(split)
    limits = precisions.calibrated(model, some.inputs) if "int8" in chosen.operators.values() else None
    lowered = lowering.lower(model, chosen, limits)
    exports.write(lowered, out)
    back = exports.difference(reload.load(out), lowered, some.inputs[0])
    if not (back <= exports.LARGEST_DIFFERENCE or "int8" in chosen.operators.values()):
        raise UserError(
            f"OUT {out}: reloaded, its scores differ from the model's by {back:.1e}, more than "
            f"{exports.LARGEST_DIFFERENCE:g}. Do not serve it; look for scores that are not finite, or another version "
            "of jax."
        )
    scored = {"split": split, "examples": len(some.labels), "of": total}
    measured = {"run": str(run_folder), "out": str(out), "reloaded_difference": back, "scored": scored}
    measured |= report.measure(lowered, some)
    console = output.console()
    for table in report.tables(measured):
        console.print(table)
    which = "all" if examples >= total else f"{len(some.labels):,}, drawn at random, of the"
    print(f"Scores and times above: of {which} {total:,} examples of split {split!r}.")
    if json is not None:
        output.write_json(json, measured)
    print(f"Wrote {out}; reloaded, its scores differ from the model's by at most {back:.1e}.")
    code = f"import sys; sys.path.insert(0, {str(out)!r}); import reload; print(reload.load({str(out)!r}).signature)"
    output.print_next(
        {("python", "-c", code): "load it with jax and numpy alone; the model is called with ids and dense"}
    )
