"""What the columns of a table are for a click model, and why: read off their types and values."""

import dataclasses
from typing import Literal

import polars as pl

from scalejax.errors import UserError

Kind = Literal["number", "text", "date", "list"]

_SHARED_BY = 5  # occurrences from which on a text is one that rows share
_FEWEST_SHARED = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a table that a model is to see.

    Attributes:
      name: Its name in the table.
      kind: "number": a dense feature and a feature of bins. "text": a feature with a vocabulary. "date": day of the
        month, weekday and month, and the hour if any time has one, as features. "list": one feature with any number of
        values, which have weights where the elements are (value, weight) pairs.
    """

    name: str
    kind: Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What was made of a column.

    Attributes:
      name: Of the column.
      column: As the model sees it, or None: it is left out.
      reason: Why.
    """

    name: str
    column: TableColumn | None
    reason: str


def infer(frame: pl.DataFrame, bins: int) -> tuple[Finding, ...]:
    """A finding for every column of a table, in its order.

    Args:
      frame: Without the label and other columns that have a part of their own.
      bins: Different numbers up to which each has a bin of its own, for the reason.
    """
    return tuple(_infer(frame[name], bins) for name in frame.columns)


def default_kind(kind: pl.DataType) -> Kind | None:
    """What a column of this type is, if nothing in it speaks against it; None: nothing a model could see."""
    if isinstance(kind, pl.List):
        inner = kind.inner
        return "list" if is_pair(inner) or _is_value(inner) else None
    if kind.is_numeric():
        return "number"
    if kind in (pl.Date, pl.Datetime):
        return "date"
    return "text" if _is_value(kind) else None


def is_pair(kind: object) -> bool:
    """Whether the elements of a list are (value, weight) pairs."""
    if not isinstance(kind, pl.Struct) or len(kind.fields) != 2:
        return False
    value, weight = (field.dtype for field in kind.fields)
    return _is_value(value) and isinstance(weight, pl.DataType) and weight.is_numeric()


def _is_value(kind: object) -> bool:
    return isinstance(kind, pl.DataType) and (kind.is_numeric() or kind in (pl.String, pl.Boolean))


def _infer(column: pl.Series, bins: int) -> Finding:
    kind = default_kind(column.dtype)
    known = column.drop_nulls()
    share = 1 - len(known) / max(len(column), 1)
    missing = f", {100 * share:.2g} % missing" if share else ""

    def found(reason: str, kind: Kind | None) -> Finding:
        as_seen = None if kind is None else TableColumn(name=column.name, kind=kind)
        return Finding(name=column.name, column=as_seen, reason=reason + missing)

    if kind is None:
        return found(f"left out: a model cannot see values of type {column.dtype}", None)
    if known.is_empty():
        return Finding(name=column.name, column=None, reason="left out: every value is missing")
    if kind == "list":
        return found(f"lists{' of (value, weight) pairs' if is_pair(column.dtype.inner) else ''}", kind)  # pyright: ignore[reportAttributeAccessIssue]
    different = known.n_unique()
    if different == 1 and not share:
        return found("left out: the same value in every row", None)
    if kind == "date":
        return found(f"dates from {known.min()} to {known.max()}", kind)
    if kind == "number":
        if column.dtype.is_integer() and different == len(known) > bins:
            return found("left out: like an id, an integer that no two rows share", None)
        how = "each its own bin" if different <= bins else f"bins of equal size, frequent values apart, up to {bins}"
        return found(f"{different:,} different numbers: as number, and {how}", kind)
    counts = known.value_counts()["count"]
    shared = counts.filter(counts >= _SHARED_BY)
    if int(shared.sum() or 0) < _FEWEST_SHARED * len(known):
        return found(
            f"left out: like an id, {different:,} different texts in {len(known):,} rows, few of which "
            f"{_SHARED_BY} rows share",
            None,
        )
    return found(f"{different:,} different texts", kind)


def check_kind(column: TableColumn, kind: pl.DataType, where: str) -> None:
    """Raises UserError if a column of this type cannot be what it is said to be."""
    natural = default_kind(kind)
    if natural is None or (column.kind != natural and (column.kind != "text" or natural == "list")):
        wanted = f"kind={natural!r}" if natural else "to leave it out"
        raise UserError(
            f"{where}: column {column.name!r} holds {kind} and cannot be of kind {column.kind!r}; wanted {wanted}."
        )
