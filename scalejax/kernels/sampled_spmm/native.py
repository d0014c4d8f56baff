"""The fastest products on CPUs, in float32 and float64: the CSR kernel that jax brings, or a loop of XLA over slots.

`jax.experimental.sparse` reaches the kernel for float32 without derivatives alone: bfloat16 and every gradient fall
back to scatters, some twenty times slower. Here features are widened first (they are few beside the edges), and the
derivative is the same kernel on the transpose, which the plan holds.

The kernel fills a result with zeros, and reads and writes its row again for every edge. Where rows have a few slots and
nearly all of these are filled, as picked edges do, XLA makes one loop of them that keeps a row in registers.
"""

import jax
import jax.experimental.sparse  # registers the kernel
import jax.numpy as jnp

from scalejax.kernels.sampled_spmm.balance import FEW_SLOTS, Balance
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.sampling import Ell


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]]; the kernel balances rows over threads."""
    if balance.slots is not None:
        return _sum_slots(*_slots_of(csr, balance.slots), h, dtype)
    values = jnp.ones(csr.nnz, dtype) if csr.values is None else csr.values.astype(dtype)
    shape = jax.ShapeDtypeStruct((csr.shape[0], h.shape[1]), dtype)
    kernel = jax.ffi.ffi_call("cpu_csr_sparse_dense_ffi", shape, vmap_method="sequential")
    return kernel(values, csr.indptr, csr.indices, h.astype(dtype))


def _slots_of(csr: Csr, slots: int) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(columns [S, N], values or None, which slots have an edge or None for all of them) of rows of at most S edges."""
    if csr.nnz == csr.shape[0] * slots:
        columns, values = (None if x is None else x.reshape(-1, slots).T for x in (csr.indices, csr.values))
        assert columns is not None
        return columns, values, None
    slot = jnp.arange(slots, dtype=csr.indptr.dtype)[:, None]
    inside = slot < csr.indptr[None, 1:] - csr.indptr[None, :-1]
    edges = jnp.where(inside, csr.indptr[None, :-1] + slot, 0)
    columns, values = (
        None if x is None else x.at[edges].get(mode="promise_in_bounds") for x in (csr.indices, csr.values)
    )
    assert columns is not None
    return columns, values, inside


def _sum_slots(
    columns: jax.Array, values: jax.Array | None, inside: jax.Array | None, h: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Slot after slot; an empty one counts for nothing, though what it reads may be NaN."""
    total = jnp.zeros((columns.shape[1], h.shape[1]), dtype)
    for slot in range(columns.shape[0]):
        rows = h.at[columns[slot]].get(mode="promise_in_bounds").astype(dtype)
        if values is not None:
            rows = rows * values[slot].astype(dtype)[:, None]
        total += rows if inside is None else jnp.where(inside[slot][:, None], rows, 0)
    return total


def picked_sum(ell: Ell, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the filled slots k of row r of values[r, k] * h[indices[r, k]]; many are squeezed first."""
    if ell.width <= FEW_SLOTS:
        values = None if ell.values is None else ell.values.T
        return _sum_slots(jnp.clip(ell.indices.T, 0, ell.shape[1] - 1), values, ell.filled().T, h, dtype)
    rows, width = ell.indices.shape
    kind = ell.indices.dtype
    counts = jnp.clip(ell.counts, 0, width)  # nobody checked those of traced picks, and the kernel checks nothing
    indptr = jnp.concatenate([jnp.zeros(1, kind), jnp.cumsum(counts, dtype=kind)])
    place = jnp.arange(rows * width, dtype=kind)
    row = jnp.repeat(jnp.arange(rows, dtype=kind), counts, total_repeat_length=rows * width)
    slot = jnp.minimum(place - indptr[row], width - 1)
    # Past the last edge the kernel reads nothing; it would read memory that is not its own at a column out of range.
    indices = jnp.clip(ell.indices[row, slot], 0, ell.shape[1] - 1)
    values = None if ell.values is None else ell.values[row, slot]
    return spmm(Csr(indptr, indices, values, shape=ell.shape), Balance((), None, None), h, dtype)
