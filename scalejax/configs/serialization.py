"""Experiments as JSON data: written for people and for comparison, never turned back into objects.

A dataclass is {"type": dotted name, "fields": {...}}, a tuple a list, a mapping {"type": "dict", "fields": {...}}.
None, booleans, integers, strings and finite floats are themselves (Python's shortest repr is exact). JSON has no word
for inf and nan: these are {"type": "float", "fields": {"value": "inf"}}. Nothing is ever instantiated from a file: a
command on a run folder re-runs the recipe that the folder names, with the recorded overrides, and compares the result
with the recorded data (of earlier versions too, see `earlier`). One thing is taken from the record: a sharding plan
that came from a file (`--set tables.sharding=plan.json`), since it is data and the file may have gone or be another by
now.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import scalejax
from scalejax import configs
from scalejax.configs import discovery, earlier
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_SHOWN = 8  # differences spelt out in a message
_PLAN = "tables.sharding"


def to_data(value: object) -> Json:
    """Turns an experiment, or any part of one, into JSON data.

    Raises:
      ValueError: something in it is no plain value; names its path.
    """
    return _to_data(value, "experiment")


def diff(a: object, b: object) -> list[str]:
    """Paths that differ, as `path: a -> b`. Takes experiments or their data."""
    return list(_diff(_as_data(a), _as_data(b), ""))


def same(a: object, b: object) -> bool:
    """Whether two experiments (or their data) are equal in every value and type, 1 and 1.0 being different."""
    return not diff(a, b)


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
        "experiment": to_data(experiment),
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
    written, recorded = recorded, earlier.as_now(recorded)
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
    differences = diff(_completed(recorded["experiment"], experiment), experiment)
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
    data = _as_data(value) if dataclasses.is_dataclass(value) else None
    if not isinstance(data, dict) or not isinstance(recorded, dict) or not _one_type(recorded, data):
        return recorded
    fields: Any = recorded["fields"]
    fields = {name: _completed(one, getattr(value, name, None)) for name, one in fields.items()}
    for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
        if field.name not in fields and field.default is not dataclasses.MISSING:
            fields[field.name] = _as_data(field.default)
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


def _to_data(value: object, path: str) -> Json:
    if value is None or type(value) in (bool, int, str):
        return value  # pyright: ignore[reportReturnType]
    if isinstance(value, float):
        value = float(value)  # a NumPy float64 is a float too
        return value if math.isfinite(value) else {"type": "float", "fields": {"value": repr(value)}}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_to_data(item, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"type": "dict", "fields": {name: _to_data(item, f"{path}.{name}") for name, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _to_data(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}", "fields": fields}
    raise ValueError(
        f"to_data: {path} must be a plain value (None, bool, int, float, str, tuple, mapping or a dataclass of these); "
        f"got {type(value).__name__}."
    )


def _as_data(value: object) -> Json:
    return value if isinstance(value, dict) and "type" in value else to_data(value)  # pyright: ignore[reportReturnType]


def _diff(a: Json, b: Json, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict) and _one_type(a, b):
        fields_a, fields_b = a["fields"], b["fields"]
        assert isinstance(fields_a, dict)
        assert isinstance(fields_b, dict)
        for name in [*fields_a, *(n for n in fields_b if n not in fields_a)]:
            below = f"{path}.{name}" if path else name
            if name not in fields_a or name not in fields_b:
                yield f"{below}: {_show(fields_a, name)} -> {_show(fields_b, name)}"
            else:
                yield from _diff(fields_a[name], fields_b[name], below)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _diff(x, y, f"{path}.{i}")
    elif type(a) is not type(b) or a != b or (isinstance(a, float) and repr(a) != repr(b)):  # -0.0 is not 0.0
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _one_type(a: Mapping[str, Json], b: Mapping[str, Json]) -> bool:
    """Whether two records are of one class: modules of scalejax move between versions, the names of classes stay."""
    names = [str(one.get("type")) for one in (a, b)]
    own = all(name.startswith("scalejax.") for name in names)
    return names[0] == names[1] or (own and names[0].rpartition(".")[2] == names[1].rpartition(".")[2])


def _show(fields: dict[str, Json], name: str) -> str:
    return _short(fields[name]) if name in fields else "absent"


def _short(value: Json) -> str:
    if isinstance(value, dict):
        return str(value["type"]).rpartition(".")[2]
    return repr(tuple(value)) if isinstance(value, list) else repr(value)
