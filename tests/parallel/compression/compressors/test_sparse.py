"""The k largest values, and k values at random places."""

import jax.numpy as jnp
import numpy as np
import pytest
from compressor_cases import KEY, back, encoded, heavy, many

from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import RandomKEntries, TopKEntries


@pytest.mark.parametrize("values", ["float32", "float16"])
def test_top_k_keeps_the_largest_and_their_places(values):
    x = heavy(3, 50) / 1000
    payload, decoded = encoded(TopKEntries(k=6, values=values), x), np.asarray(back(TopKEntries(k=6, values=values), x))
    assert (payload["places"].dtype, payload["values"].dtype) == (jnp.uint32, jnp.dtype(values))
    for r in range(3):
        expected = np.zeros(50, np.float32)
        for i in sorted(range(50), key=lambda i, row=x[r]: -abs(row[i]))[:6]:
            expected[i] = x[r, i].astype(values)
        np.testing.assert_array_equal(decoded[r], expected)
        assert set(np.asarray(payload["places"])[r].tolist()) == set(np.flatnonzero(expected).tolist())


def test_top_k_contracts_by_at_least_k_of_n_and_equal_values_by_no_more():
    x = heavy(50, 64)
    for row, got in zip(x.astype(np.float64), np.asarray(back(TopKEntries(k=8), x), np.float64), strict=True):
        assert ((got - row) ** 2).sum() <= (1 - 8 / 64) * (row**2).sum()
    flat = np.ones((1, 64), np.float32)
    assert ((np.asarray(back(TopKEntries(k=8), flat)) - flat) ** 2).sum() == 64 - 8


def test_pairs_of_both_kinds_are_the_published_ratios_of_float16():
    n = 2**24
    assert TopKEntries(k=0.001).payload_bytes(n) == 8 * 16_777
    assert round(2 * n / TopKEntries(k=0.001, values="float16").payload_bytes(n)) == 333
    assert round(2 * n / TopKEntries(k=0.001).payload_bytes(n)) == 250


def test_a_fraction_is_rounded_down_to_one_at_least():
    assert TopKEntries(k=0.001).payload_bytes(999) == TopKEntries(k=0.5).payload_bytes(3) == 8
    assert TopKEntries(k=0.29).payload_bytes(100) == 8 * 29


def test_random_k_sends_values_at_shared_places_alone():
    x = heavy(3, 50)
    for scale, factor in (("n/k", np.float32(50 / 7)), ("none", np.float32(1))):
        compressor = RandomKEntries(k=7, scale=scale)
        places, payload = np.asarray(compressor.places(50, KEY)), encoded(compressor, x, KEY)
        assert set(payload) == {"values"}
        expected = np.zeros_like(x)
        for r in range(3):
            for j in range(7):
                assert payload["values"][r, j] == x[r, places[j]] * factor
                expected[r, places[j]] = x[r, places[j]] * factor
        np.testing.assert_array_equal(back(compressor, x, KEY), expected)


@pytest.mark.slow
def test_sums_of_random_k_travel_on_without_another_error():
    x, compressor = heavy(8, 40), RandomKEntries(k=9, scale="none")
    total = np.asarray(back(compressor, x, KEY)).sum(axis=0, keepdims=True)
    np.testing.assert_array_equal(back(compressor, total, KEY), total)


@pytest.mark.slow
def test_random_k_contracts_by_k_of_n_on_average():
    x = heavy(1, 40)
    left = ((np.asarray(many(RandomKEntries(k=10, scale="none"), x, 4000), np.float64) - x) ** 2).sum(axis=(1, 2))
    expected = (1 - 10 / 40) * (x.astype(np.float64) ** 2).sum()
    assert abs(left.mean() - expected) < 4 * left.std() / np.sqrt(4000)


@pytest.mark.parametrize("compressor", [TopKEntries(k=4, values="float16"), RandomKEntries(k=40, values="float16")])
def test_a_chosen_value_that_float16_has_not_makes_the_row_nan(compressor):
    x = heavy(2, 40)
    x[0, 3] = 1e5
    got = np.asarray(back(compressor, x, KEY))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("of", [TopKEntries, RandomKEntries])
def test_k_of_nothing_or_of_more_than_there_is_is_refused(of):
    for k in (0, -1, 0.0, 1.0, 1.5, float("nan"), True, "1", None):
        with pytest.raises(UserError, match=f"{of.__name__}: k must be a whole number of at least 1, or a fraction"):
            of(k=k)
    with pytest.raises(UserError, match=r"k=9: a row of 8 values has no 9\. Take a smaller k"):
        of(k=9).check(8)
    with pytest.raises(UserError, match="a row of 8 values has no 9"):
        of(k=9).encode(jnp.ones((1, 8)), KEY)
    with pytest.raises(UserError, match="values must be one of float32, float16; got 'bfloat16'"):
        of(k=1, values="bfloat16")
    of(k=8).check(8)


@pytest.mark.parametrize("of", [TopKEntries, RandomKEntries])
def test_numbers_of_numpy_are_those_of_python(of):
    """To the letter, by which checkpoints know a compression."""
    for k, plain in ((np.int64(3), 3), (np.float32(0.25), 0.25)):
        assert repr(of(k=k)) == repr(of(k=plain))
