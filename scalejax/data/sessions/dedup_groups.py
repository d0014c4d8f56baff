"""Choosing which features to deduplicate, and which of them together, by the bytes of a batch.

Over B examples, with r_f(b) the bytes of the ids, the weights and the length of feature f in example b:

  plain               sum over f, b of r_f(b)
  deduplicated in G   sum over f in G and the U_G distinct rows of r_f, plus 4 B for the inverse

A feature is worth deduplicating when what its repeated rows take exceeds its share of an inverse; with mean length L,
ids of s bytes and dedup factor k that is about (L s + 4)(1 - 1/k) > 4 / |G|.

Two groups share an inverse at the price of more distinct rows: values that are kept with probability d and d' from one
sample to the next are kept *together* with probability d d' if they change independently. Only features that change
together are worth grouping, and counting the distinct rows of a sample shows which do.
"""

import dataclasses
import itertools

import numpy as np

from scalejax.data.examples.dedup import Groups, deduplicate, first_of_equals
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError

_INVERSE_BYTES = 4
_LENGTH_BYTES = 4
# A pair of rows and a place have to fit into 63 bits.
_MOST_EXAMPLES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """What to deduplicate, and what it saves on the sample.

    Attributes:
      groups: Features that are worth it, those that change together in one group, in the order of the sample.
      factors: Per group, examples per distinct row in the sample.
      feature_factors: Feature -> examples per distinct row, taken alone.
      plain_bytes: Bytes of the sample as it is.
      dedup_bytes: Bytes of the sample, deduplicated by `groups`.
    """

    groups: Groups
    factors: tuple[float, ...]
    feature_factors: dict[str, float]
    plain_bytes: int
    dedup_bytes: int

    @property
    def saving(self) -> float:
        """plain_bytes / dedup_bytes."""
        return self.plain_bytes / self.dedup_bytes if self.dedup_bytes else 1.0


def choose_groups(sample: KeyedJagged) -> GroupChoice:
    """Chooses groups by merging, as long as it saves bytes, the pair that saves most.

    Args:
      sample: A batch as the trainer will see it: rows of a clustered log, as many as a batch of one process has (the
        factor of fewer rows is lower), ids in their final type.
    Raises:
      UserError: the sample has no examples, or more than 2^20.
    """
    if not 1 <= sample.num_examples <= _MOST_EXAMPLES:
        raise UserError(
            f"choose_groups: the sample must have 1 to {_MOST_EXAMPLES} examples; got {sample.num_examples}. Pass a "
            "batch of the clustered log."
        )
    alone = deduplicate(sample, [(key,) for key in sample.keys])
    per_id = sample.values.itemsize + (0 if sample.weights is None else sample.weights.itemsize)
    row_bytes = sample.lengths.astype(np.int64) * per_id + _LENGTH_BYTES
    clusters: dict[bytes, _Cluster] = {}
    for f, inverse in enumerate(alone.inverse):
        # Features with one inverse change together throughout: sharing it costs nothing.
        found = clusters.get(inverse.tobytes())
        rows = inverse.astype(np.uint64)
        added = _Cluster((f,), rows, row_bytes[f])
        clusters[inverse.tobytes()] = added if found is None else found.joined(added, rows)
    chosen = [cluster for cluster in _merge(list(clusters.values())) if cluster.cost < cluster.plain]
    chosen.sort(key=lambda cluster: cluster.members)
    saved = sum(cluster.plain - cluster.cost for cluster in chosen)
    plain = int(row_bytes.sum())
    return GroupChoice(
        groups=tuple(tuple(sample.keys[f] for f in cluster.members) for cluster in chosen),
        factors=tuple(sample.num_examples / cluster.distinct for cluster in chosen),
        feature_factors=dict(zip(sample.keys, alone.factors, strict=True)),
        plain_bytes=plain,
        dedup_bytes=plain - saved,
    )


class _Cluster:
    """Features that would share an inverse.

    Args:
      members: Numbers of the features, ascending.
      rows: uint64[B], equal numbers for equal rows, below B^2.
      row_bytes: int64[B] bytes of all members in each example.
    """

    def __init__(self, members: tuple[int, ...], rows: np.ndarray, row_bytes: np.ndarray) -> None:
        self.members, self.row_bytes = members, row_bytes
        self.first = first_of_equals(rows)
        distinct = self.first == np.arange(rows.size)
        self.distinct = int(distinct.sum())
        self.plain = int(row_bytes.sum())
        self.cost = min(self.plain, int(row_bytes[distinct].sum()) + _INVERSE_BYTES * rows.size)

    def joined(self, other: "_Cluster", rows: np.ndarray) -> "_Cluster":
        members = tuple(sorted(self.members + other.members))
        return _Cluster(members, rows, self.row_bytes + other.row_bytes)

    def with_(self, other: "_Cluster") -> "_Cluster | None":
        """Both as one group, or None where that saves nothing."""
        # At least as many distinct rows as either has; each takes a length or more.
        distinct = max(self.distinct, other.distinct)
        more = sum(len(c.members) * (distinct - c.distinct) for c in (self, other))
        if _LENGTH_BYTES * more >= _INVERSE_BYTES * self.first.size:
            return None
        merged = self.joined(other, (self.first * self.first.size + other.first).astype(np.uint64))
        return merged if merged.cost < self.cost + other.cost else None


def _merge(clusters: list[_Cluster]) -> list[_Cluster]:
    """Merges the pair that saves most until none saves anything."""
    alive = dict(enumerate(clusters))
    gains: dict[tuple[int, int], int] = {}

    def consider(a: int, b: int) -> None:
        merged = alive[a].with_(alive[b])
        if merged is not None:
            gains[a, b] = alive[a].cost + alive[b].cost - merged.cost

    for a, b in itertools.combinations(alive, 2):
        consider(a, b)
    while gains:
        a, b = max(gains, key=lambda pair: gains[pair])
        merged = alive[a].with_(alive[b])
        assert merged is not None
        gains = {pair: gain for pair, gain in gains.items() if not {a, b} & set(pair)}
        others = [other for other in alive if other not in (a, b)]
        new = max(alive) + 1
        alive = {**{other: alive[other] for other in others}, new: merged}
        for other in others:
            consider(other, new)
    return list(alive.values())
