"""The architecture that trained parameters belong to, and what of a config contradicts it.

Shapes of arrays do not tell all that a model computes, such as the base of rotary positions or the epsilon of a norm.
A run folder records the config of its model as data and a folder of another form gives a config; `differences` compares
either with the config of a run that begins with them.

A config, or a part of one, may say of its own fields by class variables

    FREE      trained parameters do not depend on them: how the model is trained and computed
    SHAPED    None stands for what the data or other fields say, and the shapes of parameters tell it
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalejax.train.run_folder import is_one_class

MODEL = "model"
"""Field of an experiment."""


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """One field.

    Attributes:
      path: Of the experiment, "model.rope_theta".
      here: Value in the config.
      there: Value that parameters were trained with, a plain value, a dataclass or the data of one.
      shaped: Whether shapes of parameters tell it where one of the two is None.
    """

    path: str
    here: object
    there: object
    shaped: bool = False

    def __str__(self) -> str:
        return f"{self.path} is {shown(self.there)} there and {shown(self.here)} here"


def differences(here: object, there: object, path: str = MODEL, *, remade: Sequence[str] = ()) -> Iterator[Difference]:
    """Fields on which parameters depend and whose values differ.

    Args:
      here: A config, or a part of one.
      there: That of the trained parameters: a config, or its data as `experiment.json` has it.
      path: Of both.
      remade: Names of fields that a surgery makes anew, or the ends of such names: "hidden", "mlp".
    """
    if isinstance(here, tuple) and isinstance(there, tuple | list) and len(here) == len(there):
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            yield from differences(one, other, f"{path}.{number}", remade=remade)
        return
    kind, values = _parts(there)
    if not _is_config(here) or not is_one_class(_parts(here)[0], kind):
        if plain(here) != plain(there):
            yield Difference(path, here, there)
        return
    for field in dataclasses.fields(here):  # pyright: ignore[reportArgumentType]
        if field.name in getattr(type(here), "FREE", ()) or _ends(field.name, remade):
            continue
        value = values.get(field.name, _default(field))
        if value is dataclasses.MISSING:  # a field that the record is older than
            continue
        for found in differences(getattr(here, field.name), value, f"{path}.{field.name}", remade=remade):
            shaped = field.name in getattr(type(here), "SHAPED", ())
            yield dataclasses.replace(found, shaped=shaped and None in (found.here, found.there))


def of_run(record: object, step: int) -> object | None:
    """The data of the model that a run had at a step, by its record; None where the record does not say."""
    experiment = record.get("experiment") if isinstance(record, Mapping) else None
    _, fields = _parts(experiment)
    model, stop = fields.get(MODEL), fields.get("steps")
    for phase in fields.get("phases") or ():
        if not isinstance(stop, int) or step <= stop:
            break
        own = fields_of(phase)
        stop += own.get("steps", 0)
        for path, value in fields_of(own.get("changes")).items():
            first, *rest = path.split(".")
            if first != MODEL:
                continue
            before = functools.reduce(lambda data, name: fields_of(data).get(name), rest, model)
            is_part = bool(rest) and (before is None or type_of(before) is not None)
            if type_of(value) not in (None, type_of(before)) and not is_part:
                return None  # such as a value that the phase derives, which the record does not show
            model = _replaced(model, rest, value)
    return model if type_of(model) else None


def shown(value: object) -> str:
    """A value for a message: a config by its name."""
    kind, _ = _parts(value)
    return repr(plain(value)) if kind is None else kind.rpartition(".")[2]


def plain(value: object) -> object:
    """A plain value, or a dataclass or its data as (name of the class, fields), for comparisons."""
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    kind, fields = _parts(value)
    if kind is None:
        return value
    if kind == "float":  # what JSON has no word for
        return float(str(fields["value"]))
    return kind.rpartition(".")[2], {name: plain(one) for name, one in fields.items()}


def fields_of(value: object) -> Mapping[str, Any]:
    """Fields of a dataclass or of its data; {} of anything else."""
    return _parts(value)[1]


def type_of(value: object) -> str | None:
    """Name of the class of a dataclass or of its data; None of a plain value."""
    kind, _ = _parts(value)
    return None if kind is None else kind.rpartition(".")[2]


def _parts(value: Any) -> tuple[str | None, Mapping[str, Any]]:
    """(dotted name of the class, fields) of a dataclass or of its data; (None, {}) of a plain value."""
    if _is_config(value):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__module__}.{type(value).__qualname__}", named
    if isinstance(value, Mapping) and isinstance(value.get("fields"), Mapping):
        return str(value.get("type")), value["fields"]
    return None, {}


def _replaced(data: object, path: Sequence[str], value: object) -> object:
    """Data of a dataclass with another value at a path."""
    if not path:
        return value
    (kind, fields), (name, *rest) = _parts(data), path
    return {"type": kind, "fields": {**fields, name: _replaced(fields.get(name), rest, value)}}


def _default(field: "dataclasses.Field[Any]") -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f"_{end}") for end in ends)


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
