"""Products of a CSR by scipy and NumPy, on one thread."""

import numpy as np
import scipy.sparse


class Product:
    """A matrix times dense columns.

    Args:
      matrix: indptr, indices, values.
      shape: (N, M).
      dense: float32[M, F].
      threads: Not used.
    """

    def __init__(self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], dense: np.ndarray, threads: int) -> None:
        indptr, indices, values = matrix
        self._matrix = scipy.sparse.csr_matrix((values, indices, indptr), shape=shape)
        self._dense = dense

    def run(self) -> np.ndarray:
        """float32[N, F]."""
        return self._matrix @ self._dense


class EdgeProducts:
    """a[row] . b[column] of every edge, as NumPy does it.

    Args:
      matrix: indptr, indices, values.
      shape: (N, M).
      a: float32[N, F].
      b: float32[M, F].
      threads: Not used.
    """

    def __init__(
        self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], a: np.ndarray, b: np.ndarray, threads: int
    ) -> None:
        indptr, self._columns, _ = matrix
        self._rows = np.repeat(np.arange(shape[0]), np.diff(indptr))
        self._a, self._b = a, b

    def run(self) -> np.ndarray:
        """float32[edges]."""
        return np.einsum("ef,ef->e", self._a[self._rows], self._b[self._columns])
