"""What training knows of a model and of a data set: these protocols and nothing else."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from scalejax.data.dedup import AnyBatch
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


class DataSet(Protocol):
    """Examples of every split, addressed by *global* example number.

    The training stream is infinite: example i of the stream is example i % n of epoch i // n, in the order of that
    epoch's seeded permutation. Batch k holds stream examples [k * B, (k + 1) * B), whatever the number of processes.
    """

    @property
    def schema(self) -> Schema:
        """Columns of the data."""
        ...

    def num_examples(self, split: str) -> int:
        """Examples in split "train", "validation" or "test"."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of the files, columns, split and order; a run resumes only on equal fingerprints."""
        ...

    def train_batches(
        self, *, start_example: int, process_index: int = 0, process_count: int = 1
    ) -> Iterator[AnyBatch]:
        """This process's contiguous slice of each global batch from stream position `start_example`, without end."""
        ...

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[AnyBatch]:
        """One pass in file order; the last batch is filled up with examples of weight 0."""
        ...

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(name, start, stop) of each day of the training split, as stream positions; data in time order only."""
        ...

    def range_batches(
        self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[AnyBatch]:
        """One pass over stream positions [start, stop), the last batch filled up with examples of weight 0."""
        ...


@runtime_checkable
class DataConfig(Protocol):
    """A frozen dataclass of plain values; constructing one does no I/O, `build()` does."""

    @property
    def batch_size(self) -> int:
        """Global batch size."""
        ...

    def schema(self) -> Schema:
        """Columns of the data that `build()` gives; reads as little as it can, nothing where the fields suffice."""
        ...

    def build(self) -> DataSet: ...
