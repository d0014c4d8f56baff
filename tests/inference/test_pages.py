"""The host's side of the cache: whoever holds units has the tokens that they were filled with, and nothing is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.inference.pages import OutOfUnits, Pool

SIZE = 4


def filled(pool, tokens):
    """A sequence that holds these tokens, and what it found."""
    held = pool.find(tokens)
    found = held.count
    pool.grow(held, len(tokens))
    pool.wrote(held, tokens, len(tokens))
    return held, found


def test_full_units_of_a_common_beginning_are_shared():
    pool = Pool(10, SIZE)
    one, _ = filled(pool, [*range(11)])
    other, found = filled(pool, [*range(9), 50, 51])
    assert found == 8
    assert other.units[:2] == one.units[:2]
    assert not set(other.units[2:]) & set(one.units)
    assert pool.held == 4


def test_the_last_token_is_always_read():
    pool = Pool(10, SIZE)
    filled(pool, [*range(8)])
    assert pool.find([*range(8)]).count == 4
    assert pool.find([*range(9)]).count == 8


def test_equal_units_behind_others_are_not_the_same():
    pool = Pool(10, SIZE)
    filled(pool, [1, 2, 3, 4, 7, 7, 7, 7, 0])
    assert pool.find([7, 7, 7, 7, 0]).count == 0
    assert pool.find([4, 3, 2, 1, 7, 7, 7, 7, 0]).count == 0


def test_models_and_formats_do_not_find_each_other():
    keys = [Pool(2, SIZE, identity)._root for identity in ("a int8", "a float8", "b int8")]
    assert len(set(keys)) == 3


def test_a_conversation_goes_on_in_the_unit_where_it_ended():
    pool = Pool(6, SIZE)
    held, _ = filled(pool, [*range(6)])
    units = [*held.units]
    pool.release(held, [*range(6)])
    assert pool.usable == 6
    again = pool.find([*range(6), 60, 61])
    assert (again.units, again.count) == (units, 6)
    # It is one sequence's to write to: another with the same beginning finds the full units alone.
    assert pool.find([*range(6), 70]).count == 4


def test_a_unit_that_is_not_full_is_not_found_by_what_differs_from_it():
    pool = Pool(6, SIZE)
    held, _ = filled(pool, [*range(6)])
    pool.release(held, [*range(6)])
    assert pool.find([0, 1, 2, 3, 4, 99, 100]).count == 4


def test_samples_share_full_units_and_copy_the_open_one():
    pool = Pool(6, SIZE)
    held, _ = filled(pool, [*range(6)])
    other, copy = pool.share(held)
    assert other.units[0] == held.units[0]
    assert copy == (held.units[1], other.units[1])
    assert other.units[1] != held.units[1]
    full, _ = filled(pool, [*range(40, 44)])
    assert pool.share(full)[1] is None


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning():
    pool = Pool(4, SIZE)
    for first in (0, 100):
        tokens = [*range(first, first + 8)]
        held, _ = filled(pool, tokens)
        pool.release(held, tokens)
    held = pool.find([*range(8), 8])
    pool.release(held, [*range(8)])  # used again, so 100 ... is older
    grown = pool.find([900])
    pool.grow(grown, SIZE)
    assert pool.find([*range(100, 108), 0]).count == 4
    assert pool.find([*range(8), 8]).count == 8


@pytest.mark.parametrize(("window", "left"), [(None, [14, 12, 8, 4, 0]), (6, [14, 0, 0])])
def test_units_of_a_sequence_are_needed_again_from_its_end(window, left):
    # With a window token 12 sees the second unit, which is gone before.
    pool, tokens = Pool(4, SIZE, window=window), [*range(14)]
    held, _ = filled(pool, tokens)
    kept, units = len(held.units), held.units[::-1]
    pool.release(held, tokens)
    other = pool.find([900])
    pool.grow(other, (4 - kept) * SIZE)  # those that nobody knows come first
    found, taken = [], []
    for count in range(4 - kept, 5):
        pool.grow(other, count * SIZE)
        taken += other.units[4 - kept + len(taken) :]
        again = pool.find([*tokens, 14])
        found.append(again.count)
        pool.release(again, tokens)
    assert (taken, found) == (units, left)


def test_a_sequence_that_goes_on_in_an_open_unit_begins_units_where_that_one_did():
    pool, tokens = Pool(6, SIZE), [*range(6)]
    held = pool.find(tokens, rotation=3)
    pool.grow(held, 6)
    pool.wrote(held, tokens, 6)
    pool.release(held, tokens)
    again = pool.find([*tokens, 6], rotation=1)
    assert (again.count, again.rotation) == (6, 3)
    pool.release(again, tokens)
    # Full units say nothing of where they began: the next one is begun anew.
    other = pool.find([*range(4), 50], rotation=1)
    assert (other.count, other.rotation) == (4, 1)


def test_more_than_there_is_is_refused_and_nothing_is_taken():
    pool = Pool(3, SIZE)
    held = pool.find([1])
    with pytest.raises(OutOfUnits):
        pool.grow(held, 13)
    assert (held.units, pool.usable) == ([], 3)
    pool.grow(held, 12)
    other = pool.find([2])
    with pytest.raises(OutOfUnits):
        pool.grow(other, 1)


def test_discarded_units_are_found_by_nobody():
    pool = Pool(6, SIZE)
    held, _ = filled(pool, [*range(10)])
    pool.discard(held)
    assert pool.find([*range(10)]).count == 0
    assert pool.usable == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12), st.sampled_from([None, 1, 4, 6]))
def test_any_turns_keep_what_sequences_hold(seed, units, window):
    """The content of every unit, kept on the side, is what its holders say; units in use are never handed out."""
    draw, pool = random.Random(seed), Pool(units, SIZE, window=window)
    content: dict[int, list[int]] = {}
    running: list[tuple[list[int], object]] = []
    for _ in range(60):
        if running and draw.random() < 0.5:
            tokens, held = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.2:
                pool.discard(held)
            else:
                pool.release(held, tokens)
            continue
        # Few different tokens, so that beginnings are often alike.
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 3 * SIZE))]
        held = pool.find(tokens)
        assert held.count < len(tokens)
        assert held.first <= max(0, held.count + 1 - (window or 99)) // SIZE
        for number, unit in enumerate(held.units, held.first):
            want = tokens[number * SIZE : min((number + 1) * SIZE, held.count)]
            assert content[unit][: len(want)] == want
        in_use = {unit for _, other in running for unit in other.units}
        try:
            pool.grow(held, len(tokens))
        except OutOfUnits:
            pool.release(held, tokens)
            continue
        begun = held.count // SIZE
        assert not in_use & {*held.units[begun - held.first :]}
        for number in range(begun, held.first + len(held.units)):
            content[held.unit(number)] = tokens[number * SIZE : (number + 1) * SIZE]
        pool.wrote(held, tokens, len(tokens))
        assert held.first == (max(0, len(tokens) + 1 - window) // SIZE if window else 0)
        assert held.first + len(held.units) == -(-len(tokens) // SIZE)
        running.append((tokens, held))
        assert pool.held == len({unit for _, other in running for unit in other.units})
    for tokens, held in running:
        pool.release(held, tokens)
    assert pool.usable == units


def test_with_a_window_only_what_is_seen_is_held_and_has_to_be_found():
    pool = Pool(8, SIZE, window=6)
    tokens = [*range(18)]
    held, _ = filled(pool, tokens)
    # Token 18 sees those from 13 on, which begin in unit 3.
    assert (held.first, len(held.units)) == (3, 2)
    pool.release(held, tokens)
    blocker = pool.find([100])
    pool.grow(blocker, 6 * SIZE)  # takes the units before
    again = pool.find([*range(19)])
    assert (again.count, again.first) == (18, 3)
    assert pool.find([*range(9)]).count == 0
