"""`scalejax convert`: language models from Hugging Face to scalejax and back, other runs to what their task writes."""

import os
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from scalejax.cli import environment, folders, options, output
from scalejax.errors import UserError

if TYPE_CHECKING:
    from rich import table

    from scalejax.models.llm.model_folder import LanguageModel
    from scalejax.train.experiment import Experiment

_DTYPES = ("float32", "bfloat16", "float16")
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Of a run: which checkpoint. Default: the newest.")
]


def convert(
    source: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="SOURCE", help="A folder of Hugging Face, a model folder, or one that `scalejax train` wrote."
        ),
    ],
    target: Annotated[pathlib.Path, typer.Argument(metavar="DEST", help="Folder to write; must not be there yet.")],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: as in SOURCE."),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            "--experts",
            metavar="FORM",
            help="Of a Mixtral for Hugging Face: separate, a tensor for each expert, or fused. Default: separate.",
        ),
    ] = None,
    shard_size: Annotated[
        float, typer.Option("--shard-size", metavar="GB", help="Largest file, unless one tensor is larger.")
    ] = 5.0,
    step: Step = None,
    average: Annotated[
        int,
        typer.Option("--average", metavar="N", min=1, help="Of a run: the mean of the last N checkpoints up to there."),
    ] = 1,
    recipe: options.RecipeFile = None,
) -> None:
    """Convert models of Hugging Face to scalejax, and back.

    What SOURCE is decides: a folder of Hugging Face becomes a model folder, a model folder or a run one of Hugging
    Face. Files of the tokenizer go along, and parameters stay the same to the bit unless --dtype says otherwise. Of
    other runs a ResNet becomes a folder of Hugging Face; what is read the other way is init=FOLDER of `scalejax train`.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed, so no accelerator is looked for
    environment.prepare()
    check_dtype(dtype)
    if not 0 < shard_size < float("inf"):
        raise UserError(f"--shard-size must be above 0 GB and finite; got {shard_size}.")
    if (experiment := folders.other_run(source, recipe)) is not None:
        for name, value, default in (
            ("--dtype", dtype, None),
            ("--experts", experts, None),
            ("--shard-size", shard_size, 5),
        ):
            if value != default:
                raise UserError(f"{name} {value}: {source} is no run of a language model. Leave {name} out.")
        _write_run(experiment, source, target, step, average)
        return
    model = folders.open_model(source, recipe=recipe, step=step, average=average)

    from jax.numpy import dtype as as_dtype

    from scalejax.models.llm import model_folder

    wanted = None if dtype is None else as_dtype(dtype)
    to = "model" if model.kind == "huggingface" else "huggingface"
    if experts is not None and to == "model":
        raise UserError(
            f"--experts {experts}: goes with a folder of Hugging Face, and {source} becomes a model folder. Leave it "
            "out, or convert that one."
        )
    console = output.console()
    console.print(_table(model))
    with output.transfer(console) as progress:
        task = progress.add_task(f"to {target}", total=model_folder.parameter_bytes(model, wanted))
        model_folder.convert(
            model,
            target,
            to=to,
            experts=experts,
            dtype=wanted,
            shard_bytes=int(shard_size * 10**9),
            wrote=lambda count: progress.advance(task, count),
        )
    what = "model folder" if to == "model" else "folder of Hugging Face"
    print(f"Wrote the {what} {target}.")
    folders.print_next_of_model(target)


def _write_run(
    experiment: "Experiment", source: pathlib.Path, target: pathlib.Path, step: int | None, average: int
) -> None:
    """Writes what the task of a run has for others."""
    from scalejax.train import phases
    from scalejax.train.checkpoints import trained

    experiment = phases.experiment_at(experiment, source, step)
    found = trained.open_run(source, step, average)
    experiment.model.task(experiment.data.schema()).write_folder(target, found)
    print(f"Wrote {target} from {found.origin}.")


def check_dtype(dtype: str | None) -> None:
    """Raises UserError for a dtype that weights cannot have."""
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")


def _table(model: "LanguageModel") -> "table.Table":
    from rich import box, markup, table

    from scalejax import units
    from scalejax.models.llm import model_folder

    kinds = {"huggingface": "of Hugging Face", "model": "model folder", "run": "run folder"}
    size = units.size(model_folder.parameter_bytes(model))
    rows = {
        "source": f"{model.path} ({kinds[model.kind]})",
        "parameters": f"{model.config.parameters():,}, {model.dtype}, {size} in {len(model.shards)} file(s)",
        **model.architecture.describe(model.config),
        "special tokens": f"bos {model.tokens.bos}, eos {', '.join(map(str, model.tokens.eos)) or None}",
        "files that go along": ", ".join(file.name for file in model.files) or "none",
    }
    shown = table.Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in [*rows.items(), *(("note", remark) for remark in model.remarks)]:
        shown.add_row(name, markup.escape(value))
    return shown
