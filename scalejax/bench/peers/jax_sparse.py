"""Products of a CSR by jax.experimental.sparse."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse


class Product:
    """A matrix times dense columns; arguments as in `scipy_sparse.Product`, threads are XLA's."""

    def __init__(self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], dense: np.ndarray, threads: int) -> None:
        indptr, indices, values = (jnp.asarray(array) for array in matrix)
        self._matrix = sparse.BCSR((values, indices, indptr), shape=shape)
        self._dense = jnp.asarray(dense)
        self._product = jax.jit(lambda matrix, dense: matrix @ dense)

    def run(self) -> np.ndarray:
        """float32[N, F]."""
        return np.asarray(jax.block_until_ready(self._product(self._matrix, self._dense)))


class EdgeProducts:
    """a[row] . b[column] of every edge, as two gathers and a sum; arguments as in `scipy_sparse.EdgeProducts`."""

    def __init__(
        self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], a: np.ndarray, b: np.ndarray, threads: int
    ) -> None:
        indptr, indices, _ = matrix
        rows = np.repeat(np.arange(shape[0], dtype=np.int32), np.diff(indptr))
        self._operands = jax.device_put((a, b, rows, indices))
        self._product = jax.jit(lambda a, b, rows, columns: (a[rows] * b[columns]).sum(axis=1))

    def run(self) -> np.ndarray:
        """float32[edges]."""
        return np.asarray(jax.block_until_ready(self._product(*self._operands)))
