"""Graphs in one `.npz` file of plain arrays.

| array | what |
|---|---|
| `edge_src`, `edge_dst` | integers[E]: an edge goes from source to destination |
| `edge_weight` | number[E]; missing = 1 each |
| `num_nodes` | integer; missing = one more than the highest id |
| `features` | number[N, F] |
| `feat_indptr`, `feat_indices`, `feat_values`, `num_features` | the same in compressed rows |
| `labels` | integers[N], -1 = not known |
| `train_idx`, `val_idx`, `test_idx` | integers, the nodes of each split |

Only the edges are needed. Arrays of Python objects are refused: numpy would have to unpickle them, which runs code.
"""

import io
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalejax.data.graphs.adjacency import Adjacency
from scalejax.data.graphs.graph import NodeGraph
from scalejax.errors import UserError

_SPLITS = {"train": "train_idx", "validation": "val_idx", "test": "test_idx"}


def read_npz(path: str | pathlib.Path) -> NodeGraph:
    """Reads a graph.

    Raises:
      UserError: missing, damaged, with objects in it, or without edges.
    """
    from scalejax.data.parquet_files import find_files  # pyarrow takes 0.3 s to import

    (file,) = find_files(path, "*.npz")
    return from_arrays(load_arrays(file), str(file))


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
        # Opened here: numpy leaves a file that is no archive open.
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
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
    senders, receivers = arrays["edge_src"], arrays["edge_dst"]
    labels = arrays.get("labels")
    nodes = nodes_of(arrays.get("num_nodes"), senders, receivers)
    adjacency = Adjacency.from_edges(senders, receivers, shape=(nodes, nodes), values=arrays.get("edge_weight"))
    try:
        return NodeGraph(
            adjacency,
            features=_features(arrays, nodes, where),
            labels=None if labels is None else labels.astype(np.int32),
            splits={split: arrays[name].astype(np.int64) for split, name in _SPLITS.items() if name in arrays},
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def nodes_of(stated: np.ndarray | int | None, senders: np.ndarray, receivers: np.ndarray) -> int:
    """The stated number of nodes, or one more than the highest id."""
    if stated is not None:
        return int(stated)
    return int(max(senders.max(initial=-1), receivers.max(initial=-1))) + 1


def _features(arrays: Mapping[str, np.ndarray], nodes: int, where: str) -> np.ndarray | None:
    if "features" in arrays:
        return arrays["features"].astype(np.float32)
    if "feat_indptr" not in arrays:
        return None
    for name in ("feat_indices", "feat_values"):
        if name not in arrays:
            raise UserError(f"{where} has feat_indptr and no {name}. Write all three, or `features`.")
    columns = arrays["feat_indices"]
    width = int(arrays["num_features"]) if "num_features" in arrays else int(columns.max(initial=-1)) + 1
    rows = Adjacency(arrays["feat_indptr"].astype(np.int64), columns.astype(np.int64), None, (nodes, width))
    dense = np.zeros((nodes, width), np.float32)
    np.add.at(dense, (rows.rows, rows.indices), arrays["feat_values"].astype(np.float32))
    return dense
