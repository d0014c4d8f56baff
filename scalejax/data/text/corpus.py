"""Tokenised documents on disk, mapped into memory: made once for a set of files and a tokenizer, then reused.

A corpus is a folder in the user's cache folder:

  tokens     uint16 or uint32 [N], the documents one after another, marks included
  offsets    int64 [D + 1], where each document begins
  hashes     uint64 [D], of each document's text: what splits go by
  about      sizes and checksums

Its name is a hash of the files (path, size and times of change), the tokenizer and the marks, so a changed file makes
another corpus (`kept_arrays.py`).
"""

import dataclasses
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from scalejax.data.kept_arrays import ArrayWriter, Verify, kept, open_arrays
from scalejax.data.text.sources import DocumentPiece, TextFile, read_documents
from scalejax.data.text.tokenizer import Tokenizer
from scalejax.errors import UserError

Marks = Literal["none", "begin", "end", "both"]
Progress = Callable[[int, int], None]

_FORMAT = 3
# Encoded at once: tokenizers that use threads need many texts, and none of this is large beside a model.
_BATCH_CHARACTERS = 4_000_000
_BATCH_BLOCKS = 1024
_SECONDS_BETWEEN_LINES = 10.0


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents as token ids.

    Attributes:
      tokens: uint16[N] or uint32[N], mapped from disk.
      offsets: int64[D + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
      hashes: uint64[D] of the text of each document.
      vocabulary: Ids lie in [0, vocabulary).
      digest: Hex digest of tokens and offsets.
      where: Where it lies, for messages.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    vocabulary: int
    digest: str
    where: str

    def __len__(self) -> int:
        return self.hashes.size


def cache_folder() -> pathlib.Path:
    """Where corpora are kept unless another folder is named: scalejax/text in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(base) / "scalejax" / "text"


def tokenised(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    marks: Marks = "end",
    folder: pathlib.Path | None = None,
    verify: Verify = "checksums",
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of some files, which is made if this is its first use.

    Args:
      files: Documents in this order.
      tokenizer: Built.
      column: Field of JSONL and column of Parquet that holds the text.
      marks: Whether `bos` opens each document and `eos` ends it.
      folder: Where corpora are kept; None = `cache_folder()`.
      verify: How what is kept there is checked (`kept_arrays.open_arrays`).
      progress: Called with (bytes of files read, bytes in all); None = a line on standard error every ten seconds.
    Raises:
      UserError: a file cannot be read, the tokenizer lacks a mark, or the folder cannot be used.
    """
    mark_ids = _mark_ids(tokenizer, marks)
    folder = cache_folder() if folder is None else folder
    status = [file.path.stat() for file in files]
    made_of = [
        (f.name, str(f.path.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for f, s in zip(files, status, strict=True)
    ]
    key = hashlib.sha256(repr((_FORMAT, made_of, tokenizer.fingerprint(), column, marks)).encode()).hexdigest()[:24]

    def make(path: pathlib.Path) -> None:
        sizes = [s.st_size for s in status]
        _write(path, files, sizes, tokenizer, column, mark_ids, progress or _Lines())

    return open_corpus(kept(folder, f"corpus-{key}", make), verify)


def open_corpus(path: pathlib.Path, verify: Verify = "checksums") -> Corpus:
    """Maps a corpus.

    Raises:
      UserError: it is damaged.
    """
    arrays, about = open_arrays(path, verify)
    sums = "".join(about["arrays"][name]["sha256"] for name in ("tokens", "offsets"))
    digest = hashlib.sha256(sums.encode()).hexdigest()
    return Corpus(arrays["tokens"], arrays["offsets"], arrays["hashes"], about["vocabulary"], digest, str(path))


def _mark_ids(tokenizer: Tokenizer, marks: Marks) -> tuple[list[int], list[int]]:
    begin, end = (([], []), ([tokenizer.bos], []), ([], [tokenizer.eos]), ([tokenizer.bos], [tokenizer.eos]))[
        ("none", "begin", "end", "both").index(marks)
    ]
    for name, mark in (("bos", begin), ("eos", end)):
        if mark == [None]:
            raise UserError(
                f"data.marks={marks!r} wants {name}, which the tokenizer does not have. Name it in the tokenizer's "
                f'{name}, or choose other marks ("none" for characters).'
            )
    return [i for i in begin if i is not None], [i for i in end if i is not None]


def _write(
    path: pathlib.Path,
    files: Sequence[TextFile],
    sizes: Sequence[int],
    tokenizer: Tokenizer,
    column: str,
    marks: tuple[list[int], list[int]],
    progress: Progress,
) -> None:
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    out = ArrayWriter(path, {"tokens": dtype, "offsets": np.int64, "hashes": np.uint64})
    out.append("offsets", [0])
    writer = _Encoder(out, tokenizer, *marks)
    done = 0
    for file, size in zip(files, sizes, strict=True):
        read = 0
        for block in read_documents(file, column):
            read += len(block.text)
            if writer.add(block):
                progress(done + min(read, size), sum(sizes))
        done += size
        progress(done, sum(sizes))
    writer.flush()
    out.finish(format=_FORMAT, vocabulary=tokenizer.vocabulary)


class _Encoder:
    """Encodes blocks many at a time and appends them."""

    def __init__(self, out: ArrayWriter, tokenizer: Tokenizer, begin: list[int], end: list[int]) -> None:
        self._out, self._tokenizer = out, tokenizer
        self._begin, self._end = np.array(begin, np.int32), np.array(end, np.int32)
        self._blocks: list[DocumentPiece] = []
        self._held = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._opens = True  # the next block begins a document

    def add(self, block: DocumentPiece) -> bool:
        """Takes a block; returns whether blocks were written."""
        self._blocks.append(block)
        self._held += len(block.text)
        if self._held < _BATCH_CHARACTERS and len(self._blocks) < _BATCH_BLOCKS:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Writes what is held."""
        blocks, self._blocks, self._held = self._blocks, [], 0
        tokens: list[np.ndarray] = []
        offsets: list[int] = []
        hashes: list[int] = []
        written = self._out.sizes["tokens"]
        for block, ids in zip(blocks, self._encode(blocks), strict=True):
            parts = [*([self._begin] if self._opens else []), ids, *([self._end] if block.last else [])]
            tokens += parts
            written += sum(part.size for part in parts)
            # Half of a surrogate pair, which JSON may hold and some tokenizers take, has no UTF-8; here any bytes do.
            self._hash.update(block.text.encode("utf-8", "surrogatepass"))
            self._opens = block.last
            if block.last:
                offsets.append(written)
                hashes.append(int.from_bytes(self._hash.digest(), "little"))
                self._hash = hashlib.blake2b(digest_size=8)
        self._out.append("tokens", np.concatenate(tokens) if tokens else [])
        self._out.append("offsets", offsets)
        self._out.append("hashes", hashes)

    def _encode(self, blocks: list[DocumentPiece]) -> list[np.ndarray]:
        try:
            return self._tokenizer.encode_many([block.text for block in blocks])
        except UserError:
            for block in blocks:  # one of them; say which
                try:
                    self._tokenizer.encode(block.text)
                except UserError as error:
                    raise UserError(f"{block.where}: {error}") from error
            raise


class _Lines:
    """Progress as lines on standard error, for work that takes long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            print(f"Tokenising text: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=sys.stderr, flush=True)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
