"""NVIDIA's product of CSR and dense, through jax; its workspace is planned when the program is compiled."""

import jax

from scalejax import compat
from scalejax.errors import UnsupportedError
from scalejax.kernels.sampled_spmm.balance import Balance
from scalejax.kernels.sampled_spmm.csr import Csr


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]]."""
    if h.dtype != dtype:
        raise UnsupportedError(
            f'spmm: implementation="cusparse" takes float32 and float64; got {h.dtype}. Leave implementation out, or '
            "widen h."
        )
    if csr.nnz > csr.shape[0] * csr.shape[1]:
        raise UnsupportedError(
            f'spmm: implementation="cusparse" takes no more edges than the matrix has places; got {csr.nnz} in '
            f'{csr.shape[0]} x {csr.shape[1]}. Add up edges that are there twice, or name implementation="xla".'
        )
    values = jax.numpy.ones(csr.nnz, dtype) if csr.values is None else csr.values.astype(dtype)
    return compat.cusparse_product(values, csr.indices, csr.indptr, h, csr.shape)
