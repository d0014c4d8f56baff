"""Tokenised documents on disk, mapped into memory: made once for a set of files and a tokenizer, then reused.

A corpus is a folder in the user's cache folder:

  tokens     uint16 or uint32 [N], the documents one after another, marks included
  offsets    int64 [D + 1], where each document begins
  hashes     uint64 [D], of each document's text: what splits go by
  about      what it was made of, sizes and a digest of the contents

Its name is a hash of the files (path, size and times of change), the tokenizer and the marks, so a changed file makes
another corpus. It is written beside its place and renamed, so what has the name is whole. Nothing is pickled.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Literal

import numpy as np

from scalejax.data.text_sources import Block, TextFile, read_documents
from scalejax.data.tokenizer import Tokenizer
from scalejax.errors import UserError

Marks = Literal["none", "begin", "end", "both"]
Progress = Callable[[int, int], None]

_FORMAT = 2
# Encoded at once: tokenizers that use threads need many texts, and none of this is large beside a model.
_BATCH_CHARACTERS = 4_000_000
_BATCH_BLOCKS = 1024
_SECONDS_BETWEEN_LINES = 10.0
_MAKING = ".making-"


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
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of some files, which is made if this is its first use.

    Args:
      files: Documents in this order.
      tokenizer: Built.
      column: Field of JSONL and column of Parquet that holds the text.
      marks: Whether `bos` opens each document and `eos` ends it.
      folder: Where corpora are kept; None = `cache_folder()`.
      progress: Called with (bytes of files read, bytes in all); None = a line on standard error every ten seconds.
    Raises:
      UserError: a file cannot be read, the tokenizer lacks a mark, or the folder cannot be used.
    """
    begin, end = _mark_ids(tokenizer, marks)
    folder = cache_folder() if folder is None else folder
    status = [file.path.stat() for file in files]
    made_of = [
        (f.name, str(f.path.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for f, s in zip(files, status, strict=True)
    ]
    key = hashlib.sha256(repr((_FORMAT, made_of, tokenizer.fingerprint(), column, marks)).encode()).hexdigest()[:24]

    def make(path: pathlib.Path) -> None:
        sizes = [s.st_size for s in status]
        _write(path, files, sizes, tokenizer, column, begin, end, progress or _Lines())

    return open_corpus(kept(folder, f"corpus-{key}", make))


def open_corpus(path: pathlib.Path) -> Corpus:
    """Maps a corpus.

    Raises:
      UserError: it is damaged.
    """
    try:
        about = json.loads((path / "about").read_text())
        tokens = map_array(path / "tokens", about["dtype"], about["tokens"])
        offsets = map_array(path / "offsets", "int64", about["documents"] + 1)
        hashes = map_array(path / "hashes", "uint64", about["documents"])
        return Corpus(tokens, offsets, hashes, about["vocabulary"], about["digest"], str(path))
    except (OSError, ValueError, KeyError) as error:
        raise damaged(path, error) from error


def map_array(path: pathlib.Path, dtype: str, size: int) -> np.ndarray:
    """Maps a file of `size` numbers, read-only.

    Raises:
      ValueError: it has another size.
    """
    expected = np.dtype(dtype).itemsize * size
    if (found := path.stat().st_size) != expected:
        raise ValueError(f"{path.name} has {found} bytes, not {expected}")
    if size == 0:  # nothing to map
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(size,))


def damaged(path: pathlib.Path, error: Exception) -> UserError:
    """What to say of a folder that does not hold what was written."""
    return UserError(f"{path}: is damaged ({error}). Delete this folder; it is made anew.")


def kept(folder: pathlib.Path, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder `name` in `folder`, filled by `make` if it is not there.

    Two processes may make the same; the first to finish is taken, and both are equal.

    Raises:
      UserError: the folder cannot be written, or others than this user can write it.
    """
    target = folder / name
    try:
        _make_private(folder)
        if target.is_dir():
            return target
        _clear(folder)
        mine = f"{_MAKING}{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=mine, dir=folder) as made:  # mode 0700
            inside = pathlib.Path(made) / "made"
            inside.mkdir(mode=0o700)
            make(inside)
            try:
                os.rename(inside, target)
            except OSError:
                if not target.is_dir():  # else another process was first
                    raise
    except OSError as error:
        raise UserError(
            f"{folder}: tokenised text cannot be kept there ({error.strerror}). Set data.folder to a folder that can "
            f"be written; {_free(folder)} are free in this one."
        ) from error
    return target


def _clear(folder: pathlib.Path) -> None:
    """Removes what processes of this machine that are no more were making: it may be as large as a corpus."""
    for left in folder.glob(f"{_MAKING}{socket.gethostname()}-*"):
        pid = left.name.removeprefix(f"{_MAKING}{socket.gethostname()}-").partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # it runs as another user, or is none of ours
            continue


def _make_private(folder: pathlib.Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user. Set data.folder to a folder of yours.")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise UserError(
            f"{folder} can be written by others (mode {mode:04o}), who could change what a model is trained on. Take "
            "the right away (chmod go-w), or set data.folder to a folder that only you can write."
        )


def _free(folder: pathlib.Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"


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
    begin: list[int],
    end: list[int],
    progress: Progress,
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(open(path / name, "wb")) for name in ("tokens", "offsets", "hashes")}
        writer = _Writer(out["tokens"], out["offsets"], out["hashes"], dtype, tokenizer, begin, end)
        done = 0
        for file, size in zip(files, sizes, strict=True):
            for block in read_documents(file, column):
                writer.add(block)
            done += size
            progress(done, sum(sizes))
        writer.flush()
        for stream in out.values():
            stream.flush()
            os.fsync(stream.fileno())
    about = {
        "format": _FORMAT,
        "dtype": dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "tokens": writer.tokens,
        "documents": writer.documents,
        "characters": writer.characters,
        "digest": writer.digest(),
        "tokenizer": tokenizer.fingerprint(),
    }
    (path / "about").write_text(json.dumps(about, indent=1))


class _Writer:
    """Encodes blocks many at a time and appends them."""

    def __init__(
        self,
        tokens: IO[bytes],
        offsets: IO[bytes],
        hashes: IO[bytes],
        dtype: np.dtype,
        tokenizer: Tokenizer,
        begin: list[int],
        end: list[int],
    ) -> None:
        self._tokens, self._offsets, self._hashes = tokens, offsets, hashes
        self._dtype, self._tokenizer = dtype, tokenizer
        self._begin, self._end = np.array(begin, dtype), np.array(end, dtype)
        self._blocks: list[Block] = []
        self._held = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._opens = True  # the next block begins a document
        self.tokens = self.documents = self.characters = 0
        self._token_digest, self._offset_digest = hashlib.sha256(), hashlib.sha256()
        self._add_offsets([0])

    def add(self, block: Block) -> None:
        self._blocks.append(block)
        self._held += len(block.text)
        if self._held >= _BATCH_CHARACTERS or len(self._blocks) >= _BATCH_BLOCKS:
            self.flush()

    def flush(self) -> None:
        blocks, self._blocks, self._held = self._blocks, [], 0
        parts: list[np.ndarray] = []
        offsets: list[int] = []
        hashes: list[int] = []
        for block, ids in zip(blocks, self._encode(blocks), strict=True):
            here = [self._begin] if self._opens else []
            here.append(ids.astype(self._dtype))
            self._hash.update(block.text.encode("utf-8", "surrogatepass"))
            if block.last:
                here.append(self._end)
                hashes.append(int.from_bytes(self._hash.digest(), "little"))
                self._hash = hashlib.blake2b(digest_size=8)
            self.tokens += sum(part.size for part in here)
            self.characters += len(block.text)
            if block.last:
                offsets.append(self.tokens)
            parts += here
            self._opens = block.last
        self.documents += len(offsets)
        joined = np.concatenate(parts) if parts else np.zeros(0, self._dtype)
        self._tokens.write(joined.tobytes())
        self._token_digest.update(joined.tobytes())
        self._add_offsets(offsets)
        self._hashes.write(np.array(hashes, np.uint64).tobytes())

    def digest(self) -> str:
        return hashlib.sha256(self._token_digest.digest() + self._offset_digest.digest()).hexdigest()

    def _add_offsets(self, offsets: list[int]) -> None:
        array = np.array(offsets, np.int64)
        self._offsets.write(array.tobytes())
        self._offset_digest.update(array.tobytes())

    def _encode(self, blocks: list[Block]) -> list[np.ndarray]:
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
