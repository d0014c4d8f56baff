import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import (
    DedupKeyedJagged,
    Deduplicate,
    deduplicate,
    expand,
    expand_batch,
    hash_rows,
)
from scalejax.data.examples.jagged import KeyedJagged, lengths_to_offsets
from scalejax.errors import UserError

KEYS = ("a", "b", "c", "d")
GROUPINGS = [
    (),
    (("a",),),
    (("c", "a"),),
    (("b", "d"), ("a",)),
    (("d", "a", "c", "b"),),
    (("a",), ("b",), ("c",), ("d",)),
]
# Bits that compare unlike the numbers: -0.0 equals 0.0 and nan differs from itself.
WEIGHTS = [0.0, -0.0, 1.0, float("nan")]


@st.composite
def batches(draw: st.DrawFn) -> KeyedJagged:
    """Few different rows, so that many are equal, some in one feature only."""
    count = draw(st.integers(0, 9))
    row = st.lists(st.tuples(st.sampled_from([0, 1, -1, 2**40]), st.sampled_from(WEIGHTS)), max_size=2)
    rows = {key: draw(st.lists(row, min_size=count, max_size=count)) for key in KEYS}
    ids = {key: [[i for i, _ in r] for r in lists] for key, lists in rows.items()}
    weights = {key: [[w for _, w in r] for r in lists] for key, lists in rows.items()}
    return KeyedJagged.from_lists(ids, draw(st.sampled_from([None, weights])), np.int64)


groupings = st.sampled_from(GROUPINGS)


def rows_of(features: KeyedJagged, group: tuple[str, ...]) -> list[tuple]:
    """The oracle: each example as a tuple of the bytes of its lists."""
    parts = [features[name] for name in group]
    bounds = [lengths_to_offsets(part.lengths[0]) for part in parts]
    out = []
    for b in range(features.num_examples):
        cuts = [slice(o[b], o[b + 1]) for o in bounds]
        ids = tuple(part.values[c].tobytes() for part, c in zip(parts, cuts, strict=True))
        weights = tuple(p.weights[c].tobytes() for p, c in zip(parts, cuts, strict=True) if p.weights is not None)
        out.append((ids, weights))
    return out


def assert_equal(left: KeyedJagged, right: KeyedJagged) -> None:
    """To the bit, types included."""
    assert left.keys == right.keys
    for a, b in ((left.values, right.values), (left.lengths, right.lengths), (left.weights, right.weights)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def permuted(features: KeyedJagged, order: np.ndarray) -> KeyedJagged:
    return KeyedJagged.concatenate([features.slice(b, b + 1) for b in order.tolist()])


PARTS = pytest.mark.parametrize("part", [1, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
"""Of the examples of a property, each drawn anew."""


@pytest.mark.slow
@PARTS
@given(features=batches(), groups=groupings)
@settings(max_examples=100)
def test_expanding_gives_the_features_back_to_the_bit(part: int, features: KeyedJagged, groups: tuple) -> None:
    found = deduplicate(features, groups)
    found.validate()
    assert_equal(expand(found), features)


@PARTS
@given(features=batches(), groups=groupings)
@settings(max_examples=100)
def test_distinct_rows_are_those_of_a_dictionary_in_order_of_first_occurrence(
    part: int, features: KeyedJagged, groups: tuple
) -> None:
    found = deduplicate(features, groups)
    assert found.groups == groups
    for group, distinct, inverse in zip(groups, found.distinct, found.inverse, strict=True):
        numbers: dict[tuple, int] = {}
        wanted = [numbers.setdefault(row, len(numbers)) for row in rows_of(features, group)]
        assert inverse.tolist() == wanted
        assert rows_of(distinct, group) == list(numbers)
    grouped = {name for group in groups for name in group}
    assert found.plain.keys == tuple(key for key in KEYS if key not in grouped)


@pytest.mark.slow
@PARTS
@given(
    features=batches(),
    groups=groupings,
    weaken=st.sampled_from([lambda rows: rows * 0, lambda rows: rows & 1, lambda rows: rows << 60]),
)
@settings(max_examples=70)
def test_rows_of_equal_hash_are_never_merged(part: int, features: KeyedJagged, groups: tuple, weaken) -> None:
    def weak(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return weaken(hash_rows(values, lengths).astype(np.int64)).view(np.uint64)

    good, found = deduplicate(features, groups), deduplicate(features, groups, row_hash=weak)
    for a, b in zip(good.inverse, found.inverse, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_equal(expand(found), features)


@pytest.mark.slow
@given(batches(), groupings)
def test_deduplicating_again_changes_nothing(features: KeyedJagged, groups: tuple) -> None:
    once = deduplicate(features, groups)
    again = deduplicate(expand(once), groups)
    for a, b in zip((once.plain, *once.distinct), (again.plain, *again.distinct), strict=True):
        assert_equal(a, b)
    for group, distinct in zip(groups, once.distinct, strict=True):
        rows = deduplicate(distinct, [group])
        assert rows.inverse[0].tolist() == list(range(distinct.num_examples))


@pytest.mark.slow
@given(batches(), groupings, st.randoms(use_true_random=False))
def test_deduplication_commutes_with_the_order_of_examples_up_to_names(
    features: KeyedJagged, groups: tuple, random
) -> None:
    if not features.num_examples:
        return
    order = np.array(random.sample(range(features.num_examples), features.num_examples))
    before, after = deduplicate(features, groups), deduplicate(permuted(features, order), groups)
    for a, b, left, right in zip(before.distinct, after.distinct, before.inverse, after.inverse, strict=True):
        renamed = dict(zip(left[order].tolist(), right.tolist(), strict=True))
        assert [renamed[u] for u in left[order]] == right.tolist()
        assert sorted(renamed.values()) == list(range(b.num_examples))
        rows_a, rows_b = rows_of(a, a.keys), rows_of(b, b.keys)
        assert all(rows_a[u] == rows_b[v] for u, v in renamed.items())


def test_no_examples_and_no_features_in_no_group() -> None:
    empty = KeyedJagged(("a", "b"), np.zeros(0, np.int32), np.zeros((2, 0), np.int32))
    found = deduplicate(empty, [("a", "b")])
    assert found.distinct[0].num_examples == 0
    assert found.plain.lengths.shape == (0, 0)
    assert found.factors == (1.0,)
    assert_equal(expand(found), empty)
    none = KeyedJagged((), np.zeros(0, np.int32), np.zeros((0, 5), np.int32))
    assert expand(deduplicate(none, ())).num_examples == 5


@pytest.mark.parametrize(("rows", "factor"), [([[4, 5]] * 6, 6.0), ([[i] for i in range(6)], 1.0), ([[]] * 6, 6.0)])
def test_all_equal_and_all_distinct(rows: list[list[int]], factor: float) -> None:
    features = KeyedJagged.from_lists({"a": rows})
    found = deduplicate(features, [("a",)])
    assert found.factors == (factor,)
    assert_equal(expand(found), features)


def test_rows_of_equal_ids_and_other_weights_stay_apart() -> None:
    features = KeyedJagged.from_lists({"a": [[1, 2]] * 3}, {"a": [[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]})
    found = deduplicate(features, [("a",)])
    assert found.inverse[0].tolist() == [0, 0, 1]
    assert found.distinct[0].weights is not None
    assert found.distinct[0].weights.tolist() == [1, 2, 2, 1]


def test_rows_of_one_hash_are_told_apart_by_ids_lengths_and_weights() -> None:
    rows = [[1, 2], [1], [2, 1], [1, 2], [], [1, 2]]
    weights = [[1.0, 2.0], [1.0], [1.0, 2.0], [1.0, 3.0], [], [1.0, 2.0]]
    features = KeyedJagged.from_lists({"a": rows}, {"a": weights})
    found = deduplicate(features, [("a",)], row_hash=lambda values, lengths: np.zeros(lengths.size, np.uint64))
    assert found.inverse[0].tolist() == [0, 1, 2, 3, 4, 0]
    assert_equal(expand(found), features)


def test_a_group_costs_the_product_of_its_features() -> None:
    features = KeyedJagged.from_lists({"a": [[1], [1], [2], [2]], "b": [[1], [2], [1], [2]]})
    assert deduplicate(features, [("a",), ("b",)]).factors == (2.0, 2.0)
    assert deduplicate(features, [("a", "b")]).factors == (1.0,)


def test_rows_that_differ_by_order_or_by_where_a_list_ends_stay_apart() -> None:
    features = KeyedJagged.from_lists(
        {"a": [[1, 2], [2, 1], [1], [1, 2], [0], []], "b": [[3], [3], [2, 3], [], [0], [0, 0]]}
    )
    assert deduplicate(features, [("a", "b")]).inverse[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_hashes_of_a_million_lists_do_not_collide_and_do_not_depend_on_their_place() -> None:
    # 2^20 different lists: 2^39 pairs, so a collision of 64-bit hashes has probability 2^-25.
    rng = np.random.default_rng(0)
    lengths = np.full(1 << 20, 3)
    ids = np.stack([np.arange(1 << 20) >> 10, np.arange(1 << 20) & 1023, np.zeros(1 << 20, np.int64)], axis=1)
    hashes = hash_rows(ids.reshape(-1), lengths)
    assert np.unique(hashes).size == 1 << 20
    order = rng.permutation(1 << 20)
    np.testing.assert_array_equal(hash_rows(ids[order].reshape(-1), lengths), hashes[order])
    # Every bit of the hash is one in half of them: 2^20 fair coins stay within 6 standard deviations.
    ones = np.array([np.count_nonzero(hashes >> np.uint64(bit) & np.uint64(1)) for bit in range(64)])
    assert (np.abs(ones - (1 << 19)) < 6 * 512).all()


def test_bytes_are_those_of_the_arrays() -> None:
    features = KeyedJagged.from_lists({"a": [[1, 2, 3]] * 8, "b": [[1, 2]] * 8, "c": [[i] for i in range(8)]})
    found = deduplicate(features, [("a", "b")])
    # Ids 3 + 2, lengths 1 + 1, inverse 8; the plain feature has 8 ids and 8 lengths.
    assert found.nbytes == 4 * (3 + 2 + 1 + 1 + 8 + 8 + 8)


def test_a_batch_keeps_what_is_not_a_feature() -> None:
    features = KeyedJagged.from_lists({"a": [[1], [1]]})
    batch = ClickBatch(features, np.ones((2, 1), np.float32), np.ones((2, 1), np.float32), np.ones(2, np.float32))
    found = Deduplicate(groups=(("a",),))(batch)
    assert len(found) == 2
    assert found.features.inverse[0].tolist() == [0, 0]
    back = expand_batch(found)
    assert_equal(back.features, features)
    assert back.dense is batch.dense
    assert back.labels is batch.labels
    assert back.weights is batch.weights


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("a", "x")], "there is no feature 'x'; there are a, b, c, d"),
        ([("a",), ("b", "a")], "a appear more than once"),
        ([()], "none of them empty"),
        (["a"], r'For one feature write \("name",\)'),
    ],
)
def test_wrong_groups_are_refused(groups: list, message: str) -> None:
    features = KeyedJagged.from_lists({key: [[1]] for key in KEYS})
    with pytest.raises(UserError, match=message):
        deduplicate(features, groups)


def test_features_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths add up to 3 ids; got 2"):
        deduplicate(KeyedJagged(("a",), np.zeros(2, np.int32), np.full((1, 3), 1, np.int32)), [("a",)])
    with pytest.raises(ValueError, match="ids must be integers"):
        deduplicate(KeyedJagged(("a",), np.zeros(1), np.full((1, 1), 1, np.int32)), [("a",)])


def test_a_form_that_contradicts_itself_is_refused() -> None:
    features = KeyedJagged.from_lists({"a": [[1], [2]], "b": [[1], [2]]})
    good = deduplicate(features, [("a",)])
    inverse = good.inverse[0]
    parts = {"keys": good.keys, "groups": good.groups, "distinct": good.distinct, "plain": good.plain}
    for wrong, message in (
        ({"inverse": (inverse[:1],)}, r"must be int32\[2\]; got int32\(1,\)"),
        ({"inverse": (inverse.astype(np.int64),)}, r"must be int32\[2\]; got int64"),
        ({"inverse": ()}, "needs distinct rows and an inverse per group"),
        ({"inverse": (inverse,), "plain": features}, "every feature must be in one group or in `plain`"),
        ({"inverse": (inverse,), "distinct": (features["b"],)}, "have keys"),
    ):
        with pytest.raises(ValueError, match=message):
            DedupKeyedJagged(**(parts | wrong))
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\); it spans \[0, 2\]"):
        DedupKeyedJagged(**parts, inverse=(np.array([0, 2], np.int32),)).validate()
