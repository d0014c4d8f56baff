"""Decoded examples in memory: one row of 32-bit words per example, so that gathering an example is one cache line.

Layout of a record, in words: the ids of every feature of fixed length (two words for an id of 64 bits), then the
numbers, then the labels, then the weight if examples have one (the last three are float32 bits). Features of varying
length (multi-hot) are kept beside the records, as offsets and values. So are the features of groups that are
deduplicated (`Shared`): every row of lists once, and for each example the number of its row, which is all that moves
when examples are chosen and shuffled.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import AnyBatch, DedupBatch, DedupKeyedJagged, Groups
from scalejax.data.examples.jagged import KeyedJagged, gather_runs, lengths_to_offsets, signed_ids
from scalejax.data.examples.schema import Categorical, Schema


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Lists of ids, one per example.

    Attributes:
      offsets: int64[N + 1]; list n is values[offsets[n] : offsets[n + 1]].
      values: int32[M]; int64 for ids of 64 bits.
      weights: float32[M], or None: every id weighs 1.
    """

    offsets: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64[N]."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Ragged":
        """Lists number `rows`, int[R], in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        weights = None if self.weights is None else gather_runs(self.weights, starts, lengths)
        return Ragged(lengths_to_offsets(lengths), gather_runs(self.values, starts, lengths), weights)

    @staticmethod
    def concatenate(parts: Sequence["Ragged"]) -> "Ragged":
        """The lists of all parts."""
        lengths = np.concatenate([part.lengths for part in parts])
        spans = [slice(part.offsets[0], part.offsets[-1]) for part in parts]
        values = np.concatenate([part.values[span] for part, span in zip(parts, spans, strict=True)])
        weighted = [part.weights[span] for part, span in zip(parts, spans, strict=True) if part.weights is not None]
        return Ragged(lengths_to_offsets(lengths), values, np.concatenate(weighted) if weighted else None)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Lists of a group of features over N examples, each row of lists once.

    Rows are told apart by number and never compared: two of them may hold equal lists.

    Attributes:
      lists: Per feature of the group, over U rows.
      index: int32[N] in [0, U), the row of each example.
    """

    lists: tuple[Ragged, ...]
    index: np.ndarray

    def __len__(self) -> int:
        return self.index.size

    def take(self, examples: np.ndarray) -> "Shared":
        """Examples number `examples`, int[R], in that order; of the rows those that they have, by first occurrence."""
        rows, index = _numbered_by_first_use(self.index[examples], len(self.lists[0]))
        return Shared(tuple(lists.take(rows) for lists in self.lists), index)

    @staticmethod
    def concatenate(parts: Sequence["Shared"]) -> "Shared":
        """The examples of all parts; rows of different parts stay apart."""
        firsts = lengths_to_offsets(np.array([len(part.lists[0]) for part in parts], np.int64))
        lists = zip(*(part.lists for part in parts), strict=True)
        index = np.concatenate([part.index + np.int32(first) for part, first in zip(parts, firsts, strict=False)])
        return Shared(tuple(Ragged.concatenate(member) for member in lists), index)


def _numbered_by_first_use(index: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows in `index`, int[R] below `count`, by first occurrence, and int32[R] their places in that order."""
    if not index.size:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    heads = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
    rows = index[heads]
    numbers = np.arange(rows.size, dtype=np.int32)
    place = np.empty(count, np.int32)  # nothing is read that is not written before
    place[rows[::-1]] = numbers[::-1]  # of several places the first is written last
    first = place[rows]
    is_first = first == numbers
    number = np.cumsum(is_first, dtype=np.int32) - 1
    return rows[is_first], np.repeat(number[first], np.diff(np.append(heads, index.size)))


@dataclasses.dataclass(frozen=True)
class ExampleRecords:
    """N decoded examples.

    Attributes:
      records: int32[N, W], see the module.
      jagged: The features of varying length, in schema order.
      shared: The groups of features that are deduplicated, in the order of the layout.
    """

    records: np.ndarray
    jagged: tuple[Ragged, ...] = ()
    shared: tuple[Shared, ...] = ()

    def __len__(self) -> int:
        return self.records.shape[0]

    def take(self, rows: np.ndarray) -> "ExampleRecords":
        """Examples number `rows`, int[R], in that order."""
        return ExampleRecords(
            self.records.take(rows, axis=0),
            tuple(r.take(rows) for r in self.jagged),
            tuple(s.take(rows) for s in self.shared),
        )

    @staticmethod
    def concatenate(parts: Sequence["ExampleRecords"]) -> "ExampleRecords":
        """The examples of all parts."""
        if len(parts) == 1:
            return parts[0]
        jagged = zip(*(part.jagged for part in parts), strict=True)
        shared = zip(*(part.shared for part in parts), strict=True)
        return ExampleRecords(
            np.concatenate([p.records for p in parts]),
            tuple(Ragged.concatenate(j) for j in jagged),
            tuple(Shared.concatenate(s) for s in shared),
        )


class Table(Protocol):
    """Examples that can be fetched by number; `ExampleRecords` in memory, `arrow.MappedTable` on disk."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> ExampleRecords: ...


class RecordLayout:
    """Where the columns of a schema lie in a record, and how records become a `Batch`.

    Args:
      schema: Columns.
      groups: Names of features whose lists are kept once per row (`Shared`); batches are then `DedupBatch`es.
    """

    def __init__(self, schema: Schema, groups: Groups = ()) -> None:
        self.schema, self.groups = schema, groups
        grouped = {name for group in groups for name in group}
        self.plain = tuple(c for c in schema.categorical if c.name not in grouped)
        self.fixed = tuple(c for c in self.plain if c.length is not None)
        self.jagged = tuple(c for c in self.plain if c.length is None)
        self.wide = frozenset(c.name for c in schema.categorical if c.rows is None)
        words = [(c.length or 0) * (2 if c.name in self.wide else 1) for c in self.fixed]
        starts = lengths_to_offsets(np.array(words, np.int64))
        self.ids = {c.name: slice(int(a), int(b)) for c, a, b in zip(self.fixed, starts, starts[1:], strict=False)}
        first_number = int(starts[-1])
        first_label = first_number + len(schema.dense)
        self.dense = slice(first_number, first_label)
        self.labels = slice(first_label, first_label + len(schema.labels))
        self.width = self.labels.stop + (schema.weight is not None)
        if schema.group is not None and (schema.group not in self.ids or schema[schema.group].length != 1):
            raise ValueError(
                f"Schema: group must be a categorical feature with one id per example; got {schema.group!r}."
            )

    def empty(self, rows: int) -> np.ndarray:
        """int32[rows, W], uninitialised."""
        return np.empty((rows, self.width), np.int32)

    @functools.lru_cache(maxsize=8)  # noqa: B019  a layout lives as long as its data set
    def _fixed_lengths(self, examples: int) -> np.ndarray:
        lengths = np.empty((len(self.plain), examples), np.int32)
        lengths[:] = np.array([[c.length or 0] for c in self.plain], np.int32).reshape(-1, 1)
        lengths.flags.writeable = False
        return lengths

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read example by example: all but the features of groups."""
        weight = () if self.schema.weight is None else (self.schema.weight,)
        return (*(c.name for c in self.plain), *self.schema.dense, *self.schema.labels, *weight)

    def batch(self, rows: ExampleRecords, size: int) -> AnyBatch:
        """The first examples of a batch of `size`; the rest is padding: weight 0, label 0, id 0, empty lists."""
        missing = size - len(rows)
        if missing:
            rows = ExampleRecords.concatenate([rows, self._padding(rows, missing)])
        floats = rows.records.view(np.float32)
        weights = np.ones(size, np.float32) if self.schema.weight is None else floats[:, self.labels.stop].copy()
        weights[size - missing :] = 0
        group = self.schema.group
        dense = np.ascontiguousarray(floats[:, self.dense])
        labels = np.ascontiguousarray(floats[:, self.labels])
        of_groups = None if group is None else self.ids_of(rows.records, group)[:, 0].astype(np.int64)
        plain = self._features(rows)
        if not self.groups:
            return ClickBatch(plain, dense, labels, weights, of_groups)
        distinct = tuple(_keyed(names, s.lists) for names, s in zip(self.groups, rows.shared, strict=True))
        inverse = tuple(s.index for s in rows.shared)
        features = DedupKeyedJagged(self.schema.keys, self.groups, distinct, inverse, plain)
        return DedupBatch(features, dense, labels, weights, of_groups)

    def _padding(self, like: ExampleRecords, examples: int) -> ExampleRecords:
        none = slice(0)
        empty = tuple(
            Ragged(np.zeros(examples + 1, np.int64), r.values[none], None if r.weights is None else r.weights[none])
            for r in like.jagged
        )
        shared = tuple(
            Shared(
                tuple(Ragged(np.zeros(2, np.int64), lists.values[:0]) for lists in s.lists),
                np.zeros(examples, np.int32),
            )
            for s in like.shared
        )
        return ExampleRecords(np.zeros((examples, self.width), np.int32), empty, shared)

    def put_ids(self, records: np.ndarray, name: str, ids: np.ndarray) -> None:
        """Writes the ids of a feature of fixed length, int[N] or int[N, L], into records."""
        ids = ids.reshape(len(records), -1)
        if name in self.wide:
            ids = np.ascontiguousarray(signed_ids(ids), np.int64).view(np.int32)
        records[:, self.ids[name]] = ids

    def ids_of(self, records: np.ndarray, name: str) -> np.ndarray:
        """int32 or int64 [N, L]: what `put_ids` wrote."""
        words = records[:, self.ids[name]]
        return np.ascontiguousarray(words).view(np.int64) if name in self.wide else words

    def _features(self, rows: ExampleRecords) -> KeyedJagged:
        examples = len(rows)
        lengths = self._fixed_lengths(examples)
        keys = tuple(c.name for c in self.plain)
        if not self.jagged and not self.wide:
            values = np.empty(self.dense.start * examples, np.int32)
            if self.plain:
                self._copy_ids(rows.records, values, self.plain)
            return KeyedJagged(keys, values, lengths)
        lengths = lengths.copy()
        ragged = dict(zip((c.name for c in self.jagged), rows.jagged, strict=True))
        pieces, weights = [], []
        for f, feature in enumerate(self.plain):
            if feature.name in ragged:
                lengths[f] = ragged[feature.name].lengths
                pieces.append(ragged[feature.name].values)
            else:
                pieces.append(self.ids_of(rows.records, feature.name).reshape(-1))
            found = ragged[feature.name].weights if feature.name in ragged else None
            weights.append(np.ones(pieces[-1].size, np.float32) if found is None else found)
        weighted = any(lists.weights is not None for lists in rows.jagged)
        return KeyedJagged(
            keys,
            np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
            lengths,
            np.concatenate(weights) if weighted else None,
        )

    def _copy_ids(self, records: np.ndarray, values: np.ndarray, features: Sequence[Categorical]) -> None:
        """Fills `values` feature after feature; features with one id each, the usual case, in a single copy."""
        if all(feature.length == 1 for feature in features):
            values.reshape(len(features), -1)[:] = records[:, : len(features)].T
            return
        stop = 0
        for feature in features:
            words = self.ids[feature.name]
            start, stop = stop, stop + (words.stop - words.start) * len(records)
            values[start:stop].reshape(len(records), -1)[:] = records[:, words]


def _keyed(names: tuple[str, ...], lists: Sequence[Ragged]) -> KeyedJagged:
    lengths = np.array([member.lengths for member in lists], np.int32).reshape(len(names), -1)
    return KeyedJagged(names, np.concatenate([member.values for member in lists]), lengths)
