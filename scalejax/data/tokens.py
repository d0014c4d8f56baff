"""The host form of one batch of text."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenSchema:
    """What a model must know of text.

    Attributes:
      vocabulary: Token ids lie in [0, vocabulary).
      length: S, positions of a row.
    """

    vocabulary: int
    length: int


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """B rows of S positions, each holding pieces of one or more documents.

    Attributes:
      tokens: int32[B, S].
      targets: int32[B, S], the next token of the same document; 0 where `weights` is 0.
      weights: float32[B, S], 1 where the target counts; 0 at padding and at the last token of a document.
      segment_ids: int32[B, S], documents of a row numbered from 1; 0 = padding.
      positions: int32[B, S], rotary positions.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[0]
