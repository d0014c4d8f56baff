"""Rows of very different lengths as blocks of nearly equal work.

Rows of more than 256 edges are cut into parts of 256. Rows and parts are then put into bins by length: 4, 16, 64 or 256
slots. A bin is a dense block of slots; only places and lengths are kept, not the edges themselves. The parts of a cut
row are added up in a second pass over the sums of the first, which is the same operation on fewer items and cuts again
where there are more than 256 parts. Nothing is added in an order that depends on scheduling.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = (4, 16, 64, 256)
LONGEST = WIDTHS[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bin:
    """Runs of consecutive edges that fit `width` slots: int[R] where each starts and int32[R] its length."""

    starts: Any
    counts: Any
    width: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balance:
    """How to sum rows in bins.

    Attributes:
      bins: Their runs, one after another, are the places below.
      place: int[N]: the place of a row's run; one past the last for a row that is empty or cut.
      cut: Rows that consist of parts; None where there are none.
    """

    bins: tuple[Bin, ...]
    place: Any
    cut: "Cut | None"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cut:
    """int[H], ascending: the rows that are cut; int[P]: places of their parts, row by row; how to sum those."""

    rows: Any
    parts: Any
    balance: Balance


def balance_rows(indptr: np.ndarray) -> Balance:
    """Bins of the rows of a CSR, on the host."""
    degrees = np.diff(indptr)
    parts = -(-degrees // LONGEST)
    first = np.concatenate([[0], np.cumsum(parts)])
    row = np.repeat(np.arange(degrees.size), parts)
    rank = np.arange(row.size) - first[row]
    starts = indptr[row] + rank * LONGEST
    counts = np.minimum(indptr[row + 1] - starts, LONGEST)
    kind = np.searchsorted(WIDTHS, counts)
    order = np.argsort(kind, kind="stable")
    place = np.empty(row.size, np.int64)
    place[order] = np.arange(row.size)
    bins = []
    for number, width in enumerate(WIDTHS):
        runs = order[kind[order] == number]
        if runs.size:
            bins.append(Bin(starts[runs].astype(indptr.dtype), counts[runs].astype(np.int32), width))
    whole = np.full(degrees.size, row.size, indptr.dtype)
    single = parts == 1
    whole[single] = place[first[:-1][single]]
    rows = np.flatnonzero(parts > 1)
    cut = None
    if rows.size:
        inner = np.concatenate([[0], np.cumsum(parts[rows])]).astype(indptr.dtype)
        cut = Cut(rows.astype(indptr.dtype), place[parts[row] > 1].astype(indptr.dtype), balance_rows(inner))
    return Balance(tuple(bins), whole, cut)


def sum_rows(
    balance: Balance, sum_runs: Callable[[jax.Array, jax.Array, int], jax.Array], width: int, dtype: Any
) -> jax.Array:
    """[N, width]: sums of rows, from a function that sums runs of edges.

    Args:
      balance: Of the rows.
      sum_runs: (starts [R], counts [R], slots) -> [R, width], the sums of runs of at most that many edges.
      width: Numbers in a row.
      dtype: Of the sums.
    """
    sums = [sum_runs(b.starts, b.counts, b.width) for b in balance.bins]
    by_place = jnp.concatenate(sums) if sums else jnp.zeros((0, width), dtype)
    out = by_place.at[balance.place].get(mode="fill", fill_value=0)
    if balance.cut is None:
        return out
    parts = by_place[balance.cut.parts]

    def sum_parts(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        slot = jnp.arange(slots)[None, :]
        inside = slot < counts[:, None]
        picked = parts[jnp.where(inside, starts[:, None] + slot, 0)]  # R slots width
        return jnp.where(inside[:, :, None], picked, 0).sum(axis=1)

    whole = sum_rows(balance.cut.balance, sum_parts, width, dtype)
    return out.at[balance.cut.rows].set(whole, indices_are_sorted=True, unique_indices=True)
