"""Labelled nodes as a data set for training: all of a split at once, or mini-batches with sampled neighbours."""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from scalejax.data.graphs.adjacency import Normalization
from scalejax.data.graphs.graph import NodeGraph, row_normalized
from scalejax.data.graphs.neighbors import Neighborhood, NeighborSampler
from scalejax.data.graphs.ogb import Edges, read_ogb
from scalejax.data.graphs.planetoid import read_planetoid
from scalejax.data.permutation import Permutation
from scalejax.data.reading import BatchSource, check_sizes, check_start, read_ahead
from scalejax.errors import UserError

_ORDER = 0x6EA9


@dataclasses.dataclass(frozen=True)
class GraphSchema:
    """What a model must know of a graph.

    Attributes:
      nodes: N.
      features: Width of the features, F.
      outputs: What a model says of a node, numbers: one for each class, or one for each task.
      weighted: Whether edges have weights.
      labels: "class" = a node is of one of the classes; "tasks" = it has a label, yes or no, in each of the tasks.
    """

    nodes: int
    features: int
    outputs: int
    weighted: bool
    labels: Literal["class", "tasks"] = "class"


@dataclasses.dataclass(frozen=True)
class NodeBatch:
    """B labelled nodes; one node is one example.

    Attributes:
      nodes: int32[B].
      labels: int32[B], classes; or int32[B, T], 0 or 1 for each task, -1 where that is not known.
      neighborhoods: What surrounds each part of them, parts being consecutive and equally large, of the parts of this
        process; () = the model reads the whole graph.
      epoch: Of the first of them in the training stream; 0 of splits that are scored.
    """

    nodes: np.ndarray
    labels: np.ndarray
    neighborhoods: tuple[Neighborhood, ...] = ()
    epoch: int = 0

    def __len__(self) -> int:
        return self.nodes.shape[0]


class NodeDataSet:
    """The nodes of a graph that have labels, by split.

    Args:
      graph: Ready for the model: loops added, edges normalised; with features, labels and splits.
      batch_size: Nodes of a mini-batch; all of the training split where there are no fan-outs.
      fanouts: Neighbours that a layer reads, outermost first (`NeighborSampler`); () = the whole graph in every step.
      seed: Of the order of mini-batches and of their neighbours.
      threads: Threads that draw neighbours.
    Raises:
      UserError: something is missing from the graph.
    """

    def __init__(
        self,
        graph: NodeGraph,
        *,
        batch_size: int = 512,
        fanouts: tuple[int, ...] = (),
        seed: int = 0,
        threads: int = 2,
    ) -> None:
        check_sizes(batch_size, threads)
        if graph.features is None or graph.labels is None:
            raise UserError("the graph needs features and labels to train on. Write them into its file (data.path).")
        if "train" not in graph.splits or graph.splits["train"].size == 0:
            raise UserError("the graph has no training nodes. Give it a split, train_idx in an npz.")
        self.graph, self.seed, self.threads, self.fanouts = graph, seed, threads, fanouts
        self.batch_size = batch_size if fanouts else graph.splits["train"].size
        self._features, self._labels = graph.features, graph.labels
        self._sampler = NeighborSampler(graph.adjacency, fanouts, seed=seed) if fanouts else None

    @property
    def schema(self) -> GraphSchema:
        """Sizes of the graph."""
        weighted = self.graph.adjacency.values is not None
        kind, outputs = (
            ("class", self.graph.num_classes) if self._labels.ndim == 1 else ("tasks", self._labels.shape[1])
        )
        return GraphSchema(self.graph.num_nodes, self._features.shape[1], outputs, weighted, kind)

    def num_examples(self, split: str) -> int:
        """Nodes of a split."""
        return self.graph.splits[split].size if split in self.graph.splits else 0

    @property
    def nodes_per_step(self) -> int:
        """Nodes whose features a step of training has room for."""
        return self.graph.num_nodes if self._sampler is None else self._sampler.capacities(self.batch_size)[0]

    def fingerprint(self) -> str:
        """Hex digest of the graph, the fan-outs and the order (not of the batch size)."""
        return hashlib.sha256(f"{self.graph.fingerprint()} {self.fanouts} {self.seed}".encode()).hexdigest()

    def whole(self, split: str) -> NodeBatch:
        """All nodes of a split, in the order of the split, to be scored on the whole graph."""
        return self._batch(self.graph.splits[split])

    def train_batches(
        self, *, start_example: int = 0, parts: int = 1, local_parts: Sequence[int] | None = None
    ) -> Iterator[NodeBatch]:
        """Batches of the training stream from a position on, without end.

        Without fan-outs a batch is the whole split. With them, example i of the stream is node i % n of epoch i // n,
        in the order of that epoch's seeded permutation, so a batch may hold a node twice where two epochs meet.

        Args:
          start_example: Position in the stream.
          parts: Neighbourhoods that a mini-batch comes in, for as many devices; its size is a multiple. A node draws
            the same neighbours in any number of parts.
          local_parts: Which of them this process draws, None = all; nodes and labels are those of all.
        """
        check_start(start_example)
        drawn = range(parts) if local_parts is None else local_parts
        source = BatchSource(lambda k: self._make(start_example + k * self.batch_size, parts, drawn), sys.maxsize)
        return read_ahead(source, self.threads)

    def _make(self, start: int, parts: int, drawn: Sequence[int]) -> NodeBatch:
        nodes = self.graph.splits["train"]
        if self._sampler is None:
            return self._batch(nodes, epoch=start // nodes.size)
        epochs, places = np.divmod(start + np.arange(self.batch_size), nodes.size)
        chosen = np.empty(self.batch_size, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = nodes[Permutation(nodes.size, _ORDER, self.seed, int(epoch))(places[here])]
        around = tuple(self._sampler.sample(part, start) for part in chosen.reshape(parts, -1)[list(drawn)])
        return self._batch(chosen, around, int(epochs[0]))

    def _batch(self, nodes: np.ndarray, neighborhoods: tuple[Neighborhood, ...] = (), epoch: int = 0) -> NodeBatch:
        return NodeBatch(nodes.astype(np.int32), self._labels[nodes].astype(np.int32), neighborhoods, epoch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeData:
    """One graph whose nodes are to be classified.

    Attributes:
      path: An npz (`graphs.npz` says what it holds) or the folder of an OGB data set; None = the bundled Cora.
      format: "npz" or "ogb".
      ogb_edges: Of an OGB folder, see `read_ogb`.
      ogb_split: Of an OGB folder, the name of its split; None = the only one.
      self_loops: "add" = nodes without a loop get one; "keep" = edges as they are.
      normalization: Weights of edges, see `Adjacency.normalized`; "none" = as they are.
      features: "row-normalized" = each row is divided by its sum, as is usual of words of papers; "as-is".
      fanouts: Neighbours that a layer reads in training, outermost layer first; () = the whole graph in every step.
        Splits are always scored on the whole graph.
      batch_size: Nodes of a mini-batch, where there are fan-outs.
      seed: Of mini-batches.
      threads: Threads that draw neighbours.
    """

    path: str | None = None
    format: Literal["npz", "ogb"] = "npz"
    ogb_edges: Edges = "as-written"
    ogb_split: str | None = None
    self_loops: Literal["add", "keep"] = "add"
    normalization: Normalization | Literal["none"] = "symmetric"
    features: Literal["row-normalized", "as-is"] = "row-normalized"
    fanouts: tuple[int, ...] = ()
    batch_size: int = 512
    seed: int = 0
    threads: int = 2

    def schema(self) -> GraphSchema:
        """Sizes of the graph; reads it, since nothing else knows them."""
        return self.build().schema

    def build(self) -> NodeDataSet:
        """Reads the graph and makes it ready.

        Raises:
          UserError: a file is missing or damaged, or lacks what training needs.
        """
        if self.format == "ogb":
            if self.path is None:
                raise UserError('data.format="ogb" needs data.path, the unpacked folder of an OGB data set.')
            graph = read_ogb(self.path, edges=self.ogb_edges, split=self.ogb_split)
        else:
            graph = read_planetoid(self.path)
        adjacency = graph.adjacency
        if self.self_loops == "add":
            adjacency = adjacency.with_self_loops()
        if self.normalization != "none":
            adjacency = adjacency.normalized(self.normalization)
        features = graph.features
        if features is not None and self.features == "row-normalized":
            features = row_normalized(features)
        ready = dataclasses.replace(graph, adjacency=adjacency, features=features)
        return NodeDataSet(
            ready, batch_size=self.batch_size, fanouts=self.fanouts, seed=self.seed, threads=self.threads
        )
