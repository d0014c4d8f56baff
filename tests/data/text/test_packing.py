"""Packing against literal lists: every token once, the rows that the definitions give, no fewer than can be."""

import functools
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scalejax.data.text.packing import (
    ConcatenatedRows,
    FittedRows,
    PackedRows,
    Pieces,
    Positions,
    Spans,
    best_fit_decreasing,
    fewest_rows,
    fill,
    first_fit,
    fit,
)
from scalejax.data.text.tokens import TokenBatch

Fitting = Literal["first-fit", "best-fit"]

# Sizes with empty documents, ones that fill a row and ones longer than two.
SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=30)


def spans_of(sizes: list[int], order: list[int] | None = None) -> Spans:
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    spans = Spans(bounds[:-1], bounds[1:])
    return spans if order is None else spans.take(np.array(order))


def joined(parts: list[FittedRows]) -> list[list[tuple[int, int, bool]]]:
    """(begin, length, more) of each piece of each row."""
    rows = []
    for part in parts:
        for r in range(len(part)):
            pieces = part.pieces(np.array([r]))
            rows.append(list(zip(pieces.begin.tolist(), pieces.length.tolist(), pieces.more.tolist(), strict=True)))
    return rows


def literal_first_fit(sizes: list[int], length: int) -> list[list[tuple[int, int, bool]]]:
    """The definition, with lists: rows of (begin, length, more), in the order of their first span and piece."""
    begins = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    rows: list[list[tuple[int, int]]] = []  # (span, offset)
    bins: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for span, size in enumerate(sizes):
        whole = size - size % length
        rows += [[(span, offset)] for offset in range(0, whole, length)]
        if whole < size:
            fits = [b for b, r in enumerate(room) if r >= size - whole]
            if not fits:
                fits = [len(bins)]
                bins.append([])
                room.append(length)
            bins[fits[0]].append((span, whole))
            room[fits[0]] -= size - whole
    return [
        [(begins[d] + offset, min(length, sizes[d] - offset), offset + length < sizes[d]) for d, offset in row]
        for row in sorted(rows + bins)
    ]


@given(SIZES, st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_first_fit_gives_the_rows_of_its_definition(sizes: list[int], length: int) -> None:
    assert joined(list(fit(spans_of(sizes), length, "first-fit", 1000))) == literal_first_fit(sizes, length)


@given(st.lists(st.integers(1, 20), max_size=40))
@settings(max_examples=200, deadline=None)
def test_best_fit_leaves_the_least_room_at_every_item(sizes: list[int]) -> None:
    bins = best_fit_decreasing(np.array(sizes, np.int64), 20)
    room: dict[int, int] = {}
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        possible = [r for r in room.values() if r >= sizes[item]]
        chosen = int(bins[item])
        assert (chosen in room) == bool(possible)
        if possible:
            assert room[chosen] == min(possible)
        room[chosen] = room.get(chosen, 20) - sizes[item]
    assert sorted(room) == list(range(len(room)))
    assert min(room.values(), default=0) >= 0


@given(SIZES, st.integers(1, 12), st.sampled_from(["concatenate", "first-fit", "best-fit"]), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_every_token_lies_in_one_row_and_knows_whether_its_document_goes_on(
    sizes: list[int], length: int, packing: str, window: int
) -> None:
    order = np.random.RandomState(len(sizes)).permutation(len(sizes)).tolist()
    spans = spans_of(sizes, order)
    parts: list[PackedRows]
    if packing == "concatenate":
        parts = [ConcatenatedRows(spans, length)]
    else:
        parts = list(fit(spans, length, packing, window))  # pyright: ignore[reportArgumentType]
    seen = np.zeros(sum(sizes), int)
    ends = set(np.cumsum(sizes).tolist())
    for part in parts:
        pieces = part.pieces(np.arange(len(part)))
        assert np.bincount(pieces.row, weights=pieces.length, minlength=len(part)).max(initial=0) <= length
        assert set(pieces.row.tolist()) == set(range(len(part)))  # no row is empty
        for begin, size, more in zip(pieces.begin, pieces.length, pieces.more, strict=True):
            seen[begin : begin + size] += 1
            assert size >= 1
            assert more == (begin + size not in ends)
            if packing != "concatenate" and more:
                assert size == length  # only what is longer than a row is cut
    np.testing.assert_array_equal(seen, 1)


def test_windows_share_no_rows() -> None:
    parts = list(fit(spans_of([5] * 10), 20, "first-fit", 4))
    assert [len(part) for part in parts] == [1, 1, 1]
    assert [part.begin.tolist() for part in parts] == [[0, 5, 10, 15], [20, 25, 30, 35], [40, 45]]


@given(SIZES, st.integers(1, 12), st.lists(st.integers(0, 200), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_windows_of_the_stream_may_begin_anywhere(sizes: list[int], length: int, starts: list[int]) -> None:
    order = np.random.RandomState(1).permutation(len(sizes)).tolist()
    rows = ConcatenatedRows(spans_of(sizes, order), length)
    begins = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    stream = [t for d in order for t in range(begins[d], begins[d + 1])]
    assert rows.tokens == len(stream)
    assume(stream)
    starts = [s % len(stream) for s in starts]
    pieces = rows.windows(np.array(starts))
    for r, start in enumerate(starts):
        here = pieces.row == r
        got = [t for b, n in zip(pieces.begin[here], pieces.length[here], strict=True) for t in range(b, b + n)]
        assert got == stream[start : start + length]


@functools.cache
def optimum(sizes: tuple[int, ...], rooms: tuple[int, ...], capacity: int) -> int:
    """Fewest bins, by trying every place for every item."""
    if not sizes:
        return len(rooms)
    item, rest = sizes[0], sizes[1:]
    best = optimum(rest, tuple(sorted((*rooms, capacity - item))), capacity)
    for i, room in enumerate(rooms):
        if room >= item:
            best = min(best, optimum(rest, tuple(sorted((*rooms[:i], room - item, *rooms[i + 1 :]))), capacity))
    return best


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8), st.just(10))
@settings(max_examples=150, deadline=None)
def test_no_packing_needs_fewer_rows_than_the_bound(sizes: list[int], length: int) -> None:
    least = optimum(tuple(sorted(sizes, reverse=True)), (), length)
    bound = fewest_rows(np.array(sizes), length)
    assert -(-sum(sizes) // length) <= bound <= least
    counts = {f: int(f(np.array(sizes), length).max()) + 1 for f in (first_fit, best_fit_decreasing)}
    # Dosa and Sgall 2013 and 2014, Johnson 1973 with Dosa's constant.
    assert least <= counts[first_fit] <= 1.7 * least
    assert least <= counts[best_fit_decreasing] <= 11 / 9 * least + 6 / 9


def test_the_bound_sees_pieces_that_cannot_share_a_row() -> None:
    assert fewest_rows(np.full(10, 6), 10) == 10  # by tokens it would be 6
    assert fewest_rows(np.array([25, 10, 5]), 10) == 4
    assert fewest_rows(np.array([0, 0]), 10) == 0
    assert fewest_rows(np.array([1]), 1) == 1


def literal_batch(tokens: np.ndarray, pieces: Pieces, rows: int, length: int, positions: Positions) -> TokenBatch:
    batch = TokenBatch.empty(rows, length)
    if positions == "row":
        batch.positions[:] = range(length)
    column, segment, row = 0, 0, -1
    for r, begin, size, more in zip(pieces.row, pieces.begin, pieces.length, pieces.more, strict=True):
        if r != row:
            row, column, segment = r, 0, 0
        segment += 1
        for i in range(size):
            batch.tokens[r, column] = tokens[begin + i]
            if i + 1 < size or more:
                batch.targets[r, column] = tokens[begin + i + 1]
                batch.weights[r, column] = 1
            batch.segment_ids[r, column] = segment
            if positions == "document":
                batch.positions[r, column] = i
            column += 1
    return batch


@pytest.mark.parametrize("long", [1, 1000], ids=["one-by-one", "at-once"])
@given(
    sizes=SIZES,
    length=st.integers(1, 12),
    packing=st.sampled_from(["concatenate", "first-fit", "best-fit"]),
    positions=st.sampled_from(["document", "row"]),
    at_once=st.integers(1, 60),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_batches_equal_a_literal_filling(
    long: int, sizes: list[int], length: int, packing: str, positions: Positions, at_once: int, data: st.DataObject
) -> None:
    tokens = (np.arange(sum(sizes)) * 7 % 65_521).astype(np.uint16)
    spans = spans_of(sizes)
    made: PackedRows = ConcatenatedRows(spans, length)
    if packing != "concatenate":
        made = next(fit(spans, length, packing, 1000))  # pyright: ignore[reportArgumentType]
    rows = data.draw(st.lists(st.integers(0, max(0, len(made) - 1)), max_size=5 if len(made) else 0))
    pieces = made.pieces(np.array(rows, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalejax.data.text.packing._LONG", long)
        patch.setattr("scalejax.data.text.packing._FILLED_AT_ONCE", at_once)
        got = fill(tokens, pieces, len(rows) + 1, length, positions)  # one row more than there are: padding
    expected = literal_batch(tokens, pieces, len(rows) + 1, length, positions)
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(got.arrays()[name], array, err_msg=name)
        assert got.arrays()[name].dtype == array.dtype


@pytest.mark.parametrize("packing", ["first-fit", "best-fit"])
def test_documents_of_a_usual_spread_of_lengths_leave_little_padding(packing: Fitting) -> None:
    sizes = np.exp(np.random.default_rng(0).normal(6.5, 1.2, 20_000)).astype(int) + 1
    rows = sum(len(part) for part in fit(spans_of(sizes.tolist()), 2048, packing, 4096))
    bound = fewest_rows(sizes, 2048)
    assert bound <= rows <= (1.01 if packing == "first-fit" else 1.002) * bound
