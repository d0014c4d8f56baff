"""Data sets whose examples are arrays in memory."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from scalejax.data.examples.dataset import BatchedDataSet, TableExamples, day_ranges
from scalejax.data.examples.encode import (
    Columns,
    NanPolicy,
    Scaling,
    SharedLists,
    check_schema,
    encode,
    fit_dense_transform,
    missing_column,
)
from scalejax.data.examples.records import ExampleRecords, Ragged, RecordLayout
from scalejax.data.examples.runs import SessionRuns, check_divides, check_whole
from scalejax.data.examples.schema import Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, ByPosition, ByTime, Fractions, Split
from scalejax.errors import UserError

Order = Literal["shuffled", "time"]


def from_columns(
    columns: Columns,
    schema: Schema,
    *,
    batch_size: int,
    split: Split | Mapping[str, np.ndarray] = EIGHTY_TEN_TEN,
    order: Order = "shuffled",
    seed: int = 0,
    time: str | None = None,
    session: str | None = None,
    day_name: Callable[[int], str] = str,
    log_shift: Mapping[str, float] | None = None,
    nan: NanPolicy = "mean",
    scaling: Scaling = "standard",
    threads: int = 2,
    where: str = "columns",
    shared: SharedLists | None = None,
    fitted: np.ndarray | None = None,
    counted: Sequence[str] = (),
) -> BatchedDataSet:
    """Packs columns into records and shuffles them fully.

    Args:
      columns: Name -> int[N] or int[N, L] ids, `Ragged` lists of ids, number[N] numbers, number[N] labels in {0, 1}.
      schema: Which columns play which part.
      batch_size: Global batch size.
      split: How examples are divided, or the rows of each split.
      order: "shuffled" = another seeded permutation every epoch; "time" = by the column `time`, or in the order of
        the rows if there is none.
      seed: Of the order.
      time: Integer column with the day of each example; days() and `order="time"` use it.
      session: Integer column whose runs of equal values stay together and in one split (`runs.py`), or None.
      day_name: Day -> its name in days().
      log_shift: Number column -> shift; log(x + shift) is taken of it.
      nan: "mean" = a missing number becomes the mean of the training split; "zero" = 0, before the
        logarithm; "error" = it is refused.
      scaling: "standard" = numbers get mean 0 and variance 1 on the training split; "none" = they stay.
      threads: Reading threads.
      where: Where the columns come from, for messages.
      shared: Lists of groups of features with each row of lists once, in place of their columns; batches are then
        `DedupBatch`es.
      fitted: Rows on which numbers are standardised; None = those of the training split.
      counted: Features whose ids are ranks in these very data.
    Raises:
      UserError: a column is missing or holds what it must not.
    """
    check_schema(schema)
    layout = RecordLayout(schema, tuple(shared or ()))
    used = layout.columns
    others = [split.column] if isinstance(split, ByTime) else []
    for name in [*used, *others, *(name for name in (time, session) if name)]:
        if name not in columns:
            raise missing_column(name, columns, where)
    sizes = {name: len(columns[name]) for name in used}
    sizes |= {", ".join(group): len(lists) for group, lists in (shared or {}).items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"{where}: columns must be equally long; got {sizes}.")
    examples = sizes[schema.labels[0]]
    if examples == 0:
        raise UserError(f"{where}: there are no rows. Point the data at a file that has some.")
    runs = None if session is None else SessionRuns.of(array_of(columns, session), session, where)
    if runs is not None:
        check_whole([runs], session or "", [where])
        check_divides(split)
    if isinstance(split, Fractions | ByPosition):
        # A session in two splits would show the test split to training.
        units = split.assign(examples if runs is None else runs.lengths.size)
        splits = units if runs is None else {name: runs.rows(chosen) for name, chosen in units.items()}
    elif isinstance(split, ByTime):
        splits = split.assign(array_of(columns, split.column))
    else:
        splits = dict(split)
    days = ()
    if order == "time" and time is not None:
        period = array_of(columns, time)
        splits["train"] = splits["train"][np.argsort(period[splits["train"]], kind="stable")]
        days = day_ranges(period[splits["train"]].astype(np.int64), day_name)
    chunk = [(columns, splits["train"] if fitted is None else fitted, where)]
    transform = fit_dense_transform(chunk, schema.dense, log_shift=log_shift or {}, nan=nan, scaling=scaling)
    rows = encode(columns, layout, transform, where=where, shared=shared)
    examples_ = TableExamples(
        rows,
        layout,
        splits,
        seed=None if order == "time" else seed,
        fingerprint=_fingerprint(schema, rows, splits, order, seed, runs),
        days=days,
        runs=None if runs is None else runs.lengths_among(splits["train"]),
    )
    return BatchedDataSet(examples_, batch_size=batch_size, threads=threads, counted=counted)


def array_of(columns: Columns, name: str) -> np.ndarray:
    """A column that must hold one value per row."""
    column = columns[name]
    if isinstance(column, Ragged):
        raise UserError(f"column {name!r} holds lists; wanted one value per row.")
    return column


def _fingerprint(
    schema: Schema,
    rows: ExampleRecords,
    splits: dict[str, np.ndarray],
    order: Order,
    seed: int,
    runs: SessionRuns | None,
) -> str:
    digest = hashlib.sha256(repr((schema, order, seed)).encode())
    arrays = [rows.records, *(a for r in rows.jagged for a in (r.offsets, r.values)), *splits.values()]
    arrays += [r.weights for r in rows.jagged if r.weights is not None]
    for group in rows.shared:
        arrays += [group.index, *(a for lists in group.lists for a in (lists.offsets, lists.values))]
    for array in arrays if runs is None else [*arrays, runs.lengths]:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
