"""`Adjacency`: which node reads from which, in compressed rows, on the host.

A row is a destination and a column a source: row i lists the nodes that i aggregates. The order of columns inside a row
is the order of the edges as they were given, and it matters: a kernel that samples the first S columns sees those.
"""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from scalejax.errors import UserError

Normalization = Literal["symmetric", "right"]


@dataclasses.dataclass(frozen=True, eq=False)
class Adjacency:
    """A sparse matrix in compressed rows.

    Attributes:
      indptr: int64[N + 1], where each row begins.
      indices: int64[E], columns.
      values: float32[E], or None where every edge has weight 1.
      shape: (N, M), destinations and sources.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        indptr, indices = self.indptr, self.indices
        if indptr.shape != (self.shape[0] + 1,) or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
            raise UserError(
                f"Adjacency: indptr must have {self.shape[0] + 1} entries that begin with 0 and never fall; got "
                f"{indptr.shape[0]} from {indptr[0] if indptr.size else 'nothing'} on. Build it with "
                "Adjacency.from_edges."
            )
        if indices.shape != (int(indptr[-1]),):
            raise UserError(f"Adjacency: indices must have indptr[-1] = {indptr[-1]} entries; got {indices.shape}.")
        if indices.size and not 0 <= indices.min() <= indices.max() < self.shape[1]:
            raise UserError(
                f"Adjacency: indices must lie in [0, {self.shape[1]}); got {indices.min()} to {indices.max()}. Give "
                "the true number of nodes, or number nodes from 0."
            )
        if self.values is not None and self.values.shape != indices.shape:
            raise UserError(f"Adjacency: values must be one per edge, {indices.shape}; got {self.values.shape}.")
        if self.values is not None and not np.isfinite(self.values).all():
            bad = int(np.argmax(~np.isfinite(self.values)))
            row = int(np.searchsorted(indptr, bad, side="right")) - 1
            raise UserError(
                f"Adjacency: values must be finite; that of the edge from {indices[bad]} to {row} is "
                f"{self.values[bad]}. Leave the edge out, or give it a weight."
            )

    @classmethod
    def from_edges(
        cls,
        senders: ArrayLike,
        receivers: ArrayLike,
        *,
        shape: tuple[int, int],
        values: ArrayLike | None = None,
    ) -> "Adjacency":
        """Sorts edges by receiver; those of one receiver keep their order, and repeats stay.

        Args:
          senders: integers[E], sources.
          receivers: integers[E], destinations.
          shape: (N, M), destinations and sources.
          values: number[E], or None for 1 each.
        Raises:
          UserError: lengths differ, ids are no integers or out of range.
        """
        s, r = _ids(senders, "senders", shape[1]), _ids(receivers, "receivers", shape[0])
        if s.size != r.size:
            raise UserError(f"from_edges: senders and receivers must be equally long; got {s.size} and {r.size}.")
        order = np.argsort(r, kind="stable")
        weights = None if values is None else as_float32(np.asarray(values), "values")
        if weights is not None and weights.shape != s.shape:
            raise UserError(f"from_edges: values must be one per edge, {s.shape}; got {weights.shape}.")
        indptr = np.zeros(shape[0] + 1, np.int64)
        np.cumsum(np.bincount(r, minlength=shape[0]), out=indptr[1:])
        return cls(indptr, s[order], None if weights is None else weights[order], shape)

    @property
    def num_edges(self) -> int:
        """Edges, repeats counted."""
        return self.indices.size

    @property
    def degrees(self) -> np.ndarray:
        """int64[N], edges of each row."""
        return np.diff(self.indptr)

    @property
    def rows(self) -> np.ndarray:
        """int64[E], the row of each edge."""
        return np.repeat(np.arange(self.shape[0]), self.degrees)

    def weights(self) -> np.ndarray:
        """float32[E], ones where there are no values."""
        return np.ones(self.num_edges, np.float32) if self.values is None else self.values

    def with_reverse(self) -> "Adjacency":
        """The edges in both directions, columns sorted, each pair once; of repeats the largest weight counts."""
        self._check_square("with_reverse")
        nodes, rows = self.shape[0], self.rows
        key = np.concatenate([rows * nodes + self.indices, self.indices * nodes + rows])
        if self.values is None:
            pairs, values = np.unique(key), None
        else:
            pairs, place = np.unique(key, return_inverse=True)
            values = np.full(pairs.size, -np.inf, np.float32)
            np.maximum.at(values, place, np.concatenate([self.values, self.values]))
        return Adjacency.from_edges(pairs % nodes, pairs // nodes, shape=self.shape, values=values)

    def with_self_loops(self) -> "Adjacency":
        """Every row with a loop: one of weight 1 is put at the end of rows that have none."""
        self._check_square("with_self_loops")
        rows = self.rows
        missing = np.setdiff1d(np.arange(self.shape[0]), rows[rows == self.indices])
        values = None if self.values is None else np.concatenate([self.values, np.ones(missing.size, np.float32)])
        senders, receivers = np.concatenate([self.indices, missing]), np.concatenate([rows, missing])
        return Adjacency.from_edges(senders, receivers, shape=self.shape, values=values)

    def without_self_loops(self) -> "Adjacency":
        """The edges between two different nodes."""
        rows = self.rows
        keep = rows != self.indices
        values = None if self.values is None else self.values[keep]
        return Adjacency.from_edges(self.indices[keep], rows[keep], shape=self.shape, values=values)

    def normalized(self, kind: Normalization) -> "Adjacency":
        """The same edges with normalised weights; degrees are sums of the weights of a row, 0 where it is empty.

        Args:
          kind: "symmetric" = D^-1/2 A D^-1/2 (Kipf and Welling, 2017; with `with_self_loops` before it their matrix),
            by the degrees of rows on both sides, as PyG has it. "right" = D^-1 A: the mean over a row, as DGL calls it.
        Raises:
          UserError: no such kind; "symmetric" of a matrix that is not square, or with a degree below 0.
        """
        weights, rows = self.weights(), self.rows
        degrees = np.bincount(rows, weights, minlength=self.shape[0])  # float64
        with np.errstate(divide="ignore"):
            if kind == "symmetric":
                self._check_square("normalized")
                if degrees.min(initial=0) < 0:
                    bad = int(np.argmin(degrees))
                    raise UserError(
                        f"normalized: the weights of every row must add up to at least 0, whose root is taken; those "
                        f'of row {bad} give {degrees[bad]:g}. Use kind "right", or weights of one sign.'
                    )
                root = np.where(degrees > 0, degrees, np.inf) ** -0.5
                scaled = root[rows] * weights * root[self.indices]
            elif kind == "right":
                scaled = weights / np.where(degrees != 0, degrees, np.inf)[rows]
            else:
                raise UserError(f"normalized: kind must be 'symmetric' or 'right'; got {kind!r}.")
        return dataclasses.replace(self, values=scaled.astype(np.float32))

    def _check_square(self, what: str) -> None:
        if self.shape[0] != self.shape[1]:
            raise UserError(f"{what}: the matrix must be square; got {self.shape}.")


def as_float32(values: np.ndarray, name: str) -> np.ndarray:
    """float32 of numbers, NaN and infinities as they are.

    Raises:
      UserError: they are no numbers, or a finite one is infinite in float32.
    """
    if values.dtype.kind not in "biuf":
        raise UserError(f"{name} must be numbers; got {values.dtype}.")
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    if values.dtype.kind == "f" and values.dtype.itemsize > 4 and (lost := np.isinf(found) & np.isfinite(values)).any():
        place = np.argwhere(lost)[0].tolist()
        where = ", ".join(f"{word} {n}" for word, n in zip(("row", "column", "number"), place, strict=False))
        raise UserError(
            f"{name}: {values[tuple(place)]:g} in {where} is beyond float32, whose largest number is 3.4e38. Scale the "
            "column, or take its logarithm."
        )
    return found


def _ids(values: ArrayLike, name: str, below: int) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in ("iu" if array.size else "biuf"):  # [] is a list of floats
        raise UserError(f"from_edges: {name} must be integers[E]; got {array.dtype}{list(array.shape)}.")
    if array.size and not 0 <= array.min() <= array.max() < below:
        raise UserError(
            f"from_edges: {name} must lie in [0, {below}); got {array.min()} to {array.max()}. Give the true number of "
            "nodes, or number nodes from 0."
        )
    return array.astype(np.int64)
