"""What training knows of a model and of a data set: these protocols and nothing else."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh

from scalejax.data.graphs import GraphSchema, NodeGraph
from scalejax.data.schema import Schema
from scalejax.parallel.embedding.config import RowOptimizer, TableConfig
from scalejax.parallel.embedding.jagged import DeviceBatch


class Task(Protocol):
    """A model bound to a schema: what to look up, what to compute, what to minimise. Single-device code."""

    @property
    def schema(self) -> Schema:
        """Columns of the data."""
        ...

    def tables(self) -> tuple[TableConfig, ...]:
        """The embedding tables that the model looks up."""
        ...

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module:
        """Builds the dense part; its `nnx.Param`s carry `logical_axes` metadata."""
        ...

    def loss(
        self, model: nnx.Module, embedded: dict[str, jax.Array], batch: DeviceBatch, *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns (weighted sum of losses, sum of weights, aux with "logits" float32[B, T]).

        Unpooled features come as float[B, positions, dim], and `batch.lengths[name]` int32[B] says how many of the
        positions hold rows. The batch may be a part of the one in flight, whose ids `batch.features` has.

        `key` drives dropout; None = evaluation, nothing random.
        """
        ...

    def flops_per_example(self) -> int:
        """FLOPs of forward and backward of the dense part, 6 a multiply-accumulate."""
        ...


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass of plain values that describes an architecture."""

    def task(self, schema: Schema, row_optimizer: RowOptimizer) -> Task: ...


class DenseTask(Protocol):
    """A model without embedding tables, bound to a schema. Single-device code."""

    @property
    def schema(self) -> Any:
        """What the data is like."""
        ...

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module:
        """Builds the model; its `nnx.Param`s carry `logical_axes` metadata."""
        ...

    def loss(
        self, model: Any, batch: dict[str, jax.Array], *, key: jax.Array | None = None, gather: Any = ...
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns (weighted sum of losses, sum of weights, further sums).

        Args:
          model: What `init` returned.
          batch: The fields of a host batch, [B, ...] each.
          key: Drives dropout; None = evaluation, nothing random.
          gather: Makes the parameters of a block whole, {path: array} to the same (`nn.layers.Gather`).
        """
        ...

    def tokens_per_example(self) -> int:
        """Positions of an example, of the longest where lengths differ; 1 where that means nothing."""
        ...

    def flops_per_example(self, tokens: int | None = None) -> int:
        """FLOPs of forward and backward of an example of `tokens` positions, 6 a multiply-accumulate.

        None = of `tokens_per_example()` positions.
        """
        ...


@runtime_checkable
class DenseModelConfig(Protocol):
    """A frozen dataclass of plain values that describes an architecture without embedding tables."""

    def task(self, schema: Any) -> DenseTask: ...


class GraphTask(Protocol):
    """A model of the nodes of one graph. Single-device code."""

    def init(self, rngs: nnx.Rngs, *, param_dtype: Any, compute_dtype: Any) -> nnx.Module:
        """Builds the model; its `nnx.Param`s carry `logical_axes` metadata."""
        ...

    def place(self, graph: NodeGraph, fanouts: tuple[int, ...], mesh: Mesh) -> Any:
        """What the model reads of the graph, as a pytree of arrays, cut over the devices of the mesh; made once."""
        ...

    def logits(self, model: Any, placed: Any) -> jax.Array:
        """float[N, C] of all nodes and padding at the end, nothing random."""
        ...

    def loss(
        self, model: Any, placed: Any, batch: dict[str, Any], *, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (sum of the losses of a batch, how many they are); `key` drives dropout."""
        ...

    def cross_entropy(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (sum of the losses of nodes with these logits, how many they are); labels as in `NodeBatch`."""
        ...

    def flops_per_step(self, nodes: int) -> int:
        """FLOPs of forward and backward over some nodes, 6 a multiply-accumulate of the matrices."""
        ...


@runtime_checkable
class GraphModelConfig(Protocol):
    """A frozen dataclass of plain values that describes a model of the nodes of a graph."""

    def task(self, schema: GraphSchema) -> GraphTask: ...


class DataSet(Protocol):
    """Examples of every split, addressed by *global* example number.

    The training stream is infinite: example i of the stream is example i % n of epoch i // n, in the order of that
    epoch's seeded permutation. Batch k holds stream examples [k * B, (k + 1) * B), whatever the number of processes.
    """

    @property
    def schema(self) -> Any:
        """Columns of the data, or what else a model must know of it."""
        ...

    def num_examples(self, split: str) -> int:
        """Examples in split "train", "validation" or "test"."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of the files, columns, split and order; a run resumes only on equal fingerprints."""
        ...

    def train_batches(self, *, start_example: int, process_index: int = 0, process_count: int = 1) -> Iterator[Any]:
        """This process's contiguous slice of each global batch from stream position `start_example`, without end."""
        ...

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[Any]:
        """One pass in file order; the last batch is filled up with examples of weight 0."""
        ...

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(name, start, stop) of each day of the training split, as stream positions; data in time order only."""
        ...

    def range_batches(self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1) -> Iterator[Any]:
        """One pass over stream positions [start, stop), the last batch filled up with examples of weight 0."""
        ...


@runtime_checkable
class DataConfig(Protocol):
    """A frozen dataclass of plain values; constructing one does no I/O, `build()` does."""

    @property
    def batch_size(self) -> int:
        """Global batch size."""
        ...

    def schema(self) -> Any:
        """That of what `build()` gives; reads as little as it can, nothing where the fields suffice."""
        ...

    def build(self) -> DataSet: ...
