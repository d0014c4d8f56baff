"""Deduplicated jagged features: every distinct row once, and for each example the number of its row.

The samples of one session share most of their user-side features. For a *group* of features that change together, a
batch of B examples holds only U distinct rows (tuples of id lists):

    example   "pages"    "topics"            distinct row   "pages"    "topics"        inverse
    0         [3, 7]     [1]                 0              [3, 7]     [1]             [0, 0, 1, 0]
    1         [3, 7]     [1]         =       1              [3, 7]     []
    2         [3, 7]     []
    3         [3, 7]     [1]

The inverse costs 4 bytes per example and *group*, whatever the number of features in it. Everything that treats rows
one by one (transforms of ids, lookup, pooling, attention over a row) can run on the U rows and be expanded afterwards.

Rows are found by hash and then compared, id by id and weight by weight: two rows of one hash are never merged.

Source: Zhao et al., RecD (MLSys 2023, arXiv 2211.05239), "inverse keyed jagged tensors".
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.jagged import KeyedJagged, gather_runs, lengths_to_offsets
from scalejax.data.permutation import mix
from scalejax.errors import UserError

Groups = tuple[tuple[str, ...], ...]
RowHash = Callable[[np.ndarray, np.ndarray], np.ndarray]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class DedupKeyedJagged:
    """Ids of F features over B examples, the features of a group stored once per distinct row.

    Construction checks shapes and that every feature has one place; `validate` looks at every number.

    Attributes:
      keys: Names of the F features, in the order of the plain form.
      groups: Names of the features of each of the G groups.
      distinct: Per group its features over U_g distinct rows, keys = the group's names.
      inverse: Per group int32[B] in [0, U_g): the distinct row of each example.
      plain: The features in no group, over B examples, in the order of `keys`.
    """

    keys: tuple[str, ...]
    groups: Groups
    distinct: tuple[KeyedJagged, ...]
    inverse: tuple[np.ndarray, ...]
    plain: KeyedJagged

    def __post_init__(self) -> None:
        placed = [*self.plain.keys, *(name for group in self.groups for name in group)]
        if sorted(placed) != sorted(self.keys):
            raise ValueError(
                f"DedupKeyedJagged: every feature must be in one group or in `plain`; got keys {self.keys} and "
                f"places {tuple(placed)}."
            )
        if not len(self.groups) == len(self.distinct) == len(self.inverse):
            raise ValueError(
                f"DedupKeyedJagged: needs distinct rows and an inverse per group; got {len(self.groups)} groups, "
                f"{len(self.distinct)} distinct and {len(self.inverse)} inverse."
            )
        for group, distinct, inverse in zip(self.groups, self.distinct, self.inverse, strict=True):
            if distinct.keys != group:
                raise ValueError(f"DedupKeyedJagged: the rows of group {group} have keys {distinct.keys}.")
            if inverse.shape != (self.num_examples,) or inverse.dtype != np.int32:
                raise ValueError(
                    f"DedupKeyedJagged: the inverse of group {group} must be int32[{self.num_examples}]; got "
                    f"{inverse.dtype}{inverse.shape}."
                )

    @property
    def num_examples(self) -> int:
        """B."""
        return self.plain.num_examples

    @property
    def factors(self) -> tuple[float, ...]:
        """Per group, examples per distinct row, B / U_g (1.0 where there are no examples)."""
        rows = [distinct.num_examples for distinct in self.distinct]
        return tuple(self.num_examples / count if count else 1.0 for count in rows)

    @property
    def nbytes(self) -> int:
        """Bytes of ids, weights, lengths and inverses."""
        parts = (self.plain, *self.distinct)
        return sum(_bytes(part) for part in parts) + sum(inverse.nbytes for inverse in self.inverse)

    def validate(self) -> None:
        """Looks at every length and every number of the inverses.

        Raises:
          ValueError: an inverse points outside its distinct rows, or lengths do not add up to the ids.
        """
        for name, part in zip(("plain", *self.groups), (self.plain, *self.distinct), strict=True):
            if (part.lengths.size and part.lengths.min() < 0) or part.feature_offsets()[-1] != part.values.size:
                raise ValueError(
                    f"DedupKeyedJagged.validate: lengths of {name} must not be negative and must add up to its "
                    f"{part.values.size} ids; they add up to {part.lengths.sum()}."
                )
        for group, distinct, inverse in zip(self.groups, self.distinct, self.inverse, strict=True):
            if inverse.size and not 0 <= inverse.min() <= inverse.max() < distinct.num_examples:
                raise ValueError(
                    f"DedupKeyedJagged.validate: the inverse of group {group} must lie in [0, "
                    f"{distinct.num_examples}); it spans [{inverse.min()}, {inverse.max()}]."
                )


@dataclasses.dataclass(frozen=True)
class DedupBatch:
    """A `Batch` whose features are deduplicated; `expand_batch` gives the `Batch` back.

    Attributes:
      features: Over B examples.
      dense, labels, weights, groups: As in `Batch`.
    """

    features: DedupKeyedJagged
    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]


AnyBatch = ClickBatch | DedupBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deduplicate:
    """`Batch` -> `DedupBatch`, for `grain.MapDataset.map` or any other pipeline.

    Attributes:
      groups: Names of the features of each group, see `deduplicate`.
    """

    groups: Groups

    def __call__(self, batch: AnyBatch) -> DedupBatch:
        """Deduplicates one batch; one that is deduplicated already is expanded first.

        Raises:
          UserError: as `deduplicate`.
        """
        features = deduplicate(expand_batch(batch).features, self.groups)
        return DedupBatch(features, batch.dense, batch.labels, batch.weights, batch.groups)


def expand_batch(batch: AnyBatch) -> ClickBatch:
    """The batch that was deduplicated; one that is not deduplicated as it is."""
    if isinstance(batch, ClickBatch):
        return batch
    return ClickBatch(expand(batch.features), batch.dense, batch.labels, batch.weights, batch.groups)


def hash_rows(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each list of one feature; equal lists have equal hashes, also in other batches.

    hash(v_0 .. v_{n-1}) = mix(sum_j mix(v_j) P^j + n Q) modulo 2^64, with P and Q odd. The sums of all lists come from
    one prefix sum: P is invertible, so the sum over [a, b) is (prefix[b] - prefix[a]) P^-a.

    Args:
      values: int[N] (or the bits of float32 weights as integers), the lists one after another.
      lengths: int[M] their lengths.

    Returns:
      uint64[M].
    """
    offsets = lengths_to_offsets(lengths)
    powers, inverses = _powers(values.size)
    prefix = np.zeros(values.size + 1, np.uint64)
    terms = mix(values.astype(np.int64).view(np.uint64) + _ODD)
    terms *= powers[: values.size]
    np.cumsum(terms, out=prefix[1:])
    sums = prefix[offsets[1:]]
    sums -= prefix[offsets[:-1]]
    sums *= inverses[offsets[:-1]]
    return mix(sums + lengths.astype(np.uint64) * _LENGTH)


def deduplicate(
    features: KeyedJagged, groups: Sequence[Sequence[str]], *, row_hash: RowHash = hash_rows
) -> DedupKeyedJagged:
    """Stores each distinct row of every group once, in the order of first occurrence.

    Args:
      features: Plain features over B examples. Weights are part of a row: equal ids with weights of other bits are
        another row.
      groups: Names of the features of each group; a feature in no group stays plain. A row is distinct when any
        feature of the group differs, so group only features that change together (`dedup_groups.choose_groups`).
      row_hash: (values, lengths) -> uint64[M]; a poor one costs time and merges nothing.
    Raises:
      UserError: a group is empty, names a feature that is not there, or one that another group has.
      ValueError: ids are not integers, or lengths do not add up to them.
    """
    groups = check_groups(groups, features.keys)
    if features.values.dtype.kind not in "iu":
        raise ValueError(f"deduplicate: ids must be integers; got {features.values.dtype}.")
    bounds = features.feature_offsets()
    if bounds[-1] != features.values.size:
        raise ValueError(f"deduplicate: lengths add up to {bounds[-1]} ids; got {features.values.size} values.")
    columns = {key: _Column.of(features, f, bounds) for f, key in enumerate(features.keys)}
    distinct, inverses = [], []
    for group in groups:
        members = [columns[name] for name in group]
        first, inverse = _first_occurrences(members, features.num_examples, row_hash)
        distinct.append(_assemble(group, [member.take(first) for member in members], features))
        inverses.append(inverse)
    grouped = {name for group in groups for name in group}
    rest = tuple(key for key in features.keys if key not in grouped)
    plain = features if not groups else _assemble(rest, [columns[key] for key in rest], features)
    return DedupKeyedJagged(features.keys, groups, tuple(distinct), tuple(inverses), plain)


def repeats_previous(features: KeyedJagged) -> np.ndarray:
    """bool[B]: whether all lists (and weights) of an example are those of the example before it."""
    bounds = features.feature_offsets()
    return _repeats([_Column.of(features, f, bounds) for f in range(len(features.keys))], features.num_examples)


def deduplicate_runs(features: KeyedJagged, index: np.ndarray) -> tuple[KeyedJagged, np.ndarray]:
    """The distinct rows and int32[B] inverse of one group of which runs of equal rows are known.

    Args:
      features: The features of the group over R rows.
      index: int64[B] the row of each example; row r first occurs before row r + 1.
    """
    found = deduplicate(features, [features.keys])
    return found.distinct[0], found.inverse[0][index]


def expand(dedup: DedupKeyedJagged) -> KeyedJagged:
    """The plain form: `expand(deduplicate(x, groups))` holds the values, lengths, order and weights of `x`."""
    columns: dict[str, _Column] = {}
    for part, inverse in [(dedup.plain, None), *zip(dedup.distinct, dedup.inverse, strict=True)]:
        bounds = part.feature_offsets()
        for f, key in enumerate(part.keys):
            column = _Column.of(part, f, bounds)
            columns[key] = column if inverse is None else column.take(inverse)
    like = next((part for part in (dedup.plain, *dedup.distinct) if part.keys), dedup.plain)
    return _assemble(dedup.keys, [columns[key] for key in dedup.keys], like, examples=dedup.num_examples)


@dataclasses.dataclass(frozen=True)
class _Column:
    """The lists of one feature: values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None

    @classmethod
    def of(cls, features: KeyedJagged, f: int, bounds: np.ndarray) -> "_Column":
        ids = slice(bounds[f], bounds[f + 1])
        weights = None if features.weights is None else features.weights[ids]
        lengths = features.lengths[f]
        return cls(features.values[ids], lengths, lengths_to_offsets(lengths), weights)

    def take(self, rows: np.ndarray) -> "_Column":
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        pick = gather_runs(np.arange(self.values.size), starts, lengths) if self.weights is not None else None
        values = gather_runs(self.values, starts, lengths) if pick is None else self.values[pick]
        weights = None if self.weights is None else self.weights[pick]
        return _Column(values, lengths, lengths_to_offsets(lengths), weights)

    def hashes(self, row_hash: RowHash) -> np.ndarray:
        """uint64[B]."""
        hashes = row_hash(self.values, self.lengths)
        if self.weights is not None:
            hashes = mix(hashes * _ODD + row_hash(_bits(self.weights), self.lengths))
        return hashes

    def clear_changed(self, repeats: np.ndarray) -> None:
        """Clears bool[B] `repeats` where a list is not the one before it; where set, both have one length."""
        if not repeats.any():
            return
        # The id at the same place of the list before, or, where there is nothing to compare, the id itself.
        before = np.arange(self.values.size)
        before -= np.repeat(np.where(repeats, self.lengths, 0), self.lengths)
        changed = self.values[before] != self.values
        if self.weights is not None:
            bits = _bits(self.weights)
            changed |= bits[before] != bits
        repeats[np.searchsorted(self.offsets, np.flatnonzero(changed), side="right") - 1] = False

    def equal(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """bool[R]: whether list rows[r] is list others[r], weights by their bits."""
        lengths = self.lengths[rows]
        same = lengths == self.lengths[others]
        lengths = np.where(same, lengths, 0)
        left = gather_runs(np.arange(self.values.size), self.offsets[:-1][rows], lengths)
        right = left + np.repeat(self.offsets[:-1][others] - self.offsets[:-1][rows], lengths)
        differs = self.values[left] != self.values[right]
        if self.weights is not None:
            bits = _bits(self.weights)
            differs |= bits[left] != bits[right]
        if differs.any():
            owner = np.repeat(np.arange(rows.size), lengths)
            same[owner[differs]] = False
        return same


def _bits(weights: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(weights).view({2: np.int16, 4: np.int32, 8: np.int64}[weights.itemsize])


def _bytes(features: KeyedJagged) -> int:
    weights = 0 if features.weights is None else features.weights.nbytes
    return features.values.nbytes + features.lengths.nbytes + weights


def _repeats(members: list[_Column], examples: int) -> np.ndarray:
    """bool[B]: whether all lists of an example are those of the example before."""
    repeats = np.arange(examples) > 0
    for member in members:
        repeats[1:] &= member.lengths[1:] == member.lengths[:-1]
    for member in members:
        member.clear_changed(repeats)
    return repeats


def _first_occurrences(members: list[_Column], examples: int, row_hash: RowHash) -> tuple[np.ndarray, np.ndarray]:
    """int64[U] first example of each distinct row, ascending, and int32[B] the distinct row of each example."""
    # In a clustered log most rows repeat the one before. Comparing with that is cheaper than hashing, and where lengths
    # differ, as they do almost everywhere in other orders, it costs nothing.
    repeats = _repeats(members, examples)
    heads = np.flatnonzero(~repeats)
    leader = _leaders([member.take(heads) for member in members] if heads.size < examples else members, row_hash)
    is_first = leader == np.arange(heads.size)
    number = np.cumsum(is_first, dtype=np.int32)
    number -= 1
    head_of = np.cumsum(~repeats) - 1
    return heads[is_first], number[leader][head_of]


def _leaders(members: list[_Column], row_hash: RowHash) -> np.ndarray:
    """int64[M]: the first row that is equal to each row."""
    rows = members[0].lengths.size
    hashes = np.zeros(rows, np.uint64)
    for member in members:
        hashes = mix(hashes * _ODD + member.hashes(row_hash))
    leader = np.arange(rows)
    # Rows that are not settled yet, ascending. Those of one hash follow the first of them, those that prove to be
    # another row go round again without it: as many rounds as there are different rows of one hash, nearly always one.
    left = leader
    while left.size:
        # As many bits of the hash as leave room for the places; what it makes equal, the comparison tells apart.
        bits = np.uint64(left.size.bit_length() + 1)
        first = left[first_of_equals(hashes[left] >> bits)]
        follow = np.flatnonzero(first != left)
        same = np.ones(follow.size, bool)
        for member in members:
            same &= member.equal(left[follow], first[follow])
        leader[left[follow[same]]] = first[follow[same]]
        left = left[follow[~same]]
    return leader


def first_of_equals(numbers: np.ndarray) -> np.ndarray:
    """int64[M]: for each number the first place that holds it; uint64[M] below 2^64 / (2 M)."""
    # The place stands in the low bits: sorting plain numbers is several times faster than a stable argsort.
    bits = np.uint64(max(1, numbers.size.bit_length()))
    low = (np.uint64(1) << bits) - np.uint64(1)
    keys = (numbers << bits) | np.arange(numbers.size, dtype=np.uint64)
    keys.sort()
    places = (keys & low).astype(np.int64)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, keys.size), bool), (keys[1:] ^ keys[:-1]) > low]))
    first = np.empty(numbers.size, np.int64)
    first[places] = np.repeat(places[begins], np.diff(np.append(begins, keys.size)))
    return first


def _assemble(
    keys: tuple[str, ...], columns: Sequence[_Column], like: KeyedJagged, examples: int | None = None
) -> KeyedJagged:
    if not columns:
        lengths = np.zeros((0, like.num_examples if examples is None else examples), np.int32)
        return KeyedJagged(keys, like.values[:0], lengths, None if like.weights is None else like.weights[:0])
    weights = [column.weights for column in columns if column.weights is not None]
    return KeyedJagged(
        keys,
        np.concatenate([column.values for column in columns]),
        np.stack([column.lengths for column in columns]),
        np.concatenate(weights) if weights else None,
    )


def check_groups(groups: Sequence[Sequence[str]], keys: tuple[str, ...]) -> Groups:
    """The groups as tuples.

    Raises:
      UserError: a group is empty, names a feature that is not there, or one that another group has.
    """
    out = tuple(tuple(group) for group in groups)
    names = [name for group in out for name in group]
    if any(isinstance(group, str) for group in groups) or any(not group for group in out):
        raise UserError(
            f"groups must be sequences of feature names, none of them empty; got {list(groups)}. For one feature write "
            '("name",).'
        )
    check_names(names, keys)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"groups: {', '.join(twice)} appear more than once; a feature belongs to one group at most.")
    return out


def check_names(names: Iterable[str], keys: tuple[str, ...]) -> None:
    """Refuses names of features that are not there.

    Raises:
      UserError: naming them.
    """
    if unknown := [name for name in names if name not in keys]:
        raise UserError(
            f"there is no feature {', '.join(map(repr, unknown))}; there are {', '.join(keys)}. Name features of the "
            "batch."
        )


_cached_powers = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64[>= count + 1]: P^j and P^-j modulo 2^64, for odd P; kept for the next call."""
    global _cached_powers
    kept = _cached_powers
    if kept[0].size <= count:
        size = 1 << (count + 1).bit_length()
        kept = _geometric(int(_ODD), size), _geometric(pow(int(_ODD), -1, 1 << 64), size)
        _cached_powers = kept  # threads that race compute equal arrays
    return kept


def _geometric(base: int, size: int) -> np.ndarray:
    powers = np.ones(size, np.uint64)
    done, factor = 1, base
    while done < size:  # the second half is the first times base^done
        count = min(done, size - done)
        np.multiply(powers[:count], np.uint64(factor), out=powers[done : done + count])
        done += count
        factor = factor * factor & _MASK
    return powers
