"""Sparse matrices in compressed rows: row = destination of messages, column = their source.

    indptr    0     2  2        5         row r holds the edges indptr[r] ... indptr[r + 1] - 1
    indices   0  3     1  1  2            column of each edge, in the order in which it was given

The order of columns inside a row is kept as given and never sorted: what sampling picks depends on it.
"""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from scalejax.errors import UserError
from scalejax.kernels.types import AnyArray

_INT32_MAX = 2**31 - 1

Stored = Any
"""Arrays of a graph: NumPy's on the host, JAX's in a program. A union of the two could be used as neither."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Csr:
    """A sparse matrix. Duplicate edges are summed, and rows may be empty.

    Attributes:
      indptr: int32[N + 1] or int64[N + 1], NumPy or JAX; non-decreasing from 0 to nnz.
      indices: int[nnz], NumPy or JAX; columns in [0, M).
      values: [nnz], real numbers; None = all ones.
      shape: (N, M).
    """

    indptr: Stored
    indices: Stored
    values: Stored = None
    shape: tuple[int, int] = dataclasses.field(kw_only=True, metadata={"static": True})

    @classmethod
    def from_edges(
        cls, senders: ArrayLike, receivers: ArrayLike, *, shape: tuple[int, int], values: ArrayLike | None = None
    ) -> "Csr":
        """Edges sender -> receiver, in any order; those of one receiver stay in the order given.

        Args:
          senders: int[E], columns in [0, M).
          receivers: int[E], rows in [0, N).
          shape: (N, M): receivers, senders.
          values: [E]; None = all ones.

        Raises:
          UserError: lengths differ, an index is no integer or out of range, or the shape is none.
        """
        _check_shape(shape)
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
        np.cumsum(np.bincount(receivers.astype(dtype), minlength=shape[0]), out=indptr[1:])
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
        """A scipy sparse matrix or array of two dimensions; columns stay in its order (`sort_indices` changes it).

        Raises:
          UserError: it is no such matrix.
        """
        if not hasattr(matrix, "tocsr") or len(matrix.shape) != 2:
            raise UserError(
                f"Csr.from_scipy: matrix must be a sparse matrix of two dimensions; got {type(matrix).__name__}. "
                "Pass scipy.sparse.csr_array(matrix), or use Csr.from_edges."
            )
        matrix = matrix.tocsr()
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        dtype = index_dtype(int(matrix.indices.size), shape)
        csr = cls(matrix.indptr.astype(dtype), matrix.indices.astype(dtype), np.asarray(matrix.data), shape=shape)
        return csr.check()

    @property
    def nnz(self) -> int:
        """The number of edges."""
        return self.indices.shape[0]

    def check_form(self) -> "Csr":
        """The same matrix, once the shapes and dtypes of its arrays are looked through, which may be traced.

        Raises:
          UserError: one of them does not fit.
        """
        _check_shape(self.shape)
        for name, array in (("indptr", self.indptr), ("indices", self.indices)):
            if not _is_array(array) or array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
                raise UserError(
                    f"Csr.check: {name} must be an integer vector of NumPy or JAX; got {_described(array)}. "
                    "Build the matrix with Csr.from_edges or Csr.from_scipy."
                )
        if self.indptr.shape[0] != self.shape[0] + 1:
            raise UserError(
                f"Csr.check: indptr must have length {self.shape[0] + 1}, shape[0] + 1; got {self.indptr.shape[0]}. "
                "Pass where each row begins, and the number of edges at the end."
            )
        values = self.values
        if values is not None and (not _is_array(values) or values.shape != self.indices.shape):
            raise UserError(
                f"Csr.check: values must be a vector of {self.nnz}, one for each edge; got {_described(values)}."
            )
        real = (jnp.bool_, jnp.integer, jnp.floating)
        if values is not None and not any(jnp.issubdtype(values.dtype, kind) for kind in real):
            raise UserError(f"Csr.check: values must be real numbers; got {values.dtype}. Convert them to float32.")
        return self

    def check(self) -> "Csr":
        """The same matrix, once looked through on the host.

        Raises:
          UserError: lengths do not fit, `indptr` decreases, a column is out of range, or there are more edges than the
            dtype of the indices can count.
        """
        self.check_form()
        for name, array in (("indptr", self.indptr), ("indices", self.indices)):
            if isinstance(array, Tracer):
                raise UserError(
                    f"Csr.check: {name} must be an array with values, not one that is traced; got {array}. "
                    "Check, and plan, outside of jax.jit."
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
        _check_range("indices", indices, self.shape[1], "shape[1], the number of columns")
        return self


def index_dtype(edges: int, shape: tuple[int, int]) -> type[np.signedinteger]:
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


def _integers(name: str, array: ArrayLike) -> np.ndarray:
    array = np.asarray(array)
    if array.shape == (0,):
        return array.astype(np.int32)  # an empty list has no dtype of its own
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"Csr.from_edges: {name} must be an integer vector; got {_described(array)}.")
    return array


def _check_shape(shape: tuple[int, int]) -> None:
    whole = isinstance(shape, tuple) and all(isinstance(count, int | np.integer) and count >= 0 for count in shape)
    if not whole or len(shape) != 2:
        raise UserError(f"Csr: shape must be (rows, columns), two whole numbers of at least 0; got {shape!r}.")


def _is_array(array: object) -> TypeGuard[AnyArray]:
    return isinstance(array, np.ndarray | jax.Array | jax.ShapeDtypeStruct)


def _described(array: object) -> str:
    return f"{array.dtype}{list(array.shape)}" if _is_array(array) else type(array).__name__


def _check_range(name: str, array: np.ndarray, bound: int, what: str) -> None:
    if array.size and (array.min() < 0 or array.max() >= bound):
        place = int(np.flatnonzero((array < 0) | (array >= bound))[0])
        raise UserError(
            f"Csr: {name} must be in [0, {bound}) ({what}); got {name}[{place}] = {array[place]}. "
            "Renumber the nodes, or pass the larger shape."
        )
