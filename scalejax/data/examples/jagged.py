"""The host form of jagged categorical features."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError

_LARGEST_ROWS = 2**31 - 1


def lengths_to_offsets(lengths: np.ndarray) -> np.ndarray:
    """int[M] non-negative lengths -> int64[M + 1] offsets: offsets[0] == 0, offsets[m + 1] - offsets[m] == lengths[m].

    Raises:
      ValueError: `lengths` is not a vector of non-negative integers.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths_to_offsets: lengths must be an integer vector; got {lengths.dtype}{lengths.shape}.")
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"lengths_to_offsets: lengths must not be negative; got {lengths.min()}. Offsets passed?")
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather_runs(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates values[starts[m] : starts[m] + lengths[m]] over m; int[M] starts and lengths."""
    offsets = lengths_to_offsets(lengths)
    return values[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])]


@dataclasses.dataclass(frozen=True)
class KeyedJagged:
    """Ids of F features over B examples, stored feature after feature.

        feature   example 0   example 1   example 2
        "genre"   [3, 7]      []          [1]
        "user"    [12]        [5]         [12]

        values = [3, 7, 1, 12, 5, 12]      lengths = [[2, 0, 1], [1, 1, 1]]

    Construction checks shapes only; `validate` looks at every id.

    Attributes:
      keys: Names of the F features.
      values: int[N], all ids of the first feature, then of the second, each in example order.
      lengths: int32[F, B], ids per feature and example.
      weights: float32[N], one per id, or None (all ones).
    """

    keys: tuple[str, ...]
    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            twice = sorted({key for key in self.keys if self.keys.count(key) > 1})
            raise ValueError(
                f"KeyedJagged: keys must be unique; {', '.join(twice)} appear more than once. Rename one of them, or "
                "join their lists."
            )
        if self.lengths.ndim != 2 or self.lengths.shape[0] != len(self.keys):
            raise ValueError(
                f"KeyedJagged: lengths must have shape (features, examples) with {len(self.keys)} features; "
                f"got {self.lengths.shape}."
            )
        if self.values.ndim != 1:
            raise ValueError(f"KeyedJagged: values must be a vector; got shape {self.values.shape}.")
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise ValueError(
                f"KeyedJagged: weights must have one entry per id, shape {self.values.shape}; got {self.weights.shape}."
            )

    @classmethod
    def from_dense(cls, columns: Mapping[str, np.ndarray]) -> "KeyedJagged":
        """int[B] (one id per example) or int[B, L] (L ids per example) for each feature."""
        arrays = {name: np.asarray(ids) for name, ids in columns.items()}
        sizes = {name: len(ids) for name, ids in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"KeyedJagged.from_dense: columns must have equal length; got {sizes}.")
        widths = [ids[0].size if len(ids) else int(np.prod(ids.shape[1:])) for ids in arrays.values()]
        examples = next(iter(sizes.values()), 0)
        lengths = np.broadcast_to(np.array(widths, np.int32).reshape(-1, 1), (len(arrays), examples)).copy()
        values = [signed_ids(ids.reshape(-1)) for ids in arrays.values()]
        return cls(tuple(arrays), np.concatenate(values) if values else np.zeros(0, np.int32), lengths)

    @classmethod
    def from_lists(
        cls,
        rows: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
        dtype: type[np.signedinteger] = np.int32,
    ) -> "KeyedJagged":
        """For each feature one list of ids per example (and, if given, equally shaped weights for every feature)."""
        sizes = {name: len(lists) for name, lists in rows.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"KeyedJagged.from_lists: features must have equally many examples; got {sizes}.")
        examples = next(iter(sizes.values()), 0)
        lengths = np.array([[len(ids) for ids in lists] for lists in rows.values()], np.int32)
        values = np.array([i for lists in rows.values() for ids in lists for i in ids], dtype)
        flat = None
        if weights is not None:
            shapes = {name: [len(w) for w in weights[name]] for name in rows if name in weights}
            if any(name not in shapes or shapes[name] != [len(i) for i in rows[name]] for name in rows):
                raise ValueError("KeyedJagged.from_lists: weights must mirror the ids, list for list.")
            flat = np.array([w for name in rows for ws in weights[name] for w in ws], np.float32)
        return cls(tuple(rows), values, lengths.reshape(len(rows), examples), flat)

    @classmethod
    def from_torchrec(cls, features: Any) -> "KeyedJagged":
        """From a torchrec `KeyedJaggedTensor` on the CPU, whose values are in the same order.

        Raises:
          UserError: its features have batches of different sizes.
        """
        keys = tuple(features.keys())
        lengths = np.asarray(features.lengths()).astype(np.int32)
        if not keys or lengths.size % len(keys) or getattr(features, "variable_stride_per_key", lambda: False)():
            raise UserError(
                f"KeyedJagged.from_torchrec: every feature must have as many examples; got {lengths.size} lengths of "
                f"{len(keys)} features. Expand features of variable stride first."
            )
        weights = features.weights_or_none()
        return cls(
            keys,
            np.asarray(features.values()),
            lengths.reshape(len(keys), -1),
            None if weights is None else np.asarray(weights).astype(np.float32),
        )

    @property
    def num_examples(self) -> int:
        """B."""
        return self.lengths.shape[1]

    def feature_offsets(self) -> np.ndarray:
        """int64[F + 1]: the ids of feature f are values[offsets[f] : offsets[f + 1]]."""
        return lengths_to_offsets(self.lengths.sum(axis=1, dtype=np.int64))

    def offsets(self, key: str) -> np.ndarray:
        """int64[B + 1] offsets of the examples inside `self[key].values`."""
        return lengths_to_offsets(self.lengths[self._index(key)])

    def __getitem__(self, key: str) -> "KeyedJagged":
        """One feature, as views."""
        f = self._index(key)
        bounds = self.feature_offsets()
        ids = slice(bounds[f], bounds[f + 1])
        weights = None if self.weights is None else self.weights[ids]
        return KeyedJagged((key,), self.values[ids], self.lengths[f : f + 1], weights)

    def to_lists(self) -> dict[str, list[list[int]]]:
        """Per feature, the list of ids of each example; for tests and printing."""
        return {
            key: [ids.tolist() for ids in np.split(self[key].values, self.offsets(key)[1:-1])]
            if self.num_examples
            else []
            for key in self.keys
        }

    def slice(self, start: int, stop: int) -> "KeyedJagged":
        """Examples [start, stop).

        Raises:
          ValueError: not 0 <= start <= stop <= B.
        """
        if not 0 <= start <= stop <= self.num_examples:
            raise ValueError(
                f"KeyedJagged.slice: needs 0 <= start <= stop <= {self.num_examples}; got [{start}, {stop})."
            )
        flat = lengths_to_offsets(self.lengths.reshape(-1))
        firsts = np.arange(len(self.keys)) * self.num_examples
        begins, ends = flat[firsts + start], flat[firsts + stop]
        pick = gather_runs(np.arange(self.values.size), begins, ends - begins)
        weights = None if self.weights is None else self.weights[pick]
        return KeyedJagged(self.keys, self.values[pick], self.lengths[:, start:stop], weights)

    def take(self, examples: np.ndarray) -> "KeyedJagged":
        """The examples of int[M] numbers in [0, B), in that order; a number may occur several times."""
        flat = lengths_to_offsets(self.lengths.reshape(-1))[:-1].reshape(self.lengths.shape)
        lengths = self.lengths[:, examples]
        pick = gather_runs(np.arange(self.values.size), flat[:, examples].reshape(-1), lengths.reshape(-1))
        weights = None if self.weights is None else self.weights[pick]
        return KeyedJagged(self.keys, self.values[pick], lengths, weights)

    @staticmethod
    def concatenate(parts: Sequence["KeyedJagged"]) -> "KeyedJagged":
        """Examples of the first part, then of the second, and so on.

        Raises:
          ValueError: no parts, unequal keys, or weights in some parts only.
        """
        if not parts:
            raise ValueError("KeyedJagged.concatenate: needs at least one part.")
        keys = parts[0].keys
        if any(part.keys != keys for part in parts):
            raise ValueError(f"KeyedJagged.concatenate: keys must be equal; got {[part.keys for part in parts]}.")
        if len({part.weights is None for part in parts}) > 1:
            raise ValueError("KeyedJagged.concatenate: either all parts have weights or none has.")
        bounds = [part.feature_offsets() for part in parts]

        def interleave(arrays: Sequence[np.ndarray]) -> np.ndarray:
            pieces = [a[b[f] : b[f + 1]] for f in range(len(keys)) for a, b in zip(arrays, bounds, strict=True)]
            return np.concatenate(pieces) if pieces else arrays[0]

        weights = None
        if parts[0].weights is not None:
            weights = interleave([part.weights for part in parts if part.weights is not None])
        lengths = np.concatenate([part.lengths for part in parts], axis=1)
        return KeyedJagged(keys, interleave([part.values for part in parts]), lengths, weights)

    def validate(self, schema: Schema) -> None:
        """Looks at every length, id and weight.

        Raises:
          UserError: keys or lengths contradict `values` or the schema, an id outside [0, rows), a feature of fixed
            length with another number of ids, an example with more ids than max_length, or a weight that is not a
            finite number; the message names feature, value, example and range.
        """
        if self.keys != schema.keys:
            absent = [key for key in schema.keys if key not in self.keys]
            unknown = [key for key in self.keys if key not in schema.keys]
            wrong = f"missing: {absent}, unknown: {unknown}" if absent or unknown else "got them in another order"
            raise UserError(
                f"KeyedJagged.validate: keys must be those of the schema, {', '.join(schema.keys)}; {wrong}. Rename or "
                "reorder the features."
            )
        if self.lengths.size and self.lengths.min() < 0:
            f, example = np.unravel_index(int(self.lengths.argmin()), self.lengths.shape)
            raise UserError(
                f"KeyedJagged.validate: lengths must not be negative; feature {self.keys[f]!r} has "
                f"{self.lengths.min()} in example {example}. Offsets passed?"
            )
        bounds = self.feature_offsets()
        if bounds[-1] != self.values.size:
            raise UserError(
                f"KeyedJagged.validate: lengths add up to {bounds[-1]} ids; got {self.values.size} values. Pass one "
                "length per feature and example, features in the order of keys."
            )
        if self.weights is not None and not np.isfinite(self.weights).all():
            bad = int((~np.isfinite(self.weights)).argmax())
            f = int(np.searchsorted(bounds, bad, side="right")) - 1
            example = int(np.searchsorted(np.cumsum(self.lengths[f]), bad - bounds[f], side="right"))
            raise UserError(
                f"Feature {self.keys[f]!r}: an id of example {example} has the weight {self.weights[bad]}; weights "
                "must be finite numbers. Clean the column, or drop those ids."
            )
        for f, feature in enumerate(schema.categorical):
            lengths = self.lengths[f]
            if feature.length is not None and (wrong := lengths != feature.length).any():
                example = int(wrong.argmax())
                raise UserError(
                    f"Feature {feature.name!r}: example {example} has {lengths[example]} ids; the schema says exactly "
                    f"{feature.length}. Declare the feature with length=None and a capacity to allow any number."
                )
            check_lengths(lengths, feature.name, feature.max_length)
            check_ids(self.values[bounds[f] : bounds[f + 1]], feature.name, feature.rows, lengths=lengths)

    def _index(self, key: str) -> int:
        if key not in self.keys:
            raise KeyError(f"KeyedJagged: no feature {key!r}; there are {', '.join(self.keys)}.")
        return self.keys.index(key)


def signed_ids(ids: np.ndarray) -> np.ndarray:
    """uint64 ids as int64 of the same bits, others as they are: NumPy makes float64 of the two side by side."""
    return ids.view(np.int64) if ids.dtype == np.uint64 else ids


def check_lengths(lengths: np.ndarray, name: str, max_length: int | None, *, where: str = "") -> None:
    """Refuses examples with more ids than a feature may have: lists are never cut in silence.

    Args:
      lengths: int[B] ids per example.
      name: Feature, for the message.
      max_length: Of the feature; None = any number will do.
      where: Where the lists come from ("file x, row group 3"), for the message.
    Raises:
      UserError: naming the first example with too many.
    """
    if max_length is None or lengths.max(initial=0) <= max_length:
        return
    long = lengths > max_length
    example = int(long.argmax())
    raise UserError(
        f"{f'{where}: ' if where else ''}feature {name!r}: example {example} has {lengths[example]} ids; its "
        f"max_length is {max_length} ({int(long.sum())} of {lengths.size} examples have more). Raise "
        f"Categorical.max_length to {lengths.max()}, or shorten the lists when the data are prepared."
    )


def check_ids(
    ids: np.ndarray,
    name: str,
    rows: int | None,
    *,
    lengths: np.ndarray | None = None,
    first_example: int = 0,
    where: str = "",
) -> None:
    """Refuses ids outside [0, rows): they are never mapped to another row in silence.

    Args:
      ids: int[N].
      name: Feature, for the message.
      rows: Rows of the feature; None = any 64-bit integer will do.
      lengths: int[B] ids per example, or None for one each; only used to name the example.
      first_example: Number of the first example, for the message.
      where: Where the ids come from ("file x, row group 3"), for the message.
    Raises:
      UserError: naming the first bad id, or the type of what are no integers.
    """
    if rows is None:
        if not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"{f'{where}: ' if where else ''}feature {name!r}: ids must be integers; got {ids.dtype}. Numbers "
                "above 2**53 do not survive as floats: keep hashes as int64 or uint64 from the file on."
            )
        return
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < rows):
        return
    bad = int(((ids < 0) | (ids >= rows)).argmax())
    example = bad if lengths is None else int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
    what = f"{f'{where}: ' if where else ''}feature {name!r}: id {ids[bad]} of example {first_example + example} is"
    largest = int(ids.max())
    if max(largest, -int(ids.min())) > _LARGEST_ROWS:
        raise UserError(
            f"{what} outside [0, {rows}); the column holds ids as large as 64-bit hashes, not numbers of rows. Map it "
            f"to [0, {rows}) when the file is prepared (data.coding has Hashed and Counted), or declare the "
            "feature with rows=None and give its table an id map (Tables.id_maps)."
        )
    if ids[bad] < 0:
        raise UserError(f"{what} negative; ids lie in [0, {rows}). Give missing values an id of their own.")
    raise UserError(
        f"{what} outside [0, {rows}). Correct the data, or declare the feature with more rows (at least {largest + 1})."
    )
