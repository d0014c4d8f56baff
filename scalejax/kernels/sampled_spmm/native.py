"""The fastest products on CPUs, in float32 and float64: the CSR kernel that jax brings, or a loop of XLA over slots.

`jax.experimental.sparse` reaches the kernel for float32 without derivatives alone: bfloat16 and every gradient fall
back to scatters, some twenty times slower. Here features are widened first (they are few beside the edges), and the
derivative is the same kernel on the transpose, which the plan holds.

The kernel fills a result with zeros, and reads and writes its row again for every edge. Picked edges lie in slots, and
XLA makes one loop of several that keeps a row in registers. That wins where rows have a few and nearly all are filled,
and where filled ones would have to be squeezed together for the kernel first, unless there are many features to read.
"""

import functools

import jax
import jax.experimental.sparse  # pyright: ignore[reportUnusedImport] (registers the kernel)
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.sampled_spmm.balance import FEW_SLOTS, Balance
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.sampling import Ell

_TOGETHER = 8
"""Slots in one turn of a loop over many: 2 and 4 were slower, 16 were no faster."""

_NARROW = 128
"""Features up to which reading an empty slot costs less than squeezing it out, 18 ns a slot."""


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]]; the kernel balances rows over threads."""
    if balance.slots is not None:
        return _sum_slots(*_slots_of(csr, balance.slots), h, dtype)
    values = jnp.ones(csr.nnz, dtype) if csr.values is None else csr.values.astype(dtype)
    shape = jax.ShapeDtypeStruct((csr.shape[0], h.shape[1]), dtype)
    kernel = jax.ffi.ffi_call("cpu_csr_sparse_dense_ffi", shape, vmap_method="sequential")
    return kernel(values, csr.indptr, csr.indices, h.astype(dtype))


def _slots_of(csr: Csr, slots: int) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """(columns [N, S], values or None, edges of each row) of rows of at most S edges."""
    starts = csr.indptr[:-1]

    def apart(x: jax.Array) -> jax.Array:
        if csr.nnz == csr.shape[0] * slots:  # they lie so
            return x.reshape(-1, slots)
        # Slots that a row does not have read some other edge, which `_sum_slots` counts for nothing.
        edges = jnp.minimum(starts[:, None] + jnp.arange(slots, dtype=starts.dtype)[None, :], csr.nnz - 1)
        return x.at[edges].get(mode="promise_in_bounds")

    return apart(csr.indices), None if csr.values is None else apart(csr.values), csr.indptr[1:] - starts


def _sum_slots(
    columns: jax.Array, values: jax.Array | None, counts: jax.Array, h: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Slot after slot; an empty one counts for nothing, though what it reads may be NaN."""

    def add(total: jax.Array, slot: jax.typing.ArrayLike) -> jax.Array:
        column = lax.dynamic_index_in_dim(columns, slot, 1, keepdims=False)
        rows = h.at[column].get(mode="promise_in_bounds").astype(dtype)
        if values is not None:
            rows *= lax.dynamic_index_in_dim(values, slot, 1, keepdims=False).astype(dtype)[:, None]
        return total + jnp.where((slot < counts)[:, None], rows, 0)

    def add_group(group: jax.Array, total: jax.Array) -> jax.Array:
        return functools.reduce(add, [group * _TOGETHER + slot for slot in range(_TOGETHER)], total)

    total = jnp.zeros((columns.shape[0], h.shape[1]), dtype)
    done = 0
    if columns.shape[1] > FEW_SLOTS:
        groups = columns.shape[1] // _TOGETHER
        total, done = lax.fori_loop(0, groups, add_group, total), groups * _TOGETHER
    return functools.reduce(add, range(done, columns.shape[1]), total)


def picked_sum(ell: Ell, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the filled slots k of row r of values[r, k] * h[indices[r, k]]."""
    columns = jnp.clip(ell.indices, 0, ell.shape[1] - 1)  # nobody checked those of traced picks
    counts = jnp.clip(ell.counts, 0, ell.width)
    if ell.width <= FEW_SLOTS or h.shape[1] <= _NARROW:
        return _sum_slots(columns, ell.values, counts, h, dtype)
    return spmm(_squeezed(columns, ell.values, counts, ell.shape), Balance((), None, None), h, dtype)


def _squeezed(columns: jax.Array, values: jax.Array | None, counts: jax.Array, shape: tuple[int, int]) -> Csr:
    """The filled slots of [N, S] together, and behind them what the kernel does not read."""
    rows, width = columns.shape
    kind = columns.dtype
    indptr = jnp.concatenate([jnp.zeros(1, kind), jnp.cumsum(counts, dtype=kind)])
    row = jnp.repeat(jnp.arange(rows, dtype=kind), counts, total_repeat_length=rows * width)
    slot = jnp.minimum(jnp.arange(rows * width, dtype=kind) - indptr[row], width - 1)
    return Csr(indptr, columns[row, slot], None if values is None else values[row, slot], shape=shape)
