"""Graphs in one `.npz` file of plain arrays.

| array | what |
|---|---|
| `edge_src`, `edge_dst` | integers[E]: an edge goes from source to destination |
| `edge_weight` | number[E]; missing = 1 each |
| `num_nodes` | integer; missing = as many as have features or labels, or one more than the highest id |
| `features` | number[N, F] |
| `feat_indptr`, `feat_indices`, `feat_values`, `num_features` | the same in compressed rows |
| `labels` | integers[N], classes, -1 = not known; integers[N, T], 0 or 1 in each of T tasks, -1 = not known |
| `train_idx`, `val_idx`, `test_idx` | integers, the nodes of each split |

Only the edges are needed. Arrays of Python objects are refused: numpy would have to unpickle them, which runs code.
"""

import io
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalejax.data import packed_files
from scalejax.data.graphs.adjacency import Adjacency, as_float32
from scalejax.data.graphs.graph import NodeGraph, as_labels
from scalejax.errors import UserError

_BEYOND_INT64 = 2**63
_MOST_NODES = 2**31 - 1  # numbers of nodes are int32 on devices
_ALWAYS_NODES = 2**24
_NODES_PER_EDGE = 64
_ALWAYS_DENSE = 2**26
_DENSE_PER_VALUE = 10_000
_SPLITS = {"train": "train_idx", "validation": "val_idx", "test": "test_idx"}


def read_npz(path: str | pathlib.Path) -> NodeGraph:
    """Reads a graph.

    Raises:
      UserError: missing, damaged, with objects in it, or without edges.
    """
    file = one_file(path, "*.npz")
    return from_arrays(load_arrays(file), str(file))


def one_file(path: str | pathlib.Path, pattern: str) -> pathlib.Path:
    """The file, or the only one of a folder that matches.

    Raises:
      UserError: nothing is there, it is empty, or there are several.
    """
    from scalejax.data.tables.parquet_files import find_files  # pyarrow takes 0.3 s to import

    files = find_files(path, pattern)
    if len(files) > 1:
        raise UserError(f"{path}: holds {len(files)} files, and a graph is one. Name it, for example {files[0]}.")
    return files[0]


def write_npz(path: str | pathlib.Path, graph: NodeGraph) -> None:
    """Writes a graph so that `read_npz` gives it back, rows of edges sorted by destination."""
    a = graph.adjacency
    arrays: dict[str, Any] = {"edge_src": a.indices, "edge_dst": a.rows, "num_nodes": np.int64(graph.num_nodes)}
    optional = {"edge_weight": a.values, "features": graph.features, "labels": graph.labels}
    optional |= {_SPLITS[split]: nodes for split, nodes in graph.splits.items()}
    arrays |= {name: array for name, array in optional.items() if array is not None}
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    pathlib.Path(path).write_bytes(data.getvalue())


def load_arrays(file: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an npz.

    Raises:
      UserError: damaged, or with objects in it.
    """
    try:
        return packed_files.read_npz(file)
    except (ValueError, OSError) as error:
        raise UserError(
            f"{file}: is not a complete npz of plain numbers ({error}). Arrays of objects are pickles and "
            "are not read; write plain numbers, or copy the file again."
        ) from error


def from_arrays(arrays: Mapping[str, np.ndarray], where: str) -> NodeGraph:
    """A graph from the arrays that the module describes.

    Raises:
      UserError: an array is missing, or they contradict one another.
    """
    for name in ("edge_src", "edge_dst"):
        if name not in arrays:
            raise UserError(
                f"{where} has no array {name!r}, only {', '.join(arrays)}. Write edges as edge_src, edge_dst."
            )
    try:
        senders, receivers = arrays["edge_src"], arrays["edge_dst"]
        nodes = nodes_of(_stated(arrays), senders, receivers)
        weights = _numbers(arrays, "edge_weight") if "edge_weight" in arrays else None
        adjacency = Adjacency.from_edges(senders, receivers, shape=(nodes, nodes), values=weights)
        return NodeGraph(
            adjacency,
            features=_features(arrays, nodes),
            labels=as_labels(_integers(arrays, "labels")) if "labels" in arrays else None,
            splits={split: _nodes(arrays, name) for split, name in _SPLITS.items() if name in arrays},
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def nodes_of(stated: np.ndarray | int | None, senders: np.ndarray, receivers: np.ndarray) -> int:
    """The stated number of nodes, or one more than the highest id.

    Raises:
      UserError: what is stated is no number of nodes, or there are so many for the edges that memory would go to nodes
        that nothing is known of.
    """
    if stated is None:
        ends = [int(array.max()) for array in (senders, receivers) if array.size and array.dtype.kind in "iu"]
        nodes = max(0, max(ends, default=-1) + 1)
    else:
        number = np.asarray(stated)
        if number.size != 1 or number.dtype.kind not in "iu" or number.item() < 0:
            raise UserError(f"num_nodes must be one whole number of at least 0; got {stated}.")
        nodes = int(number.item())
    if nodes > min(_MOST_NODES, max(_ALWAYS_NODES, _NODES_PER_EDGE * senders.size)):
        raise UserError(
            f"{nodes:,} nodes are too many for {senders.size:,} edges: wanted at most {_NODES_PER_EDGE} an edge above "
            f"{_ALWAYS_NODES:,}, and fewer than 2**31. Number nodes from 0 without gaps (np.unique(ids, "
            "return_inverse=True))."
        )
    return nodes


def _stated(arrays: Mapping[str, np.ndarray]) -> np.ndarray | int | None:
    """The number of nodes as the file says it, in words or by the rows of what it knows of them."""
    if "num_nodes" in arrays:
        return arrays["num_nodes"]
    if "feat_indptr" in arrays:
        return arrays["feat_indptr"].size - 1
    known = [arrays[name] for name in ("features", "labels") if name in arrays]
    return next((array.shape[0] for array in known if array.ndim), None)


def _features(arrays: Mapping[str, np.ndarray], nodes: int) -> np.ndarray | None:
    if "features" in arrays:
        return _numbers(arrays, "features")
    if "feat_indptr" not in arrays:
        return None
    for name in ("feat_indices", "feat_values"):
        if name not in arrays:
            raise UserError(f"has feat_indptr and no {name}. Write all three, or `features`.")
    indptr, columns = _integers(arrays, "feat_indptr"), _integers(arrays, "feat_indices")
    try:
        width = nodes_of(arrays.get("num_features"), columns, columns)
    except UserError as error:
        raise UserError(f"the width of features: {error}") from error
    if nodes * width > max(_ALWAYS_DENSE, _DENSE_PER_VALUE * columns.size):
        raise UserError(f"features of {nodes:,} nodes would be {width:,} wide, of which {columns.size:,} are not 0.")
    try:
        rows = Adjacency(indptr, columns, _numbers(arrays, "feat_values"), (nodes, width))
    except UserError as error:
        raise UserError(f"features in compressed rows do not fit together, as {error}") from error
    dense = np.zeros((nodes, width), np.float32)
    with np.errstate(over="ignore"):  # sums beyond float32 are infinite, which a graph refuses
        np.add.at(dense, (rows.rows, rows.indices), rows.weights())
    return dense


def _numbers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """float32 of an array."""
    return as_float32(arrays[name], name)


def _integers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """int64 of an array, which may hold whole numbers as floats."""
    array = arrays[name]
    if array.dtype.kind not in "iuf":
        raise UserError(f"{name} must be whole numbers; got {array.dtype}.")
    if array.dtype.kind == "f" and not (whole := is_whole(array)).all():
        raise UserError(f"{name} must be whole numbers; got {array[~whole][0]} among them.")
    if array.size and not (array.min() >= -_BEYOND_INT64 and array.max() < _BEYOND_INT64):
        raise UserError(f"{name} must be whole numbers below 2**63; got {array.min()} to {array.max()}.")
    return array.astype(np.int64)


def is_whole(array: np.ndarray) -> np.ndarray:
    """bool of the same shape: which numbers are finite and have no fraction."""
    return np.isfinite(array) & (array == np.floor(array))


def _nodes(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The nodes of a split."""
    if arrays[name].dtype.kind == "b" or arrays[name].ndim != 1:
        raise UserError(
            f"{name} must be numbers of nodes, integers[K]; got {arrays[name].dtype}{list(arrays[name].shape)}. Of a "
            "mask write np.flatnonzero(mask)."
        )
    return _integers(arrays, name)
