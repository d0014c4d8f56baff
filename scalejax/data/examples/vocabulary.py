"""Exact counts of the values of a column, in one pass over it and with bounded memory, and vocabularies made of them.

Counted values are kept in memory as long as they fit. When they do not, they are written to disk as (value, count)
pairs, spread over 64 partitions by a hash, and counting begins anew. In the end partition after partition is read back
and added up; one whose different values still do not fit is spread again by another hash. All occurrences of a value
are in one partition, so the counts are exact. What is written is at most 16 bytes for each value read.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np

from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError, check_at_least

MISSING, RARE, FIRST = 0, 1, 2
"""Ids of a missing value, of all values that are not in a vocabulary, and of the first that is."""

_ENTRY = np.dtype([("value", np.int64), ("count", np.int64)])
FEWEST_BYTES = 64 * _ENTRY.itemsize
"""Memory below which a counter refuses to work."""
_PARTITION_BITS = 6


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The values of a column that have an id of their own.

    Attributes:
      values: int64[V], ascending.
      ids: int64[V], their ids: FIRST, FIRST + 1, ... from the most frequent on, ties by value.
    """

    values: np.ndarray
    ids: np.ndarray

    @property
    def rows(self) -> int:
        """Ids in all, those of missing and rare values included."""
        return FIRST + self.values.size

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """int64[N] values, none missing -> int64[N] ids."""
        if not self.values.size:
            return np.full(values.size, RARE)
        at = np.minimum(np.searchsorted(self.values, values), self.values.size - 1)
        return np.where(self.values[at] == values, self.ids[at], RARE)


class ValueCounter:
    """How often each int64 value occurs in a column. A context manager: leaving it deletes what was spilled.

        with ValueCounter(memory_bytes=1 << 30) as counter:
            for chunk in chunks:
                counter.add(chunk)
            vocabulary = counter.vocabulary(min_count=10, max_values=40_000_000)

    Args:
      memory_bytes: For counted values, 16 bytes each. Sorting them takes about three times as much for a moment, and a
        vocabulary is held besides.
      folder: Where to spill; a new folder inside it is used. None = where temporary files go.

    Raises:
      UserError: less memory than for 64 values.
    """

    def __init__(self, *, memory_bytes: int = 1 << 30, folder: str | pathlib.Path | None = None) -> None:
        self._limit = memory_bytes // _ENTRY.itemsize
        if memory_bytes < FEWEST_BYTES:
            raise UserError(f"ValueCounter: memory_bytes must be at least {FEWEST_BYTES}; got {memory_bytes}.")
        self._parent, self._depth = folder, 0
        self._spill: pathlib.Path | None = None
        self._parts: list[np.ndarray] = []
        self._held = 0
        self.spilled_bytes = 0
        """Written to disk so far."""
        self.peak_bytes = 0
        """The most that was held in memory at once, sorting aside."""

    def __enter__(self) -> "ValueCounter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._spill is not None:
            shutil.rmtree(self._spill)
            self._spill = None

    def add(self, values: np.ndarray) -> None:
        """Counts int64[N] values; any of them may be negative."""
        step = self._limit // 2
        for start in range(0, values.size, step):
            different, counts = np.unique(values[start : start + step], return_counts=True)
            self._add(_entries(different, counts))

    def counts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """int64 values and their counts, in pieces that fit the memory; every value is in one piece only.

        The counter is used up by it.
        """
        self._merge()
        if self._spill is None:
            yield from ((part["value"], part["count"]) for part in self._parts)
            return
        self._write()
        for file in sorted(self._spill.iterdir()):
            with self._deeper() as partition:
                for entries in _read(file, self._limit // 2):
                    partition._add(entries)
                file.unlink()
                yield from partition.counts()
                self.peak_bytes = max(self.peak_bytes, partition.peak_bytes)
                self.spilled_bytes += partition.spilled_bytes

    def vocabulary(self, *, min_count: int, max_values: int | None = None) -> Vocabulary:
        """The values that occur at least `min_count` times; of these the `max_values` most frequent, ties by value.

        The counter is used up by it.
        """
        check_at_least("Vocabulary: min_count", min_count, 1)
        if max_values is not None and max_values < 1:
            raise UserError(f"Vocabulary: max_values must be at least 1, or None; got {max_values}.")
        kept = np.zeros(0, _ENTRY)
        for values, counts in self.counts():
            frequent = counts >= min_count
            kept = np.concatenate([kept, _entries(values[frequent], counts[frequent])])
            if max_values is not None and kept.size > max_values:
                kept = kept[_by_frequency(kept)[:max_values]]
        ids = np.empty(kept.size, np.int64)
        ids[_by_frequency(kept)] = np.arange(FIRST, FIRST + kept.size)
        order = np.argsort(kept["value"])
        return Vocabulary(kept["value"][order], ids[order])

    def _deeper(self) -> "ValueCounter":
        counter = ValueCounter(memory_bytes=self._limit * _ENTRY.itemsize, folder=self._parent)
        counter._depth = self._depth + 1
        return counter

    def _add(self, entries: np.ndarray) -> None:
        """Adds at most half as many entries as fit."""
        if self._held + entries.size > self._limit:
            self._merge()
            # A merge that frees less than half would soon be followed by another.
            if self._held > self._limit // 2:
                self._write()
        self._parts.append(entries)
        self._held += entries.size
        self.peak_bytes = max(self.peak_bytes, self._held * _ENTRY.itemsize)

    def _merge(self) -> None:
        if self._parts:
            entries = np.concatenate(self._parts)
            entries = entries[np.argsort(entries["value"], kind="stable")]
            starts = np.flatnonzero(np.diff(entries["value"], prepend=entries["value"][:1] - 1))
            self._parts = [_entries(entries["value"][starts], np.add.reduceat(entries["count"], starts))]
        self._held = sum(part.size for part in self._parts)

    def _write(self) -> None:
        """Empties the memory into the partitions."""
        entries = np.concatenate([*self._parts, np.zeros(0, _ENTRY)])
        self._parts, self._held = [], 0
        hashes = mix(entries["value"].astype(np.uint64) + np.uint64(key_of(self._depth)))
        partition = (hashes >> np.uint64(64 - _PARTITION_BITS)).astype(np.int64)
        entries = entries[np.argsort(partition, kind="stable")]
        bounds = np.cumsum(np.bincount(partition, minlength=1 << _PARTITION_BITS))
        with _disk_errors(self._parent):
            if self._spill is None:
                self._spill = pathlib.Path(tempfile.mkdtemp(prefix="counts-", dir=self._parent))
            for number, own in enumerate(np.split(entries, bounds[:-1])):
                if own.size:
                    with (self._spill / f"{number:02d}").open("ab") as f:
                        f.write(own.tobytes())
        self.spilled_bytes += entries.nbytes


def _entries(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    entries = np.empty(values.size, _ENTRY)
    entries["value"], entries["count"] = values, counts
    return entries


def _by_frequency(entries: np.ndarray) -> np.ndarray:
    return np.lexsort((entries["value"], -entries["count"]))


def _read(file: pathlib.Path, size: int) -> Iterator[np.ndarray]:
    """Entries of a partition; a value may come back, in one piece too."""
    with file.open("rb") as f:
        while raw := f.read(size * _ENTRY.itemsize):
            yield np.frombuffer(raw, _ENTRY)


@contextlib.contextmanager
def _disk_errors(folder: str | pathlib.Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = folder if folder is not None else tempfile.gettempdir()
        raise UserError(
            f"{place}: counts of values cannot be written ({error.strerror}). Give the coding a folder with more room "
            "(spill_folder), or more memory (memory_bytes)."
        ) from error
