"""A user's own Parquet files as a data set."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from scalejax.data.examples.dataset import BatchedDataSet, Day, day_ranges
from scalejax.data.examples.dedup import Groups, check_groups, check_names
from scalejax.data.examples.encode import DenseTransform, NanPolicy, Scaling, check_schema, fit_dense_transform
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.examples.memory import Order, array_of, from_columns
from scalejax.data.examples.records import Ragged, RecordLayout, Shared
from scalejax.data.examples.row_transforms import FirstIds, HashIds, map_columns
from scalejax.data.examples.runs import SessionRuns, check_divides, check_whole
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, SPLITS, ByPosition, ByTime, Fractions, Split
from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.data.tables.parquet_files import ParquetFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetReading:
    """How Parquet files are read, whatever is in them; the attributes are those of `ParquetData`."""

    path: str
    access: Literal["memory", "windows"] = "memory"
    window: int = 4
    order: Order = "shuffled"
    batch_size: int = 1024
    seed: int = 0
    threads: int = 2

    def read(
        self,
        schema: Schema,
        *,
        split: Split,
        time: str | None = None,
        log_shift: tuple[tuple[str, float], ...] = (),
        scaling: Scaling = "standard",
        nan: NanPolicy = "mean",
    ) -> BatchedDataSet:
        """The data set of files that hold the columns of a schema; arguments and errors as of `ParquetData`."""
        return ParquetData(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(ParquetReading)},
            categorical=schema.categorical,
            dense=schema.dense,
            labels=schema.labels,
            split=split,
            time=time,
            log_shift=log_shift,
            scaling=scaling,
            nan=nan,
        ).build()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetData(ParquetReading):
    """Examples in Parquet: one row each, integer columns (or lists of integers) as ids, numbers, labels in {0, 1}.

    Only the columns named here are read.

    Attributes:
      path: A file, or a folder whose `*.parquet` are read in the order of their names.
      categorical: Features. A column of lists needs `length=None` and a `capacity` (multi-hot) or `max_length`
        (sequences), or its fixed `length`.
      dense: Number columns.
      labels: Label columns, one per task.
      group: Categorical feature with one id per example whose values form the groups of grouped AUC, or None.
      split: `Fractions`, `ByTime` or `ByPosition`. In windows, random fractions hold inside every row group.
      access: "memory" = read everything once, shuffle fully. "windows" = keep a few windows of row groups, shuffle
        row groups and rows inside a window (`windows.py` has the definition). For a full shuffle of a file larger
        than memory: `arrow.convert`, then `ArrowData`.
      window: Row groups per window. Memory is about 4 windows of 4 bytes per column and row.
      order: "shuffled", or "time" = by `time` (files read in windows must already be sorted by it).
      time: Integer column with the day of each example, for `order="time"`, or None.
      session: Integer column whose rows of equal value lie together, as `clustering.cluster_by_session` leaves them, or
        None. Sessions are then shuffled and not rows, a batch holds whole sessions but for the one that its end cuts
        (`runs.py`), and `Fractions` divides sessions.
      dedup: Groups of list columns whose lists are kept once per row of lists: batches are `DedupBatch`es, which
        `Tables.dedup` with the same groups looks up as they are. Lists that `cluster_by_session(groups=...)` left
        out are neither read nor expanded, and those that it wrote stay rows of their own, also where two are equal;
        other files are deduplicated row group by row group. The examples and their order are those of plain batches.
      transforms: (feature, transform) pairs, applied to ids as they are read: once per row of lists in `dedup`.
      log_shift: (column, shift) pairs: log(x + shift) is taken of a number column.
      scaling: "standard" = numbers get mean 0 and variance 1 on the training split (one pass over the number columns
        when the data set is built); "none" = they stay.
      nan: "mean" = a missing number becomes the mean of the training split; "zero" = 0, before the
        logarithm; "error" = it is refused.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    categorical: tuple[Categorical, ...]
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    group: str | None = None
    split: Split = EIGHTY_TEN_TEN
    time: str | None = None
    session: str | None = None
    dedup: Groups = ()
    transforms: tuple[tuple[str, HashIds | FirstIds], ...] = ()
    log_shift: tuple[tuple[str, float], ...] = ()
    scaling: Scaling = "standard"
    nan: NanPolicy = "mean"

    def schema(self) -> Schema:
        """What batches hold; does no I/O."""
        return Schema(categorical=self.categorical, dense=self.dense, labels=self.labels, group=self.group)

    def build(self) -> BatchedDataSet:
        """Opens the files.

        Raises:
          UserError: a file or a column is missing or wrong.
        """
        return build(self)


def build(data: ParquetData) -> BatchedDataSet:
    """The data set of a `ParquetData`."""
    from scalejax.data.tables.parquet_files import ParquetFiles

    files = ParquetFiles(data.path)
    built = _build(data, files)
    built.remarks = files.remarks()
    return built


def _build(data: ParquetData, files: "ParquetFiles") -> BatchedDataSet:

    schema = data.schema()
    check_schema(schema)
    by_time = (data.split.column,) if isinstance(data.split, ByTime) else ()
    others = tuple(dict.fromkeys([*by_time, *((data.time,) if data.time else ())]))
    files.check(schema, (*others, *((data.session,) if data.session else ())))
    layout = RecordLayout(schema, check_groups(data.dedup, schema.keys))
    files.check_lists(name for group in layout.groups for name in group)
    check_names([name for name, _ in data.transforms], schema.keys)
    if data.access == "windows":
        return _build_windows(data, layout, files, others)
    names = list(dict.fromkeys([*layout.columns, *others, *((data.session,) if data.session else ())]))
    read = (files.read_shared(group, names, layout.groups) for group in files.groups)
    parts = [map_columns(columns, shared, data.transforms) for columns, shared in read]
    columns = {name: _concatenate([part[name] for part, _ in parts]) for name in names}
    return from_columns(
        columns,
        schema,
        batch_size=data.batch_size,
        split=data.split,
        order=data.order,
        seed=data.seed,
        time=data.time,
        session=data.session,
        log_shift=dict(data.log_shift),
        nan=data.nan,
        scaling=data.scaling,
        threads=data.threads,
        where=data.path,
        shared={group: Shared.concatenate([part[group] for _, part in parts]) for group in layout.groups},
    )


def _concatenate(parts: list[np.ndarray | Ragged]) -> np.ndarray | Ragged:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return Ragged.concatenate(ragged)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


def _build_windows(
    data: ParquetData, layout: RecordLayout, files: "ParquetFiles", others: tuple[str, ...]
) -> BatchedDataSet:
    from scalejax.data.tables.windows import WindowExamples

    schema = layout.schema
    if data.window < 1:
        raise UserError(f"data.window must be at least 1 row group; got {data.window}.")
    # One pass over the columns that place an example in time.
    placed = {name: [array_of(files.read(group, [name]), name) for group in files.groups] for name in others}
    runs = None if data.session is None else _sessions(files, data.session)
    split_rows, sizes = _split_by_group(data, files, placed, runs)
    days: tuple[Day, ...] = ()
    if data.order == "time" and data.time is not None:
        period = np.concatenate([time[split_rows("train", g)] for g, time in enumerate(placed[data.time])])
        if (np.diff(period) < 0).any():
            raise UserError(
                f'{data.path}: rows are not sorted by {data.time!r}, which order="time" needs when a file is read in '
                'windows. Sort the file, or use access="memory".'
            )
        days = day_ranges(period.astype(np.int64), str)
    transform = DenseTransform(log_shift=dict(data.log_shift), nan=data.nan)
    if schema.dense and (data.scaling == "standard" or data.nan == "mean"):
        chunks = (
            (files.read(group, schema.dense), split_rows("train", g), group.where)
            for g, group in enumerate(files.groups)
        )
        transform = fit_dense_transform(
            chunks, schema.dense, log_shift=dict(data.log_shift), nan=data.nan, scaling=data.scaling
        )
    key = (schema, data.split, data.window, data.order, data.time, data.seed, data.log_shift, data.scaling, data.nan)
    if data.session is not None:
        key = (*key, data.session)
    if data.transforms:
        key = (*key, data.transforms)
    examples = WindowExamples(
        files,
        layout,
        transform,
        split_rows,
        sizes,
        window=data.window,
        seed=None if data.order == "time" else data.seed,
        fingerprint=hashlib.sha256((repr(key) + files.fingerprint()).encode()).hexdigest(),
        days=days,
        runs=None if runs is None else lambda g: runs[g].lengths_among(split_rows("train", g)),
        transforms=data.transforms,
    )
    return BatchedDataSet(examples, batch_size=data.batch_size, threads=data.threads)


def _sessions(files: "ParquetFiles", name: str) -> list[SessionRuns]:
    """The sessions of each row group, in one pass over their column."""
    runs = [SessionRuns.of(array_of(files.read(group, [name]), name), name, group.where) for group in files.groups]
    check_whole(runs, name, [group.where for group in files.groups])
    return runs


def _split_by_group(
    data: ParquetData, files: "ParquetFiles", placed: dict[str, list[np.ndarray]], runs: list[SessionRuns] | None
) -> tuple[Callable[[str, int], np.ndarray], dict[str, np.ndarray]]:
    """(split, row group) -> rows, and the number of rows per split and row group."""
    split = data.split
    if isinstance(split, ByTime):
        by_group = [split.assign(time) for time in placed[split.column]]
        sizes = {name: np.array([rows[name].size for rows in by_group], np.int64) for name in SPLITS}
        return lambda name, group: by_group[group][name], sizes
    if runs is not None:
        check_divides(split)
        # A session in two splits would show the test split to training, so sessions are divided.
        chosen, _ = _fractions_by_group(split, np.array([part.lengths.size for part in runs], np.int64))
        sizes = {
            name: np.array([part.lengths[chosen(name, g)].sum() for g, part in enumerate(runs)], np.int64)
            for name in SPLITS
        }
        return lambda name, group: runs[group].rows(chosen(name, group)), sizes
    return _fractions_by_group(split, np.array([group.rows for group in files.groups], np.int64))


def _fractions_by_group(
    split: Fractions | ByPosition, rows: np.ndarray
) -> tuple[Callable[[str, int], np.ndarray], dict[str, np.ndarray]]:
    """The same for fractions of row groups of `rows` rows (or of so many sessions)."""
    if isinstance(split, ByPosition) or split.by == "position":
        # Numbers of rows only, never the rows: a log has billions.
        starts = lengths_to_offsets(rows)
        bounds = split.bounds(int(starts[-1]))
        edges = {name: np.clip(starts, *bounds[name]) for name in SPLITS}
        sizes = {name: np.diff(edge) for name, edge in edges.items()}

        def positions(name: str, group: int) -> np.ndarray:
            return np.arange(*edges[name][group : group + 2]) - starts[group]

        return positions, sizes
    counts = [split.group_sizes(int(n)) for n in rows]
    sizes = {name: np.array([count[name] for count in counts], np.int64) for name in SPLITS}
    return lambda name, group: split.assign_group(group, int(rows[group]), name), sizes
