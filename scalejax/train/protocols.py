"""Protocols of data sets and of configs of models, as training sees them; that of a model itself is `task`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from scalejax.train.task import Task

Batch_co = TypeVar("Batch_co", covariant=True)


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass of plain values that describes an architecture."""

    def task(self, schema: Any) -> "Task":
        """Binds the model to the schema of its data."""
        ...


class DataSet(Protocol[Batch_co]):
    """Examples of every split, addressed by *global* example number.

    The training stream is infinite: example i of the stream is example i % n of epoch i // n, in the order of that
    epoch's seeded permutation. Batch k holds stream examples [k * B, (k + 1) * B), whatever the number of processes.

    It may also have `counted`, names of features whose ids are ranks in these very data, so that the same id means
    another value elsewhere; `remarks`, lines that are printed when a run begins; `files()`, name -> bytes of what the
    run folder is to keep of it; and `pictures()`, (split, name, caption, SVG) for the report.
    """

    @property
    def schema(self) -> object:
        """Columns of the data, or what else a model must know of it."""
        ...

    def num_examples(self, split: str) -> int:
        """Examples in split "train", "validation" or "test"."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of the files, columns, split and order; a run resumes only on equal fingerprints."""
        ...

    def train_batches(
        self, *, start_example: int, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch_co]:
        """This process's contiguous slice of each global batch from stream position `start_example`, without end."""
        ...

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[Batch_co]:
        """One pass in file order; the last batch is filled up with examples of weight 0."""
        ...

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(name, start, stop) of each day of the training split, as stream positions; data in time order only."""
        ...

    def range_batches(
        self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch_co]:
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

    def build(self) -> Any:
        """The `DataSet`; of `NodeData` the graph."""
        ...
