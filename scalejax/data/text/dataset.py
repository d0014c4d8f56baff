"""Batches of rows of tokens, by global example number; an example is one row."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from scalejax.data.reading import GlobalBatches, Streamed
from scalejax.data.text.modalities import check_capacities
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError


class TokenExamples(Streamed[TokenBatch], Protocol):
    """Rows of tokens."""

    @property
    def schema(self) -> TokenSchema: ...


class TokenSource(Protocol):
    """A config of rows of tokens: `TextData`, `TokenShards`, `data.images.TwoModalityData`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def batch_size(self) -> int:
        """Global batch size, in rows."""
        ...

    @property
    def threads(self) -> int:
        """Reading threads."""
        ...

    def schema(self) -> TokenSchema:
        """What batches hold; reads no rows."""
        ...

    def build(self, progress: Callable[[int, int], None] | None = None) -> "TokenDataSet":
        """Opens the rows.

        Args:
          progress: Called with (bytes of files read, bytes in all) while they are made.
        """
        ...


class TokenDataSet(GlobalBatches[TokenBatch, TokenBatch]):
    """Batches of text; implements the `DataSet` protocol of `train.protocols`.

    Row i of the training stream depends on nothing but the data and its seed, so that a run may change its batch size
    anywhere (`with_batch_size`).

    Args:
      examples: Where rows come from.
      batch_size: Global batch size.
      threads: Reading threads.
    """

    examples: TokenExamples
    empty = (
        'the training split is empty. Change data.split (by="position" cuts a document in parts), or give more text.'
    )

    @property
    def schema(self) -> TokenSchema:
        """Vocabulary and length of rows."""
        return self.examples.schema

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said when a run begins."""
        return ()

    def files(self) -> dict[str, bytes]:
        """What a run folder is to hold of the data, by name."""
        return {}

    def pictures(self) -> Iterator[tuple[str, str, str, str]]:
        """(split, name, caption, SVG) of pictures for the report."""
        return iter(())

    def with_batch_size(self, batch_size: int) -> "TokenDataSet":
        """The same rows in batches of another size: a batch-size ramp goes on at its global example counter."""
        return TokenDataSet(self.examples, batch_size=batch_size, threads=self.threads)

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(): text has no days."""
        return ()

    def filled(self, read: Callable[[int, int], TokenBatch], start: int, stop: int, size: int) -> TokenBatch:
        if stop - start == size:
            return self._read(read, start, stop)
        batch = TokenBatch.empty(size, self.schema.length, len(self.schema.modalities))
        if stop > start:
            batch.place(slice(0, stop - start), self._read(read, start, stop))
        return batch

    def _read(self, read: Callable[[int, int], TokenBatch], start: int, stop: int) -> TokenBatch:
        batch = read(start, stop)
        check_capacities(batch, self.schema, first_row=start)
        return batch


class Parts:
    """What several sets, read as one, want to say and to keep.

    Args:
      names: Of the sets, for messages.
      sets: Theirs.

    Raises:
      UserError: two want to keep different files under one name: the same ids mean different things in them.
    """

    def __init__(self, names: Sequence[str], sets: Sequence[TokenDataSet]) -> None:
        self._sets, self._files = sets, dict[str, bytes]()
        owners: dict[str, str] = {}
        for name, part in zip(names, sets, strict=True):
            for file, content in part.files().items():
                if self._files.setdefault(file, content) != content:
                    raise UserError(
                        f"{name} has another {file} than {owners[file]}: the codes of their images mean different "
                        "things. Give both the same images, codes, split and seed."
                    )
                owners.setdefault(file, name)

    def remarks(self) -> tuple[str, ...]:
        """Those of all, each once."""
        return tuple(dict.fromkeys(remark for part in self._sets for remark in part.remarks))

    def files(self) -> dict[str, bytes]:
        """Those of all."""
        return dict(self._files)

    def pictures(self) -> Iterator[tuple[str, str, str, str]]:
        """Those of all, of equal names the first."""
        shown: set[tuple[str, str]] = set()
        for split, name, caption, svg in (picture for part in self._sets for picture in part.pictures()):
            if (split, name) not in shown:
                shown.add((split, name))
                yield split, name, caption, svg


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
