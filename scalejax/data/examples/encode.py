"""Columns of a file -> records, with every check on the way: nothing wrong goes further than this."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from scalejax.data.examples.jagged import check_ids, check_lengths, signed_ids
from scalejax.data.examples.records import ExampleRecords, Ragged, RecordLayout, Shared
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError

Columns = Mapping[str, "np.ndarray | Ragged"]
SharedLists = Mapping[tuple[str, ...], Shared]
"""Names of the features of a group -> their lists."""
NanPolicy = Literal["mean", "zero", "error"]
Scaling = Literal["standard", "none"]

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseTransform:
    """What happens to number columns, in this order: log(x + shift), minus mean, divided by std, NaN -> mean.

    (With nan="zero" the first of all is NaN -> 0.)

    Attributes:
      log_shift: Column -> shift for columns of which the logarithm is taken.
      nan: "mean" = a missing number becomes the mean of the training split (0 after scaling); "zero" = it becomes 0
        before anything else; "error" = it is refused.
      mean: Column -> mean after the logarithm, or empty (0).
      std: Column -> standard deviation after the logarithm, or empty (1).
    """

    log_shift: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nan: NanPolicy = "mean"
    mean: Mapping[str, float] = dataclasses.field(default_factory=dict)
    std: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def logarithm(self, name: str, column: np.ndarray, where: str) -> np.ndarray:
        """number[N] -> float64[N], the logarithm taken where asked for.

        Raises:
          UserError: the logarithm does not exist, or the column holds an infinity.
        """
        x = column.astype(np.float64)
        if self.nan == "zero":
            x[np.isnan(x)] = 0.0
        shift = self.log_shift.get(name)
        if shift is not None:
            if x.size and (bad := x + shift <= 0).any():
                row = int(bad.argmax())
                raise UserError(
                    f"{where}: number {name!r} is {x[row]:g} in row {row}, and log(x + {shift:g}) does not exist. "
                    f"Correct the data or choose a shift above {-np.nanmin(x):g}."
                )
            np.log(x + shift, out=x)
        if np.isinf(x).any():
            row = int(np.isinf(x).argmax())
            raise UserError(
                f"{where}: number {name!r} is infinite in row {row}; wanted finite numbers. Correct the data."
            )
        return x

    def __call__(self, name: str, column: np.ndarray, where: str) -> np.ndarray:
        """number[N] -> float64[N], ready for the model."""
        x = self.logarithm(name, column, where)
        mean = self.mean.get(name, 0.0)
        missing = np.isnan(x)
        if missing.any():
            if self.nan == "error":
                raise UserError(
                    f"{where}: number {name!r} is missing (NaN) in row {int(missing.argmax())} and "
                    f'{int(missing.sum())} rows in all, and nan="error". Fill it in, or set nan="mean" to use the '
                    "mean of the training split."
                )
            x[missing] = mean
        x -= mean
        x /= self.std.get(name, 1.0)
        return x


class Moments:
    """Count, mean and standard deviation of number columns over chunks, NaN left out."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sums = {name: np.zeros(3) for name in names}

    def add(self, name: str, x: np.ndarray) -> None:
        """Adds float64[N]."""
        known = x[~np.isnan(x)]
        # Sums around the first value seen would be safer for numbers of huge offset; float64 has room to spare here.
        self._sums[name] += (known.size, known.sum(), np.square(known).sum())

    def mean(self) -> dict[str, float]:
        """Mean per column; 0 where nothing is known."""
        return {name: float(s / max(n, 1)) for name, (n, s, _) in self._sums.items()}

    def std(self) -> dict[str, float]:
        """Population standard deviation per column; 1 where a column does not vary."""
        out = {}
        for name, (n, s, q) in self._sums.items():
            variance = q / max(n, 1) - (s / max(n, 1)) ** 2
            varies = variance > 1e-12 * max(1.0, q / max(n, 1))
            out[name] = float(np.sqrt(variance)) if varies else 1.0
        return out


def fit_dense_transform(
    chunks: Iterable[tuple[Columns, np.ndarray, str]],
    names: tuple[str, ...],
    *,
    log_shift: Mapping[str, float],
    nan: NanPolicy,
    scaling: Scaling,
) -> DenseTransform:
    """Statistics over the training rows.

    Args:
      chunks: (columns, training rows inside them, where they come from).
      names: Number columns.
      log_shift: As in `DenseTransform`.
      nan: As in `DenseTransform`.
      scaling: "standard" = mean 0 and variance 1 on the training rows; "none" = numbers stay as they are, apart from
        the logarithm, and NaN becomes the mean.
    """
    transform = DenseTransform(log_shift=log_shift, nan=nan)
    moments = Moments(names)
    for columns, rows, where in chunks:
        for name in names:
            column = columns[name]
            assert isinstance(column, np.ndarray)
            moments.add(name, transform.logarithm(name, column, where)[rows])
    if scaling == "standard":
        return dataclasses.replace(transform, mean=moments.mean(), std=moments.std())
    return _Unscaled(log_shift=log_shift, nan=nan, mean=moments.mean())


class _Unscaled(DenseTransform):
    """Numbers that keep their scale; the mean only stands in for what is missing."""

    def __call__(self, name: str, column: np.ndarray, where: str) -> np.ndarray:
        return super().__call__(name, column, where) + self.mean.get(name, 0.0)


def encode(
    columns: Columns, layout: RecordLayout, transform: DenseTransform, *, where: str, shared: SharedLists | None = None
) -> ExampleRecords:
    """Checks columns and packs them into records.

    Args:
      columns: Name -> int[N] or int[N, L] ids, `Ragged` lists of ids, number[N] numbers, number[N] labels.
      shared: The lists of the groups of the layout.
      layout: Of the schema.
      transform: Of the number columns.
      where: Where the columns come from, for messages; rows are counted from its beginning.
    Raises:
      UserError: a bad id, label or number, or too many ids in an example.
    """
    schema = layout.schema
    rows = len(columns[schema.labels[0]])
    records = layout.empty(rows)
    floats = records.view(np.float32)
    for feature in layout.fixed:
        ids = columns[feature.name]
        if isinstance(ids, Ragged):
            assert feature.length is not None
            _check_length(ids, feature, where)
            ids = ids.values.reshape(rows, feature.length)
        _no_missing(ids, feature.name, where)
        lengths = None if ids.ndim == 1 else np.full(rows, feature.length)
        check_ids(ids.reshape(-1), feature.name, feature.rows, lengths=lengths, where=where)
        layout.put_ids(records, feature.name, ids)
    for d, name in enumerate(schema.dense, start=layout.dense.start):
        floats[:, d] = _as_float32(transform(name, _vector(columns, name), where), name, where)
    for t, name in enumerate(schema.labels, start=layout.labels.start):
        floats[:, t] = _labels(_vector(columns, name), name, where)
    if schema.weight is not None:
        floats[:, layout.labels.stop] = check_weights(_vector(columns, schema.weight), schema.weight, where)
    jagged = []
    for feature in layout.jagged:
        lists = columns[feature.name]
        assert isinstance(lists, Ragged)
        check_lengths(lists.lengths, feature.name, feature.max_length, where=where)
        check_ids(lists.values, feature.name, feature.rows, lengths=lists.lengths, where=where)
        jagged.append(_as_kept(lists, feature))
    groups = []
    for group in layout.groups:
        assert shared is not None
        groups.append(_shared(shared[group], [schema[name] for name in group], where))
    return ExampleRecords(records, tuple(jagged), tuple(groups))


def _shared(rows: Shared, features: list[Categorical], where: str) -> Shared:
    for feature, lists in zip(features, rows.lists, strict=True):
        try:
            _check_lists(lists, feature, where)
        except UserError:
            _check_lists(lists.take(rows.index), feature, where)  # the same, said of an example and not of a row
            raise
    return Shared(tuple(map(_as_kept, rows.lists, features)), rows.index)


def _check_lists(lists: Ragged, feature: Categorical, where: str) -> None:
    if feature.length is not None:
        _check_length(lists, feature, where)
    check_lengths(lists.lengths, feature.name, feature.max_length, where=where)
    check_ids(lists.values, feature.name, feature.rows, lengths=lists.lengths, where=where)


def _check_length(lists: Ragged, feature: Categorical, where: str) -> None:
    if (wrong := lists.lengths != feature.length).any():
        row = int(wrong.argmax())
        raise UserError(
            f"{where}: feature {feature.name!r} has {lists.lengths[row]} ids in row {row}; the schema says exactly "
            f"{feature.length}. Declare it with length=None and a capacity to allow any number."
        )


def _as_kept(lists: Ragged, feature: Categorical) -> Ragged:
    wide = feature.rows is None
    return Ragged(lists.offsets, signed_ids(lists.values).astype(np.int64 if wide else np.int32), lists.weights)


def _no_missing(ids: np.ndarray, name: str, where: str) -> None:
    # Integers of a file with missing values arrive as floats with NaN.
    if not np.issubdtype(ids.dtype, np.integer):
        missing = np.isnan(ids) if np.issubdtype(ids.dtype, np.floating) else np.zeros(0, bool)
        detail = (
            f"{int(missing.sum())} are missing, the first in row {int(missing.argmax())}"
            if missing.any()
            else ids.dtype
        )
        raise UserError(
            f"{where}: feature {name!r} must have an integer id in every row; got {detail}. Give missing values an id "
            "of their own."
        )


def _as_float32(x: np.ndarray, name: str, where: str) -> np.ndarray:
    """float64[N], finite -> float32[N]."""
    if (large := np.abs(x) > _FLOAT32_MAX).any():
        row = int(large.argmax())
        raise UserError(
            f"{where}: number {name!r} becomes {x[row]:g} in row {row}, beyond float32, whose largest number is "
            f"{_FLOAT32_MAX:.3g}. Scale the column, or take its logarithm (log_shift)."
        )
    return x.astype(np.float32)


def _vector(columns: Columns, name: str) -> np.ndarray:
    column = columns[name]
    assert isinstance(column, np.ndarray)
    return column


def _labels(column: np.ndarray, name: str, where: str) -> np.ndarray:
    good = (column == 0) | (column == 1)
    if not good.all():
        row = int((~good).argmax())
        raise UserError(
            f"{where}: label {name!r} is {column[row]} in row {row}; wanted 0 or 1. Turn it into a yes-or-no question "
            "when the file is prepared, for example rating >= 4."
        )
    return column


def check_weights(column: np.ndarray, name: str, where: str) -> np.ndarray:
    """float[N] weights of examples -> float32[N].

    Raises:
      UserError: one is negative, missing or not finite in float32, or all are 0.
    """
    good = np.isfinite(column) & (column >= 0)
    if not good.all():
        row = int((~good).argmax())
        raise UserError(f"{where}: weight {name!r} is {column[row]} in row {row}; wanted a finite number, at least 0.")
    column = _as_float32(column.astype(np.float64), name, where)
    if not column.any():
        raise UserError(f"{where}: weight {name!r} is 0 in every row, so that nothing would count. Leave it out.")
    return column


def check_schema(schema: Schema) -> None:
    """Refuses what no source can deliver.

    Raises:
      UserError: no label, a table of 2**31 rows or more, or one column in two roles.
    """
    if not schema.labels:
        raise UserError("Schema: needs at least one label column.")
    for feature in schema.categorical:
        if feature.rows is not None and feature.rows > _INT32_MAX:
            raise UserError(
                f"feature {feature.name!r}: rows={feature.rows} must be below 2**31. Hash into fewer rows, or declare "
                "rows=None and give its table an id map."
            )
    names = [*schema.keys, *schema.dense, *schema.labels, *([schema.weight] if schema.weight else [])]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UserError(
            f"columns {', '.join(twice)} are listed twice among categorical, dense, label and weight; keep one each."
        )


def missing_column(name: str, present: Iterable[str], where: str) -> UserError:
    """The error for a column that is not there, with the nearest names."""
    present = list(present)
    near = difflib.get_close_matches(name, present, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(map(repr, near))}?" if near else f"It has: {', '.join(present[:40])}."
    return UserError(f"{where}: there is no column {name!r}. {hint}")
