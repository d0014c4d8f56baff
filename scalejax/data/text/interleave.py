"""The order of sources in a mixture: fixed, and every prefix of it holds the right shares.

After t rows, source k with share w_k has given floor(w_k t) or ceil(w_k t) rows, so it is never a whole row off. That
asks of its row j (from 0) to come after row floor(j / w_k) - 1 of the mixture and before row ceil((j + 1) / w_k): jobs
with release times and deadlines, which earliest-deadline-first always meets (Baruah et al., "Proportionate progress",
1996; the bound is that of Tijdeman's chairman assignment, 1980).

Shares are fractions of whole numbers, so the order repeats after their sum: one period is computed, and any row is
found from there without looking at those before it.
"""

import fractions
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.errors import UserError

MAX_PERIOD = 1_000_000
"""Most rows of a period: shares to a millionth."""


class Interleave:
    """The order of sources by weight; weights may change at given rows.

    Args:
      weights: One per source, at least 0; only their ratios count.
      schedule: (from_row, weights) in ascending order: from that row on, these weights hold, and their shares are
        counted from there.
    Raises:
      UserError: weights that are negative, all 0, not one per source or too fine, or rows out of order.
    """

    def __init__(self, weights: Sequence[float], schedule: Sequence[tuple[int, Sequence[float]]] = ()) -> None:
        starts = [0, *(row for row, _ in schedule)]
        if any(b <= a for a, b in itertools.pairwise(starts)):
            raise UserError(f"data.schedule must begin after row 0 and ascend; got rows {starts[1:]}.")
        names = ["data.sources", *(f"data.schedule from row {row}" for row, _ in schedule)]
        given = [weights, *(later for _, later in schedule)]
        for name, each in zip(names, given, strict=True):
            if len(each) != len(weights):
                raise UserError(f"{name}: wanted one weight for each of {len(weights)} sources; got {tuple(each)}.")
        self.sources = len(weights)
        self._starts = np.array(starts, np.int64)
        self._phases = [_Period(_whole(name, each)) for name, each in zip(names, given, strict=True)]
        # Rows that each source has given when a phase begins.
        taken = [np.zeros(self.sources, np.int64)]
        for phase, length in zip(self._phases, np.diff(self._starts).tolist(), strict=False):
            taken.append(taken[-1] + phase.counts(length))
        self._taken = np.stack(taken)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(source int64[M], position int64[M] in the source's own stream) of rows [start, stop) of the mixture."""
        rows = np.arange(start, stop)
        phase_of = np.searchsorted(self._starts, rows, side="right") - 1
        source, position = np.empty_like(rows), np.empty_like(rows)
        for p in np.unique(phase_of):
            here = np.flatnonzero(phase_of == p)
            source[here], inside = self._phases[p].rows(rows[here] - self._starts[p])
            position[here] = self._taken[p][source[here]] + inside
        return source, position


class _Period:
    """One period of the order for whole-number weights, computed when it is first asked for."""

    def __init__(self, weights: list[int]) -> None:
        self._weights = weights
        self._length = sum(weights)
        self._source = _earliest_deadline_first(weights)
        order = np.argsort(self._source, kind="stable")
        first = lengths_to_offsets(np.array(weights, np.int64))[:-1]
        self._rank = np.empty(self._length, np.int64)
        self._rank[order] = np.arange(self._length) - np.repeat(first, weights)

    def rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        period, inside = np.divmod(rows, self._length)
        source = self._source[inside].astype(np.int64)
        return source, period * np.array(self._weights, np.int64)[source] + self._rank[inside]

    def counts(self, rows: int) -> np.ndarray:
        """int64[K] rows of each source among the first `rows`."""
        period, inside = divmod(rows, self._length)
        part = np.bincount(self._source[:inside], minlength=len(self._weights))
        return period * np.array(self._weights, np.int64) + part


def _earliest_deadline_first(weights: list[int]) -> np.ndarray:
    """uint16[sum(weights)] source of each row of a period."""
    total = sum(weights)
    order = np.empty(total, np.uint16)
    # Of each source, the row that is next: waiting for its release, or released and sorted by deadline.
    waiting = [(0, k, 0) for k, weight in enumerate(weights) if weight]
    released: list[tuple[int, int, int]] = []
    for row in range(total):
        while waiting and waiting[0][0] <= row:
            _, k, j = heapq.heappop(waiting)
            heapq.heappush(released, (-(-(j + 1) * total // weights[k]), k, j))
        _, k, j = heapq.heappop(released)
        order[row] = k
        if j + 1 < weights[k]:
            heapq.heappush(waiting, ((j + 1) * total // weights[k], k, j + 1))
    return order


def _whole(name: str, weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of some weights, which are read as the decimals that they print as."""
    if any(not (math.isfinite(weight) and weight >= 0) for weight in weights) or not any(weights):
        raise UserError(f"{name}: weights must be at least 0, and one of them more; got {tuple(weights)}.")
    exact = [fractions.Fraction(repr(weight) if isinstance(weight, float) else weight) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > MAX_PERIOD:
        rounded = tuple(round(float(weight / sum(exact)), 4) for weight in exact)
        raise UserError(
            f"{name}: weights {tuple(weights)} are too fine: their order repeats only after {sum(whole):,} rows; "
            f"wanted at most {MAX_PERIOD:,}. Round them, for example to {rounded}."
        )
    return whole
