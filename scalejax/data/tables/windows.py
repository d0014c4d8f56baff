"""Streaming Parquet files that do not fit in memory, with an exactly defined partial shuffle.

A streamed file cannot be shuffled as a whole. What is done instead, in epoch e with seed s:

1. The row groups are permuted by `Permutation(groups, s, e)`.
2. Every `window` consecutive row groups of that order form a window w; their training rows are put one after another.
3. Inside a window of m rows, `Permutation(m, s, e, w + 1)` gives the order. Where sessions stay together
   (`runs.py`), a window of k sessions is ordered by `Permutation(k, s, e, w + 1)`, the rows of a session in file order.

Position i of an epoch therefore maps to one row, computable without reading anything before it: a window is decoded
when a batch first touches it, the next one is decoded ahead, and a few are kept. With order "time" both permutations
are the identity. For a full permutation convert the file (`arrow.convert`).
"""

import collections
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from scalejax.data.examples.dataset import Day
from scalejax.data.examples.encode import DenseTransform, encode
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.examples.records import ExampleRecords, RecordLayout
from scalejax.data.examples.row_transforms import RowTransform, map_columns
from scalejax.data.examples.runs import RunOrder
from scalejax.data.permutation import Permutation
from scalejax.data.splits import SPLITS
from scalejax.data.tables.parquet_files import ParquetFiles, RowGroup
from scalejax.errors import UserError

# Batches in flight straddle two windows, a third is decoded ahead.
_KEPT_WINDOWS = 3


def decode(
    files: ParquetFiles,
    group: RowGroup,
    layout: RecordLayout,
    transform: DenseTransform,
    transforms: Sequence[tuple[str, RowTransform]] = (),
) -> ExampleRecords:
    """The examples of a row group; the lists of the layout's groups are decoded and transformed once per row of lists.

    Raises:
      UserError: the row group is damaged, or holds a bad id, label or number.
    """
    columns, shared = files.read_shared(group, layout.columns, layout.groups)
    columns, shared = map_columns(columns, shared, transforms)
    return encode(columns, layout, transform, where=group.where, shared=shared)


class WindowExamples:
    """Examples of Parquet files, decoded window by window (see the module).

    Args:
      files: Checked against the schema.
      layout: Of the schema.
      transform: Of the number columns.
      split_rows: (split, row group number) -> int64 rows of the split inside that row group, ascending.
      split_sizes: Split -> int64[groups] examples in each row group.
      window: Row groups per window.
      seed: Of the order of training; None = file order.
      fingerprint: Hex digest.
      days: Days of the training rows, or ().
      runs: Row group number -> int64[M] lengths of the runs of its training rows that stay together, or None.
      transforms: (feature, transform) pairs, run where row groups are decoded.
    """

    def __init__(
        self,
        files: ParquetFiles,
        layout: RecordLayout,
        transform: DenseTransform,
        split_rows: Callable[[str, int], np.ndarray],
        split_sizes: dict[str, np.ndarray],
        *,
        window: int,
        seed: int | None,
        fingerprint: str,
        days: tuple[Day, ...] = (),
        runs: Callable[[int], np.ndarray] | None = None,
        transforms: Sequence[tuple[str, RowTransform]] = (),
    ) -> None:
        self.layout = layout
        self._transforms = transforms
        self._files, self._transform = files, transform
        self._split_rows, self._sizes = split_rows, split_sizes
        self._window, self._seed = window, seed
        self._fingerprint, self._days, self._runs = fingerprint, days, runs
        # Kept while batches of a window are cut; the following window may be begun by another thread.
        self._order = functools.lru_cache(maxsize=_KEPT_WINDOWS)(self._make_order)
        self._decoded: collections.OrderedDict[Hashable, Future[ExampleRecords]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._decoders = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scalejax-decode")

    def num_examples(self, split: str) -> int:
        if split not in self._sizes:
            raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}.")
        return int(self._sizes[split].sum())

    def days(self) -> tuple[Day, ...]:
        return self._days

    def fingerprint(self) -> str:
        return self._fingerprint

    def stream(self, start: int, stop: int) -> ExampleRecords:
        size = self.num_examples("train")
        parts = []
        while start < stop:
            epoch, position = divmod(start, size)
            groups, bounds = self._plan(epoch)
            w = int(np.searchsorted(bounds, position, side="right")) - 1
            count = min(stop - start, int(bounds[w + 1]) - position)
            positions = np.arange(position, position + count) - bounds[w]
            if self._seed is not None:
                positions = self._order(epoch, w, groups[w])(positions)
            parts.append(self._decode("train", groups[w]).take(positions))
            following = groups[w + 1] if w + 1 < len(groups) else self._plan(epoch + 1)[0][0]
            self._request("train", following)
            start += count
        return ExampleRecords.concatenate(parts) if parts else self._nothing()

    def held(self, split: str, start: int, stop: int) -> ExampleRecords:
        stop = min(stop, self.num_examples(split))
        bounds = lengths_to_offsets(self._sizes[split])
        parts = []
        while start < stop:
            g = int(np.searchsorted(bounds, start, side="right")) - 1
            end = min(stop, int(bounds[g + 1]))
            parts.append(self._decode(split, (g,)).take(np.arange(start, end) - bounds[g]))
            if g + 1 < len(self._files.groups):
                self._request(split, (g + 1,))
            start = end
        return ExampleRecords.concatenate(parts) if parts else self._nothing()

    def _make_order(self, epoch: int, w: int, groups: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
        assert self._seed is not None
        if self._runs is not None:
            return RunOrder(np.concatenate([self._runs(g) for g in groups]), self._seed, epoch, w + 1)
        return Permutation(int(self._sizes["train"][list(groups)].sum()), self._seed, epoch, w + 1)

    def _nothing(self) -> ExampleRecords:
        return self._decode("train", (0,)).take(np.zeros(0, np.int64))

    def _plan(self, epoch: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Row groups of each window of an epoch, and int64[windows + 1] their bounds in positions."""
        order = np.arange(len(self._files.groups))
        if self._seed is not None:
            order = Permutation(order.size, self._seed, epoch)(order)
        order = order[self._sizes["train"][order] > 0]
        firsts = range(0, order.size, self._window)
        groups = [tuple(order[a : a + self._window].tolist()) for a in firsts]
        return groups, lengths_to_offsets(np.array([self._sizes["train"][list(g)].sum() for g in groups], np.int64))

    def _decode(self, split: str, groups: tuple[int, ...]) -> ExampleRecords:
        return self._request(split, groups).result()

    def _request(self, split: str, groups: tuple[int, ...]) -> "Future[ExampleRecords]":
        with self._lock:
            found = self._decoded.get((split, groups))
            if found is None:
                # Kept before it is done, so that threads that want the same window wait for one decoding of it.
                found = self._decoders.submit(self._read, split, groups)
                self._decoded[split, groups] = found
            self._decoded.move_to_end((split, groups))
            while len(self._decoded) > _KEPT_WINDOWS:
                self._decoded.popitem(last=False)
            return found

    def _read(self, split: str, groups: tuple[int, ...]) -> ExampleRecords:
        parts = []
        for g in groups:
            group = self._files.groups[g]
            rows = decode(self._files, group, self.layout, self._transform, self._transforms)
            wanted = self._split_rows(split, g)
            parts.append(rows if wanted.size == group.rows else rows.take(wanted))
        return ExampleRecords.concatenate(parts)
