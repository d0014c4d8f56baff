import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.data.examples.dedup import deduplicate, expand
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.row_transforms import FirstIds, HashIds, map_distinct, map_rows
from scalejax.errors import UserError

KEYS = ("a", "b", "c")


@st.composite
def batches(draw: st.DrawFn) -> KeyedJagged:
    count = draw(st.integers(0, 8))
    row = st.lists(st.sampled_from([3, 5, -7, 2**62]), max_size=3)
    rows = {key: draw(st.lists(row, min_size=count, max_size=count)) for key in KEYS}
    weights = {key: [[0.5 * n for n, _ in enumerate(r)] for r in lists] for key, lists in rows.items()}
    return KeyedJagged.from_lists(rows, draw(st.sampled_from([None, weights])), np.int64)


@given(batches(), st.sampled_from([(), (("b",),), (("c", "a"),), (("a",), ("b", "c"))]))
def test_transforming_distinct_rows_equals_transforming_all_rows(features: KeyedJagged, groups: tuple) -> None:
    transforms = {"a": HashIds(rows=3), "c": FirstIds(count=1), "b": lambda x: FirstIds(count=2)(HashIds(rows=9)(x))}
    for chosen in (transforms, {"a": transforms["a"]}, {}):
        whole = map_rows(features, chosen)
        found = expand(map_distinct(deduplicate(features, groups), chosen))
        for name in ("values", "lengths", "weights"):
            a, b = getattr(found, name), getattr(whole, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b, strict=True)


def test_a_transform_sees_each_distinct_row_once() -> None:
    seen = []

    def record(part: KeyedJagged) -> KeyedJagged:
        seen.append(part.to_lists())
        return part

    features = KeyedJagged.from_lists({"a": [[1], [2], [1], [1]], "b": [[1], [1], [1], [1]]})
    map_distinct(deduplicate(features, [("a",)]), {"a": record, "b": record})
    assert {"a": [[1], [2]]} in seen
    assert {"b": [[1], [1], [1], [1]]} in seen
    assert len(seen) == 2


def test_first_ids_equals_cutting_the_lists() -> None:
    rows = {"a": [[1, 2, 3], [], [4]], "b": [[5], [6, 7, 8, 9], []]}
    weights = {key: [[10.0 * i for i in r] for r in lists] for key, lists in rows.items()}
    for count in range(5):
        found = FirstIds(count=count)(KeyedJagged.from_lists(rows, weights))
        assert found.to_lists() == {key: [r[:count] for r in lists] for key, lists in rows.items()}
        assert found.weights is not None
        np.testing.assert_array_equal(found.weights, 10.0 * found.values)


def test_hashed_ids_fill_all_buckets_evenly_and_follow_the_seed() -> None:
    ids = np.concatenate([np.arange(40_000), np.arange(40_000) << 32, -1 - np.arange(20_000)])
    features = KeyedJagged(("a",), ids, np.full((1, ids.size), 1, np.int32))
    found = HashIds(rows=100)(features).values
    assert found.min() == 0
    assert found.max() == 99
    # Each bucket is binomial(100 000, 1/100): 1000 with a standard deviation of 31.5; 100 buckets stay within 5.
    assert np.abs(np.bincount(found) - 1000).max() < 5 * 31.5
    np.testing.assert_array_equal(found, HashIds(rows=100)(features).values)
    assert (found == HashIds(rows=100, seed=1)(features).values).mean() < 0.02


def test_mistakes_are_refused() -> None:
    features = KeyedJagged.from_lists({"a": [[1], [2]]})
    with pytest.raises(UserError, match="there is no feature 'x'"):
        map_rows(features, {"x": HashIds(rows=2)})
    with pytest.raises(UserError, match="there is no feature 'x'"):
        map_distinct(deduplicate(features, [("a",)]), {"x": HashIds(rows=2)})
    with pytest.raises(ValueError, match="must keep its 2 rows and its name; got 1 rows"):
        map_rows(features, {"a": lambda part: part.slice(0, 1)})
    both = KeyedJagged.from_lists({"a": [[1]], "b": [[1]]})
    with pytest.raises(ValueError, match="either all features have weights or none has"):
        map_rows(both, {"a": lambda part: dataclasses.replace(part, weights=np.ones(1, np.float32))})
    with pytest.raises(UserError, match="rows must be in"):
        HashIds(rows=0)
    with pytest.raises(UserError, match="count must not be negative"):
        FirstIds(count=-1)
