import numpy as np
import pytest
import scipy.sparse

from scalejax.data.graphs import Adjacency
from scalejax.errors import UserError


def _random(nodes: int = 30, edges: int = 150, seed: int = 0) -> Adjacency:
    rng = np.random.default_rng(seed)
    senders, receivers = rng.integers(0, nodes, (2, edges))
    values = rng.uniform(0.1, 2.0, edges).astype(np.float32)
    return Adjacency.from_edges(senders, receivers, shape=(nodes, nodes), values=values)


def _scipy(a: Adjacency) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array((a.weights(), a.indices, a.indptr), shape=a.shape)


def test_edges_of_a_receiver_keep_their_order_and_repeats() -> None:
    a = Adjacency.from_edges([5, 1, 4, 1, 0], [2, 0, 2, 2, 0], shape=(4, 6))
    np.testing.assert_array_equal(a.indptr, [0, 2, 2, 5, 5])
    np.testing.assert_array_equal(a.indices, [1, 0, 5, 4, 1])
    np.testing.assert_array_equal(a.rows, [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(a.degrees, [2, 0, 3, 0])


def test_reverse_edges_make_the_larger_of_matrix_and_transpose() -> None:
    rng = np.random.default_rng(1)
    pairs = rng.permutation(30 * 30)[:150]  # without repeats, which scipy would add up
    values = rng.uniform(0.1, 2.0, 150).astype(np.float32)
    a = Adjacency.from_edges(pairs % 30, pairs // 30, shape=(30, 30), values=values)
    both, matrix = a.with_reverse(), _scipy(a)
    np.testing.assert_allclose(_scipy(both).todense(), matrix.maximum(matrix.T).todense())
    assert all((np.diff(both.indices[both.indptr[i] : both.indptr[i + 1]]) > 0).all() for i in range(30))
    unweighted = Adjacency.from_edges(pairs % 30, pairs // 30, shape=(30, 30)).with_reverse()
    np.testing.assert_array_equal(unweighted.indices, both.indices)
    assert unweighted.values is None


def test_reverse_edges_of_many_nodes_are_those_of_few() -> None:
    # The number of a pair of nodes does not fit 32 bits.
    ends = np.array([69_999], np.int32), np.array([69_998], np.int32)
    a = Adjacency.from_edges(*ends, shape=(70_000, 70_000)).with_reverse()
    np.testing.assert_array_equal(a.rows, [69_998, 69_999])
    np.testing.assert_array_equal(a.indices, [69_999, 69_998])


def test_self_loops_go_to_the_end_of_rows_that_have_none() -> None:
    a = Adjacency.from_edges([1, 1, 2, 0], [0, 1, 1, 2], shape=(4, 4), values=[5.0, 7.0, 1.0, 2.0])
    looped = a.with_self_loops()
    np.testing.assert_array_equal(looped.indices, [1, 0, 1, 2, 0, 2, 3])
    np.testing.assert_array_equal(looped.weights(), [5, 1, 7, 1, 2, 1, 1])
    np.testing.assert_array_equal(looped.without_self_loops().indices, [1, 2, 0])
    np.testing.assert_array_equal(looped.with_self_loops().indices, looped.indices)


def test_normalised_weights_are_those_of_the_matrices() -> None:
    a = _random().with_self_loops()
    dense = _scipy(a).todense()
    degrees = dense.sum(1)
    symmetric = _scipy(a.normalized("symmetric")).todense()
    np.testing.assert_allclose(symmetric, dense / np.sqrt(np.outer(degrees, degrees)), rtol=1e-6)
    right = _scipy(a.normalized("right")).todense()
    np.testing.assert_allclose(right, dense / degrees[:, None], rtol=1e-6)
    np.testing.assert_allclose(right.sum(1), 1, rtol=1e-6)


def test_empty_rows_stay_empty_and_finite_when_normalised() -> None:
    a = Adjacency.from_edges([1, 2], [0, 0], shape=(3, 3))
    for kind in ("symmetric", "right"):
        assert np.isfinite(a.normalized(kind).weights()).all()
    np.testing.assert_array_equal(a.normalized("symmetric").weights(), [0, 0])  # their sources read nothing


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Adjacency.from_edges([0, 3], [0, 1], shape=(3, 3)), r"senders must lie in \[0, 3\); got 0 to 3"),
        (lambda: Adjacency.from_edges([0], [-1], shape=(3, 3)), "receivers must lie in"),
        (lambda: Adjacency.from_edges([0.5], [1], shape=(3, 3)), "must be integers"),
        (lambda: Adjacency.from_edges([0, 1], [1], shape=(3, 3)), "equally long; got 2 and 1"),
        (lambda: Adjacency.from_edges([0], [1], shape=(3, 3), values=[1, 2]), "one per edge"),
        (lambda: Adjacency(np.array([0, 2, 1]), np.array([0]), None, (2, 2)), "never fall"),
        (lambda: Adjacency(np.array([0, 1, 3]), np.array([0]), None, (2, 2)), r"indptr\[-1\] = 3 entries"),
        (lambda: Adjacency(np.array([0, 1]), np.array([4]), None, (1, 4)), "got 4 to 4"),
        (
            lambda: Adjacency.from_edges([0, 1], [1, 1], shape=(2, 2), values=[1, -3]).normalized("symmetric"),
            "those of row 1 give -2",
        ),
        (lambda: _random().normalized("left"), "'symmetric' or 'right'; got 'left'"),  # type: ignore[arg-type]
        (lambda: Adjacency.from_edges([3], [0], shape=(2, 4)).with_self_loops(), r"square; got \(2, 4\)"),
    ],
)
def test_says_what_is_wrong_with_edges(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
