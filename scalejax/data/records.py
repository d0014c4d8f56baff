"""Decoded examples in memory: one row of 32-bit words per example, so that gathering an example is one cache line.

Layout of a record, in words: the ids of every feature of fixed length (two words for an id of 64 bits), then the
numbers, then the labels (the last two are float32 bits). Features of varying length (multi-hot) are kept beside the
records, as offsets and values.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scalejax.data.batch import Batch
from scalejax.data.jagged import KeyedJagged, gather_runs, lengths_to_offsets, signed_ids
from scalejax.data.schema import Categorical, Schema


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Lists of ids, one per example.

    Attributes:
      offsets: int64[N + 1]; list n is values[offsets[n] : offsets[n + 1]].
      values: int32[M]; int64 for ids of 64 bits.
    """

    offsets: np.ndarray
    values: np.ndarray

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
        return Ragged(lengths_to_offsets(lengths), gather_runs(self.values, starts, lengths))

    @staticmethod
    def concatenate(parts: Sequence["Ragged"]) -> "Ragged":
        """The lists of all parts."""
        lengths = np.concatenate([part.lengths for part in parts])
        values = np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts])
        return Ragged(lengths_to_offsets(lengths), values)


@dataclasses.dataclass(frozen=True)
class Rows:
    """N decoded examples.

    Attributes:
      records: int32[N, W], see the module.
      jagged: The features of varying length, in schema order.
    """

    records: np.ndarray
    jagged: tuple[Ragged, ...] = ()

    def __len__(self) -> int:
        return self.records.shape[0]

    def take(self, rows: np.ndarray) -> "Rows":
        """Examples number `rows`, int[R], in that order."""
        return Rows(self.records.take(rows, axis=0), tuple(r.take(rows) for r in self.jagged))

    @staticmethod
    def concatenate(parts: Sequence["Rows"]) -> "Rows":
        """The examples of all parts."""
        if len(parts) == 1:
            return parts[0]
        jagged = zip(*(part.jagged for part in parts), strict=True)
        return Rows(np.concatenate([p.records for p in parts]), tuple(Ragged.concatenate(j) for j in jagged))


class Table(Protocol):
    """Examples that can be fetched by number; `Rows` in memory, `arrow.MappedTable` on disk."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Rows: ...


class RecordLayout:
    """Where the columns of a schema lie in a record, and how records become a `Batch`."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.fixed = tuple(c for c in schema.categorical if c.length is not None)
        self.jagged = tuple(c for c in schema.categorical if c.length is None)
        self.wide = frozenset(c.name for c in schema.categorical if c.rows is None)
        words = [(c.length or 0) * (2 if c.name in self.wide else 1) for c in self.fixed]
        starts = lengths_to_offsets(np.array(words, np.int64))
        self.ids = {c.name: slice(int(a), int(b)) for c, a, b in zip(self.fixed, starts, starts[1:], strict=False)}
        first_number = int(starts[-1])
        first_label = first_number + len(schema.dense)
        self.dense = slice(first_number, first_label)
        self.labels = slice(first_label, first_label + len(schema.labels))
        self.width = self.labels.stop
        if schema.group is not None and (schema.group not in self.ids or schema[schema.group].length != 1):
            raise ValueError(
                f"Schema: group must be a categorical feature with one id per example; got {schema.group!r}."
            )

    def empty(self, rows: int) -> np.ndarray:
        """int32[rows, W], uninitialised."""
        return np.empty((rows, self.width), np.int32)

    @functools.lru_cache(maxsize=8)  # noqa: B019  a layout lives as long as its data set
    def _fixed_lengths(self, examples: int) -> np.ndarray:
        lengths = np.empty((len(self.schema.categorical), examples), np.int32)
        lengths[:] = np.array([[c.length or 0] for c in self.schema.categorical], np.int32).reshape(-1, 1)
        lengths.flags.writeable = False
        return lengths

    def batch(self, rows: Rows, size: int) -> Batch:
        """The first examples of a batch of `size`; the rest is padding: weight 0, label 0, id 0, empty lists."""
        missing = size - len(rows)
        if missing:
            pad = [Ragged(np.zeros(missing + 1, np.int64), r.values[:0]) for r in rows.jagged]
            rows = Rows.concatenate([rows, Rows(np.zeros((missing, self.width), np.int32), tuple(pad))])
        weights = np.ones(size, np.float32)
        weights[size - missing :] = 0
        floats = rows.records.view(np.float32)
        group = self.schema.group
        return Batch(
            features=self._features(rows),
            dense=np.ascontiguousarray(floats[:, self.dense]),
            labels=np.ascontiguousarray(floats[:, self.labels]),
            weights=weights,
            groups=None if group is None else self.ids_of(rows.records, group)[:, 0].astype(np.int64),
        )

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

    def _features(self, rows: Rows) -> KeyedJagged:
        examples = len(rows)
        lengths = self._fixed_lengths(examples)
        if not self.jagged and not self.wide:
            values = np.empty(self.dense.start * examples, np.int32)
            self._copy_ids(rows.records, values, self.schema.categorical)
            return KeyedJagged(self.schema.keys, values, lengths)
        lengths = lengths.copy()
        ragged = dict(zip((c.name for c in self.jagged), rows.jagged, strict=True))
        pieces = []
        for f, feature in enumerate(self.schema.categorical):
            if feature.name in ragged:
                lengths[f] = ragged[feature.name].lengths
                pieces.append(ragged[feature.name].values)
            else:
                pieces.append(self.ids_of(rows.records, feature.name).reshape(-1))
        return KeyedJagged(self.schema.keys, np.concatenate(pieces), lengths)

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
