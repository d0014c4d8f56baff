"""Text to token ids and back: what every tokenizer offers, and the two that need no library.

A tokenizer is configured by a frozen dataclass of plain values (`ByteTokenizer`, `CharacterTokenizer`,
`HuggingFaceTokenizer`), whose `build()` reads files and returns a `Tokenizer`. Encoding adds nothing: whether a
document begins with `bos` or ends with `eos` is said by who encodes it (`TextData.marks`).

Text of documents is never read as special tokens: "<|eot_id|>" inside a page is nine or so ordinary tokens unless
`specials="parse"` is asked for, as the rendering of a chat template does.
"""

import codecs
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from scalejax.data.text.sources import read_text
from scalejax.errors import UserError

Specials = Literal["text", "parse"]


class TextStream(Protocol):
    """Decodes ids as they come, never giving out half a character."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes ids; returns the text that they complete, perhaps ""."""
        ...

    def finish(self) -> str:
        """What is left; bytes that are no character become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. All pushes of a `stream()` and its `finish()` together equal `decode` of all ids."""

    @property
    def vocabulary(self) -> int:
        """Ids lie in [0, vocabulary)."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins a document, if there is one."""
        ...

    @property
    def eos(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    @property
    def pad(self) -> int | None:
        """The id of padding, if there is one (batches pad with 0 and weight 0 all the same)."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by name."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which generation ends."""
        ...

    def encode(self, text: str, *, specials: Specials = "text") -> np.ndarray:
        """int32[N] ids of a text; with specials="parse" names of special tokens in it become those tokens.

        Raises:
          UserError: the text has a character that the tokenizer cannot represent.
        """
        ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, perhaps in parallel."""
        ...

    def decode(self, ids: Iterable[int], *, specials: Literal["skip", "show"] = "skip") -> str:
        """Text of ids; bytes that are no character become U+FFFD, special tokens nothing or their names.

        Raises:
          UserError: an id outside the vocabulary.
        """
        ...

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one; special tokens are skipped.

        Where ids continue a prompt, push the prompt's first and drop their text: a space may belong to both.
        """
        ...

    def fingerprint(self) -> str:
        """Hex digest of everything that decides what `encode` returns."""
        ...


class TokenizerConfig(Protocol):
    """A frozen dataclass of plain values."""

    def build(self) -> Tokenizer: ...


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int, what: str) -> None:
    """Raises UserError if a tokenizer has ids that do not fit a table of `vocabulary` rows; more rows are fine.

    Args:
      tokenizer: Built.
      vocabulary: Rows of the model's embedding.
      what: Where that number stands, for the message.
    """
    if tokenizer.vocabulary > vocabulary:
        raise UserError(
            f"{what}={vocabulary} is too small: the tokenizer has ids up to {tokenizer.vocabulary - 1}. Set it to "
            f"{tokenizer.vocabulary} or more, or use the tokenizer that the model was made with."
        )


def check_ids(ids: np.ndarray, vocabulary: int) -> None:
    """Raises UserError if an id lies outside [0, vocabulary)."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if outside.size:
        raise UserError(
            f"decode: ids must lie in [0, {vocabulary}); got {int(ids[outside[0]])} at position {int(outside[0])}. The "
            "model was made with another tokenizer, or its table is padded: do not sample from the padding."
        )


def utf8(text: str) -> bytes:
    """The bytes of a text; raises UserError where it has half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"encode: character {error.start} of the text is half of a surrogate pair, "
            f"U+{ord(text[error.start]):04X}, which UTF-8 cannot hold. Repair the text where it was made."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """The bytes of UTF-8; needs no file.

    Ids 0 to 255 are bytes, 256 `bos`, 257 `eos`, 258 `pad`; those from 259 on are reserved, so that the table divides
    among any power of two up to 64 devices.
    """

    def build(self) -> "Bytes":
        """The tokenizer."""
        return Bytes()


class Bytes:
    """See `ByteTokenizer`; implements `Tokenizer`."""

    vocabulary = 320
    bos, eos, pad = 256, 257, 258
    special_ids: Mapping[str, int] = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}
    stop_ids = (257,)

    def encode(self, text: str, *, specials: Specials = "text") -> np.ndarray:
        """int32[N]: the bytes of the text."""
        if specials == "parse":
            return _parse_specials(self, text)
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], *, specials: Literal["skip", "show"] = "skip") -> str:
        """Text of ids; reserved ids count as special tokens."""
        array = _as_ids(ids, self.vocabulary)
        if specials == "skip":
            return _byte_text(array)
        names = {i: name for name, i in self.special_ids.items()}
        at = np.flatnonzero(array > 255)
        parts = [_byte_text(part) for part in np.split(array, at)]
        shown = [names.get(i, f"<|reserved_{i}|>") for i in array[at].tolist()]
        return parts[0] + "".join(name + part for name, part in zip(shown, parts[1:], strict=True))

    def stream(self) -> "ByteStream":
        """A decoder for ids that come one by one."""
        return ByteStream()

    def fingerprint(self) -> str:
        """Hex digest."""
        return hashlib.sha256(b"bytes of UTF-8, bos 256, eos 257").hexdigest()


class ByteStream:
    """Implements `TextStream` for `Bytes`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """As `TextStream.push`."""
        return self._decoder.decode(bytes(i for i in _as_ids(ids, Bytes.vocabulary).tolist() if i < 256))

    def finish(self) -> str:
        """As `TextStream.finish`."""
        return self._decoder.decode(b"", final=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharacterTokenizer:
    """One id for each distinct character of a text, in the order of code points; no special tokens.

    Attributes:
      path: Text file (UTF-8; also *.gz and *.zst) whose characters are the alphabet.
      alphabet: The characters themselves, instead of a file.
    """

    path: str | None = None
    alphabet: str = ""

    def build(self) -> "Characters":
        """Reads the file.

        Raises:
          UserError: neither or both of path and alphabet are given, or the file cannot be read.
        """
        if (self.path is None) == (not self.alphabet):
            raise UserError(
                f"CharacterTokenizer: wanted either path or alphabet; got path={self.path!r} and alphabet="
                f"{self.alphabet!r}. Name the text file whose characters are the vocabulary."
            )
        if self.path is None:
            return Characters("".join(sorted(set(self.alphabet))))
        found: set[str] = set()
        for block in read_text(pathlib.Path(self.path)):
            found.update(block)
        if not found:
            raise UserError(f"{self.path}: holds no character, so there is no vocabulary. Point path at a text.")
        return Characters("".join(sorted(found)))


class Characters:
    """See `CharacterTokenizer`; implements `Tokenizer`.

    Args:
      alphabet: Distinct characters; the id of each is its place.
    """

    bos = eos = pad = None
    special_ids: Mapping[str, int] = {}
    stop_ids: tuple[int, ...] = ()

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self.vocabulary = len(alphabet)
        codes = np.array([ord(c) for c in alphabet])
        self._ids = np.full(int(codes.max()) + 1, -1, np.int32)
        self._ids[codes] = np.arange(len(alphabet))

    def encode(self, text: str, *, specials: Specials = "text") -> np.ndarray:
        """int32[N]; there are no special tokens to parse."""
        del specials
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = np.where(codes < self._ids.size, self._ids[np.minimum(codes, self._ids.size - 1)], -1)
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            character = text[int(unknown[0])]
            raise UserError(
                f"encode: character {character!r} (U+{ord(character):04X}) at {int(unknown[0])} is not one of the "
                f"{self.vocabulary} characters of the vocabulary. Make the vocabulary of a text that has it, or use "
                "ByteTokenizer()."
            )
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], *, specials: Literal["skip", "show"] = "skip") -> str:
        """Text of ids."""
        del specials
        return "".join(self.alphabet[i] for i in _as_ids(ids, self.vocabulary).tolist())

    def stream(self) -> "WholeCharacters":
        """A decoder for ids that come one by one."""
        return WholeCharacters(self)

    def fingerprint(self) -> str:
        """Hex digest of the alphabet."""
        return hashlib.sha256(b"characters " + self.alphabet.encode("utf-8", "surrogatepass")).hexdigest()


@dataclasses.dataclass(frozen=True)
class WholeCharacters:
    """Implements `TextStream` where every id is a whole character."""

    tokenizer: Characters

    def push(self, ids: Iterable[int]) -> str:
        """As `TextStream.push`."""
        return self.tokenizer.decode(ids)

    def finish(self) -> str:
        """As `TextStream.finish`."""
        return ""


def _as_ids(ids: Iterable[int], vocabulary: int) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
    check_ids(array, vocabulary)
    return array


def _byte_text(ids: np.ndarray) -> str:
    return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


def _parse_specials(tokenizer: Bytes, text: str) -> np.ndarray:
    parts = re.split("(" + "|".join(map(re.escape, tokenizer.special_ids)) + ")", text)
    ids = [
        np.array([tokenizer.special_ids[part]], np.int32) if part in tokenizer.special_ids else tokenizer.encode(part)
        for part in parts
    ]
    return np.concatenate(ids)
