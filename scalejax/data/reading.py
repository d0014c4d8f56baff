"""Reading batches ahead by number, in threads, and the share of each process in a global batch.

Grain drives the threads. An element of its `MapDataset` is a whole batch, never a row: per row it reaches some ten
thousand rows a second, per batch millions. Grain imports jax, hence it is imported on first use.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from scalejax.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BatchSource(Generic[T]):
    """Random access to batches by number, the form in which Grain takes data."""

    make: Callable[[int], T]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> T:
        return self.make(int(index))

    def __repr__(self) -> str:
        return "scalejax batches"


def read_ahead(source: BatchSource[T], threads: int) -> Iterator[T]:
    """The batches of a source in order, made ahead of use by `threads` threads."""
    import grain

    if source.count == 0:
        return iter(())
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads + 2)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def check_sizes(batch_size: int, threads: int) -> None:
    """Raises UserError unless both are at least 1."""
    if batch_size < 1:
        raise UserError(f"data.batch_size must be at least 1; got {batch_size}.")
    if threads < 1:
        raise UserError(f"data.threads must be at least 1; got {threads}.")


def check_start(start_example: int) -> None:
    """Raises UserError for a negative position of the stream."""
    if start_example < 0:
        raise UserError(
            f"start_example must not be negative; got {start_example}. If it comes from a checkpoint, that one is "
            "damaged: resume from an earlier step."
        )


def share(batch_size: int, process_index: int, process_count: int) -> int:
    """Examples of each global batch that one process reads: a contiguous slice.

    Raises:
      UserError: the processes cannot share the batch evenly.
      ValueError: there is no such process.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}); got {process_index}.")
    if batch_size % process_count:
        raise UserError(
            f"data.batch_size={batch_size} cannot be divided evenly among {process_count} processes; choose a "
            f"multiple of {process_count}, for example {-(-batch_size // process_count) * process_count}."
        )
    return batch_size // process_count
