"""`scalejax export`: a trained model as a folder that jax and numpy alone can score with."""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.cli.commands import precision as precisions
from scalejax.cli.commands.convert import check_dtype
from scalejax.errors import UserError, check_one_of

if TYPE_CHECKING:
    from scalejax.models.llm.model_folder import LanguageModel

_CLICKS, _LANGUAGE = "a click model", "a language model"
_TABLES, _DENSE, _EXAMPLES, _ROWS, _LENGTH, _LOGITS = "float32", "float32", 8192, 1, 512, "last"


def export(
    run_folder: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="RUN_FOLDER", help="A folder that `scalejax train` wrote, or of a language model in any form."
        ),
    ],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder to write; must not be there yet.")],
    tables: Annotated[
        str,
        typer.Option(
            "--tables",
            metavar="NAME",
            help="float32, float16, int8, kmeans4, int4, kmeans4_shared, kmeans2, int2 or kmeans2_shared.",
        ),
    ] = _TABLES,
    dense: Annotated[str, typer.Option("--dense", metavar="NAME", help="float32, float16 or int8.")] = _DENSE,
    precision: Annotated[
        pathlib.Path | None,
        typer.Option("--precision", metavar="FILE", help="One for each instead, from `scalejax precision --save`."),
    ] = None,
    examples: precisions.Examples = _EXAMPLES,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Texts that a language model scores at once.")
    ] = _ROWS,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Tokens of a text of a language model, at most.")
    ] = _LENGTH,
    logits: Annotated[
        str, typer.Option("--logits", metavar="WHICH", help="Of a language model: of the last token of a text, or all.")
    ] = _LOGITS,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="Of a language model: float32, bfloat16 or float16. Default: as stored."
        ),
    ] = None,
    step: precisions.Step = None,
    recipe: options.RecipeFile = None,
    json: options.JsonFile = None,
) -> None:
    """Export a model: StableHLO, safetensors, a signature.

    --tables, --dense, --precision and --examples are for click models; --rows, --length, --logits and --dtype for
    language models.

    OUT/reload.py loads and scores it and needs jax and numpy only. What was written is read back and compared with
    the run's own model before this ends.
    """
    environment.prepare()
    of_clicks = {
        "--tables": (tables, _TABLES),
        "--dense": (dense, _DENSE),
        "--precision": (precision, None),
        "--examples": (examples, _EXAMPLES),
    }
    of_language = {
        "--rows": (rows, _ROWS),
        "--length": (length, _LENGTH),
        "--logits": (logits, _LOGITS),
        "--dtype": (dtype, None),
    }
    if (model := _language_model(run_folder, recipe, step)) is not None:
        _refuse(of_clicks, run_folder, _LANGUAGE, _CLICKS)
        _export_language(model, out, rows=rows, length=length, logits=logits, dtype=dtype, json=json)
        return
    _refuse(of_language, run_folder, _CLICKS, _LANGUAGE)
    if precision is not None and (tables != _TABLES or dense != _DENSE):
        raise UserError(f"--precision {precision} names a precision for each; leave --tables and --dense out.")
    if out.exists():
        raise UserError(f"OUT {out} is there already. Give a new folder, or remove it.")
    from scalejax.inference.recommendation import precision as choices

    for name, given, known in (("tables", tables, choices.TABLES), ("dense", dense, choices.DENSE)):
        check_one_of(f"--{name}", given, known)
    experiment, model = precisions.open_run(run_folder, recipe, step)
    from scalejax.inference import reload
    from scalejax.inference.recommendation import click_model, lowering, report
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
    _print_next(out, "ids and dense")


def _language_model(folder: pathlib.Path, recipe: str | None, step: int | None) -> "LanguageModel | None":
    """The language model of a folder; None where it is a run of another kind of model."""
    from scalejax.models.llm import families, model_folder

    if folder.is_dir() and model_folder.kind_of(folder) != "run":
        return folders.open_model(folder, recipe=recipe, step=step)
    experiment = folders.load_run(folder, recipe)
    if families.find(experiment.model) is None:
        return None
    from scalejax.inference import run_model

    return run_model.open_run(folder, experiment, step)


def _refuse(given: Mapping[str, tuple[object, object]], folder: pathlib.Path, of: str, instead: str) -> None:
    """Refuses options that another kind of model has: name -> (value, that without the option)."""
    for name, (value, default) in given.items():
        if value != default:
            raise UserError(f"{name} {value}: {folder} has {of}, and this is of {instead}. Leave it out.")


def _export_language(
    model: "LanguageModel",
    out: pathlib.Path,
    *,
    rows: int,
    length: int,
    logits: str,
    dtype: str | None,
    json: pathlib.Path | None,
) -> None:
    check_dtype(dtype)
    check_one_of("--logits", logits, ("last", "all"))
    if out.exists():
        raise UserError(f"OUT {out} is there already. Give a new folder, or remove it.")
    import jax

    from scalejax.inference import export as exports
    from scalejax.inference import generate, reload
    from scalejax.parallel.mesh import MeshShape, make_mesh

    engine = generate.load(model, make_mesh(MeshShape(), jax.devices()[:1]), dtype=dtype)
    length = min(length, model.config.max_positions) if length == _LENGTH else length
    signature = exports.write(engine, out, rows=rows, length=length, logits=logits)  # pyright: ignore[reportArgumentType]
    back = exports.difference(reload.load(out), engine)
    wide = str(dtype or model.dtype) == "float32"
    limit = exports.LARGEST_DIFFERENCE if wide else exports.LARGEST_DIFFERENCE_IN_16_BITS
    if not back <= limit:
        raise UserError(
            f"OUT {out}: reloaded, its probabilities differ from the model's by {back:.1e}, more than "
            f"{limit:g}. Do not serve it; look for logits that are not finite, or another version "
            "of jax."
        )
    if json is not None:
        output.write_json(json, {"run": str(model.path), "out": str(out), "reloaded_difference": back, **signature})
    print(
        f"Wrote {out}, {rows} x {length} tokens; reloaded, its probabilities differ from the model's by at most "
        f"{back:.1e}."
    )
    _print_next(out, "tokens")


def _print_next(out: pathlib.Path, given: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(out)!r}); import reload; print(reload.load({str(out)!r}).signature)"
    output.print_next({("python", "-c", code): f"load it with jax and numpy alone; the model is called with {given}"})
