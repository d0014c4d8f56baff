"""The CSR kernel that jax brings for CPUs: the fastest product there, in float32 and float64.

`jax.experimental.sparse` reaches it for float32 without derivatives alone: bfloat16 and every gradient fall back to
scatters, some twenty times slower. Here features are widened first (they are few beside the edges), and the derivative
is the same kernel on the transpose, which the plan holds.
"""

import jax
import jax.experimental.sparse  # registers the kernel
import jax.numpy as jnp

from scalejax.kernels.sampled_spmm.balance import Balance
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.sampling import Ell


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]]; the kernel balances rows over threads."""
    values = jnp.ones(csr.nnz, dtype) if csr.values is None else csr.values.astype(dtype)
    shape = jax.ShapeDtypeStruct((csr.shape[0], h.shape[1]), dtype)
    kernel = jax.ffi.ffi_call("cpu_csr_sparse_dense_ffi", shape, vmap_method="sequential")
    return kernel(values, csr.indptr, csr.indices, h.astype(dtype))


def picked_sum(ell: Ell, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the filled slots k of row r of values[r, k] * h[indices[r, k]], empty slots squeezed out."""
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
