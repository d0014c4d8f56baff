"""Sparse matrices in compressed rows: row = destination of messages, column = their source.

    indptr    0     2  2        5         row r holds the edges indptr[r] ... indptr[r + 1] - 1
    indices   0  3     1  1  2            column of each edge, in the order in which it was given

The order of columns inside a row is kept as given and never sorted: what sampling picks depends on it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from scalejax.errors import UserError

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Csr:
    """A sparse matrix. Duplicate edges are summed, and rows may be empty.

    Attributes:
      indptr: int32[N + 1] or int64[N + 1], NumPy or JAX; non-decreasing from 0 to nnz.
      indices: int[nnz] in the dtype of `indptr`, columns in [0, M).
      values: float[nnz]; None = all ones.
      shape: (N, M).
    """

    indptr: Any
    indices: Any
    values: Any = None
    shape: tuple[int, int] = dataclasses.field(kw_only=True, metadata={"static": True})

    @classmethod
    def from_edges(cls, senders: Any, receivers: Any, *, shape: tuple[int, int], values: Any = None) -> "Csr":
        """Edges sender -> receiver, in any order; those of one receiver stay in the order given.

        Args:
          senders: int[E], columns in [0, M).
          receivers: int[E], rows in [0, N).
          shape: (N, M): receivers, senders.
          values: [E]; None = all ones.

        Raises:
          UserError: lengths differ, or an index is no integer or out of range.
        """
        senders, receivers = _integers("senders", senders), _integers("receivers", receivers)
        if senders.shape != receivers.shape:
            raise UserError(
                f"Csr.from_edges: senders and receivers must have one length; got {senders.size} and {receivers.size}."
                " Pass edge_index[0] and edge_index[1]."
            )
        _check_range("receivers", receivers, shape[0], "shape[0], the number of rows")
        _check_range("senders", senders, shape[1], "shape[1], the number of columns")
        dtype = index_dtype(receivers.size, shape)
        order = np.argsort(receivers, kind="stable")
        indptr = np.zeros(shape[0] + 1, dtype)
        np.cumsum(np.bincount(receivers, minlength=shape[0]), out=indptr[1:])
        if values is not None:
            values = np.asarray(values)
            if values.shape != receivers.shape:
                raise UserError(
                    f"Csr.from_edges: values must be a vector of {receivers.size}, one for each edge; "
                    f"got shape {values.shape}."
                )
            values = values[order]
        return cls(indptr, senders[order].astype(dtype), values, shape=shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> "Csr":
        """A scipy sparse matrix or array of two dimensions; columns stay in its order (`sort_indices` changes it)."""
        matrix = matrix.tocsr()
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        dtype = index_dtype(int(matrix.indices.size), shape)
        csr = cls(matrix.indptr.astype(dtype), matrix.indices.astype(dtype), np.asarray(matrix.data), shape=shape)
        return csr.check()

    @property
    def nnz(self) -> int:
        """Edges."""
        return self.indices.shape[0]

    def check(self) -> "Csr":
        """The same matrix, once looked through on the host.

        Raises:
          UserError: lengths do not fit, `indptr` decreases, a column is out of range, or there are more edges than the
            dtype of the indices can count.
        """
        for name, array in (("indptr", self.indptr), ("indices", self.indices)):
            if isinstance(array, Tracer):
                raise UserError(
                    f"Csr.check: {name} must be an array with values, not one that is traced; got {array}. "
                    "Check, and plan, outside of jax.jit."
                )
            if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                raise UserError(
                    f"Csr.check: {name} must be an integer vector; got {array.dtype}{list(array.shape)}. "
                    "Build the matrix with Csr.from_edges or Csr.from_scipy."
                )
        rows, columns = self.shape
        if self.indptr.shape[0] != rows + 1:
            raise UserError(
                f"Csr.check: indptr must have length {rows + 1}, shape[0] + 1; got {self.indptr.shape[0]}. "
                "Pass where each row begins, and the number of edges at the end."
            )
        if self.values is not None and self.values.shape != self.indices.shape:
            raise UserError(
                f"Csr.check: values must be a vector of {self.nnz}, one for each edge; got shape {self.values.shape}."
            )
        index_dtype(self.nnz, self.shape)
        indptr, indices = np.asarray(self.indptr), np.asarray(self.indices)
        if indptr[0] != 0 or indptr[-1] != self.nnz:
            raise UserError(
                f"Csr.check: indptr must begin with 0 and end with {self.nnz}, the number of indices; got {indptr[0]} "
                f"and {indptr[-1]}. Pass cumulative counts, not counts."
            )
        falls = np.flatnonzero(indptr[1:] < indptr[:-1])
        if falls.size:
            row = int(falls[0])
            raise UserError(
                f"Csr.check: indptr must not decrease; got indptr[{row}] = {indptr[row]} and indptr[{row + 1}] = "
                f"{indptr[row + 1]}. Sort the edges by receiver, or use Csr.from_edges."
            )
        _check_range("indices", indices, columns, "shape[1], the number of columns")
        return self


def index_dtype(edges: int, shape: tuple[int, int]) -> Any:
    """int32 where it can count edges, rows and columns, else int64.

    Raises:
      UserError: int64 is needed and JAX has no 64-bit types in force.
    """
    if max(edges, *shape) <= _INT32_MAX:
        return np.int32
    if not jax.config.read("jax_enable_x64"):
        raise UserError(
            f"Csr: {edges} edges of a matrix {shape[0]} x {shape[1]} are more than int32 can count (2^31 - 1). "
            'Turn 64-bit indices on with jax.config.update("jax_enable_x64", True), or cut the rows into blocks.'
        )
    return np.int64


def _integers(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"Csr.from_edges: {name} must be an integer vector; got {array.dtype}{list(array.shape)}.")
    return array


def _check_range(name: str, array: np.ndarray, bound: int, what: str) -> None:
    if array.size and (array.min() < 0 or array.max() >= bound):
        place = int(np.flatnonzero((array < 0) | (array >= bound))[0])
        raise UserError(
            f"Csr: {name} must be in [0, {bound}) ({what}); got {name}[{place}] = {array[place]}. "
            "Renumber the nodes, or pass the larger shape."
        )
