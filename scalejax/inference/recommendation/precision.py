"""The precision of every table and operator: plain data, in a file if need be."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

from scalejax import json_reading
from scalejax.errors import UserError, check_one_of
from scalejax.inference.recommendation import operators
from scalejax.inference.recommendation.click_model import ServedModel
from scalejax.kernels import block_quant
from scalejax.train import disk

TablePrecision = Literal[
    "float32", "float16", "int8", "kmeans4", "int4", "kmeans4_shared", "kmeans2", "int2", "kmeans2_shared"
]
DensePrecision = Literal["float32", "float16", "int8"]
TABLES: tuple[TablePrecision, ...] = get_args(TablePrecision)
DENSE: tuple[DensePrecision, ...] = get_args(DensePrecision)

_WIDTH = {"float32": 4, "float16": 2}
_FORMAT = "scalejax click model precisions 1"


@dataclasses.dataclass(frozen=True)
class Precisions:
    """A choice for a model.

    Attributes:
      tables: Name -> precision of its rows.
      operators: Path -> precision of its weights, and of its products where that is "int8".
    """

    tables: dict[str, TablePrecision]
    operators: dict[str, DensePrecision]

    def with_one(self, name: tuple[str, str], precision: Any) -> "Precisions":
        """Another precision for ("table", its name) or ("operator", its path)."""
        kind, key = name
        if kind == "table":
            return dataclasses.replace(self, tables={**self.tables, key: precision})
        return dataclasses.replace(self, operators={**self.operators, key: precision})

    def of(self, name: tuple[str, str]) -> str:
        """The precision of ("table", its name) or ("operator", its path)."""
        kind, key = name
        return self.tables[key] if kind == "table" else self.operators[key]

    def save(self, path: pathlib.Path) -> None:
        """Writes it as JSON.

        Raises:
          UserError: the disk refuses.
        """
        disk.write_json(path, {"format": _FORMAT, **dataclasses.asdict(self)})


def names(model: ServedModel) -> list[tuple[str, str]]:
    """All that has a precision: ("table", name) and ("operator", path)."""
    return [("table", c.name) for c in model.configs] + [("operator", path) for path in operators.find(model.shape)]


def choices(model: ServedModel, name: tuple[str, str]) -> Sequence[str]:
    """Precisions that a table or operator can have, the widest first."""
    kind, key = name
    if kind == "table":
        return TABLES
    return DENSE if operators.find(model.shape)[key].kind == "linear" else DENSE[:2]


def uniform(model: ServedModel, *, tables: TablePrecision = "float32", dense: DensePrecision = "float32") -> Precisions:
    """One precision for all tables and one for all operators; float16 for those that have no int8.

    Raises:
      UserError: an unknown precision.
    """
    for what, given, known in (("tables", tables, TABLES), ("dense", dense, DENSE)):
        check_one_of(f"--{what}", given, known)
    found = operators.find(model.shape)
    return Precisions(
        {c.name: tables for c in model.configs},
        {path: "float16" if dense == "int8" and o.kind == "other" else dense for path, o in found.items()},
    )


def load(path: pathlib.Path, model: ServedModel) -> Precisions:
    """Reads what `Precisions.save` wrote.

    Raises:
      UserError: the file cannot be read, is something else, or speaks of another model.
    """
    try:
        content = json_reading.read(path)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        found = Precisions(dict(content["tables"]), dict(content["operators"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--precision {path}: is no file of precisions ({error}). Write one with `scalejax precision --save`."
        ) from error
    check(found, model, where=f"--precision {path}")
    return found


def check(precisions: Precisions, model: ServedModel, *, where: str = "precisions") -> None:
    """Raises UserError unless every table and operator of a model, and nothing else, has a precision for it."""
    given = {("table", name) for name in precisions.tables} | {("operator", path) for path in precisions.operators}
    wanted = names(model)
    for kind, key in sorted(given.symmetric_difference(wanted)):
        what = "is not in the model" if (kind, key) in given else "has no precision"
        raise UserError(f"{where}: {kind} {key!r} {what}. Make the choice for this model.")
    for name in wanted:
        check_one_of(f"{where}: {name[0]} {name[1]!r}", precisions.of(name), choices(model, name))


def bytes_of(model: ServedModel, name: tuple[str, str], precision: str) -> int:
    """Bytes at rest of a table or operator in a precision, scales, biases and codebooks included."""
    kind, key = name
    if kind == "table":
        rows, dim = model.tables[key].shape
        if precision in _WIDTH:
            return rows * dim * _WIDTH[precision]
        return block_quant.table_bytes(precision, rows, dim)
    shapes = [model.params[path].shape for path in operators.find(model.shape)[key].params]
    sizes = [_size(shape) for shape in shapes]
    if precision in _WIDTH:
        return sum(sizes) * _WIDTH[precision]
    outputs = next(shape[1] for shape in shapes if len(shape) == 2)
    return max(sizes) + 8 * outputs + 4 * outputs  # codes; scale and sum of a column; a float32 bias


def total_bytes(model: ServedModel, precisions: Precisions) -> int:
    """Bytes at rest of the whole model."""
    return sum(bytes_of(model, name, precisions.of(name)) for name in names(model))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
