"""Documents laid into rows of S positions.

What is laid are *spans* of a token array, one a document (or the part of it that a split holds). A *piece* is a stretch
of a span that lies in one row:

  concatenate   the spans follow one another without a gap and are cut every S tokens; only the last row has padding

Every token of every span lies in exactly one row. Where a span is cut, the last token of the first piece keeps its
target, which is the first token of the next; the pieces do not see each other.
"""

import dataclasses
from typing import Literal, Protocol

import numpy as np

from scalejax.data.jagged import lengths_to_offsets
from scalejax.data.tokens import TokenBatch

Positions = Literal["document", "row"]


@dataclasses.dataclass(frozen=True)
class Spans:
    """Stretches of a token array, in the order in which they are laid.

    Attributes:
      begin: int64[D] first token of each.
      end: int64[D] behind the last token of each; equal to begin = empty.
    """

    begin: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return self.begin.size

    def take(self, order: np.ndarray) -> "Spans":
        """The spans `order`, in that order."""
        return Spans(self.begin[order], self.end[order])


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What some rows hold, row after row, P pieces in all.

    Attributes:
      row: int64[P] row of each piece, not decreasing.
      begin: int64[P] its first token in the token array.
      length: int64[P] its tokens, at least 1.
      more: bool[P] whether the span goes on behind the piece.
    """

    row: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    more: np.ndarray


class PackedRows(Protocol):
    """Rows of pieces with random access."""

    def __len__(self) -> int: ...

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What rows int64[R] hold; piece.row counts within `rows`."""
        ...


class ConcatenatedRows:
    """Spans without a gap between them, cut every `length` tokens.

    Args:
      spans: In the order in which they follow one another.
      length: Positions of a row.
    """

    def __init__(self, spans: Spans, length: int) -> None:
        self._spans, self._length = spans, length
        self._bounds = lengths_to_offsets(spans.end - spans.begin)
        self.tokens = int(self._bounds[-1])

    def __len__(self) -> int:
        return -(-self.tokens // self._length)

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What rows int64[R] hold."""
        return self.windows(rows * self._length)

    def windows(self, starts: np.ndarray) -> Pieces:
        """Windows of `length` tokens from positions int64[R] of the stream, or fewer where it ends."""
        stops = np.minimum(starts + self._length, self.tokens)
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        last = np.searchsorted(self._bounds, stops, side="left") - 1
        counts = last - first + 1
        row = np.repeat(np.arange(starts.size), counts)
        span = np.repeat(first - lengths_to_offsets(counts)[:-1], counts) + np.arange(row.size)
        a, b = np.maximum(self._bounds[span], starts[row]), np.minimum(self._bounds[span + 1], stops[row])
        some = np.flatnonzero(b > a)  # an empty span may lie between two others
        row, span, a, b = row[some], span[some], a[some], b[some]
        return Pieces(row, self._spans.begin[span] + a - self._bounds[span], b - a, b < self._bounds[span + 1])


def fill(tokens: np.ndarray, pieces: Pieces, rows: int, length: int, positions: Positions) -> TokenBatch:
    """The batch of rows that hold some pieces.

    Args:
      tokens: int[N], what the spans are stretches of.
      pieces: Of the rows; those of a row take at most `length` positions together.
      rows: Rows of the batch; one without pieces is nothing but padding.
      length: Positions of a row.
      positions: "document" = rotary positions restart with each piece; "row" = they run through the row.
    """
    batch = TokenBatch.empty(rows, length)
    if positions == "row":
        batch.positions[:] = np.arange(length, dtype=np.int32)
    counting = np.arange(length, dtype=np.int32)
    flat = [array.reshape(-1) for array in batch.arrays().values()]
    out_tokens, out_targets, out_weights, out_segments, out_positions = flat
    before = lengths_to_offsets(pieces.length)[:-1]
    heads = np.flatnonzero(np.diff(pieces.row, prepend=-1))
    in_row = np.diff(np.append(heads, pieces.row.size))
    at = pieces.row * length + before - np.repeat(before[heads], in_row)
    number = np.arange(pieces.row.size) - np.repeat(heads, in_row) + 1
    columns = (at, pieces.begin, pieces.length, pieces.more, number)
    for a, begin, size, more, segment in zip(*(column.tolist() for column in columns), strict=True):
        known = size if more else size - 1
        out_tokens[a : a + size] = tokens[begin : begin + size]
        out_targets[a : a + known] = tokens[begin + 1 : begin + 1 + known]
        out_weights[a : a + known] = 1
        out_segments[a : a + size] = segment
        if positions == "document":
            out_positions[a : a + size] = counting[:size]
    return batch
