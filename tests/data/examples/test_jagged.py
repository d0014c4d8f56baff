import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.jagged import KeyedJagged, lengths_to_offsets
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError

Lists = dict[str, list[list[int]]]


@st.composite
def features(draw: st.DrawFn, examples: int | None = None) -> Lists:
    """The oracle: plain lists of lists."""
    count = draw(st.integers(0, 6)) if examples is None else examples
    row = st.lists(st.integers(0, 9), max_size=4)
    return {key: draw(st.lists(row, min_size=count, max_size=count)) for key in ("a", "b", "c")}


@given(features())
def test_lists_survive_the_round_trip(lists: Lists) -> None:
    assert KeyedJagged.from_lists(lists).to_lists() == lists


@given(features())
def test_getitem_is_one_feature(lists: Lists) -> None:
    whole = KeyedJagged.from_lists(lists)
    for key in lists:
        assert whole[key].to_lists() == {key: lists[key]}


@given(features(), st.integers(0, 6), st.integers(0, 6))
def test_slice_equals_slicing_the_lists(lists: Lists, start: int, stop: int) -> None:
    count = len(lists["a"])
    start, stop = sorted((min(start, count), min(stop, count)))
    part = KeyedJagged.from_lists(lists).slice(start, stop)
    assert part.to_lists() == {key: rows[start:stop] for key, rows in lists.items()}


@given(st.lists(features(), min_size=1, max_size=4))
def test_concatenate_equals_adding_the_lists(parts: list[Lists]) -> None:
    whole = KeyedJagged.concatenate([KeyedJagged.from_lists(p) for p in parts])
    assert whole.to_lists() == {key: [row for part in parts for row in part[key]] for key in parts[0]}


@given(features(examples=5), st.integers(0, 5))
def test_slices_concatenate_to_the_whole_with_weights(lists: Lists, cut: int) -> None:
    weights = {key: [[0.5 * i for i in ids] for ids in rows] for key, rows in lists.items()}
    whole = KeyedJagged.from_lists(lists, weights)
    again = KeyedJagged.concatenate([whole.slice(0, cut), whole.slice(cut, 5)])
    np.testing.assert_array_equal(again.values, whole.values)
    np.testing.assert_array_equal(again.lengths, whole.lengths)
    assert again.weights is not None
    np.testing.assert_array_equal(again.weights, 0.5 * whole.values)


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_offsets_are_sums_of_lengths(lengths: list[int]) -> None:
    offsets = lengths_to_offsets(np.array(lengths, np.int32))
    assert offsets.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def test_rejects_offsets_passed_as_lengths() -> None:
    with pytest.raises(ValueError, match="Offsets passed"):
        lengths_to_offsets(np.array([0, -2]))


def test_from_dense_takes_one_or_several_ids_per_example() -> None:
    jagged = KeyedJagged.from_dense({"one": np.array([4, 5]), "two": np.array([[1, 2], [3, 4]])})
    assert jagged.to_lists() == {"one": [[4], [5]], "two": [[1, 2], [3, 4]]}
    assert jagged.lengths.dtype == np.int32


def test_construction_checks_shapes() -> None:
    ids = np.arange(3)
    with pytest.raises(ValueError, match="lengths must have shape"):
        KeyedJagged(("a",), ids, np.array([1, 1, 1]))
    with pytest.raises(ValueError, match="one entry per id"):
        KeyedJagged(("a",), ids, np.ones((1, 3), np.int32), np.ones(2, np.float32))
    with pytest.raises(KeyError, match="no feature 'b'"):
        KeyedJagged(("a",), ids, np.ones((1, 3), np.int32))["b"]
    with pytest.raises(ValueError, match="0 <= start"):
        KeyedJagged(("a",), ids, np.ones((1, 3), np.int32)).slice(2, 4)


SCHEMA = Schema(
    categorical=(Categorical(name="genre", rows=5, length=None, capacity=2.0), Categorical(name="user", rows=9))
)


@given(
    st.lists(st.lists(st.integers(-2, 6), max_size=3), min_size=3, max_size=3),
    st.lists(st.integers(-2, 10), min_size=3, max_size=3),
)
@settings(max_examples=200)
def test_validate_refuses_exactly_the_ids_outside_the_range(genres: list[list[int]], users: list[int]) -> None:
    jagged = KeyedJagged.from_lists({"genre": genres, "user": [[u] for u in users]})
    bad = [("genre", n, i) for n, ids in enumerate(genres) for i in ids if not 0 <= i < 5]
    bad += [("user", n, i) for n, i in enumerate(users) if not 0 <= i < 9]
    if not bad:
        jagged.validate(SCHEMA)
        return
    with pytest.raises(UserError) as error:
        jagged.validate(SCHEMA)
    name, example, value = bad[0]
    rows = {"genre": 5, "user": 9}[name]
    for part in (f"feature {name!r}", f"id {value} of example {example} ", f"[0, {rows})"):
        assert part in str(error.value)


def test_validate_refuses_a_wrong_number_of_ids() -> None:
    with pytest.raises(UserError, match="example 1 has 2 ids; the schema says exactly 1"):
        KeyedJagged.from_lists({"genre": [[1], []], "user": [[1], [2, 3]]}).validate(SCHEMA)


def test_validate_refuses_exactly_the_lists_that_are_too_long() -> None:
    limited = Schema(categorical=(Categorical(name="genre", rows=5, length=None, max_length=2), SCHEMA["user"]))
    KeyedJagged.from_lists({"genre": [[1, 2], [], [3]], "user": [[1], [2], [3]]}).validate(limited)
    long = KeyedJagged.from_lists({"genre": [[1], [1, 2, 3], [1, 2, 3, 4]], "user": [[1], [2], [3]]})
    long.validate(SCHEMA)
    with pytest.raises(UserError, match=r"'genre': example 1 has 3 ids; its max_length is 2 \(2 of 3 .*_length to 4"):
        long.validate(limited)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": None}, "needs capacity, .* or max_length"),
        ({"length": None, "max_length": 0}, "max_length must be at least 1, or None; got 0"),
        ({"length": 3, "max_length": 3}, "max_length is for jagged features; got max_length=3 beside length=3"),
        ({"length": None, "max_length": 3, "capacity": 4}, "capacity must be at most max_length=3, .*; got 4"),
    ],
)
def test_features_whose_lengths_contradict_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"'genre': .*{message}"):
        Categorical(name="genre", rows=5, **fields)


def test_room_is_the_capacity_or_the_longest_list() -> None:
    def room(**fields: float | None) -> int:
        return Categorical(name="genre", rows=5, **fields).capacity_for(7)  # pyright: ignore[reportArgumentType]

    assert room(length=2) == 14
    assert room(length=None, capacity=1.5) == 11
    assert room(length=None, capacity=1.5, max_length=4) == 11
    assert room(length=None, max_length=4) == 28
    assert room(length=None, capacity=0) == 1


def test_validate_refuses_lengths_that_do_not_fit_the_values() -> None:
    with pytest.raises(UserError, match="add up to 4 ids; got 3"):
        KeyedJagged(("genre", "user"), np.zeros(3, np.int32), np.ones((2, 2), np.int32)).validate(SCHEMA)
    lengths = np.array([[3, 1], [1, -1]], np.int32)
    with pytest.raises(UserError, match="feature 'user' has -1 in example 1"):
        KeyedJagged(("genre", "user"), np.zeros(4, np.int32), lengths).validate(SCHEMA)


def test_validate_refuses_other_feature_names() -> None:
    one = {"genre": [[1]], "user": [[1]]}
    with pytest.raises(UserError, match=r"missing: \['user'\], unknown: \['usr'\]"):
        KeyedJagged.from_lists({"genre": [[1]], "usr": [[1]]}).validate(SCHEMA)
    with pytest.raises(UserError, match="genre, user; got them in another order"):
        KeyedJagged.from_lists(dict(reversed(one.items()))).validate(SCHEMA)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_validate_refuses_weights_that_are_not_numbers(weight: float) -> None:
    ids = {"genre": [[1, 2], [], [3]], "user": [[1], [2], [0]]}
    weights = {"genre": [[1.0, 1.0], [], [1.0]], "user": [[1.0], [weight], [1.0]]}
    with pytest.raises(UserError, match=f"'user': an id of example 1 has the weight {weight}"):
        KeyedJagged.from_lists(ids, weights).validate(SCHEMA)
    weights["genre"][2][0] = weight
    with pytest.raises(UserError, match="'genre': an id of example 2"):
        KeyedJagged.from_lists(ids, weights).validate(SCHEMA)


@pytest.mark.parametrize("hash_", [2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_hashes_of_64_bits_are_refused_with_the_ways_out(hash_: int) -> None:
    ids = KeyedJagged.from_lists({"genre": [[1]], "user": [[hash_]]}, dtype=np.int64)
    with pytest.raises(UserError, match=rf"id {hash_} of example 0 .*64-bit hashes.*Hashed and Counted.*id map"):
        ids.validate(SCHEMA)
