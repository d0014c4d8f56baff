"""Rows in which images stand among text, composed so that the share of image tokens stays inside of bounds.

A row is one document an image, each a stretch of text that the image and its caption interrupt:

    t t t  caption  <begin> c c ... c <end>  t t t t t     or    t t  <begin> c c ... c <end>  caption  t t t t

or one document of text alone where a row has no image. Images are whole. How many a row has is drawn evenly from the
numbers that keep the row inside of the bounds and as full as any; text fills the rest to the token. So every row keeps
the bounds, and with it every device and every part of a batch.

Row i depends on nothing but data, seed and i. Training goes on without end: images come in a seeded order that is new
in each epoch of images, stretches of text from anywhere in the training range. A row of a held-out split has images and
a stretch of text that no other row of it has.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from scalejax.data.permutation import Permutation, key_of, mix
from scalejax.data.splits import SPLITS
from scalejax.data.text.modalities import InterleavedIds, ModalityMap
from scalejax.data.text.packing import Pieces, Positions, fill
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError

Caption = Literal["before", "after", "either", "none"]

_ROWS, _IMAGES = 0x2078, 0x1A6E
# Splitmix64, of which `mix` is the second half: its state at number n is n times this constant.
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Material:
    """What the rows of a split are made of.

    Attributes:
      codes: int32[N, 49], the images.
      labels: int64[N], their classes.
      text: int[T] ids, one stretch.
    """

    codes: np.ndarray
    labels: np.ndarray
    text: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStyle:
    """How rows are composed.

    Attributes:
      image_share: Bounds of image tokens over all tokens of a row.
      caption: Where the caption of an image stands.
      positions: As `packing.fill`.
      seed: Of all that is drawn.
    """

    image_share: tuple[float, float]
    caption: Caption
    positions: Positions
    seed: int


@dataclasses.dataclass(frozen=True)
class RowContents:
    """What a row may be made of.

    Attributes:
      images: Whole images.
      text_tokens: Tokens of text, marks and captions among them where they count as text.
    """

    images: int
    text_tokens: int


def capacities(length: int, share: tuple[float, float]) -> tuple[int, int]:
    """Most tokens of text and of images in a row of `length` positions whose share of image tokens keeps the bounds."""
    low, high = share
    # 1e-9: 10 * (1 - 0.3) is 6.999..., which means 7.
    return int(length * (1 - low) + 1e-9), int(length * high + 1e-9)


def possible_rows(
    length: int, share: tuple[float, float], *, image_tokens: int, beside: int
) -> tuple[RowContents, ...]:
    """The contents of which a row inside of the bounds can be, of those the fullest.

    Args:
      length: Positions of a row.
      share: Bounds of image tokens over all tokens of a row.
      image_tokens: Tokens of the modality image of one image.
      beside: Most tokens of text that come with an image whatever happens: its caption, and marks that are text.
    Raises:
      UserError: there is none.
    """
    low, high = share
    found: list[RowContents] = []
    for images in range(length // image_tokens + 1):
        of_images = images * image_tokens
        text = length - of_images
        if low > 0:
            text = int(min(text, of_images * (1 - low) / low + 1e-9))
        if text >= images * beside and of_images + text and of_images <= high * (of_images + text) + 1e-9:
            found.append(RowContents(images, text))
    if not found:
        raise UserError(
            f"data.image_share={share}: no row of data.length={length} is inside. An image has {image_tokens} tokens "
            f"of image and up to {beside} of text with it, and images are whole: widen the bounds, or take longer rows."
        )
    fullest = max(row.images * image_tokens + row.text_tokens for row in found)
    return tuple(row for row in found if row.images * image_tokens + row.text_tokens == fullest)


class InterleavedRows:
    """Implements `TokenExamples`, see the module.

    Args:
      schema: Of two modalities.
      ids: Where text, marks and codes lie.
      modalities: The map from them.
      material: Of each split.
      captions: int32[...] ids of the caption of each class.
      style: How rows are composed.
      text_digest: Hex digest of the text of all splits, for the fingerprint.

    Raises:
      UserError: no row is inside of the bounds, or the training split has too little text for one.
    """

    def __init__(
        self,
        schema: TokenSchema,
        ids: InterleavedIds,
        modalities: ModalityMap,
        material: Mapping[str, Material],
        captions: Sequence[np.ndarray],
        style: RowStyle,
        text_digest: str,
    ) -> None:
        self.schema, self._ids, self._modalities = schema, ids, modalities
        self._material, self._style, self._text_digest = material, style, text_digest
        self._captions = [_NOTHING] * len(captions) if style.caption == "none" else captions
        marks = modalities.of(np.array([[ids.begin_image, ids.end_image]]), np.ones((1, 2), int))
        counted = int(np.count_nonzero(marks == modalities.names.index("image")))
        self._beside = 2 - counted
        self._possible = possible_rows(
            schema.length,
            style.image_share,
            image_tokens=material["train"].codes.shape[1] + counted,
            beside=self._beside + max(caption.size for caption in self._captions),
        )
        self._most_images = max(row.images for row in self._possible)
        self._most_text = max(row.text_tokens for row in self._possible)
        row = self._possible[0]
        self.tokens_per_row = row.text_tokens + row.images * (material["train"].codes.shape[1] + counted)
        """Tokens of every row; what is left of its positions is padding."""
        if material["train"].text.size < self._most_text:
            raise UserError(
                f"data.length={schema.length}: a row may have {self._most_text} tokens of text, and the training split "
                f"has {material['train'].text.size}. Shorten data.length or give more text."
            )
        self._order = functools.lru_cache(maxsize=4)(self._order_of)

    def num_examples(self, split: str) -> int:
        """Rows that need no image and no text twice; the training stream goes on after them."""
        found = self._material.get(split)
        if found is None:
            raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}.")
        rows = [found.labels.size // self._most_images] if self._most_images else []
        rows += [found.text.size // self._most_text] if self._most_text else []
        # Training may have an image twice in a row, where there are few.
        return max(min(rows), int(split == "train" and (found.labels.size > 0 or not self._most_images)))

    def stream(self, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of the training stream."""
        return self._rows("train", start, stop)

    def held(self, split: str, start: int, stop: int) -> TokenBatch:
        """Rows [start, stop) of a split, images and text in their order."""
        return self._rows(split, start, min(stop, self.num_examples(split)), order="file")

    def fingerprint(self) -> str:
        """Hex digest of text, images as codes, captions and how rows are composed."""
        arrays = [getattr(self._material[split], name) for split in SPLITS for name in ("codes", "labels")]
        digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in (*arrays, *self._captions)]
        schema = (self.schema, self.schema.modalities, self.schema.capacities)
        parts = (self._text_digest, digests, schema, self._ids, self._modalities, self._style)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _order_of(self, epoch: int) -> Permutation:
        return Permutation(self._material["train"].labels.size, _IMAGES, self._style.seed, epoch)

    def _image(self, place: int, order: Literal["drawn", "file"]) -> int:
        if order == "file":
            return place
        epoch, inside = divmod(place, self._material["train"].labels.size)
        return int(self._order(epoch)(np.array([inside]))[0])

    def _rows(self, split: str, start: int, stop: int, order: Literal["drawn", "file"] = "drawn") -> TokenBatch:
        width = 2 + 3 * self._most_images
        counter = np.arange(start * width, stop * width, dtype=np.uint64)
        key = np.uint64(key_of(_ROWS, self._style.seed, SPLITS.index(split)))
        drawn = mix(key + counter * _STEP).reshape(-1, width)
        documents: list[np.ndarray] = []
        rows: list[int] = []
        for row, numbers in enumerate(drawn.tolist()):
            made = self._row(split, start + row, numbers, order)
            documents += made
            rows += [row] * len(made)
        lengths = np.array([document.size for document in documents], np.int64)
        begins = np.cumsum(lengths) - lengths
        pieces = Pieces(np.array(rows, np.int64), begins, lengths, np.zeros(lengths.size, bool))
        joined = np.concatenate([*documents, np.zeros(1, np.int32)])  # `fill` looks one token ahead
        batch = fill(joined, pieces, stop - start, self.schema.length, self._style.positions)
        return dataclasses.replace(batch, modality=self._modalities.of(batch.tokens, batch.segment_ids))

    def _row(self, split: str, row: int, drawn: Sequence[int], order: Literal["drawn", "file"]) -> list[np.ndarray]:
        """The documents of a row.

        Args:
          drawn: 2 + 3 * most images numbers below 2^64: how many images, where text begins, on which side of each image
            its caption stands, and where the text is cut.
        """
        material = self._material[split]
        contents = self._possible[drawn[0] % len(self._possible)]
        begin = row * self._most_text
        if order == "drawn":
            begin = drawn[1] % (material.text.size - self._most_text + 1)
        text = material.text[begin : begin + contents.text_tokens].astype(np.int32)
        if not contents.images:
            return [text]
        places = (row * self._most_images + i for i in range(contents.images))
        images = [self._image(place, order) % material.labels.size for place in places]
        captions = [self._captions[material.labels[image]] for image in images]
        free = contents.text_tokens - sum(self._beside + caption.size for caption in captions)
        # Text before the first image, behind it, before the second one, ...: cuts at drawn places.
        cuts = sorted(number % (free + 1) for number in drawn[2 + self._most_images :][: 2 * contents.images - 1])
        edges = [0, *cuts, free]
        documents: list[np.ndarray] = []
        for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
            a, b, c = edges[2 * number : 2 * number + 3]
            coded = [[self._ids.begin_image], material.codes[image] + self._ids.first_code, [self._ids.end_image]]
            side = self._style.caption
            before = side == "before" or (side == "either" and drawn[2 + number] % 2 == 0)
            around = [caption, *coded] if before else [*coded, caption]
            documents.append(np.concatenate([text[a:b], *around, text[b:c]]).astype(np.int32))
        return documents


_NOTHING = np.zeros(0, np.int32)
