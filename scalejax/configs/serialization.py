"""The record of an experiment in its run folder, and the way back: by running the recipe again.

Nothing is ever instantiated from a file: a command on a run folder re-runs the recipe that the folder names, with the
recorded overrides, and compares the result with the recorded data (of earlier versions too, see `earlier`). One thing
is taken from the record: a sharding plan that came from a file (`--set tables.sharding=plan.json`), since it is data
and the file may have gone or be another by now.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import scalejax
from scalejax import configs
from scalejax.configs import as_data, discovery, earlier
from scalejax.configs.as_data import Json
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment


_SHOWN = 8  # differences spelt out in a message
_PLAN = "tables.sharding"


def record(recipe: str, sets: Sequence[str], experiment: "Experiment") -> dict[str, Any]:
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


def reload(recorded: Mapping[str, Any], *, recipe: str | None = None, where: pathlib.Path | str = "") -> "Experiment":
    """Re-runs the recipe of a run folder with its overrides, and checks that it still is the same experiment.

    Fields that types have gained since the record count as their defaults, which must be what was before.

    Args:
      recorded: What `record` wrote.
      recipe: The user's file again, `path.py:function`; required if, and only if, the run came from one: code is run
        because the user names it, never because a folder does.
      where: Run folder, for messages.

    Raises:
      UserError: the file is not given, not the same file, or the recipe now gives another experiment.
    """
    written = earlier.renamed(recorded)
    recorded = earlier.as_now(written)
    named, sets, sha256 = recorded["recipe"], recorded["sets"], recorded["file_sha256"]
    if sha256 is None:
        if recipe is not None and discovery.find(recipe) != discovery.find(named):
            raise UserError(f"--recipe {recipe}: the run {where} came from {named!r}. Leave --recipe out.")
    elif recipe is None:
        raise UserError(
            f"The run {where} came from a file of yours, {named!r}. Say which file to run again: --recipe {named}"
        )
    else:
        found, function = discovery.find(recipe), _function(named)
        if found.sha256() != sha256 and recorded is written:  # a file of before cannot be run as it was
            raise UserError(
                f"--recipe {recipe}: this file is not the one that the run {where} was made with (SHA-256 "
                f"{(found.sha256() or 'none: not a file')[:12]}, recorded {sha256[:12]}). Give the original file, or "
                "train again."
            )
        if function and found.function != function:
            raise UserError(f"--recipe {recipe}: the run {where} came from function {function!r} of this file.")
    experiment = _build(recipe or named, sets, recorded["experiment"], where)
    differences = as_data.diff(_completed(recorded["experiment"], experiment), experiment)
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UserError(
            f"Recipe {named!r} no longer gives the experiment of the run {where}: "
            f"{'; '.join(differences[:_SHOWN])}{more}. It was made with scalejax {recorded['scalejax']}, this is "
            f"{scalejax.__version__}: use the version that made it, or train again."
        )
    return experiment


def _build(recipe: str, sets: Sequence[str], recorded: Any, where: pathlib.Path | str) -> "Experiment":
    parts = [[part.strip() for part in text.partition("=")] for text in sets]
    if not any(path == _PLAN and value.endswith(".json") for path, _, value in parts):
        return configs.load(recipe, sets)
    from scalejax.parallel.embedding.plan.placement import ShardingPlan

    others = [text for text, (path, *_) in zip(sets, parts, strict=True) if not f"{path}.".startswith(f"{_PLAN}.")]
    tables: Any = _plain(recorded.get("fields", {}).get("tables"))
    found = None if tables is None else tables.get("sharding")
    plan = ShardingPlan.from_json(found, f"{_PLAN} in experiment.json of the run {where}")
    experiment = configs.load(recipe, others)
    return dataclasses.replace(experiment, tables=dataclasses.replace(experiment.tables, sharding=plan))


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


def _function(recipe: str) -> str:
    head, colon, function = recipe.rpartition(":")
    return function if colon and head.endswith(".py") else ""
