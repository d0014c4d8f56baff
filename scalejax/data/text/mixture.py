"""Several sources of text in one stream, by weight: `MixtureData`."""

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np

from scalejax.data.text.corpus import Progress
from scalejax.data.text.dataset import Parts, TokenDataSet, TokenExamples, TokenSource
from scalejax.data.text.interleave import Interleave
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureData:
    """Rows of several sources, interleaved so that every prefix has the shares that the weights ask for.

    A source with share w has given floor(w t) or ceil(w t) of the first t rows (`interleave.py`); each gives its own
    training stream in its own order, epoch after epoch. Weights may change at given rows: the schedule counts rows from
    the beginning of the run, and shares are counted from each change on. A resumed run may add changes that lie ahead
    of it: the fingerprint holds the first weights only. (One that lies behind would move the sources' streams.)

    Validation and test are those of the sources, one source after another.

    Attributes:
      sources: (data, weight) pairs; equal in length and vocabulary, and where they have images in modalities, the most
        tokens of each in a row, and the codebook. Their batch sizes and threads play no part.
      schedule: (from_row, weights) pairs, ascending: weights of all sources from that row on.
      batch_size: Global batch size, in rows.
      threads: Reading threads.
    """

    sources: tuple[tuple[TokenSource, float], ...]
    schedule: tuple[tuple[int, tuple[float, ...]], ...] = ()
    batch_size: int = 16
    threads: int = 2

    def schema(self) -> TokenSchema:
        """What batches hold; reads no text.

        Raises:
          UserError: there is no source, or they differ.
        """
        if not self.sources:
            raise UserError("data.sources: wanted at least one (data, weight) pair; got ().")
        first, *others = (data.schema() for data, _ in self.sources)
        for number, schema in enumerate(others, start=1):
            if schema != first:
                hint = "Set length and tokenizer alike (vocabulary may be set to the larger)."
                if schema.capacities != first.capacities:
                    hint = "Set length and image_share alike: the most tokens of each modality follow from them."
                raise UserError(
                    f"data.sources[{number}] gives {schema}, data.sources[0] {first}; sources of a mixture must agree. "
                    f"{hint}"
                )
        return first

    def build(self, progress: Progress | None = None) -> TokenDataSet:
        """Opens all sources.

        Args:
          progress: As in `TextData.build`, source after source.
        Raises:
          UserError: as `TextData.build`, or the weights cannot be used.
        """
        self.schema()
        order = Interleave([weight for _, weight in self.sources], self.schedule)
        weights = tuple(weight for _, weight in self.sources)
        sets = [data.build(progress) for data, _ in self.sources]
        parts = Parts([f"data.sources[{number}]" for number in range(len(sets))], sets)
        examples = Mixture([found.examples for found in sets], order, weights)
        for number, source in enumerate(examples.sources):
            used = any(each[number] for each in (weights, *(later for _, later in self.schedule)))
            if used and source.num_examples("train") == 0:
                raise UserError(f"data.sources[{number}] has no training rows but a weight; give it more text.")
        return MixtureDataSet(examples, parts, batch_size=self.batch_size, threads=self.threads)


class MixtureDataSet(TokenDataSet):
    """Batches of a mixture, which knows what its sources say."""

    def __init__(self, examples: "Mixture", parts: Parts, *, batch_size: int, threads: int) -> None:
        super().__init__(examples, batch_size=batch_size, threads=threads)
        self._parts = parts

    @property
    def remarks(self) -> tuple[str, ...]:
        """See `TokenDataSet`."""
        return self._parts.remarks()

    def files(self) -> dict[str, bytes]:
        """See `TokenDataSet`."""
        return self._parts.files()

    def pictures(self) -> Iterator[tuple[str, str, str, str]]:
        """See `TokenDataSet`."""
        return self._parts.pictures()


class Mixture:
    """Implements `TokenExamples`.

    Args:
      sources: Equal in schema.
      order: Which row comes from which source.
      weights: What the order begins with, for the fingerprint.
    """

    def __init__(self, sources: list[TokenExamples], order: Interleave, weights: tuple[float, ...]) -> None:
        self.sources, self._order, self._weights = sources, order, weights
        self.schema = sources[0].schema

    def num_examples(self, split: str) -> int:
        """Rows of all sources; a mixture has no epochs of its own."""
        return sum(source.num_examples(split) for source in self.sources)

    def stream(self, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of the mixture."""
        source, position = self._order.rows(start, stop)
        batch = TokenBatch.empty(stop - start, self.schema.length, len(self.schema.modalities))
        for k in np.unique(source):
            here = np.flatnonzero(source == k)  # a stretch of the source's stream, in order
            first = int(position[here[0]])
            batch.place(here, self.sources[k].stream(first, first + here.size))
        return batch

    def held(self, split: str, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of a split, source after source."""
        batch = TokenBatch.empty(stop - start, self.schema.length, len(self.schema.modalities))
        begin = 0
        for source in self.sources:
            end = begin + source.num_examples(split)
            a, b = max(start, begin), min(stop, end)
            if a < b:
                batch.place(slice(a - start, b - start), source.held(split, a - begin, b - begin))
            begin = end
        return batch

    def fingerprint(self) -> str:
        """Hex digest of the sources and the first weights."""
        parts = ([source.fingerprint() for source in self.sources], self._weights)
        return hashlib.sha256(repr(parts).encode()).hexdigest()
