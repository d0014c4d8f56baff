"""Batches of rows of tokens, by global example number; an example is one row."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from scalejax.data.reading import BatchSource, check_sizes, check_start, read_ahead, share
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError


class TokenExamples(Protocol):
    """Rows of every split, in the order of training and in file order."""

    @property
    def schema(self) -> TokenSchema: ...

    def num_examples(self, split: str) -> int: ...

    def stream(self, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of the infinite training stream."""
        ...

    def held(self, split: str, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of a split in file order."""
        ...

    def fingerprint(self) -> str: ...


class TokenDataSet:
    """Batches of text of a global size; implements the `DataSet` protocol of `train.protocols`.

    Row i of the training stream depends on nothing but the data and its seed, and process p reads its contiguous slice
    of each *global* batch. So where a run stands is one number, the global example counter; it resumes exactly at any
    number of processes and may change its batch size anywhere (`with_batch_size`).

    Args:
      examples: Where rows come from.
      batch_size: Global batch size.
      threads: Reading threads.
    """

    def __init__(self, examples: TokenExamples, *, batch_size: int, threads: int = 2) -> None:
        check_sizes(batch_size, threads)
        self.examples, self.batch_size, self.threads = examples, batch_size, threads

    @property
    def schema(self) -> TokenSchema:
        """Vocabulary and length of rows."""
        return self.examples.schema

    def with_batch_size(self, batch_size: int) -> "TokenDataSet":
        """The same rows in batches of another size: a batch-size ramp goes on at its global example counter."""
        return TokenDataSet(self.examples, batch_size=batch_size, threads=self.threads)

    def num_examples(self, split: str) -> int:
        """Rows in split "train", "validation" or "test"; of "train" those of an epoch."""
        return self.examples.num_examples(split)

    def fingerprint(self) -> str:
        """Hex digest of data, packing, split and order (not of the batch size or of file names)."""
        return self.examples.fingerprint()

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(): text has no days."""
        return ()

    def train_batches(
        self, *, start_example: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Iterator[TokenBatch]:
        """This process's slice of each global batch from stream position `start_example`, without end.

        Raises:
          UserError: a negative position, or a batch that the processes cannot share evenly.
        """
        check_start(start_example)
        local = share(self.batch_size, process_index, process_count)
        self._check_train()
        first = start_example + process_index * local

        def make(number: int) -> TokenBatch:
            start = first + number * self.batch_size
            return self.examples.stream(start, start + local)

        return read_ahead(BatchSource(make, sys.maxsize), self.threads)

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[TokenBatch]:
        """One pass over a split in file order; the last batch is filled up with rows of weight 0."""
        stop = self.num_examples(split)
        return self._pass(lambda a, b: self.examples.held(split, a, b), 0, stop, process_index, process_count)

    def range_batches(
        self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[TokenBatch]:
        """One pass over rows [start, stop) of the training stream, the last batch filled up with weight 0."""
        if not 0 <= start <= stop:
            raise UserError(f"range_batches needs 0 <= start <= stop; got [{start}, {stop}).")
        self._check_train()
        return self._pass(self.examples.stream, start, stop, process_index, process_count)

    def _check_train(self) -> None:
        if self.num_examples("train") == 0:
            raise UserError(
                'the training split is empty. Change data.split (by="position" cuts a document in parts), or give more '
                "text."
            )

    def _pass(
        self, read: Callable[[int, int], TokenBatch], start: int, stop: int, process_index: int, process_count: int
    ) -> Iterator[TokenBatch]:
        local = share(self.batch_size, process_index, process_count)

        def make(number: int) -> TokenBatch:
            a = start + number * self.batch_size + process_index * local
            a, b = min(a, stop), min(a + local, stop)
            if b - a == local:
                return read(a, b)
            batch = TokenBatch.empty(local, self.schema.length)
            if b > a:
                batch.place(slice(0, b - a), read(a, b))
            return batch

        return read_ahead(BatchSource(make, -(-(stop - start) // self.batch_size)), self.threads)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What rows hold.

    Attributes:
      rows: Rows.
      tokens: Positions that hold a token.
      targets: Positions whose target counts.
    """

    rows: int
    tokens: int
    targets: int

    @classmethod
    def of(cls, batch: TokenBatch) -> "Counts":
        """The counts of a batch."""
        return cls(
            rows=len(batch),
            tokens=int(np.count_nonzero(batch.segment_ids)),
            targets=int(np.count_nonzero(batch.weights)),
        )
