import numpy as np
import pytest
from sklearn.preprocessing import KBinsDiscretizer

from scalejax.data.examples.binning import quantile_bins
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
