"""Reading batches ahead by number, in threads, and the share of each process in a global batch.

Grain drives the threads. An element of its `MapDataset` is a whole batch, never a row: per row it reaches some ten
thousand rows a second, per batch millions. Grain imports jax, hence it is imported on first use.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from scalejax.errors import UserError, check_at_least

T = TypeVar("T")
Rows = TypeVar("Rows")
Rows_co = TypeVar("Rows_co", covariant=True)


class Streamed(Protocol[Rows_co]):
    """Examples of every split, in the order of training and in file order."""

    def num_examples(self, split: str) -> int: ...

    def stream(self, start: int, stop: int) -> Rows_co:
        """Positions [start, stop) of the infinite training stream."""
        ...

    def held(self, split: str, start: int, stop: int) -> Rows_co:
        """Examples [start, stop) of a split in file order."""
        ...

    def fingerprint(self) -> str: ...


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
    check_at_least("data.batch_size", batch_size, 1)
    check_at_least("data.threads", threads, 1)


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


class GlobalBatches(Generic[Rows, T]):
    """Batches of a fixed global size, cut by global example number: the part of a `DataSet` that all kinds share.

    Every process reads its contiguous slice of each *global* batch, so where a run stands is one number, the global
    example counter, and it resumes exactly at any number of processes.

    Args:
      examples: Where they come from.
      batch_size: Global batch size.
      threads: Reading threads.
    """

    empty = "the training split is empty; change the split or the data."
    """What is said where nothing can be trained on."""

    def __init__(self, examples: Streamed[Rows], *, batch_size: int, threads: int = 2) -> None:
        check_sizes(batch_size, threads)
        self.examples, self.batch_size, self.threads = examples, batch_size, threads

    def filled(self, read: Callable[[int, int], Rows], start: int, stop: int, size: int) -> T:
        """A batch of `size` examples: read(start, stop), and examples of weight 0 for what they are fewer."""
        raise NotImplementedError

    def num_examples(self, split: str) -> int:
        """Examples in split "train", "validation" or "test"; of "train" those of an epoch."""
        return self.examples.num_examples(split)

    def fingerprint(self) -> str:
        """Hex digest of data, split and order (not of the batch size or of file names)."""
        return self.examples.fingerprint()

    def train_batches(self, *, start_example: int = 0, process_index: int = 0, process_count: int = 1) -> Iterator[T]:
        """This process's slice of each global batch from stream position `start_example`, without end.

        Raises:
          UserError: a negative position, or a batch that the processes cannot share evenly.
        """
        check_start(start_example)
        local = share(self.batch_size, process_index, process_count)
        self._check_train()
        first = start_example + process_index * local

        def make(number: int) -> T:
            start = first + number * self.batch_size
            return self.filled(self.examples.stream, start, start + local, local)

        return read_ahead(BatchSource(make, sys.maxsize), self.threads)

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[T]:
        """One pass over a split in file order; the last batch is filled up with examples of weight 0."""
        stop = self.num_examples(split)
        return self._pass(lambda a, b: self.examples.held(split, a, b), 0, stop, process_index, process_count)

    def range_batches(self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1) -> Iterator[T]:
        """One pass over positions [start, stop) of the training stream, the last batch filled up with weight 0.

        Progressive validation scores `range_batches(*day)` before it trains on the same positions.
        """
        if not 0 <= start <= stop:
            raise UserError(f"range_batches needs 0 <= start <= stop; got [{start}, {stop}).")
        self._check_train()
        return self._pass(self.examples.stream, start, stop, process_index, process_count)

    def _check_train(self) -> None:
        if self.num_examples("train") == 0:
            raise UserError(self.empty)

    def _pass(
        self, read: Callable[[int, int], Rows], start: int, stop: int, process_index: int, process_count: int
    ) -> Iterator[T]:
        local = share(self.batch_size, process_index, process_count)

        def make(number: int) -> T:
            a = start + number * self.batch_size + process_index * local
            return self.filled(read, min(a, stop), min(a + local, stop), local)

        return read_ahead(BatchSource(make, -(-(stop - start) // self.batch_size)), self.threads)
