"""The host form of one batch of text: rows of tokens in which documents lie packed one after another."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenSchema:
    """What batches of text hold.

    Attributes:
      vocabulary: Token ids lie in [0, vocabulary).
      length: Positions of a row, S.
    """

    vocabulary: int
    length: int


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """B rows of S positions; one row is one example.

        row           a b c . | x y . | pad          (. = the last token of a document)
        targets       b c . 0   y . 0   0
        weights       1 1 1 0   1 1 0   0
        segment_ids   1 1 1 1   2 2 2   0
        positions     0 1 2 3   0 1 2   0            (or 0 1 2 3 4 5 6 7: through the row)

    Where a document goes on in another row, its last token here has the target and weight of any other.

    Attributes:
      tokens: int32[B, S]; 0 at padding.
      targets: int32[B, S], the next token of the same document; 0 where the weight is 0.
      weights: float32[B, S], 1 where the target counts; 0 at padding and at the last token of a document.
      segment_ids: int32[B, S], documents of a row numbered from 1, in order; 0 = padding.
      positions: int32[B, S], rotary positions: they restart with each document of a row, or run through the row.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def arrays(self) -> dict[str, np.ndarray]:
        """The five arrays by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def empty(cls, rows: int, length: int) -> "TokenBatch":
        """Rows of nothing but padding: weight 0, segment 0."""
        ints = [np.zeros((rows, length), np.int32) for _ in range(4)]
        return cls(ints[0], ints[1], np.zeros((rows, length), np.float32), ints[2], ints[3])

    def place(self, rows: np.ndarray | slice, other: "TokenBatch") -> None:
        """Writes `other` over rows `rows` of this batch, in place."""
        for name, array in self.arrays().items():
            array[rows] = getattr(other, name)
