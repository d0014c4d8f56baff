"""Products of a CSR by torch on a CPU."""

import warnings

import numpy as np
import torch


def csr(matrix: tuple[np.ndarray, ...], shape: tuple[int, int], threads: int) -> torch.Tensor:
    """(row starts, columns, values) as a matrix, and the number of threads that products with it take."""
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        arrays = (torch.from_numpy(array) for array in matrix)
        # Drawn edges have columns in no order, and some twice; products do not mind, the check would.
        return torch.sparse_csr_tensor(*arrays, size=shape, check_invariants=False)


class Product:
    """A matrix times dense columns; arguments as in `scipy_sparse.Product`, with the number of CPU threads."""

    def __init__(self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], dense: np.ndarray, threads: int) -> None:
        self._matrix, self._dense = csr(matrix, shape, threads), torch.from_numpy(dense)

    def run(self) -> np.ndarray:
        """float32[N, F]."""
        with torch.no_grad():
            return (self._matrix @ self._dense).numpy()


class EdgeProducts:
    """a[row] . b[column] of every edge by `sampled_addmm`; arguments as in `scipy_sparse.EdgeProducts`."""

    def __init__(
        self, matrix: tuple[np.ndarray, ...], shape: tuple[int, int], a: np.ndarray, b: np.ndarray, threads: int
    ) -> None:
        self._matrix = csr(matrix, shape, threads)
        self._a, self._b = torch.from_numpy(a), torch.from_numpy(b).T

    def run(self) -> np.ndarray:
        """float32[edges]."""
        with torch.no_grad():
            return torch.sparse.sampled_addmm(self._matrix, self._a, self._b, beta=0.0).values().numpy()
