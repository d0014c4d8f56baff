"""Text with images in it to ids and back: `InterleavedTokenizer`."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from scalejax.data.images.codebook import PATCHES
from scalejax.data.text.files import AnyTokenizer
from scalejax.data.text.modalities import InterleavedIds
from scalejax.data.text.tokenizer import Specials, TextStream, Tokenizer

BEGIN, END = "<image>", "</image>"
"""Names of the two marks around an image."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterleavedTokenizer:
    """The ids of `TwoModalityData`: those of text, two marks, the codes of images.

    Attributes:
      text: Text to ids.
      codes: Patches of the codebook.
    """

    text: AnyTokenizer
    codes: int

    def build(self) -> "TextAndImages":
        """Reads the tokenizer's file, if it has one."""
        text = self.text.build()
        return TextAndImages(text, InterleavedIds(text.vocabulary, self.codes))


@dataclasses.dataclass(frozen=True)
class TextAndImages:
    """A `data.text.tokenizer.Tokenizer`. In text an image is "<image>", where it begins; its codes have no text."""

    text: Tokenizer
    ids: InterleavedIds

    @property
    def vocabulary(self) -> int:
        return self.ids.vocabulary

    @property
    def bos(self) -> int | None:
        return self.text.bos

    @property
    def eos(self) -> int | None:
        return self.text.eos

    @property
    def pad(self) -> int | None:
        return self.text.pad

    @property
    def special_ids(self) -> Mapping[str, int]:
        return {**self.text.special_ids, BEGIN: self.ids.begin_image, END: self.ids.end_image}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.text.stop_ids

    def encode(self, text: str, *, specials: Specials = "text") -> np.ndarray:
        if specials == "text":
            return self.text.encode(text)
        marks = {BEGIN: self.ids.begin_image, END: self.ids.end_image}
        parts = [
            np.array([marks[part]], np.int32) if part in marks else self.text.encode(part, specials=specials)
            for part in re.split(f"({BEGIN}|{END})", text)
            if part
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self.text.encode_many(texts)

    def decode(self, ids: Iterable[int], *, specials: Literal["skip", "show"] = "skip") -> str:
        found, run = [], []
        for token in [*ids, None]:
            if token is not None and token < self.ids.text:
                run.append(token)
                continue
            found.append(self.text.decode(run, specials=specials))
            run = []
            if token == self.ids.begin_image:
                found.append(BEGIN)
            elif token == self.ids.end_image and specials == "show":
                found.append(END)
        return "".join(found)

    def stream(self) -> TextStream:
        return _Stream(self)

    def fingerprint(self) -> str:
        return f"{self.text.fingerprint()} with {self.ids.codes} codes of images"


class _Stream:
    """Text between images goes through a stream of its own, which an image ends."""

    def __init__(self, tokenizer: TextAndImages) -> None:
        self._tokenizer, self._text = tokenizer, tokenizer.text.stream()

    def push(self, ids: Iterable[int]) -> str:
        found = []
        for token in ids:
            if token < self._tokenizer.ids.text:
                found.append(self._text.push([token]))
                continue
            found.append(self.finish())
            self._text = self._tokenizer.text.stream()
            if token == self._tokenizer.ids.begin_image:
                found.append(BEGIN)
        return "".join(found)

    def finish(self) -> str:
        return self._text.finish()


def whole_images(tokens: Sequence[int], ids: InterleavedIds) -> np.ndarray:
    """The codes of the images that are whole, int32[N, 49]: a mark and as many codes behind it as an image has."""
    array = np.asarray(tokens, np.int32)
    found = []
    for begin in np.flatnonzero(array == ids.begin_image).tolist():
        codes = array[begin + 1 : begin + 1 + PATCHES] - ids.first_code
        if codes.size == PATCHES and ((codes >= 0) & (codes < ids.codes)).all():
            found.append(codes)
    return np.stack(found) if found else np.zeros((0, PATCHES), np.int32)
