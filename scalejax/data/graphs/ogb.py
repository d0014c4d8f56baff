"""Node property data sets of the Open Graph Benchmark, as its downloads unpack.

    ogbn_arxiv/
      raw/edge.csv.gz                  source,destination, no header
      raw/num-node-list.csv.gz         one number        raw/num-edge-list.csv.gz    one number
      raw/node-feat.csv.gz             optional          raw/node-label.csv.gz       optional
      raw/edge-feat.csv.gz             optional
      raw/data.npz, raw/node-label.npz                   instead of those: edge_index, num_nodes_list, node_feat, ...
      split/time/train.csv.gz, valid.csv.gz, test.csv.gz

Where nodes have no features and edges do, as in ogbn-proteins, a node gets the mean over the edges that it reads, which
is what OGB's own baselines take. Years and species are left alone.
"""

import dataclasses
import pathlib
import zlib
from typing import Literal

import numpy as np

from scalejax.data.graphs import npz
from scalejax.data.graphs.adjacency import Adjacency, as_float32
from scalejax.data.graphs.graph import NodeGraph, as_labels
from scalejax.data.packed_files import open_unpacked
from scalejax.errors import UserError, check_one_of

Edges = Literal["as-written", "both-ways"]
_FILES = {"train": "train", "validation": "valid", "test": "test"}


def read_ogb(folder: str | pathlib.Path, *, edges: Edges, split: str | None = None) -> NodeGraph:
    """Reads one graph.

    Args:
      folder: With `raw/`, and `split/` if there is one.
      edges: "as-written" = one direction each, which is right for the citations of ogbn-arxiv; "both-ways" = the
        reverse of each edge is added after it, which is what OGB does for undirected graphs, of which files hold one
        direction (ogbn-products, ogbn-proteins).
      split: Name of the folder in `split/`; None = the only one.
    Returns:
      The graph. Labels of one column are classes, int32[N]; several columns are those of binary tasks, int32[N, T]; a
      missing label is -1.
    Raises:
      UserError: a file is missing, damaged, or contradicts another.
    """
    place = pathlib.Path(folder)
    raw = place / "raw"
    if not place.is_dir():
        raise UserError(f"{place}: is not a folder. Set data.path to the unpacked folder of an OGB data set.")
    if not raw.is_dir():
        raise UserError(f"{place}: has no folder raw/. Give the unpacked folder of an OGB data set.")
    check_one_of("read_ogb: edges", edges, ("as-written", "both-ways"))
    found = _binary(raw) if (raw / "data.npz").exists() else _text(raw)
    pairs = found.pairs
    try:
        npz.nodes_of(found.nodes, pairs[:, 0], pairs[:, 1])
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    if edges == "both-ways":
        # Each edge and its reverse side by side, as OGB numbers them.
        pairs = np.stack([pairs, pairs[:, ::-1]], axis=1).reshape(-1, 2)
    try:
        adjacency = Adjacency.from_edges(pairs[:, 0], pairs[:, 1], shape=(found.nodes, found.nodes))
        features = found.features
        if features is None and found.edge_features is not None:
            features = _mean_of_edges(found, found.edge_features, edges)
        return NodeGraph(adjacency, features, found.labels, _splits(place, split))
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Raw:
    """What files hold: int64[E, 2] sources and destinations, nodes, features of nodes and of edges, labels."""

    pairs: np.ndarray
    nodes: int
    features: np.ndarray | None
    edge_features: np.ndarray | None
    labels: np.ndarray | None


def _mean_of_edges(found: _Raw, features: np.ndarray, edges: Edges) -> np.ndarray:
    """float32[N, F]: the mean over the edges that a node reads, zeros where there are none."""
    if features.ndim != 2 or features.shape[0] != found.pairs.shape[0]:
        raise UserError(
            f"features of edges must be one row for each of the {found.pairs.shape[0]} edges; got "
            f"{list(features.shape)}. Unpack the data set again."
        )
    ends = [found.pairs[:, 1]] if edges == "as-written" else [found.pairs[:, 1], found.pairs[:, 0]]
    total = np.zeros((features.shape[1], found.nodes))
    for readers in ends:
        for column, numbers in enumerate(features.T):
            total[column] += np.bincount(readers, numbers, minlength=found.nodes)
    counts = sum(np.bincount(readers, minlength=found.nodes) for readers in ends)
    return (total / np.maximum(counts, 1)).T.astype(np.float32)


def _text(raw: pathlib.Path) -> _Raw:
    pairs = _integers(raw / "edge.csv.gz")
    nodes, count = (_single(_csv(raw / f"num-{what}-list.csv.gz"), raw, what) for what in ("node", "edge"))
    if pairs.shape != (count, 2):
        raise UserError(
            f"{raw / 'edge.csv.gz'}: must have {count} lines of 2 numbers (num-edge-list.csv.gz); got "
            f"{pairs.shape[0]} of {pairs.shape[1]}. Unpack the data set again."
        )
    features, of_edges, labels = (raw / f"{what}.csv.gz" for what in ("node-feat", "edge-feat", "node-label"))
    return _Raw(
        pairs,
        nodes,
        as_float32(_csv(features), str(features)) if features.exists() else None,
        as_float32(_csv(of_edges), str(of_edges)) if of_edges.exists() and not features.exists() else None,
        _labels(_csv(labels), labels) if labels.exists() else None,
    )


def _binary(raw: pathlib.Path) -> _Raw:
    arrays = npz.load_arrays(raw / "data.npz")
    for name in ("edge_index", "num_nodes_list"):
        if name not in arrays:
            raise UserError(f"{raw / 'data.npz'} has no array {name!r}, only {', '.join(arrays)}.")
    if arrays["edge_index"].shape[:1] != (2,) or arrays["edge_index"].ndim != 2:
        raise UserError(f"{raw / 'data.npz'}: edge_index must be [2, E]; got {arrays['edge_index'].shape}.")
    nodes = _single(arrays["num_nodes_list"].reshape(-1, 1), raw, "node")
    features, of_edges = (
        as_float32(arrays[name], f"{raw / 'data.npz'}: {name}") if name in arrays else None
        for name in ("node_feat", "edge_feat")
    )
    labels = None
    if (file := raw / "node-label.npz").exists():
        found = npz.load_arrays(file)
        if "node_label" not in found:
            raise UserError(f"{file} has no array 'node_label', only {', '.join(found)}.")
        labels = _labels(found["node_label"], file)
    return _Raw(arrays["edge_index"].T, nodes, features, of_edges, labels)


def _labels(values: np.ndarray, file: pathlib.Path) -> np.ndarray:
    if values.dtype.kind not in "iuf":
        raise UserError(f"{file}: must hold classes, whole numbers; got {values.dtype}.")
    numbers = np.where(np.isnan(values), -1, values)
    if not (whole := npz.is_whole(numbers)).all():
        raise UserError(f"{file}: must hold classes, whole numbers; got {numbers[~whole][0]} among them.")
    if numbers.size and not abs(numbers).max() < 2**63:
        raise UserError(f"{file}: must hold classes below 2**31; got {numbers.max()} among them.")
    labels = numbers.astype(np.int64)
    try:
        return as_labels(labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _single(values: np.ndarray, raw: pathlib.Path, what: str) -> int:
    if values.shape != (1, 1):
        raise UserError(f"{raw}: holds {values.shape[0]} graphs ({what} list). Only data sets of one graph are read.")
    if values.dtype.kind not in "iuf" or not npz.is_whole(values).all() or not 0 <= values[0, 0] < 2**53:
        raise UserError(f"{raw}: wanted a number of {what}s; got {values[0, 0]}. Unpack the data set again.")
    return int(values[0, 0])


def _splits(place: pathlib.Path, name: str | None) -> dict[str, np.ndarray]:
    folder = place / "split"
    choices = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if name is None and len(choices) > 1:
        raise UserError(f"{folder}: there are several splits: {', '.join(choices)}. Name one, split={choices[0]!r}.")
    if name is None and not choices:
        return {}
    name = name or choices[0]
    if name not in choices:
        raise UserError(f"{folder}: there is no split {name!r}; it has {', '.join(choices) or 'none'}.")
    return {ours: _integers(folder / name / f"{theirs}.csv.gz")[:, 0] for ours, theirs in _FILES.items()}


def _integers(file: pathlib.Path) -> np.ndarray:
    """int64[lines, columns] of a gzipped table of whole numbers."""
    table = _csv(file)
    if (whole := npz.is_whole(table)).all():
        return table.astype(np.int64)
    line, column = np.argwhere(~whole)[0]
    raise UserError(f"{file}, line {line + 1}: {table[line, column]:g} is no node. Unpack the data set again.")


def _csv(file: pathlib.Path) -> np.ndarray:
    """float64[lines, columns] of a gzipped table of numbers without a header; an empty field is NaN."""
    from pyarrow import ArrowException, types
    from pyarrow import csv as arrow_csv

    if not file.exists():
        raise UserError(f"{file}: is missing. Unpack the data set again.")
    try:
        with open_unpacked(file) as text:
            table = arrow_csv.read_csv(text, read_options=arrow_csv.ReadOptions(autogenerate_column_names=True))
        for name, kind in zip(table.column_names, table.schema.types, strict=True):
            if not (types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind)):
                raise ValueError(f"column {name} holds {kind}")
        return np.stack([column.to_numpy().astype(np.float64) for column in table.columns], axis=1)
    except (OSError, EOFError, zlib.error, ArrowException, ValueError) as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file}: is no complete gzipped table of numbers ({what}). Unpack it again.") from error
