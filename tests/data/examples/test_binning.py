import numpy as np
import pytest
from sklearn.preprocessing import KBinsDiscretizer

from scalejax.data.examples.binning import quantile_bins, value_bins
from scalejax.errors import UserError


def test_equals_scikit_learn_on_distinct_values() -> None:
    x = np.random.default_rng(0).normal(size=1000)
    theirs = KBinsDiscretizer(
        10, encode="ordinal", strategy="quantile", quantile_method="linear", subsample=None
    ).fit_transform(x[:, None])
    np.testing.assert_array_equal(quantile_bins(x, np.arange(1000), 10), theirs[:, 0])


def test_edges_come_from_training_rows_alone_and_missing_has_its_own_bin() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, np.nan, 1e9, -1e9])
    # Quartiles of the first four: 1.75, 2.5, 3.25.
    np.testing.assert_array_equal(quantile_bins(x, np.arange(5), 4), [0, 1, 2, 3, 4, 3, 0])


def test_a_value_that_many_share_is_one_bin() -> None:
    x = np.array([0.0] * 90 + list(range(1, 11)))
    bins = quantile_bins(x, np.arange(100), 20)
    assert len(set(bins[:90])) == 1
    assert bins[90:].min() >= bins[0]
    assert (np.diff(bins[90:]) >= 0).all()


def test_a_number_that_is_never_known_in_training_is_in_one_bin() -> None:
    np.testing.assert_array_equal(quantile_bins(np.array([np.nan, 5.0]), np.array([0]), 4), [4, 0])


def test_one_bin_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2; got 1"):
        quantile_bins(np.zeros(3), np.arange(3), 1)


def test_few_different_values_have_a_bin_each() -> None:
    x = np.random.RandomState(0).permutation(np.repeat(np.arange(48) ** 2, 5)).astype(float)
    ids, rows = value_bins(np.append(x, np.nan), np.arange(240), 48)
    np.testing.assert_array_equal(ids[:-1], np.sqrt(x))
    assert (ids[-1], rows) == (48, 49)


def test_a_value_that_few_training_rows_lack_has_the_bin_of_the_next_below() -> None:
    x = np.array([1.0, 5.0, 9.0, 6.0, 0.0, 99.0])
    np.testing.assert_array_equal(value_bins(x, np.arange(3), 4)[0], [0, 1, 2, 1, 0, 2])


def test_frequent_values_have_bins_of_their_own_and_the_others_quantiles_of_the_others() -> None:
    random = np.random.RandomState(1)
    rest = random.normal(size=600)
    x = random.permutation(np.concatenate([np.zeros(400), np.full(30, 7.0), rest]))
    train = np.arange(0, x.size, 2)
    known = x[train]
    assert (known == 7).sum() <= known.size / 10  # not frequent: it counts as one of the others
    edges = np.quantile(known[known != 0], np.arange(1, 10) / 10)
    expected = np.where(x == 0, 10, np.digitize(x, edges))
    ids, rows = value_bins(x, train, 10)
    np.testing.assert_array_equal(ids, expected)
    assert rows == 12  # ten bins, the frequent value, missing


def test_a_value_is_frequent_by_its_share_of_the_known_training_rows_alone() -> None:
    train = np.concatenate([np.full(30, 7.0), np.arange(100.0, 190.0), np.full(80, np.nan)])
    ids, rows = value_bins(np.append(train, np.full(800, 150.0)), np.arange(200), 5)
    assert (ids[:30] == 5).all()  # a quarter of 120, and a sixth of 200
    assert (ids[30:120] < 5).all()
    assert rows == 7


def test_a_number_that_is_missing_in_all_training_rows_has_a_bin_beside_missing() -> None:
    ids, rows = value_bins(np.array([np.nan, 5.0]), np.array([0]), 4)
    np.testing.assert_array_equal(ids, [1, 0])
    assert rows == 2


@pytest.mark.parametrize("first", [2**60, 2**63, -(2**62)])
def test_integers_that_float64_would_merge_have_bins_as_small_ones(first: int) -> None:
    small = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 6))
    large = np.array([first + int(k) for k in small], np.uint64 if first == 2**63 else np.int64)
    assert np.unique(large.astype(np.float64)).size == 1
    ids, rows = value_bins(large, np.arange(240), 40)
    np.testing.assert_array_equal(ids, small)
    assert rows == 41
    # More than there are bins: 7 is frequent, and the edges are integers of the others.
    small[small % 3 == 0] = 7
    ids, rows = value_bins(np.array([first + int(k) for k in small], large.dtype), np.arange(240), 10)
    assert (rows, set(ids[small == 7])) == (12, {10})
    counts = np.bincount(ids[small != 7], minlength=10)
    assert counts.max() <= 24
    assert counts.min() >= 12
