import hashlib

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

from scalejax.data import graphs
from scalejax.errors import UserError


def test_power_law_has_the_tail_that_was_asked_for() -> None:
    a = graphs.power_law(20_000, 400_000, exponent=2.5)
    assert a.num_edges == 400_000
    degrees = np.sort(a.degrees)[::-1].astype(np.float64)
    # Expected degrees fall with rank as rank^(-1 / (exponent - 1)); in the middle of the ranks noise is small.
    slope = np.polyfit(np.log(np.arange(50, 2000) + 1), np.log(degrees[50:2000]), 1)[0]
    assert slope == pytest.approx(-1 / 1.5, abs=0.05)
    out = np.bincount(a.indices, minlength=20_000)
    assert abs(np.corrcoef(out, a.degrees)[0, 1]) < 0.05  # hubs of one side are not those of the other


def test_rmat_quarters_have_their_shares() -> None:
    a = graphs.rmat(10, 200_000, probabilities=(0.5, 0.25, 0.15, 0.1))
    quarters = 2 * (a.indices >= 512) + (a.rows >= 512)
    np.testing.assert_allclose(np.bincount(quarters) / 200_000, [0.5, 0.25, 0.15, 0.1], atol=0.005)
    inner = a.indices[quarters == 0] >= 256
    assert inner.mean() == pytest.approx(0.25, abs=0.005)  # the same shares inside a quarter


@pytest.mark.parametrize(
    "make", [lambda seed: graphs.power_law(500, 3000, seed=seed), lambda s: graphs.rmat(9, 3000, seed=s)]
)
def test_equal_seeds_give_equal_graphs(make) -> None:
    first, again, other = make(0), make(0), make(1)
    np.testing.assert_array_equal(first.indices, again.indices)
    assert (first.indices != other.indices).any()


def test_a_seed_means_the_same_graph_on_every_machine() -> None:
    digest = hashlib.sha256(graphs.rmat(8, 1000).indices.astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == "9ac0594cc8004159"


def test_neighbours_of_digits_are_those_of_scikit_learn() -> None:
    # With a little noise: of equally near images either may be taken.
    images = load_digits().data[:400] + np.random.default_rng(0).normal(0, 0.01, (400, 64))
    found = graphs.knn(images, 7, block=64)
    peer = NearestNeighbors(n_neighbors=7, algorithm="brute").fit(images)
    one_way = peer.kneighbors_graph(mode="connectivity")
    want = one_way.maximum(one_way.T).tocsr().sorted_indices()
    np.testing.assert_array_equal(found.indptr, want.indptr)
    np.testing.assert_array_equal(found.indices, want.indices)


def test_knn_takes_the_lower_number_of_equally_near_nodes() -> None:
    a = graphs.knn(np.zeros((5, 2)), 1)
    np.testing.assert_array_equal(a.indices, [1, 2, 3, 4, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graphs.power_law(0, 5), "nodes must be at least 1"),
        (lambda: graphs.power_law(5, 5, exponent=1.0), "exponent must be above 1"),
        (lambda: graphs.rmat(3, 5, probabilities=(0.5, 0.5, 0.5, -0.5)), "add up to 1"),
        (lambda: graphs.knn(np.zeros((3, 2)), 3), "fewer than the 3 nodes; got 3"),
        (lambda: graphs.knn(np.array([[np.nan], [1.0]]), 1), "must be finite"),
    ],
)
def test_says_what_is_wrong(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
