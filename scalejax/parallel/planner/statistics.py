"""Statistics of the ids of each table: how many an example has, and how often they repeat.

    statistics = from_batches(tables, batches)          # measured
    statistics = assumed(tables, pooling_factor=10.0)   # made up, and said so

The number of *distinct* rows of a batch decides what an update costs. It is modelled by Zipf's law, which carries over
to other batch sizes: over R rows with exponent s, row k has probability p_k = k^-s / sum_j j^-s, and O occurrences
touch

    E[distinct] = sum_k 1 - (1 - p_k)^O

rows. `from_batches` chooses s such that this equals what it counted.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig

MOST_ZIPF = 8.0
"""Largest exponent that is fitted: 99.6 % of the occurrences are one row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zipf:
    """Popularity by rank. exponent 0 = all rows alike."""

    exponent: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.exponent <= MOST_ZIPF:
            raise UserError(f"Zipf: exponent must lie in [0, {MOST_ZIPF:g}]; got {self.exponent}.")

    def distinct_rows(self, occurrences: float, rows: int) -> float:
        """Expected number of distinct rows among so many occurrences."""
        return expected_distinct(occurrences, rows, self.exponent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """A batch of the planned size has `factor` occurrences per distinct row, as published statistics say it."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise UserError(f"Reuse: factor must be at least 1, every row used once; got {self.factor}.")

    def distinct_rows(self, occurrences: float, rows: int) -> float:
        """occurrences / factor, at most all rows."""
        return min(float(rows), occurrences / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Ids of one table.

    Attributes:
      table: Name of the table.
      pooling_factors: Mean number of ids of an example, one for each feature of the table, in their order there.
      popularity: How unevenly rows are used.
      positions: Positions that rows are spread over where a table is not pooled and its features are jagged, as
        `Categorical.max_length`, one for each feature; () = as many as ids.
    """

    table: str
    pooling_factors: tuple[float, ...]
    popularity: Zipf | Reuse
    positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.positions and (len(self.positions) != len(self.pooling_factors) or min(self.positions) < 1):
            raise UserError(
                f"TableStatistics {self.table!r}: positions must be one number, at least 1, for each of the "
                f"{len(self.pooling_factors)} features, or (); got {self.positions}."
            )
        if not all(math.isfinite(factor) and factor >= 0 for factor in self.pooling_factors):
            raise UserError(
                f"TableStatistics {self.table!r}: pooling_factors must be finite and not negative; got "
                f"{self.pooling_factors}."
            )

    @property
    def ids_per_example(self) -> float:
        """Occurrences in this table of one example, all features together."""
        return math.fsum(self.pooling_factors)


def assumed(
    tables: Sequence[TableConfig], *, pooling_factor: float = 1.0, popularity: Zipf | Reuse | None = None
) -> tuple[TableStatistics, ...]:
    """The same for all tables, where nothing was measured; Zipf's law with exponent 1.05 unless given."""
    popularity = popularity or Zipf(exponent=1.05)
    return tuple(
        TableStatistics(
            table=table.name, pooling_factors=(pooling_factor,) * len(table.features), popularity=popularity
        )
        for table in tables
    )


def from_batches(tables: Sequence[TableConfig], batches: Iterable[KeyedJagged]) -> tuple[TableStatistics, ...]:
    """Counts ids and distinct rows of sample batches.

    Distinct ids of a table with an id map count as rows, as if all had one; never more than there are.

    Args:
      tables: The tables; their features must be keys of the batches.
      batches: Some batches, best of the size that is planned for; at least one example in all.

    Raises:
      UserError: no example, a feature that the batches lack, or an id outside its table (one without an id map).
    """
    examples, count = 0, 0
    ids = {table.name: np.zeros(len(table.features)) for table in tables}
    distinct = dict.fromkeys(ids, 0)
    for batch in batches:
        count += 1
        examples += batch.num_examples
        for table in tables:
            values = []
            for f, feature in enumerate(table.features):
                if feature not in batch.keys:
                    raise UserError(
                        f"from_batches: table {table.name!r} has feature {feature!r}, which batch {count - 1} lacks; "
                        f"it has {', '.join(batch.keys)}. Give batches with all features."
                    )
                found = batch[feature].values
                bounded = table.id_map is None  # any integer is an id of a map
                if bounded and found.size and not 0 <= found.min() <= found.max() < table.rows:
                    raise UserError(
                        f"from_batches: feature {feature!r} has an id outside [0, {table.rows}) in batch {count - 1}. "
                        f"Correct the data or the rows of table {table.name!r}."
                    )
                ids[table.name][f] += found.size
                values.append(found)
            distinct[table.name] += min(table.rows, len(np.unique(np.concatenate(values))))
    if not examples:
        raise UserError(f"from_batches: needs at least one example; got {count} batches without any.")
    return tuple(
        TableStatistics(
            table=table.name,
            pooling_factors=tuple(float(total) / examples for total in ids[table.name]),
            popularity=Zipf(exponent=fit_zipf(ids[table.name].sum() / count, distinct[table.name] / count, table.rows)),
        )
        for table in tables
    )


def fit_zipf(occurrences: float, distinct: float, rows: int) -> float:
    """The exponent in [0, 8] with which `expected_distinct` comes closest to `distinct`."""
    low, high = 0.0, MOST_ZIPF
    if occurrences <= 1 or rows == 1 or distinct >= expected_distinct(occurrences, rows, low):
        return low
    if distinct <= expected_distinct(occurrences, rows, high):
        return high
    while high - low > 1e-4:
        middle = (low + high) / 2
        if expected_distinct(occurrences, rows, middle) > distinct:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def expected_distinct(occurrences: float, rows: int, exponent: float) -> float:
    """sum_k 1 - (1 - p_k)^occurrences over `rows` ranks of Zipf's law.

    The first 1,024 ranks are summed one by one, the others in about 50 groups per factor of e, each at its mean.
    """
    if occurrences <= 0:
        return 0.0
    if rows == 1:
        return min(1.0, occurrences)
    single = np.arange(1.0, min(rows, 1024) + 1)
    weight, size = single**-exponent, np.ones_like(single)
    if rows > 1024:
        groups = math.ceil(50 * math.log(rows / 1024)) + 1
        edges = np.unique(np.round(np.geomspace(1024, rows, groups)))
        begin, end = edges[:-1] + 0.5, edges[1:] + 0.5  # k^-s is summed as an integral from k - 1/2 to k + 1/2
        if abs(exponent - 1.0) < 1e-6:  # the limit of what follows
            mass = np.log(end / begin)
        else:
            mass = (end ** (1 - exponent) - begin ** (1 - exponent)) / (1 - exponent)
        size = np.concatenate([size, end - begin])
        weight = np.concatenate([weight, mass / (end - begin)])
    p = np.minimum(weight / (weight * size).sum(), 1 - 1e-12)
    return float((size * -np.expm1(occurrences * np.log1p(-p))).sum())
