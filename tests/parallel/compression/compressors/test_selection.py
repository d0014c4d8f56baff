"""The k largest of a row, and k distinct places at random."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressor_cases import heavy

from scalejax.parallel.compression.compressors import selection

largest = jax.jit(selection.largest, static_argnums=1)


def expected(x, k):
    """Of each row the places of the k largest magnitudes, of equal ones the first, ascending."""
    order = [sorted(range(len(row)), key=lambda i, row=row: (-abs(row[i]), i))[:k] for row in x.astype(np.float64)]
    return np.sort(order, axis=1)


# Groups of 8 and 16, padded and not, and rows that are selected from as they are.
@pytest.mark.parametrize(("n", "k"), [(1024, 2), (1000, 15), (301, 1), (64, 9), (64, 64), (1, 1)])
@pytest.mark.parametrize("kind", ["heavy", "ties", "zeros"])
def test_places_are_those_of_a_sort(n, k, kind):
    x = heavy(3, n)
    if kind != "heavy":
        x = np.random.default_rng(1).integers(-2, 3, (3, n)).astype(np.float32)
    if kind == "zeros":
        x[:, k // 2 :] = 0  # fewer than k others, if k > 1
    np.testing.assert_array_equal(largest(x, k), expected(x, k))


def test_what_is_no_number_comes_first():
    x = heavy(1, 500)
    x[0, [3, 400, 77, 78]] = [np.nan, np.inf, -np.inf, -np.nan]
    assert set(np.asarray(largest(x, 5))[0]) > {3, 400, 77, 78}
    assert np.asarray(largest(x, 2)).tolist() == [[3, 77]]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def places(n, k, count):
    keys = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 3, jnp.uint32)], axis=1)
    return jax.vmap(lambda key: selection.distinct(key, n, k))(keys)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (5, 5), (13, 4), (1000, 999), (46341, 300)])
def test_places_are_distinct_and_in_the_row(n, k):
    drawn = np.asarray(places(n, k, 20))
    assert drawn.min() >= 0
    assert drawn.max() < n
    for row in drawn:
        assert len(set(row.tolist())) == k


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(2, 1), (13, 4), (14, 5), (100, 3)])
def test_every_place_and_every_pair_comes_equally_often(n, k):
    count = 20_000
    chosen = np.zeros((count, n), bool)
    np.put_along_axis(chosen, np.asarray(places(n, k, count)), True, axis=1)
    share = k / n
    assert abs(chosen.mean(axis=0) - share).max() < 4.5 * np.sqrt(share * (1 - share) / count)
    if k > 1 and n < 50:
        both = chosen.T.astype(np.float64) @ chosen / count
        pairs = both[np.triu_indices(n, 1)]
        share = k * (k - 1) / (n * (n - 1))
        assert abs(pairs - share).max() < 4.5 * np.sqrt(share * (1 - share) / count)
