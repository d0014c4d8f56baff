"""Transforms of id lists row by row, over all rows or over the distinct rows of deduplicated features only.

Hashing, renaming or cutting the ids of a row depends on that row alone, so it may run before rows are repeated:

    map_rows(expand(dedup), transforms) == expand(map_distinct(dedup, transforms))

and the right-hand side does the work once per distinct row ("deduplicated preprocessing" of RecD, arXiv 2211.05239).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from scalejax.data.examples.dedup import DedupKeyedJagged, check_names
from scalejax.data.examples.jagged import KeyedJagged, gather_runs, signed_ids
from scalejax.data.examples.records import Ragged, Shared
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError

RowTransform = Callable[[KeyedJagged], KeyedJagged]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashIds:
    """Any 64-bit id -> a bucket in [0, rows); the same for the same seed everywhere.

    Attributes:
      rows: Buckets.
      seed: Chooses the hash, so that features that share ids need not share collisions.
    """

    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rows < 1 << 32:
            raise UserError(f"HashIds: rows must be in [1, 2**32); got {self.rows}.")

    def __call__(self, features: KeyedJagged) -> KeyedJagged:
        """Ids int64[N] in [0, rows)."""
        hashes = mix(features.values.astype(np.int64).view(np.uint64) + np.uint64(key_of(self.seed)))
        # The high 32 bits times rows, shifted back: a bucket without a division, uniform up to 2**-32 * rows.
        hashes >>= np.uint64(32)
        hashes *= np.uint64(self.rows)
        hashes >>= np.uint64(32)
        return dataclasses.replace(features, values=hashes.view(np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstIds:
    """Keeps the first ids of every row.

    Attributes:
      count: Ids that are kept at most.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"FirstIds: count must not be negative; got {self.count}.")

    def __call__(self, features: KeyedJagged) -> KeyedJagged:
        """Lists of at most `count` ids."""
        lengths = np.minimum(features.lengths, self.count)
        starts = np.cumsum(features.lengths, dtype=np.int64) - features.lengths.reshape(-1)
        pick = gather_runs(np.arange(features.values.size), starts, lengths.reshape(-1))
        weights = None if features.weights is None else features.weights[pick]
        return KeyedJagged(features.keys, features.values[pick], lengths, weights)


def map_rows(features: KeyedJagged, transforms: Mapping[str, RowTransform]) -> KeyedJagged:
    """Runs transforms of single features over all examples; the other features stay as they are.

    Args:
      features: Over B examples.
      transforms: Feature -> function of that feature over any number of rows. Each row of its result must depend on
        that row alone; rows keep their number and order, their lengths may change.
    Raises:
      UserError: there is no such feature.
      ValueError: a transform changed the number of rows or the name, or weights in some features only.
    """
    check_names(transforms, features.keys)
    parts = []
    for key in features.keys:
        part = features[key]
        if key in transforms:
            done = transforms[key](part)
            if done.keys != part.keys or done.num_examples != part.num_examples:
                raise ValueError(
                    f"map_rows: the transform of {key!r} must keep its {part.num_examples} rows and its name; got "
                    f"{done.num_examples} rows of {done.keys}."
                )
            part = done
        parts.append(part)
    if not parts:
        return features
    if len({part.weights is None for part in parts}) > 1:
        raise ValueError("map_rows: either all features have weights or none has.")
    values = np.concatenate([part.values for part in parts])
    weights = [part.weights for part in parts if part.weights is not None]
    lengths = np.concatenate([part.lengths for part in parts])
    return KeyedJagged(features.keys, values, lengths, np.concatenate(weights) if weights else None)


def map_distinct(dedup: DedupKeyedJagged, transforms: Mapping[str, RowTransform]) -> DedupKeyedJagged:
    """Runs transforms on the distinct rows only: `expand(map_distinct(d, t))` equals `map_rows(expand(d), t)`.

    Distinct rows may become equal (two ids in one bucket of a hash). They are kept apart: the form stays right, and
    `deduplicate(expand(...))` would merge them.

    Args:
      dedup: Deduplicated features.
      transforms: As in `map_rows`.
    Raises:
      UserError: there is no such feature.
    """
    check_names(transforms, dedup.keys)

    def over(part: KeyedJagged) -> KeyedJagged:
        return map_rows(part, {key: transforms[key] for key in part.keys if key in transforms})

    return dataclasses.replace(dedup, distinct=tuple(map(over, dedup.distinct)), plain=over(dedup.plain))


def map_columns(
    columns: Mapping[str, np.ndarray | Ragged],
    shared: Mapping[tuple[str, ...], Shared],
    transforms: Sequence[tuple[str, RowTransform]],
) -> tuple[dict[str, np.ndarray | Ragged], dict[tuple[str, ...], Shared]]:
    """Runs transforms on columns as they come from a file, on the features of groups once per row of lists.

    Args:
      columns: Name -> int[N] ids, or `Ragged` lists of ids; others stay as they are.
      shared: Names of the features of a group -> their lists.
      transforms: (feature, transform) pairs; those of one feature run one after another.
    Raises:
      UserError: there is no such feature.
      ValueError: a transform changed the number of rows, or how many ids a column of one id a row has.
    """
    columns, shared = dict(columns), dict(shared)
    check_names([name for name, _ in transforms], (*columns, *(name for group in shared for name in group)))
    for name, transform in transforms:
        if name in columns:
            columns[name] = _transformed(columns[name], name, transform)
            continue
        group = next(group for group in shared if name in group)
        rows = shared[group]
        lists = tuple(
            _lists_transformed(own, name, transform) if member == name else own
            for member, own in zip(group, rows.lists, strict=True)
        )
        shared[group] = Shared(lists, rows.index)
    return columns, shared


def _transformed(column: np.ndarray | Ragged, name: str, transform: RowTransform) -> np.ndarray | Ragged:
    if isinstance(column, Ragged):
        return _lists_transformed(column, name, transform)
    lists = _lists_transformed(Ragged(np.arange(column.size + 1), column), name, transform)
    if (lists.lengths != 1).any():
        raise ValueError(f"map_columns: the transform of {name!r}, one id a row, must keep one id a row.")
    return lists.values


def _lists_transformed(lists: Ragged, name: str, transform: RowTransform) -> Ragged:
    values = signed_ids(lists.values[lists.offsets[0] : lists.offsets[-1]])
    part = KeyedJagged((name,), values, lists.lengths.astype(np.int32)[None])
    done = map_rows(part, {name: transform})
    return Ragged(done.offsets(name), done.values)
