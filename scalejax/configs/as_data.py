"""Experiments as JSON data: written for people and for comparison, never turned back into objects.

A dataclass is {"type": dotted name, "fields": {...}}, a tuple a list, a mapping {"type": "dict", "fields": {...}}.
None, booleans, integers, strings and finite floats are themselves (Python's shortest repr is exact). JSON has no word
for inf and nan: these are {"type": "float", "fields": {"value": "inf"}}.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TypedDict

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Record(TypedDict):
    """What `experiment.json` of a run folder holds, see `serialization.record`."""

    recipe: str
    sets: list[str]
    file_sha256: str | None
    scalejax: str
    experiment: Json


def to_data(value: object) -> Json:
    """Turns an experiment, or any part of one, into JSON data.

    Raises:
      ValueError: something in it is no plain value; names its path.
    """
    return _to_data(value, "experiment")


def is_data(value: object) -> bool:
    """Whether a value that came from JSON has the form that `to_data` gives."""
    if isinstance(value, dict):
        fields = value.get("fields")
        return isinstance(value.get("type"), str) and isinstance(fields, dict) and all(map(is_data, fields.values()))
    return all(map(is_data, value)) if isinstance(value, list) else True


def diff(a: object, b: object) -> list[str]:
    """Paths that differ, as `path: a -> b`. Takes experiments or their data."""
    return list(_diff(of(a), of(b), ""))


def same(a: object, b: object) -> bool:
    """Whether two experiments (or their data) are equal in every value and type, 1 and 1.0 being different."""
    return not diff(a, b)


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


def of(value: object) -> Json:
    """The data of an experiment or a part of one; itself if it is data."""
    return value if isinstance(value, dict) and "type" in value else to_data(value)  # pyright: ignore[reportReturnType]


def _diff(a: Json, b: Json, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict) and one_type(a, b):
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


def one_type(a: Mapping[str, Json], b: Mapping[str, Json]) -> bool:
    """Whether two records are of one class, see `run_folder.is_one_class`."""
    from scalejax.train.run_folder import is_one_class

    return is_one_class(a.get("type"), b.get("type"))


def _show(fields: dict[str, Json], name: str) -> str:
    return _short(fields[name]) if name in fields else "absent"


def _short(value: Json) -> str:
    if isinstance(value, dict):
        return str(value["type"]).rpartition(".")[2]
    return repr(tuple(value)) if isinstance(value, list) else repr(value)
