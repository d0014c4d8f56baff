"""A user's own table, of any kind, as a data set: one label of two values, features of whatever the columns hold."""

import dataclasses
import datetime
import itertools
from typing import TYPE_CHECKING

import numpy as np

from scalejax.data.examples.binning import value_bins
from scalejax.data.examples.coding import Coder, Counted
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.encode import check_weights, missing_column
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import SPLITS, ByTime, Fractions
from scalejax.data.tables.inference import Finding, TableColumn, check_kind, infer, is_pair
from scalejax.errors import UserError

if TYPE_CHECKING:
    import polars as pl

    from scalejax.data.tables.frames import ArrowStream

FEWEST_ROWS = 500
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableData:
    """A table whose rows are examples: CSV or TSV (plain, .gz, .zst), Parquet, Arrow, or a frame in memory.

    What is not said of the columns is inferred (`inference.py`). Whatever is counted or measured to encode them is
    that of the training split alone: texts that fewer than `coding.min_count` of its rows hold share one id, numbers
    are standardised and also put into bins (`binning.value_bins`), and a missing value has an id of its own everywhere.

    Attributes:
      path: The file, or what `from_frame` names a frame.
      label: Column with two different values.
      positive: The value that is to be predicted, as text; None = the greater one (1, true, "yes").
      weight: Column with the weights of the examples, or None.
      time: Column by whose order the examples are split, oldest first, or None = at random. Examples of the same time
        are in one split. If it holds numbers it is no feature, as later numbers are never trained.
      columns: What the model sees; () = inferred.
      leave_out: Columns that are not inferred.
      split: Shares of the splits.
      bins: Of numbers.
      coding: Of texts.
      sha256: Of the file, in hex; another content is refused. None = any.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    path: str
    label: str
    positive: str | None = None
    weight: str | None = None
    time: str | None = None
    columns: tuple[TableColumn, ...] = ()
    leave_out: tuple[str, ...] = ()
    split: Fractions = Fractions(train=0.76, validation=0.04)
    bins: int = 48
    coding: Counted = Counted(min_count=5)
    sha256: str | None = None
    batch_size: int = 64
    seed: int = 0
    threads: int = 2

    @classmethod
    def from_frame(
        cls,
        frame: "ArrowStream",
        *,
        label: str,
        positive: str | None = None,
        weight: str | None = None,
        time: str | None = None,
        leave_out: tuple[str, ...] = (),
    ) -> "TableData":
        """A table in memory: of pandas, polars, DuckDB or pyarrow, whatever has `__arrow_c_stream__`.

        The frame is kept for as long as the process lives, and known by the digest of its content, which is the `path`
        of the config and so part of what a run records. To resume or to score such a run, make the frame again: a
        recipe in a file of yours does so wherever it is named.

        Args:
          frame: The table.
          label, positive, weight, time, leave_out: As the attributes.

        Raises:
          UserError: the frame cannot be taken as columns of one type each.
        """
        from scalejax.data.tables import frames

        path = frames.hold(frame)
        return cls(path=path, label=label, positive=positive, weight=weight, time=time, leave_out=leave_out)

    def schema(self) -> Schema:
        """What batches hold; reads the table, whose training split says how many ids there are."""
        return self.build().schema

    def build(self) -> BatchedDataSet:
        """Reads the table.

        Raises:
          UserError: the table, or a column of it, is not what it must be.
        """
        return self.open().build()

    def open(self) -> "OpenTable":
        """The table with what is found of its columns.

        Raises:
          UserError: as `build`.
        """
        from scalejax.data.tables import frames

        if self.sha256 is not None and (found := frames.digest_of(self.path)) != self.sha256:
            raise UserError(
                f"{self.path}: is not the file it was (SHA-256 {found[:12]}, recorded {self.sha256[:12]}). Put the one "
                "back with which the run was made, or begin a new run."
            )
        return OpenTable(self, frames.read(self.path))


class OpenTable:
    """A table that was read, and what its columns are.

    Attributes:
      findings: Of each column that is a feature or is left out, in the order of the table.
      positive: The value of the label that is to be predicted, and
      negative: The other.
      splits: Rows of each split.
    """

    def __init__(self, data: TableData, frame: "pl.DataFrame") -> None:
        self.data, self._frame = data, frame
        where = data.path
        for name in (data.label, data.weight, data.time, *data.leave_out, *(column.name for column in data.columns)):
            if name is not None and name not in frame.columns:
                raise missing_column(name, frame.columns, where)
        if data.label in (data.weight, data.time):
            raise UserError(
                f"{where}: the label {data.label!r} cannot be the weight or the time too. Name another column."
            )
        if frame.height < FEWEST_ROWS:
            raise UserError(
                f"{where}: has {frame.height} rows; at least {FEWEST_ROWS} are wanted, since "
                f"{100 * data.split.validation:g} % of them have to say when to stop. A regression of few parameters "
                "(scikit-learn's LogisticRegression) is the better model for so few."
            )
        self._labels = self._read_label()
        self._weights = self._read_weights()
        self.splits = self._split()
        shares = "Choose other shares: --set data.split.train=... --set data.split.validation=..."
        for split, rows in self.splits.items():
            if not rows.size:
                tied = "" if data.time is None else f" (rows of one {data.time!r} stay together)"
                raise UserError(f"{where}: the {split} split has no rows{tied}. {shares}")
            counted = rows if self._weights is None else rows[self._weights[rows] > 0]
            held = np.unique(self._labels[counted])
            if held.size < 2:
                only = f"only {(self.negative, self.positive)[int(held[0])]!r}" if held.size else "of weight 0"
                raise UserError(
                    f"{where}: label {data.label!r} is {only} in the {rows.size} rows of the {split} split; both "
                    f"values are wanted there, with weights above 0. {shares}"
                )
        self.findings = self._find()

    @property
    def columns(self) -> tuple[TableColumn, ...]:
        """Those that the model sees."""
        return tuple(found.column for found in self.findings if found.column is not None)

    def _read_label(self) -> np.ndarray:
        column, data = self._frame[self.data.label], self.data
        where = f"{data.path}: label {data.label!r}"
        if column.dtype.is_nested() or str(column.dtype) == "Binary":
            raise UserError(f"{where} holds {column.dtype}; wanted numbers, text, or true and false.")
        if missing := column.null_count():
            row = int(column.is_null().to_numpy().argmax())
            raise UserError(f"{where} is missing in {missing} rows, first in row {row}. Take those rows out.")
        values = [_shown(value) for value in column.unique().sort()]
        if len(values) != 2:
            more = ", ..." if len(values) > _SHOWN else ""
            raise UserError(
                f"{where} has {len(values):,} different values ({', '.join(values[:_SHOWN])}{more}); wanted two. "
                "Choose another column, or make a yes-or-no question of it, for example income > 30000."
            )
        wanted = values[1] if data.positive is None else data.positive
        if wanted not in values:
            raise UserError(f"{where} has the values {values[0]!r} and {values[1]!r}; got positive={wanted!r}.")
        self.positive, self.negative = wanted, values[1 - values.index(wanted)]
        greater = column == column.unique().sort()[1]
        return (greater.to_numpy() == (wanted == values[1])).astype(np.float32)

    def _read_weights(self) -> np.ndarray | None:
        if self.data.weight is None:
            return None
        column, where = self._frame[self.data.weight], self.data.path
        if not column.dtype.is_numeric():
            raise UserError(f"{where}: weight {self.data.weight!r} holds {column.dtype}; wanted numbers.")
        return check_weights(_numbers(column), self.data.weight, where)

    def _split(self) -> dict[str, np.ndarray]:
        data = self.data
        if data.time is None:
            return data.split.assign(self._frame.height)
        column = self._frame[data.time]
        if not (column.dtype.is_temporal() or column.dtype.is_numeric()):
            raise UserError(
                f"{data.path}: time {data.time!r} holds {column.dtype}; wanted numbers, or dates like 2024-12-31."
            )
        if column.null_count():
            row = int(column.is_null().to_numpy().argmax())
            raise UserError(f"{data.path}: time {data.time!r} is missing in row {row}; wanted one in every row.")
        time = column.to_physical().to_numpy()
        bounds = data.split.bounds(time.size)
        ordered = np.sort(time)
        first = {split: ordered[min(bounds[split][0], time.size - 1)] for split in SPLITS}
        by_time = ByTime(column=data.time, validation_from=first["validation"], test_from=first["test"])
        return by_time.assign(time)

    def _find(self) -> tuple[Finding, ...]:
        data, where = self.data, self.data.path
        roles = {data.label, data.weight}
        if data.time is not None and self._frame[data.time].dtype.is_numeric():
            roles.add(data.time)
        others = self._frame.select(name for name in self._frame.columns if name not in roles)
        if data.columns:
            if both := sorted({column.name for column in data.columns} & set(data.leave_out)):
                raise UserError(f"{where}: {both[0]!r} is in data.columns and in data.leave_out. Take it out of one.")
            named = {column.name: column for column in data.columns}
            if clash := sorted(roles & named.keys() - {None}, key=str):
                raise UserError(f"{where}: column {clash[0]!r} cannot be a feature too; take it out of data.columns.")
            for column in data.columns:
                check_kind(column, others[column.name].dtype, where)
            return tuple(
                Finding(name=name, column=named.get(name), reason="named" if name in named else "left out: not named")
                for name in others.columns
            )
        found = tuple(
            Finding(name=one.name, column=None, reason="left out: as asked") if one.name in data.leave_out else one
            for one in infer(others, data.bins)
        )
        if all(one.column is None for one in found):
            why = "; ".join(f"{one.name}: {one.reason}" for one in found[:_SHOWN]) or "there is none beside the label"
            raise UserError(f"{where}: no column is left to predict {data.label!r} from ({why}). Add columns.")
        return found

    def build(self) -> BatchedDataSet:
        """The data set."""
        from scalejax.data.tables import frames

        data, frame = self.data, self._frame
        encoder = _Encoder(self.splits["train"], data.bins, data.coding, data.path)
        for column in self.columns:
            encoder.add(column, frame[column.name])
        label, weight = encoder.fresh(data.label), None
        encoder.columns[label] = self._labels
        if data.weight is not None and self._weights is not None:
            weight = encoder.fresh(data.weight)
            encoder.columns[weight] = self._weights
        built = from_columns(
            encoder.columns,
            Schema(categorical=tuple(encoder.categorical), dense=tuple(encoder.dense), labels=(label,), weight=weight),
            batch_size=data.batch_size,
            split=self.splits,
            seed=data.seed,
            threads=data.threads,
            where=data.path,
            counted=encoder.counted,
        )
        built.remarks = frames.remarks(data.path)
        return built


class _Encoder:
    """Columns of a table as columns of ids and numbers, by statistics of the training rows."""

    def __init__(self, train: np.ndarray, bins: int, coding: Counted, where: str) -> None:
        self._train, self._bins, self._coding, self._where = train, bins, coding, where
        self.columns: dict[str, np.ndarray | Ragged] = {}
        self.categorical: list[Categorical] = []
        self.dense: list[str] = []
        self.counted: list[str] = []

    def add(self, column: TableColumn, series: "pl.Series") -> None:
        """Encodes one column of the table."""
        getattr(self, f"_add_{column.kind}")(column.name, series)

    def fresh(self, name: str) -> str:
        """A name for a feature, in letters, digits and _ alone, as it becomes part of paths in checkpoints."""
        plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        numbered = (f"{plain}_{i}" for i in itertools.count(2))
        return next(n for n in itertools.chain([plain], numbered) if n not in self.columns)

    def _put(self, name: str, ids: np.ndarray | Ragged, rows: int, **lists: int | None) -> None:
        name = self.fresh(name)
        self.columns[name] = ids
        self.categorical.append(Categorical(name=name, rows=rows, **lists))

    def _add_number(self, name: str, series: "pl.Series") -> None:
        present = series.is_not_null().to_numpy()
        train = np.cumsum(present)[self._train[present[self._train]]] - 1  # among the values that are there
        bins, rows = value_bins(series.drop_nulls().to_numpy(), train, self._bins)
        ids = np.full(len(series), rows - 1, np.int32)
        ids[present] = bins
        dense = self.fresh(name)
        self.columns[dense] = _numbers(series)
        self.dense.append(dense)
        self._put(f"{name}_bin", ids, rows)
        self.counted.append(name)

    def _add_text(self, name: str, series: "pl.Series") -> None:
        ids, rows = self._coded(series, self._train)
        self._put(name, ids, rows)
        self.counted.append(name)

    def _add_date(self, name: str, series: "pl.Series") -> None:
        import polars as pl

        parts = {"day": (series.dt.day(), 1, 31), "weekday": (series.dt.weekday(), 1, 7)}
        parts["month"] = (series.dt.month(), 1, 12)
        if series.dtype == pl.Datetime and (series.drop_nulls().dt.time() != datetime.time()).any():
            parts["hour"] = (series.dt.hour(), 0, 24)
        for part, (values, first, count) in parts.items():
            ids = (values.cast(pl.Int32) - first).fill_null(count)
            self._put(f"{name}_{part}", ids.to_numpy(), count + 1)

    def _add_list(self, name: str, series: "pl.Series") -> None:
        lengths = series.list.len().fill_null(0)
        offsets = lengths_to_offsets(lengths.to_numpy().astype(np.int64))
        values, weights = series.filter(lengths > 0).explode(), None
        if is_pair(values.dtype):
            values, weight = values.struct.unnest().get_columns()
            with np.errstate(over="ignore"):
                weights = _numbers(weight).astype(np.float32)
            if not np.isfinite(weights).all():
                raise UserError(
                    f"{self._where}: a weight in the lists of {name!r} is missing, or not finite in float32."
                )
        inside = np.repeat(np.isin(np.arange(len(series)), self._train), np.diff(offsets))
        ids, rows = self._coded(values, np.flatnonzero(inside))
        most = max(int(lengths.max() or 0), 1)  # pyright: ignore[reportArgumentType]
        self._put(name, Ragged(offsets, ids, weights), rows, length=None, max_length=most)
        self.counted.append(name)

    def _coded(self, series: "pl.Series", train: np.ndarray) -> tuple[np.ndarray, int]:
        """int32[N] ids and their number; values are counted at the places `train`."""
        import polars as pl

        texts = series.cast(pl.String)
        present = texts.is_not_null().to_numpy()
        # A text's number in alphabetical order stands for it: which one is nowhere kept.
        order = pl.Enum(texts.drop_nulls().unique().sort())
        values = texts.cast(order).to_physical().fill_null(0).to_numpy().astype(np.int64)
        coder = Coder.fit(self._coding, ("value",), [{"value": (values[train], present[train])}])
        return coder({"value": (values, present)})["value"], coder.rows["value"]


def _numbers(series: "pl.Series") -> np.ndarray:
    """float64[N], NaN where missing."""
    import polars as pl

    return series.cast(pl.Float64).fill_null(float("nan")).to_numpy()


def _shown(value: object) -> str:
    """A value of a label as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
