"""The folders that commands are given: runs by their record, language models of whichever form."""

import dataclasses
import functools
import importlib.util
import pathlib
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from scalejax import json_reading
from scalejax.cli import output
from scalejax.configs import as_data
from scalejax.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from scalejax.inference.generate import Engine
    from scalejax.inference.text import Writer
    from scalejax.models.llm.model_folder import LanguageModel
    from scalejax.train.experiment import Experiment

Loaded = TypeVar("Loaded", "Writer", "Engine")


def read_record(run_folder: pathlib.Path) -> as_data.Record:
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
        record: as_data.Record = json_reading.read(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON: {error}. Restore it from a copy, or give another run folder."
        ) from error
    types = {"recipe": str, "sets": list, "file_sha256": str | None, "scalejax": str, "experiment": dict}
    known = isinstance(record, dict) and all(isinstance(record.get(name, ...), kind) for name, kind in types.items())
    if not known or not as_data.is_data(record["experiment"]) or not all(isinstance(s, str) for s in record["sets"]):
        raise UserError(
            f"{path}: is no record of a run (recipe, sets, file_sha256, scalejax, experiment). It is damaged: restore "
            "it from a copy."
        )
    return record


def load_run(run_folder: pathlib.Path, recipe: str | None) -> "Experiment":
    """The experiment of a run folder, by running its recipe again.

    Raises:
      UserError: not a run folder, or its recipe does not give the same experiment any more.
    """
    from scalejax.configs import serialization

    experiment = serialization.reload(read_record(run_folder), recipe=recipe, where=run_folder)
    return dataclasses.replace(experiment, data=_with_own_caches(experiment.data))


def _with_own_caches(data: Any) -> Any:
    """Data whose caches lie in the user's own folder: where a command writes, the record of a run does not choose."""
    if isinstance(data, tuple):
        return tuple(map(_with_own_caches, data))
    if not dataclasses.is_dataclass(data) or isinstance(data, type):
        return data
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
    ours = type(data).__module__.startswith("scalejax.")  # what a user's own class calls so may be another thing
    changed = {name: None if ours and name == "folder" else _with_own_caches(value) for name, value in fields.items()}
    changed = {name: value for name, value in changed.items() if value is not fields[name]}
    return dataclasses.replace(data, **changed) if changed else data


def on_mesh(experiment: "Experiment", mesh: str | None) -> "Experiment":
    """The experiment on the devices that --mesh says; None = on those of the run.

    Raises:
      UserError: the text says no mesh.
    """
    if mesh is None:
        return experiment
    from scalejax.parallel.mesh import parse_mesh

    placement = dataclasses.replace(experiment.placement, mesh=parse_mesh(mesh))
    return dataclasses.replace(experiment, placement=placement)


def print_next_of_model(folder: pathlib.Path) -> None:
    """Says how a folder of a language model that was just written generates text; nothing if it has no tokenizer."""
    from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
    from scalejax.models.llm import model_folder

    tokenizer = model_folder.open_folder(folder).tokenizer
    if tokenizer is None:
        return
    command = ("scalejax", "generate", str(folder), "--prompt", "The")
    if isinstance(tokenizer, HuggingFaceTokenizer) and importlib.util.find_spec("tokenizers") is None:
        print(f"With pip install 'scalejax[llm]': {shlex.join(command)}")
    else:
        output.print_next({command: "continue a text"})


def open_model(folder: pathlib.Path, *, recipe: str | None, step: int | None, average: int = 1) -> "LanguageModel":
    """Opens whichever kind of folder it is.

    Raises:
      UserError: it is none, or `recipe`, `step` or `average` are given for one that is no run.
    """
    from scalejax.models.llm import model_folder

    if model_folder.kind_of(folder) != "run":
        several = None if average == 1 else average
        for name, value in (("--recipe", recipe), ("--step", step), ("--average", several)):
            if value is not None:
                raise UserError(f"{name} {value}: {folder} is no run folder. Leave {name} out.")
        return model_folder.open_folder(folder)
    from scalejax.inference import run_model

    return run_model.open_run(folder, load_run(folder, recipe), step, average)


def other_run(folder: pathlib.Path, recipe: str | None) -> "Experiment | None":
    """The experiment of a folder that is a run, but not of a language model; None for all else."""
    from scalejax.models.llm import families, model_folder

    if not folder.is_dir() or model_folder.kind_of(folder) != "run":
        return None
    experiment = load_run(folder, recipe)
    return experiment if families.find(experiment.model) is None else None


def load(
    opened: "Callable[..., Loaded]", model: "LanguageModel", mesh: "Mesh", *, dtype: str | None, weights: str
) -> "Loaded":
    """Puts a model on devices, by `generate.load` or `text.open_writer`, and shows how far it is.

    Raises:
      UserError: it does not fit the devices, or lacks what `opened` wants.
    """
    import jax.numpy as jnp
    import rich.console

    from scalejax.models.llm import model_folder

    total = model_folder.parameter_bytes(model, jnp.dtype(model.dtype if dtype is None else dtype))
    with output.transfer(rich.console.Console(stderr=True)) as progress:  # standard output is for the text
        task = progress.add_task(f"from {model.path}", total=total)
        loaded = functools.partial(progress.advance, task)
        return opened(model, mesh, dtype=dtype, weights=weights, loaded=loaded)
