"""Documents laid into rows of S positions.

What is laid are *spans* of a token array, one a document (or the part of it that a split holds). A *piece* is a stretch
of a span that lies in one row:

  concatenate   the spans follow one another without a gap and are cut every S tokens; only the last row has padding
  first-fit     each span goes whole into the first row that has room for it
  best-fit      the same from the longest span of a window on, into the row that is left with the least room
                (best-fit decreasing, as in Ding et al., "Fewer truncations improve language modeling", 2024)

The last two cut only spans longer than S: into pieces of S, each a row of its own, and the rest, which is fitted. They
look at a window of spans at a time, so that a corpus of any size is packed in little memory.

With a `ModalityRoom` a row holds no more tokens of each modality than its capacities say: spans that hold more, or are
longer than a row, are cut into pieces that do not, and a piece goes into the first row that has room for all of it.

Every token of every span lies in exactly one row. Where a span is cut, the last token of the first piece keeps its
target, which is the first token of the next; the pieces do not see each other, and each has a segment of its own.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.text.tokens import TokenBatch
from scalejax.errors import UserError

Positions = Literal["document", "row"]

# Pieces of this mean length or more are copied one by one; of shorter ones, so many positions are filled at once.
_LONG = 256
_FILLED_AT_ONCE = 16_384


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
        """`length` tokens from each of positions int64[R] of the stream, in [0, tokens), or fewer where it ends."""
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
    if pieces.length.sum() >= _LONG * pieces.length.size:
        _copy_pieces(tokens, pieces, batch, positions)
        return batch
    # A few rows at once: temporaries that leave the caches, and are asked of the system anew, cost most of the time.
    step = max(1, _FILLED_AT_ONCE // length)
    bounds = np.searchsorted(pieces.row, np.arange(0, rows + step, step))
    for r, (a, b) in zip(range(0, rows, step), itertools.pairwise(bounds.tolist()), strict=False):
        if a < b:
            flat = {name: array[r : r + step].reshape(-1) for name, array in batch.arrays().items()}
            part = Pieces(pieces.row[a:b] - r, pieces.begin[a:b], pieces.length[a:b], pieces.more[a:b])
            _fill_rows(tokens, part, flat, length, positions)
    return batch


def _copy_pieces(tokens: np.ndarray, pieces: Pieces, batch: TokenBatch, positions: Positions) -> None:
    """Piece after piece."""
    counter = np.arange(batch.tokens.shape[1], dtype=np.int32)
    row, column, number = -1, 0, 0
    columns = (pieces.row, pieces.begin, pieces.length, pieces.more)
    for r, begin, size, more in zip(*(values.tolist() for values in columns), strict=True):
        if r != row:
            row, column, number = r, 0, 0
        end, known = column + size, size if more else size - 1
        number += 1
        batch.tokens[r, column:end] = tokens[begin : begin + size]
        batch.targets[r, column : column + known] = tokens[begin + 1 : begin + 1 + known]
        batch.weights[r, column : column + known] = 1
        batch.segment_ids[r, column:end] = number
        if positions == "document":
            batch.positions[r, column:end] = counter[:size]
        column = end


def _fill_rows(
    tokens: np.ndarray, pieces: Pieces, flat: dict[str, np.ndarray], length: int, positions: Positions
) -> None:
    """All pieces of some rows at once."""
    rows = flat["tokens"].size // length
    heads = np.flatnonzero(np.diff(pieces.row, prepend=-1))
    number = np.arange(pieces.row.size) - np.repeat(heads, np.diff(np.append(heads, pieces.row.size))) + 1
    # Padding is laid as pieces of segment 0, so that everything below is written from end to end, without an index.
    used = np.bincount(pieces.row, weights=pieces.length, minlength=rows).astype(np.int64)
    padded = np.flatnonzero(used < length)
    order = np.argsort(np.concatenate([pieces.row, padded]), kind="stable")
    none = np.zeros_like(padded)
    begin = np.concatenate([pieces.begin, none])[order]
    size = np.concatenate([pieces.length, length - used[padded]])[order]
    segment = np.concatenate([number, none])[order]
    more = np.concatenate([pieces.more, none.astype(bool)])[order]
    gaps = [slice(r * length + used[r], (r + 1) * length) for r in padded.tolist()]
    ends = np.cumsum(size)
    cut = ends[~more] - 1  # the last token of a span has no target
    counter = np.arange(rows * length)
    take = counter + np.repeat(begin - (ends - size), size)
    for gap in gaps:
        take[gap] = -1  # some token, also after 1 is added
    flat["tokens"][:] = tokens[take]
    take += 1
    take[cut] = 0
    flat["targets"][:] = tokens[take]
    flat["targets"][cut] = 0
    flat["weights"][:] = 1
    flat["weights"][cut] = 0
    flat["segment_ids"][:] = np.repeat(segment.astype(np.int32), size)
    if positions == "document":
        flat["positions"][:] = counter - np.repeat(ends - size, size)
    for gap in gaps:
        for name in ("tokens", "targets", "weights"):
            flat[name][gap] = 0
        if positions == "document":
            flat["positions"][gap] = 0


class FittedRows:
    """Rows whose pieces were chosen beforehand (`fit`), kept as arrays, perhaps mapped from disk.

    Attributes:
      offsets: int64[R + 1], pieces of row r are [offsets[r], offsets[r + 1]).
      begin: int64[P] first token of each piece.
      length: int32[P] its tokens.
      more: bool[P] whether its span goes on behind it.
    """

    def __init__(self, offsets: np.ndarray, begin: np.ndarray, length: np.ndarray, more: np.ndarray) -> None:
        self.offsets, self.begin, self.length, self.more = offsets, begin, length, more

    def __len__(self) -> int:
        return self.offsets.size - 1

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What rows int64[R] hold."""
        counts = self.offsets[rows + 1] - self.offsets[rows]
        row = np.repeat(np.arange(rows.size), counts)
        take = np.arange(row.size) + np.repeat(self.offsets[rows] - (np.cumsum(counts) - counts), counts)
        return Pieces(row, self.begin[take], self.length[take].astype(np.int64), self.more[take])


def fit(spans: Spans, length: int, packing: Literal["first-fit", "best-fit"], window: int) -> Iterator[FittedRows]:
    """Lays spans into rows, window after window of `window` spans; rows of different windows share nothing.

    Args:
      spans: In the order in which they are laid.
      length: Positions of a row.
      packing: How.
      window: Spans that may share rows.

    Yields:
      The rows of each window, in the order of the first span in each.
    """
    for start in range(0, len(spans), window):
        here = spans.take(np.arange(start, min(start + window, len(spans))))
        yield _fit_window(here, length, packing)


def _fit_window(spans: Spans, length: int, packing: Literal["first-fit", "best-fit"]) -> FittedRows:
    sizes = spans.end - spans.begin
    whole, rest = np.divmod(sizes, length)
    # Pieces that fill a row come first, then what is left of each span.
    cut = np.repeat(np.arange(len(spans)), whole)
    at = np.arange(cut.size) - np.repeat(np.cumsum(whole) - whole, whole)
    left = np.flatnonzero(rest)
    place = first_fit if packing == "first-fit" else best_fit_decreasing
    bins = place(rest[left], length)
    span = np.concatenate([cut, left])
    offset = np.concatenate([at, whole[left]]) * length
    row = np.concatenate([np.arange(cut.size), cut.size + bins])
    # Number the rows by the first span in them, then by where in that span they begin.
    rows = int(row.max(initial=-1)) + 1
    first = np.full(rows, len(spans))
    np.minimum.at(first, row, span)
    begins = np.full(rows, np.iinfo(np.int64).max)
    is_first = span == first[row]
    begins[row[is_first]] = offset[is_first]
    rank = np.empty(rows, np.int64)
    rank[np.lexsort((begins, first))] = np.arange(rows)
    order = np.lexsort((span, rank[row]))
    row, span, offset = rank[row][order], span[order], offset[order]
    size = np.minimum(sizes[span] - offset, length)
    counts = np.bincount(row, minlength=rows)
    more = offset + size < sizes[span]
    return FittedRows(lengths_to_offsets(counts), spans.begin[span] + offset, size.astype(np.int32), more)


@dataclasses.dataclass(frozen=True)
class ModalityRoom:
    """What a row has room for where tokens are of several modalities.

    Attributes:
      of_ids: int8[V], the modality of each id.
      capacities: Most tokens of each in a row.
      length: Positions of a row.
      names: Of the modalities. Runs of "image" are never cut.
    """

    of_ids: np.ndarray
    capacities: tuple[int, ...]
    length: int
    names: tuple[str, ...]

    def fit(self, tokens: np.ndarray, spans: Spans, window: int) -> Iterator[FittedRows]:
        """As `fit`, of stretches of `tokens`.

        Raises:
          UserError: an image has more tokens than a row has room for.
        """
        limits = np.array([self.length, *self.capacities], np.int64)
        for start in range(0, len(spans), window):
            pieces: list[tuple[int, int, bool]] = []
            counts: list[np.ndarray] = []
            for begin, end in zip(
                spans.begin[start : start + window].tolist(), spans.end[start : start + window].tolist(), strict=True
            ):
                of = self.of_ids[tokens[begin:end]]
                edges = [0, *self._cuts(of, begin), end - begin]
                for a, b in itertools.pairwise(edges):
                    if a < b:
                        pieces.append((begin + a, b - a, begin + b < end))
                        counts.append(np.bincount(of[a:b], minlength=len(self.names)))
            lengths = np.array([length for _, length, _ in pieces], np.int64)
            sizes = np.column_stack([lengths, np.array(counts, np.int64).reshape(-1, len(self.names))])
            bins = _first_fit_of_several(sizes, limits)
            order = np.argsort(bins, kind="stable")
            yield FittedRows(
                lengths_to_offsets(np.bincount(bins, minlength=int(bins.max(initial=-1)) + 1)),
                np.array([begin for begin, _, _ in pieces], np.int64)[order],
                lengths[order].astype(np.int32),
                np.array([more for _, _, more in pieces], bool)[order],
            )

    def _cuts(self, of: np.ndarray, begin: int) -> list[int]:
        """Where a span is cut, whose tokens have modalities int8[n]."""
        counts = np.bincount(of, minlength=len(self.names))
        if of.size <= self.length and (counts <= self.capacities).all():
            return []
        starts = np.flatnonzero(np.diff(of, prepend=-1)).tolist()
        cuts: list[int] = []
        free, left = self.length, list(self.capacities)
        for start, stop in itertools.pairwise([*starts, of.size]):
            modality = int(of[start])
            most = min(self.length, self.capacities[modality])
            whole = self.names[modality] == "image"
            if most == 0 or (whole and stop - start > most):
                raise UserError(
                    f"data.image_share: {stop - start} tokens of {self.names[modality]} follow one another from token "
                    f"{begin + start} of the corpus on, and a row of {self.length} has room for {most}. Widen the "
                    "bounds, or take longer rows."
                )
            at = start
            while at < stop:
                here = min(free, left[modality])
                if here == 0 or (whole and here < stop - at):
                    cuts.append(at)
                    free, left = self.length, list(self.capacities)
                    continue
                taken = min(here, stop - at)
                at, free = at + taken, free - taken
                left[modality] -= taken
        return cuts


def _first_fit_of_several(sizes: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Bin of each item, int64[M]: the first that has room for each of its sizes [M, K], none above limits [K]."""
    room = np.empty((sizes.shape[0], limits.size), np.int64)
    bins = np.empty(sizes.shape[0], np.int64)
    opened = 0
    for item, size in enumerate(sizes):
        fits = (room[:opened] >= size).all(1)
        chosen = int(fits.argmax()) if fits.any() else opened
        if chosen == opened:
            room[opened] = limits
            opened += 1
        room[chosen] -= size
        bins[item] = chosen
    return bins


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each item, int64[M]: the first bin that has room, in the order of the items (sizes in [1, capacity])."""
    leaves = 1 << max(0, sizes.size - 1).bit_length()
    room = [capacity] * (2 * leaves)  # a tree: the most room of any bin below a node
    bins = []
    for size in sizes.tolist():
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        bins.append(node - leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return np.array(bins, np.int64)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each item, int64[M]: from the largest item on, the bin that is left with the least room."""
    bins = np.zeros(sizes.size, np.int64)
    with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a bin has room r
    opened = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fits = rooms >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, opened
            opened += 1
        bins[item] = chosen
        if room > size:
            with_room.setdefault(room - size, []).append(chosen)
            rooms |= 1 << (room - size)
    return bins


def fewest_rows(sizes: np.ndarray, length: int) -> int:
    """Rows that no packing of these spans can do without.

    Spans longer than a row are cut as `fit` cuts them. The bound is L2 of Martello and Toth ("Lower bounds and
    reduction procedures for the bin packing problem", 1990): for each k up to length / 2, pieces above length - k are
    alone, and those from k to length / 2 find room only beside the ones between.
    """
    whole, rest = np.divmod(np.asarray(sizes, np.int64), length)
    counts = np.bincount(rest[rest > 0], minlength=length + 1)
    number = np.concatenate([[0], np.cumsum(counts)])  # number[s]: pieces shorter than s
    total = np.concatenate([[0], np.cumsum(counts * np.arange(length + 1))])
    k = np.arange(length // 2 + 1)
    half = length // 2 + 1  # the first size above length / 2
    alone = number[-1] - number[length - k + 1]
    large = number[length - k + 1] - number[half]
    large_total = total[length - k + 1] - total[half]
    small_total = total[half] - total[k]
    excess = np.maximum(0, -(-(small_total - (large * length - large_total)) // length))
    return int(whole.sum() + (alone + large + excess).max(initial=0))
