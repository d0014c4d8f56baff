"""The data set that training sees: batches cut from a source of examples, by global example number."""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from scalejax.data.examples.dedup import AnyBatch
from scalejax.data.examples.records import ExampleRecords, RecordLayout, Table
from scalejax.data.examples.runs import RunOrder
from scalejax.data.examples.schema import Schema
from scalejax.data.permutation import Permutation
from scalejax.data.reading import GlobalBatches, Streamed
from scalejax.data.splits import rows_of
from scalejax.errors import UserError

Day = tuple[str, int, int]

# The order is computed in blocks, so that small batches do not pay the overhead of many short NumPy calls.
_ORDER_BLOCK = 32_768
_KEPT_ORDER_BLOCKS = 4


class Examples(Streamed[ExampleRecords], Protocol):
    """Examples that know their layout and their days."""

    layout: RecordLayout

    def days(self) -> tuple[Day, ...]:
        """(name, start, stop) of each period in the first epoch of the stream."""
        ...


class TableExamples:
    """Examples of a table with random access: in memory, or mapped from disk.

    Args:
      table: All examples.
      layout: Of their schema.
      splits: Split -> rows, in file order.
      seed: Of the order of training; None = file order, the same in every epoch.
      days: Days of the training rows, or ().
      fingerprint: Hex digest.
      runs: int64[M] lengths of the runs of training rows that stay together (`runs.py`); None = rows are shuffled one
        by one.
    """

    def __init__(
        self,
        table: Table,
        layout: RecordLayout,
        splits: dict[str, np.ndarray],
        *,
        seed: int | None,
        fingerprint: str,
        days: tuple[Day, ...] = (),
        runs: np.ndarray | None = None,
    ) -> None:
        self.layout = layout
        self._table, self._splits, self._seed, self._days = table, splits, seed, days
        self._fingerprint, self._runs = fingerprint, runs
        # The order of an epoch holds its permuted runs: kept for the epoch at hand and the one that begins.
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def num_examples(self, split: str) -> int:
        return rows_of(self._splits, split).size

    def stream(self, start: int, stop: int) -> ExampleRecords:
        train = self._splits["train"]
        if self._seed is None:
            return self._table.take(train[np.arange(start, stop) % train.size])
        rows = []
        while start < stop:
            epoch, position = divmod(start, train.size)
            block, offset = divmod(position, _ORDER_BLOCK)
            rows.append(self._order(epoch, block)[offset : offset + stop - start])
            start += rows[-1].size
        return self._table.take(rows[0] if len(rows) == 1 else np.concatenate(rows))

    def held(self, split: str, start: int, stop: int) -> ExampleRecords:
        return self._table.take(rows_of(self._splits, split)[start:stop])

    def days(self) -> tuple[Day, ...]:
        return self._days

    def fingerprint(self) -> str:
        return self._fingerprint

    def _order(self, epoch: int, block: int) -> np.ndarray:
        """Rows at positions [block * _ORDER_BLOCK, (block + 1) * _ORDER_BLOCK) of an epoch."""
        # Reading threads may both miss; they then compute equal arrays.
        found = self._orders.get((epoch, block))
        if found is None:
            assert self._seed is not None
            train = self._splits["train"]
            start = block * _ORDER_BLOCK
            positions = np.arange(start, min(start + _ORDER_BLOCK, train.size))
            found = train[self._epoch_order(epoch)(positions)]
            self._orders = dict([*self._orders.items(), ((epoch, block), found)][-_KEPT_ORDER_BLOCKS:])
        return found

    def _make_epoch_order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        assert self._seed is not None
        if self._runs is not None:
            return RunOrder(self._runs, self._seed, epoch)
        return Permutation(self._splits["train"].size, self._seed, epoch)


def day_ranges(period: np.ndarray, name: Callable[[int], str]) -> tuple[Day, ...]:
    """int[N] non-decreasing period of each training example -> (name, start, stop) of each period that occurs."""
    starts = np.flatnonzero(np.diff(period, prepend=period[:1] - 1))
    stops = np.append(starts[1:], period.size)
    return tuple((name(int(period[a])), int(a), int(b)) for a, b in zip(starts, stops, strict=True))


class BatchedDataSet(GlobalBatches[ExampleRecords, AnyBatch]):
    """Batches of examples; implements the `DataSet` protocol of `train.protocols`.

    They are `DedupBatch`es where the layout of the examples has groups, else `Batch`es.

    Args:
      examples: Where they come from.
      batch_size: Global batch size.
      threads: Reading threads.
      counted: Features whose ids are ranks in these very data.
    """

    examples: Examples

    def __init__(self, examples: Examples, *, batch_size: int, threads: int = 2, counted: Sequence[str] = ()) -> None:
        super().__init__(examples, batch_size=batch_size, threads=threads)
        self.remarks: tuple[str, ...] = ()  # what a user should know of the files; a run prints it when it begins
        self.counted = tuple(counted)
        self.schema: Schema = examples.layout.schema

    def days(self) -> tuple[Day, ...]:
        """(name, start, stop) of each day of the training split, as positions of the training stream.

        Raises:
          UserError: the stream is not in time order, or the source has no days.
        """
        days = self.examples.days()
        if not days:
            raise UserError(
                'this data set has no days: progressive validation needs data.order="time" and a source that knows '
                "the time of its examples."
            )
        return days

    def filled(self, read: Callable[[int, int], ExampleRecords], start: int, stop: int, size: int) -> AnyBatch:
        rows = read(start, stop) if start < stop else read(stop - 1, stop).take(np.zeros(0, np.int64))
        return self.examples.layout.batch(rows, size)
