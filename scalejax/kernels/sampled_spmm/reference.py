"""The definitions in plain jax.numpy, written to be believed: every row looks at every edge."""

import jax
import jax.numpy as jnp

from scalejax.kernels.sampled_spmm.balance import Balance
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.sampling import Ell


def _row_of_edge(csr: Csr) -> jax.Array:
    edges = jnp.arange(csr.nnz)
    return (edges[:, None] >= csr.indptr[None, 1:]).sum(axis=1)  # the number of rows that end before the edge


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]]."""
    terms = h.astype(dtype)[csr.indices]  # E F
    if csr.values is not None:
        terms = terms * csr.values.astype(dtype)[:, None]
    member = _row_of_edge(csr)[None, :] == jnp.arange(csr.shape[0])[:, None]  # N E
    return jnp.where(member[:, :, None], terms[None], 0).sum(axis=1)


def sddmm(csr: Csr, row_ids: jax.Array, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[e] = a[row of e] . b[indices[e]]."""
    return (a.astype(dtype)[_row_of_edge(csr)] * b.astype(dtype)[csr.indices]).sum(axis=1)


def picked_sum(ell: Ell, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the filled slots k of row r of values[r, k] * h[indices[r, k]]."""
    terms = h.astype(dtype)[ell.indices]  # N S F
    if ell.values is not None:
        terms = terms * ell.values.astype(dtype)[:, :, None]
    return jnp.where(ell.filled()[:, :, None], terms, 0).sum(axis=1)
