"""Rows of very different lengths as blocks of nearly equal work.

Rows of more than 256 edges are cut into parts of 256. Rows and parts are then put into bins by length: 4, 16, 64 or 256
slots. A bin is a dense block of slots; only places and lengths are kept, not the edges themselves. The parts of a cut
row are added up in a second pass over the sums of the first, which is the same operation on fewer items and cuts again
where there are more than 256 parts. Nothing is added in an order that depends on scheduling.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.sampled_spmm.csr import Stored

WIDTHS = (4, 16, 64, 256)
LONGEST = WIDTHS[-1]
FEW_SLOTS = 16
"""Rows of at most so many slots may be summed slot after slot, in a program with a gather for each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bin:
    """Runs of consecutive edges that fit `width` slots: int[R] where each starts and int32[R] its length."""

    starts: Stored
    counts: Stored
    width: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balance:
    """How to sum rows in bins.

    Attributes:
      bins: Their runs, one after another, are the places below.
      place: int[N]: the place of a row's run; one past the last for a row that is empty or cut.
      cut: Rows that consist of parts; None where there are none.
      slots: The most edges of a row, where these are few and nearly all rows have as many; else None.
    """

    bins: tuple[Bin, ...]
    place: Stored
    cut: "Cut | None"
    slots: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cut:
    """int[H], ascending: the rows that are cut; int[P]: places of their parts, row by row; how to sum those."""

    rows: Stored
    parts: Stored
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


def reduce_rows(
    balance: Balance,
    reduce_runs: Callable[[jax.Array, jax.Array, int], jax.Array],
    reduction: Literal["sum", "max"] = "sum",
) -> jax.Array:
    """[N, F]: rows reduced, from a function that reduces runs of edges; 0 or -inf for a row without edges.

    Args:
      balance: Of the rows, of which one at least has an edge.
      reduce_runs: (starts [R], counts [R], slots) -> [R, F], reductions of runs of at most that many edges.
      reduction: What it does.
    """
    neutral = 0.0 if reduction == "sum" else -jnp.inf
    by_place = jnp.concatenate([reduce_runs(b.starts, b.counts, b.width) for b in balance.bins])
    out = by_place.at[balance.place].get(mode="fill", fill_value=neutral)
    if balance.cut is None:
        return out
    parts = by_place[balance.cut.parts]

    def reduce_parts(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        return reduce_slots(*rows_of_runs(parts, starts, counts, slots), reduction)

    whole = reduce_rows(balance.cut.balance, reduce_parts, reduction)
    return out.at[balance.cut.rows].set(whole, mode="drop", indices_are_sorted=True, unique_indices=True)


def rows_of_runs(values: jax.Array, starts: jax.Array, counts: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """([R, slots, F], bool[R, slots]): values [E, F] of runs of edges, and which slots a run has."""
    slot = jnp.arange(slots, dtype=starts.dtype)[None, :]
    inside = slot < counts[:, None]
    return values[jnp.where(inside, starts[:, None] + slot, 0)], inside


def reduce_slots(rows: jax.Array, inside: jax.Array, reduction: Literal["sum", "max"] = "sum") -> jax.Array:
    """[..., F] of [..., slots, F]; what is not inside counts for nothing, though it may be NaN."""
    if reduction == "sum":
        return jnp.where(inside[..., None], rows, 0).sum(axis=-2)
    return jnp.where(inside[..., None], rows, -jnp.inf).max(axis=-2)


def align_balances(balances: Sequence[Balance]) -> list[Balance]:
    """The same balances with arrays of the same sizes, on the host, so that devices can run one program on them.

    Runs that are added have no edges, and rows that are added are none (cut ones) or empty. At least one balance has an
    edge.
    """
    lengths = [{b.width: len(b.starts) for b in balance.bins} for balance in balances]
    room = {w: most for w in WIDTHS if (most := max(length.get(w, 0) for length in lengths))}
    rows = max(len(balance.place) for balance in balances)
    dtype = balances[0].place.dtype
    total = sum(room.values())
    cuts = [balance.cut for balance in balances]
    inner: list[Balance | None] = [None] * len(cuts)
    if any(cuts):
        empty = Balance((), np.zeros(0, dtype), None)
        inner = [*align_balances([empty if cut is None else cut.balance for cut in cuts])]
    most_cut = max(0 if cut is None else len(cut.rows) for cut in cuts)
    most_parts = max(0 if cut is None else len(cut.parts) for cut in cuts)
    aligned = []
    for balance, length, cut, of_parts in zip(balances, lengths, cuts, inner, strict=True):
        moved = np.full(sum(length.values()) + 1, total, dtype)  # the last place is that of no run
        bins, old, new = [], 0, 0
        for width, most in room.items():
            count = length.get(width, 0)
            moved[old : old + count] = np.arange(new, new + count)
            nothing = Bin(np.zeros(0, dtype), np.zeros(0, np.int32), width)
            found = next((b for b in balance.bins if b.width == width), nothing)
            bins.append(Bin(_filled(found.starts, most, 0), _filled(found.counts, most, 0), width))
            old, new = old + count, new + most
        both = None
        if of_parts is not None:
            cut_rows = np.zeros(0, dtype) if cut is None else cut.rows
            parts = np.zeros(0, dtype) if cut is None else moved[cut.parts]
            none = rows + np.arange(most_cut - len(cut_rows), dtype=dtype)  # beyond the rows: ascending and distinct
            both = Cut(np.concatenate([cut_rows, none]), _filled(parts, most_parts, 0), of_parts)
        aligned.append(Balance(tuple(bins), _filled(moved[balance.place], rows, total), both))
    return aligned


def _filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(length - len(array), value, array.dtype)])
