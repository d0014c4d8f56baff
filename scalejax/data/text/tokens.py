"""The host form of one batch of text: rows of tokens in which documents lie packed one after another."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenSchema:
    """What batches of text hold.

    Attributes:
      vocabulary: Token ids lie in [0, vocabulary).
      length: Positions of a row, S.
      modalities: Names of what tokens may be. Batches of several say of each token which it is.
      capacities: Most tokens of each modality that a row has; None = as many as it has positions. Static shapes follow
        from them, and `modalities.check_capacities` holds batches to them.
      ranges: Of which modality an id is, see `modalities.ModalityMap`; () = nothing is known.
    """

    vocabulary: int
    length: int
    # Neither is in the text of a schema, of which fingerprints of text were made before there were modalities.
    modalities: tuple[str, ...] = dataclasses.field(default=("text",), repr=False)
    capacities: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)
    ranges: tuple[tuple[str, int, int], ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        """All of it, for messages."""
        parts = [f"vocabulary={self.vocabulary}", f"length={self.length}"]
        if len(self.modalities) > 1:
            parts += [f"modalities={self.modalities}", f"capacities={self.capacities}", f"ranges={self.ranges}"]
        return f"TokenSchema({', '.join(parts)})"

    def capacity(self, modality: int) -> int:
        """Most tokens of a modality, by its number, that a row has."""
        return self.length if self.capacities is None else self.capacities[modality]


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
      modality: int8[B, S], number of each token's modality in `TokenSchema.modalities`; -1 at padding. None where the
        schema has one modality.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    modality: np.ndarray | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name: five, and `modality` where it is there."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: array for name, array in named.items() if array is not None}

    @classmethod
    def empty(cls, rows: int, length: int, modalities: int = 1) -> "TokenBatch":
        """Rows of nothing but padding: weight 0, segment 0, and modality -1 where there are several."""
        ints = [np.zeros((rows, length), np.int32) for _ in range(4)]
        modality = None if modalities == 1 else np.full((rows, length), -1, np.int8)
        return cls(ints[0], ints[1], np.zeros((rows, length), np.float32), ints[2], ints[3], modality)

    def place(self, rows: np.ndarray | slice, other: "TokenBatch") -> None:
        """Writes `other` over rows `rows` of this batch, in place."""
        for name, array in self.arrays().items():
            array[rows] = getattr(other, name)
