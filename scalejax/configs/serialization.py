"""The record of an experiment in its run folder, and the way back: by running the recipe again.

Nothing is ever instantiated from a file: a command on a run folder re-runs the recipe that the folder names, with the
recorded overrides, and compares the result with the recorded data (of earlier versions too, see `earlier`). Two things
are taken from the record if they came from a file: a sharding plan (`--set tables.sharding=plan.json`) and towers
(`--set model.towers=towers.json`), since they are data and the file may have gone or be another by now.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import scalejax
from scalejax import configs
from scalejax.configs import as_data, discovery, earlier
from scalejax.configs.as_data import Json, Record
from scalejax.errors import UserError
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan
from scalejax.parallel.towers import Partition

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment


_SHOWN = 8  # differences spelt out in a message
_FROM_FILES: dict[str, Callable[[object, str], object]] = {
    "tables.sharding": ShardingPlan.from_json,
    "model.towers": Partition.from_json,
}
_MAY_DIFFER = ("xla_flags", "strategy.form", "strategy.reduce_dtype")
"""Options of the compiler, and how gradients are summed: a recipe may learn better ones, and a run goes on with them.
What a user set stays set."""


def record(recipe: str, sets: Sequence[str], experiment: "Experiment") -> Record:
    """What `experiment.json` of a run folder holds.

    Args:
      recipe: As given on the command line.
      sets: The overrides, in order.
      experiment: The result of both.

    Returns:
      {"recipe", "sets", "file_sha256" (None unless the recipe is a user's file), "scalejax", "experiment"}.
    """
    return {
        "recipe": recipe,
        "sets": list(sets),
        "file_sha256": discovery.find(recipe).sha256(),
        "scalejax": scalejax.__version__,
        "experiment": as_data.to_data(experiment),
    }


def reload(recorded: Record, *, recipe: str | None = None, where: pathlib.Path | str = "") -> "Experiment":
    """Re-runs the recipe of a run folder with its overrides, and checks that it still is the same experiment.

    Fields that types have gained since the record count as their defaults, which must be what was before.

    Args:
      recorded: What `record` wrote.
      recipe: The user's own recipe again, `path.py:function` or `module:function`; required if the run came from one,
        refused otherwise: code is run because the user names it, never because a folder does.
      where: Run folder, for messages.

    Raises:
      UserError: the user's recipe is not given, not the same one, or the recipe now gives another experiment.
    """
    named = recorded["recipe"]
    if discovery.is_bundled(named):
        if recipe is not None and not (
            discovery.is_bundled(recipe) and discovery.find(recipe) == discovery.find(named)
        ):
            raise UserError(f"--recipe {recipe}: the run {where} came from {named!r}. Leave --recipe out.")
    elif recipe is None:
        raise UserError(
            f"The run {where} came from {named!r}, which is no recipe of scalejax; what a folder names is not run by "
            f"itself. If that is a file or module of yours, name it: --recipe {shlex.quote(named)}"
        )
    written = earlier.renamed(recorded)
    recorded = earlier.as_now(written)
    if recipe is not None:
        _check_same(recipe, named, recorded["file_sha256"], where, brought_forward=recorded is not written)
    experiment = _build(recipe or named, recorded["sets"], recorded["experiment"], where)
    differences = [
        line
        for line in as_data.diff(_completed(recorded["experiment"], experiment), experiment)
        if not line.startswith(_MAY_DIFFER)
    ]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UserError(
            f"Recipe {named!r} no longer gives the experiment of the run {where}: "
            f"{'; '.join(differences[:_SHOWN])}{more}. It was made with scalejax {recorded['scalejax']}, this is "
            f"{scalejax.__version__}: use the version that made it, or train again."
        )
    return experiment


def _check_same(
    recipe: str, named: str, sha256: str | None, where: pathlib.Path | str, *, brought_forward: bool
) -> None:
    """Raises UserError unless the recipe that the user names is the one that the run came from.

    A file is known by its digest, so that a copy elsewhere will do; a module by its name. What the record names is
    compared as text: looking for it would import the packages that it lies in. A file of an earlier version cannot be
    run as it was (`brought_forward`), so it may be another.
    """
    if not _is_file(named) or not _is_file(recipe):
        if recipe != named:
            raise UserError(f"--recipe {recipe}: the run {where} came from {named!r}. Give that one, or train again.")
        return
    if sha256 is None:
        raise UserError(
            f"The run {where}: experiment.json has no SHA-256 of {named!r}. It is damaged: restore it from a copy."
        )
    found = discovery.find(recipe)
    if found.sha256() != sha256 and not brought_forward:
        raise UserError(
            f"--recipe {recipe}: this file is not the one that the run {where} was made with (SHA-256 "
            f"{(found.sha256() or '')[:12]}, recorded {sha256[:12]}). Give the original file, or train again."
        )
    function = named.rpartition(":")[2]
    if not function.endswith(".py") and found.function != function:
        raise UserError(f"--recipe {recipe}: the run {where} came from function {function!r} of this file.")


def _is_file(recipe: str) -> bool:
    return (recipe.rpartition(":")[0] or recipe).endswith(".py")


def _build(recipe: str, sets: Sequence[str], recorded: Any, where: pathlib.Path | str) -> "Experiment":
    parts = [[part.strip() for part in text.partition("=")] for text in sets]
    read = {path for path, _, value in parts if path in _FROM_FILES and value.endswith(".json")}
    others = [
        text
        for text, (path, *_) in zip(sets, parts, strict=True)
        if not any(f"{path}.".startswith(f"{name}.") for name in read)
    ]
    experiment = configs.load(recipe, others)
    for path in read:
        part, _, field = path.partition(".")
        of_part: Any = _plain(recorded.get("fields", {}).get(part)) or {}
        value = _FROM_FILES[path](of_part.get(field), f"{path} in experiment.json of the run {where}")
        changed: Any = dataclasses.replace(getattr(experiment, part), **{field: value})
        experiment = dataclasses.replace(experiment, **{part: changed})
    return experiment


def _completed(recorded: Json, value: object) -> Json:
    """The record of a value, with the fields that it lacks and that have a default."""
    if isinstance(value, tuple) and isinstance(recorded, list):
        return [_completed(one, item) for one, item in zip(recorded, value, strict=False)] + recorded[len(value) :]
    data = as_data.of(value) if dataclasses.is_dataclass(value) else None
    if not isinstance(data, dict) or not isinstance(recorded, dict) or not as_data.one_type(recorded, data):
        return recorded
    fields: Any = recorded["fields"]
    fields = {name: _completed(one, getattr(value, name, None)) for name, one in fields.items()}
    for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
        if field.name not in fields and field.default is not dataclasses.MISSING:
            fields[field.name] = as_data.of(field.default)
    return {**recorded, "fields": fields}


def _plain(data: Json) -> Json:
    """Data of dataclasses as objects of their fields."""
    if isinstance(data, dict):
        fields = data.get("fields")
        return {name: _plain(value) for name, value in fields.items()} if isinstance(fields, dict) else None
    return [_plain(item) for item in data] if isinstance(data, list) else data
