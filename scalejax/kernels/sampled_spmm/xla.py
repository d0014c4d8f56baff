"""Products with sparse matrices by XLA's own gathers, in blocks whose gathered rows stay small.

The matrix is summed in the bins of `balance`; picked edges are a dense block of slots already.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax import compat
from scalejax.kernels.sampled_spmm.balance import Balance, reduce_rows, reduce_slots, rows_of_runs
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.sampling import Ell
from scalejax.kernels.sampled_spmm.sparse_plan import SparsePlan

_GATHERED = 1 << 20
"""Gathered values that a block may hold."""

_EDGES = 8192
"""Edges of a block of `sddmm` on a CPU, whose gathered rows then stay in its cache."""


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]], in the bins of `balance`."""
    features = h.shape[1]

    def sum_runs(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        def sum_run(run: tuple[jax.Array, jax.Array]) -> jax.Array:
            start, count = run
            slot = lax.iota(start.dtype, slots)
            inside = slot < count
            edges = jnp.where(inside, start + slot, 0)
            values = None if csr.values is None else csr.values.at[edges].get(mode="promise_in_bounds")
            return _weighted(h, csr.indices.at[edges].get(mode="promise_in_bounds"), inside, values, dtype)

        return _in_blocks(sum_run, (starts, counts), _GATHERED // (slots * features))

    return reduce_rows(balance, sum_runs)


def sddmm(csr: Csr, row_ids: jax.Array, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[e] = a[row_ids[e]] . b[indices[e]]."""
    if compat.platform() != "cpu":
        return (a[row_ids].astype(dtype) * b[csr.indices].astype(dtype)).sum(axis=1)
    a, b = a.astype(dtype), b.astype(dtype)
    ones = jnp.ones(a.shape[1], dtype)

    def dot(edge: tuple[jax.Array, jax.Array]) -> jax.Array:
        left, right = (x.at[i].get(mode="promise_in_bounds") for x, i in zip((a, b), edge, strict=True))
        # A sum would be added one by one; a product with ones runs in vectors.
        return lax.dot(left * right, ones)

    return _in_blocks(dot, (row_ids, csr.indices), _EDGES)


def reduce_edges(plan: SparsePlan, values: jax.Array, reduction: Literal["sum", "max"]) -> jax.Array:
    """[N, F]: values [nnz, F] of the edges of each row, reduced; 0 or -inf for a row without any."""
    if compat.platform() == "cpu":
        # Scatters of few values with sorted places are fast, and in order, on CPUs alone.
        reduce = jax.ops.segment_sum if reduction == "sum" else jax.ops.segment_max
        return reduce(values, plan.row_ids, plan.shape[0], indices_are_sorted=True)

    def reduce_runs(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        return reduce_slots(*rows_of_runs(values, starts, counts, slots), reduction)

    return reduce_rows(plan.balance, reduce_runs, reduction)


def picked_sum(ell: Ell, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the filled slots k of row r of values[r, k] * h[indices[r, k]]."""

    def sum_row(row: tuple[jax.Array, ...]) -> jax.Array:
        indices, inside, *values = row
        return _weighted(h, indices, inside, values[0] if values else None, dtype)

    rows = (ell.indices, ell.filled()) if ell.values is None else (ell.indices, ell.filled(), ell.values)
    return _in_blocks(sum_row, rows, _GATHERED // (ell.width * h.shape[1]))


def picked_sum_gradients(
    ell: Ell, h: jax.Array, grads: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Gradients of h [M, F] and of the values [N, S], slot by slot: sums of one column are added in order of slots."""
    filled = ell.filled()
    values = jnp.ones(filled.shape, dtype) if ell.values is None else ell.values.astype(dtype)

    def of_slot(sums: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        indices, inside, value = slot
        sums = sums.at[jnp.where(inside, indices, h.shape[0])].add(grads * value[:, None], mode="drop")
        picked = h.at[indices].get(mode="promise_in_bounds").astype(dtype)
        return sums, jnp.where(inside, (picked * grads).sum(axis=1), 0)

    start = jnp.zeros(h.shape, dtype)
    d_h, d_values = lax.scan(of_slot, start, (ell.indices.T, filled.T, values.T))
    return d_h, d_values.T


def _weighted(
    h: jax.Array, indices: jax.Array, inside: jax.Array, values: jax.Array | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The sum over slots of rows of h times the values of their edges."""
    rows = h.at[indices].get(mode="promise_in_bounds").astype(dtype)
    return reduce_slots(rows if values is None else rows * values.astype(dtype)[:, None], inside)


def _in_blocks(function: Callable[..., jax.Array], rows: tuple[jax.Array, ...], block: int) -> jax.Array:
    """`function` of every row, at most `block` rows at a time."""
    if rows[0].shape[0] <= block:
        return jax.vmap(function)(rows)
    return lax.map(function, rows, batch_size=max(1, block))
