"""Which modality a token is of: by its id, and how many of each a row may have.

A model of several modalities (MoMa, arXiv 2407.21770) sends the tokens of each to experts of their own. Of which a
token is, the range says in which its id lies. The paper is silent about the marks around an image, its begin and its
end: they count as text unless the map says otherwise.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError

PADDING = -1
"""The modality of padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityMap:
    """Ranges of ids, each of one modality; a modality may have several.

    Attributes:
      ranges: (modality, its first id, the id behind its last) of each range.

    Raises:
      UserError: a range is empty or negative, or two share an id.
    """

    ranges: tuple[tuple[str, int, int], ...]

    def __post_init__(self) -> None:
        taken = 0
        for name, start, stop in sorted(self.ranges, key=lambda r: r[1]):
            if not 0 <= start < stop:
                raise UserError(
                    f"ModalityMap: the ids [{start}, {stop}) of {name!r} are no range. Give (modality, first id, id "
                    "behind the last), with at least one id."
                )
            if start < taken:
                raise UserError(
                    f"ModalityMap: id {start} of {name!r} lies in another range too; got {self}. Each id has one "
                    "modality."
                )
            taken = stop
        if not self.ranges:
            raise UserError(
                "ModalityMap: ranges=() maps no id. Give at least one (modality, first id, behind the last)."
            )

    def __str__(self) -> str:
        return ", ".join(f"{name} [{start}, {stop})" for name, start, stop in self.ranges)

    @property
    def names(self) -> tuple[str, ...]:
        """The modalities, in the order in which the ranges name them: what `TokenSchema.modalities` is."""
        return tuple(dict.fromkeys(name for name, _, _ in self.ranges))

    @property
    def vocabulary(self) -> int:
        """Ids of the map lie in [0, vocabulary)."""
        return max(stop for _, _, stop in self.ranges)

    @functools.cached_property
    def of_ids(self) -> np.ndarray:
        """int8[vocabulary]: the modality of each id, -1 where no range has it."""
        found = np.full(self.vocabulary, PADDING, np.int8)
        for name, start, stop in self.ranges:
            found[start:stop] = self.names.index(name)
        return found

    def of(self, tokens: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        """The modality of each token, int8[B, S]: its number in `names`, -1 at padding.

        Args:
          tokens: int[B, S] ids.
          segment_ids: int[B, S]; 0 = padding, whose ids are not looked at.
        Raises:
          UserError: an id that is in no range.
        """
        known = (tokens >= 0) & (tokens < self.vocabulary)
        found = np.where(known & (segment_ids != 0), self.of_ids[np.where(known, tokens, 0)], PADDING).astype(np.int8)
        outside = np.argwhere((found == PADDING) & (segment_ids != 0))
        if outside.size:
            row, column = outside[0].tolist()
            raise UserError(
                f"Token {int(tokens[row, column])} of row {row}, position {column}, is in no range of the map from ids "
                f"to modalities: {self}. Give its range a modality, or take the tokenizer that the map was made for."
            )
        return found


@dataclasses.dataclass(frozen=True)
class InterleavedIds:
    """Where the ids of documents of text and images lie: text, the two marks, the codes of images.

    Attributes:
      text: Ids of text are [0, text).
      codes: Codes of images; code c has the id `first_code` + c.
    """

    text: int
    codes: int

    @property
    def begin_image(self) -> int:
        """The mark before an image."""
        return self.text

    @property
    def end_image(self) -> int:
        """The mark behind an image."""
        return self.text + 1

    @property
    def first_code(self) -> int:
        """The id of code 0."""
        return self.text + 2

    @property
    def vocabulary(self) -> int:
        """Ids lie in [0, vocabulary)."""
        return self.first_code + self.codes

    def modalities(self, marks: Literal["text", "image"] = "text") -> ModalityMap:
        """The map: text first, then image.

        Args:
          marks: The modality of the marks around an image.
        """
        edge = self.first_code if marks == "text" else self.begin_image
        return ModalityMap(ranges=(("text", 0, edge), ("image", edge, self.vocabulary)))


def check_image_share(share: object) -> None:
    """Refuses what is no pair of bounds of the share of image tokens.

    Raises:
      UserError: it is no pair of numbers, or they are no shares in ascending order.
    """
    match share:
        case [int() | float() as low, int() | float() as high] if 0 <= low <= high <= 1:
            return
        case _:
            raise UserError(
                f"data.image_share={share!r}: wanted two shares from 0 to 1, the lower one first, for example "
                "(0.3, 0.7)."
            )


def check_capacities(batch: TokenBatch, schema: TokenSchema, *, first_row: int = 0) -> None:
    """Refuses rows that have more tokens of a modality than the static shapes of a step have places for.

    Args:
      batch: Of the schema.
      schema: What it has to keep.
      first_row: Number of the first row, for the message.
    Raises:
      UserError: names the row, both numbers and the modality; or the batch has no modalities where the schema has
        several.
    """
    if len(schema.modalities) == 1:
        return
    if batch.modality is None:
        raise UserError(
            f"The batch has no `modality`, but its schema has {', '.join(schema.modalities)}. Make it with "
            "ModalityMap.of(tokens, segment_ids)."
        )
    for number, name in enumerate(schema.modalities):
        counts = np.count_nonzero(batch.modality == number, axis=1)
        over = np.flatnonzero(counts > schema.capacity(number))
        if over.size:
            row = int(over[0])
            raise UserError(
                f"Row {first_row + row} has {int(counts[row])} tokens of {name}, and there is room for "
                f"{schema.capacity(number)} in a row of {schema.length}. Widen data.image_share, or compose the rows "
                "inside of it."
            )
