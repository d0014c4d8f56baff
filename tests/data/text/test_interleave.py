"""The order of a mixture: every prefix has its shares, and any row is found without those before it."""

import fractions

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.text.interleave import Interleave
from scalejax.errors import UserError

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


def literal(order: Interleave, stop: int) -> list[tuple[int, int]]:
    source, position = order.rows(0, stop)
    return list(zip(source.tolist(), position.tolist(), strict=True))


@pytest.mark.slow
@given(WEIGHTS)
@settings(max_examples=200, deadline=None)
def test_every_prefix_is_less_than_one_row_off_and_each_source_is_read_in_order(weights: list[int]) -> None:
    rows = literal(Interleave(weights), 3 * sum(weights) + 7)
    taken = [0] * len(weights)
    for t, (source, position) in enumerate(rows, start=1):
        assert position == taken[source]
        taken[source] += 1
        for weight, count in zip(weights, taken, strict=True):
            assert abs(count - fractions.Fraction(weight, sum(weights)) * t) < 1


@given(WEIGHTS, st.integers(0, 500), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_any_stretch_is_found_alone(weights: list[int], start: int, size: int) -> None:
    order = Interleave(weights, [(50, weights[::-1]), (333, weights)])
    source, position = order.rows(start, start + size)
    assert list(zip(source.tolist(), position.tolist(), strict=True)) == literal(order, start + size)[start:]


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=2, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_shares_are_counted_from_each_change_and_no_row_of_a_source_is_lost(
    weights: list[list[int]], data: st.DataObject
) -> None:
    starts = sorted(data.draw(st.sets(st.integers(1, 200), min_size=len(weights) - 1, max_size=len(weights) - 1)))
    rows = literal(Interleave(weights[0], list(zip(starts, weights[1:], strict=True))), 300)
    for source in range(3):
        assert [p for s, p in rows if s == source] == list(range(sum(s == source for s, _ in rows)))
    for phase, (a, b) in enumerate(zip([0, *starts], [*starts, 300], strict=True)):
        for t in range(a, b):
            for source, weight in enumerate(weights[phase]):
                count = sum(s == source for s, _ in rows[a : t + 1])
                assert abs(count - fractions.Fraction(weight, sum(weights[phase])) * (t + 1 - a)) < 1


def test_each_source_goes_on_where_it_was_when_weights_change() -> None:
    rows = literal(Interleave([3, 1, 2], [(7, [1, 4, 0]), (20, [1, 1, 1])]), 60)
    for source in range(3):
        positions = [position for k, position in rows if k == source]
        assert positions == list(range(len(positions)))


def test_a_change_leaves_the_rows_before_it_alone() -> None:
    before = literal(Interleave([3, 1]), 40)
    assert literal(Interleave([3, 1], [(40, [1, 1])]), 40) == before
    assert literal(Interleave([3, 1], [(40, [1, 1])]), 44)[40:] != literal(Interleave([3, 1]), 44)[40:]


def test_weights_are_read_as_the_decimals_that_they_print_as() -> None:
    for tenths in ([0.1, 0.2, 0.7], [1, 2, 7], [10.0, 20.0, 70.0]):
        assert literal(Interleave(tenths), 50) == literal(Interleave([0.01, 0.02, 0.07]), 50)
    third = [s for s, _ in literal(Interleave([1.0, 1.0, 1.0]), 9)]
    assert third == [0, 1, 2] * 3


def test_rows_far_into_a_long_run_are_found_at_once() -> None:
    order = Interleave([0.5, 0.25, 0.17, 0.08])
    source, position = order.rows(10**15, 10**15 + 100)
    assert np.bincount(source).tolist() == [50, 25, 17, 8]
    assert position[source == 1][0] == 10**15 // 4


@pytest.mark.parametrize(
    ("weights", "schedule", "match"),
    [
        ([1, -1], [], "at least 0"),
        ([0.0, 0.0], [], "one of them more"),
        ([1, float("nan")], [], "at least 0"),
        ([1, 1], [(10, [1])], "one weight for each of 2 sources"),
        ([1, 1], [(0, [1, 2])], "begin after row 0"),
        ([1, 1], [(9, [1, 2]), (9, [2, 1])], "ascend"),
        ([1.0, 1e-7], [], r"too fine.*\(1.0, 0.0\)"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: list[float], schedule: list, match: str) -> None:
    with pytest.raises(UserError, match=match):
        Interleave(weights, schedule)


def test_a_source_without_weight_gives_nothing() -> None:
    assert {s for s, _ in literal(Interleave([1, 0, 2]), 100)} == {0, 2}
