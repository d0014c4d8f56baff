"""Graphs from objects of other libraries, known by their attributes: nothing of theirs is imported."""

from typing import Any

import numpy as np

from scalejax.data.graphs import npz
from scalejax.data.graphs.adjacency import Adjacency, as_float32
from scalejax.data.graphs.graph import NodeGraph
from scalejax.errors import UserError

_MASKS = {"train_mask": "train_idx", "val_mask": "val_idx", "test_mask": "test_idx"}


def from_scipy(matrix: Any) -> Adjacency:
    """A sparse matrix of SciPy, of any format: row i reads from the columns of its entries.

    Where matrix[i, j] means an edge from i to j, pass matrix.T.

    Args:
      matrix: number[N, M]. Entries of 0 that are stored are edges of weight 0; bool = edges without weights.
    Raises:
      UserError: it is no sparse matrix, or an entry is not finite in float32.
    """
    csr = matrix.tocsr() if hasattr(matrix, "tocsr") else matrix
    if not all(hasattr(csr, name) for name in ("indptr", "indices", "data", "shape")) or len(csr.shape) != 2:
        raise UserError(
            f"from_scipy: matrix must be a sparse matrix, with tocsr() or indptr, indices and data; got "
            f"{type(matrix).__name__}. Of a dense one: scipy.sparse.csr_array(matrix)."
        )
    data = np.asarray(csr.data)
    values = None if data.dtype.kind == "b" else as_float32(data, "from_scipy: data")
    rows, columns = csr.shape
    return Adjacency(np.array(csr.indptr, np.int64), np.array(csr.indices, np.int64), values, (int(rows), int(columns)))


def from_pyg(data: object) -> NodeGraph:
    """A `torch_geometric.data.Data`, or what has its attributes: the graph that an npz of the same arrays gives.

    Args:
      data: `edge_index` int[2, E], sources and destinations. If there: `edge_weight` number[E], `x` number[N, F], `y`
        whole numbers [N] or [N, 1], classes, or [N, T], tasks; `train_mask`, `val_mask`, `test_mask` bool[N];
        `num_nodes`. Tensors are copied from wherever they are.
    Raises:
      UserError: there is no `edge_index`, a mask is not bool[N], or arrays contradict one another.
    """
    edges = _array(data, "edge_index")
    if edges is None or edges.ndim != 2 or edges.shape[0] != 2:
        got = "none" if edges is None else list(edges.shape)
        raise UserError(
            f"from_pyg: data must have edge_index [2, E]; got {got}. Undo transforms such as ToSparseTensor, or take "
            "one graph of a data set (dataset[0])."
        )
    arrays = {"edge_src": edges[0], "edge_dst": edges[1]}
    for theirs, ours in {
        "edge_weight": "edge_weight",
        "x": "features",
        "y": "labels",
        "num_nodes": "num_nodes",
    }.items():
        if (array := _array(data, theirs)) is not None:
            arrays[ours] = array
    if "labels" in arrays and arrays["labels"].shape[1:] == (1,):
        arrays["labels"] = arrays["labels"][:, 0]
    for mask, split in _MASKS.items():
        if (array := _array(data, mask)) is not None:
            if array.dtype.kind != "b" or array.ndim != 1:
                raise UserError(
                    f"from_pyg: {mask} must be bool[N]; got {array.dtype}{list(array.shape)}. Of several splits choose "
                    f"one: data.{mask} = data.{mask}[:, 0]."
                )
            arrays[split] = np.flatnonzero(array)
    return npz.from_arrays(arrays, "from_pyg")


def _array(data: object, name: str) -> np.ndarray | None:
    value = getattr(data, name, None)
    if value is None:
        return None
    for step in ("detach", "cpu", "numpy"):  # of a tensor
        value = getattr(value, step)() if hasattr(value, step) else value
    return np.asarray(value)
