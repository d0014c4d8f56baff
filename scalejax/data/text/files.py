"""Text of files as rows of tokens: `TextData`."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from scalejax.data.kept_arrays import Verify, damaged
from scalejax.data.permutation import Permutation, key_of, mix
from scalejax.data.splits import SPLITS
from scalejax.data.text.corpus import Corpus, Marks, Progress, tokenised
from scalejax.data.text.dataset import TokenDataSet
from scalejax.data.text.fitted_rows import fitted
from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer
from scalejax.data.text.modalities import PADDING
from scalejax.data.text.packing import (
    ConcatenatedRows,
    FittedRows,
    ModalityRoom,
    PackedRows,
    Pieces,
    Positions,
    Spans,
    fill,
)
from scalejax.data.text.sources import SUFFIXES, find_texts
from scalejax.data.text.tokenizer import ByteTokenizer, CharacterTokenizer, check_vocabulary
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError, check_at_least

TextOrder = Literal["shuffled", "file", "random-crops"]
Packing = Literal["first-fit", "best-fit", "concatenate"]
AnyTokenizer = ByteTokenizer | CharacterTokenizer | HuggingFaceTokenizer

# Keep the several uses of one seed apart.
_DOCUMENTS, _ROWS, _CROPS = 0xD0C, 0x80E5, 0xC809


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSplit:
    """A share of the documents for each split; what train and validation leave is the test split.

    Attributes:
      train: Share of the training split.
      validation: Share of the validation split.
      by: "document" = by a hash of each document's text: equal documents fall into one split, and a document stays in
        its split whatever else the data hold. "position" = the first tokens train, the last test, cut to the token (a
        corpus that is one long document).
      seed: Of the hash.
    """

    train: float = 0.9
    validation: float = 0.05
    by: Literal["document", "position"] = "document"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.train, self.validation) < 0 or self.train + self.validation > 1 + 1e-9:
            raise UserError(
                f"TextSplit: train={self.train} and validation={self.validation} must not be negative and must not add "
                "up to more than 1 (the rest is the test split)."
            )

    def spans(self, corpus: Corpus) -> dict[str, Spans]:
        """What each split holds, in file order."""
        edges = (self.train, self.train + self.validation)
        if self.by == "position":
            tokens = int(corpus.offsets[-1])
            # 1e-9: 10 * (0.7 + 0.1) is 7.999..., which means 8.
            bounds = [0, *(min(int(tokens * edge + 1e-9), tokens) for edge in edges), tokens]
            parts = zip(SPLITS, bounds[:-1], bounds[1:], strict=True)
            return {split: _between(corpus.offsets, a, b) for split, a, b in parts}
        hashes = mix(corpus.hashes ^ np.uint64(key_of(self.seed)))
        shares = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        codes = np.digitize(shares, [round(edge, 12) for edge in edges])
        everything = Spans(np.asarray(corpus.offsets[:-1]), np.asarray(corpus.offsets[1:]))
        return {split: everything.take(np.flatnonzero(codes == s)) for s, split in enumerate(SPLITS)}


def _between(offsets: np.ndarray, start: int, stop: int) -> Spans:
    begin, end = np.maximum(offsets[:-1], start), np.minimum(offsets[1:], stop)
    some = np.flatnonzero(end > begin)
    return Spans(begin[some], end[some])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Documents of text files, tokenised once, packed into rows of `length` tokens.

    Tokens are kept on disk and mapped from there, so host memory stays small (`token_corpus.py`).

    Attributes:
      path: A file or a folder, or several (`text_sources.py` says of what kinds); None = the sources of Python's
        standard library, which are on every machine and differ between versions of Python.
      tokenizer: Text to ids.
      length: Positions of a row, S.
      batch_size: Global batch size, in rows.
      packing: How documents are laid into rows (`packing.py`): "concatenate" cuts them wherever a row ends, "first-fit"
        and "best-fit" cut only those longer than a row.
      window: Documents that may share rows under "first-fit" and "best-fit", after they are shuffled.
      positions: "document" = rotary positions restart with each document; "row" = they run through the row.
      order: "shuffled" = documents are shuffled once before they are packed, and rows anew every epoch. "file" =
        neither. "random-crops" = each row is `length` tokens from anywhere in the training split, drawn with
        replacement; the stream has no epochs, and `num_examples("train")` is what the split would fill (wants
        packing="concatenate").
      marks: Whether the tokenizer's `bos` opens each document and its `eos` ends it.
      split: How documents are divided. Validation and test are packed in file order.
      column: Field of JSONL and column of Parquet that holds the text.
      suffixes: Endings of the files that are taken of a folder.
      vocabulary: Rows of the model's table, where they are more than the tokenizer has ids.
      folder: Where tokens are kept; None = scalejax/text in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).
      verify: "checksums" = what is kept there is read once when it is opened, and compared; "sizes" = only sizes of
        files are.
      seed: Of the order.
      threads: Reading threads.
    """

    path: str | tuple[str, ...] | None = None
    tokenizer: AnyTokenizer = ByteTokenizer()
    length: int = 1024
    batch_size: int = 16
    packing: Packing = "best-fit"
    window: int = 16_384
    positions: Positions = "document"
    order: TextOrder = "shuffled"
    marks: Marks = "end"
    split: TextSplit = TextSplit()
    column: str = "text"
    suffixes: tuple[str, ...] = SUFFIXES
    vocabulary: int | None = None
    folder: str | None = None
    verify: Verify = "checksums"
    seed: int = 0
    threads: int = 2

    def schema(self) -> TokenSchema:
        """What batches hold; reads the tokenizer's file, if it has one, and no text."""
        self._check()
        if self.vocabulary is not None:
            return TokenSchema(self.vocabulary, self.length)
        return TokenSchema(self.tokenizer.build().vocabulary, self.length)

    def build(self, progress: Progress | None = None) -> TokenDataSet:
        """Opens the tokenised text, which is made if this is its first use.

        Args:
          progress: Called with (bytes of files read, bytes in all) while text is tokenised.
        Raises:
          UserError: a file cannot be read, or the fields contradict one another.
        """
        self._check()
        tokenizer = self.tokenizer.build()
        if self.vocabulary is not None:
            check_vocabulary(tokenizer, self.vocabulary, "data.vocabulary")
        corpus = tokenised(
            find_texts(self.path, self.suffixes),
            tokenizer,
            column=self.column,
            marks=self.marks,
            folder=None if self.folder is None else pathlib.Path(self.folder),
            verify=self.verify,
            progress=progress,
        )
        schema = TokenSchema(self.vocabulary or tokenizer.vocabulary, self.length)
        return TokenDataSet(PackedText(corpus, schema, self), batch_size=self.batch_size, threads=self.threads)

    def _check(self) -> None:
        for name in ("length", "window"):
            check_at_least(f"data.{name}", getattr(self, name), 1)
        if self.order == "random-crops" and self.packing != "concatenate":
            raise UserError(
                f'data.order="random-crops" cuts windows from documents one after another; got data.packing='
                f'{self.packing!r}. Set data.packing="concatenate".'
            )


class _HowPacked(Protocol):
    """How documents are split, packed and ordered; see `TextData`."""

    @property
    def packing(self) -> Packing: ...
    @property
    def window(self) -> int: ...
    @property
    def positions(self) -> Positions: ...
    @property
    def order(self) -> TextOrder: ...
    @property
    def split(self) -> TextSplit: ...
    @property
    def verify(self) -> Verify: ...
    @property
    def seed(self) -> int: ...


class PackedText:
    """Rows of a tokenised corpus; implements `TokenExamples`.

    Args:
      corpus: Documents.
      schema: Of the rows.
      data: How they are split, packed and ordered.
      room: What a row has room for, where tokens are of several modalities.
    """

    def __init__(self, corpus: Corpus, schema: TokenSchema, data: _HowPacked, room: ModalityRoom | None = None) -> None:
        self.schema = schema
        self._corpus, self._data, self._room = corpus, data, room
        spans = data.split.spans(corpus)
        self._rows = {split: self._pack(split, spans[split]) for split in SPLITS}
        # The target of a crop's last position must be there as well.
        self._crop_starts = int((spans["train"].end - spans["train"].begin).sum()) - schema.length
        if data.order == "random-crops" and self._crop_starts < 1:
            raise UserError(
                f"data.length={schema.length} leaves no crop: the training split has "
                f"{self._crop_starts + schema.length} tokens; wanted at least {schema.length + 1}. Shorten data.length "
                "or give more text."
            )
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)

    def _pack(self, split: str, spans: Spans) -> PackedRows:
        data = self._data
        shuffled = split == "train" and data.order == "shuffled"

        def ordered() -> Spans:
            if not shuffled:
                return spans
            return spans.take(Permutation(len(spans), _DOCUMENTS, data.seed)(np.arange(len(spans))))

        if data.packing == "concatenate":
            return ConcatenatedRows(ordered(), self.schema.length)
        order = ("shuffled", data.seed) if shuffled else "file"
        parts = (self._corpus.digest, data.split, split, order)
        if self._room is not None:
            parts += (self.schema.capacities, self.schema.ranges)
        return fitted(
            ordered,
            self.schema.length,
            data.packing,
            data.window,
            lay=None if self._room is None else self._lay,
            folder=pathlib.Path(self._corpus.where).parent,
            key=repr(parts),
            verify=data.verify,
        )

    def _lay(self, spans: Spans) -> Iterator[FittedRows]:
        assert self._room is not None
        return self._room.fit(self._corpus.tokens, spans, self._data.window)

    def num_examples(self, split: str) -> int:
        """Rows of a split."""
        if split not in self._rows:
            raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}.")
        if split == "train" and self._data.order == "random-crops":
            return (self._crops().tokens - 1) // self.schema.length
        return len(self._rows[split])

    def stream(self, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of the training stream."""
        if self._data.order == "random-crops":
            return self._crop(np.arange(start, stop))
        size = len(self._rows["train"])
        rows = np.arange(start, stop)
        epochs = rows // size
        rows %= size
        if self._data.order == "shuffled":
            for epoch in range(start // size, (stop - 1) // size + 1):
                here = np.flatnonzero(epochs == epoch)
                rows[here] = self._epoch_order(epoch)(rows[here])
        return self._read("train", rows)

    def held(self, split: str, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of a split in the order in which they were packed."""
        return self._read(split, np.arange(start, min(stop, len(self._rows[split]))))

    def fingerprint(self) -> str:
        """Hex digest of tokens, packing, split and order."""
        data = self._data
        packing = (data.packing,) if data.packing == "concatenate" else (data.packing, data.window)
        parts = (self._corpus.digest, self.schema, packing, data.positions, data.order, data.split, data.seed)
        if self._room is not None:
            parts += (self.schema.capacities, self.schema.ranges)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _make_epoch_order(self, epoch: int) -> Permutation:
        return Permutation(len(self._rows["train"]), _ROWS, self._data.seed, epoch)

    def _read(self, split: str, rows: np.ndarray) -> TokenBatch:
        return self._fill(self._rows[split].pieces(rows), rows.size)

    def _fill(self, pieces: Pieces, rows: int) -> TokenBatch:
        batch = fill(self._corpus.tokens, pieces, rows, self.schema.length, self._data.positions)
        if (largest := int(batch.tokens.max(initial=0))) >= self._corpus.vocabulary:
            what = f"token {largest} is outside the vocabulary of {self._corpus.vocabulary}"
            raise damaged(pathlib.Path(self._corpus.where), what)
        if self._room is None:
            return batch
        modality = np.where(batch.segment_ids != 0, self._room.of_ids[batch.tokens], PADDING).astype(np.int8)
        return dataclasses.replace(batch, modality=modality)

    def _crops(self) -> ConcatenatedRows:
        rows = self._rows["train"]
        assert isinstance(rows, ConcatenatedRows)
        return rows

    def _crop(self, examples: np.ndarray) -> TokenBatch:
        # Splitmix64, of which `mix` is the second half: its state at number n is n times this constant.
        counter = examples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes = mix(np.uint64(key_of(_CROPS, self._data.seed)) + counter)
        starts = (hashes % np.uint64(self._crop_starts)).astype(np.int64)
        return self._fill(self._crops().windows(starts), starts.size)
