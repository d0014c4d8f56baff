import itertools

import numpy as np
import pytest

from scalejax.data.graphs import Adjacency, NeighborSampler, power_law
from scalejax.errors import UserError

GRAPH = power_law(300, 2500, exponent=2.2, seed=3)


def _neighbors(node: int) -> list[int]:
    return GRAPH.indices[GRAPH.indptr[node] : GRAPH.indptr[node + 1]].tolist()


@pytest.mark.parametrize("seeds", [[7], [5, 9, 5, 5, 120], list(range(64))])
def test_every_hop_lists_true_neighbours_each_edge_once(seeds: list[int]) -> None:
    found = NeighborSampler(GRAPH, (4, 3), seed=1).sample(np.array(seeds), batch=2)
    valid = int(found.valid)
    assert len(set(found.nodes[:valid].tolist())) == valid
    np.testing.assert_array_equal(found.nodes[found.seeds], seeds)
    rows = len(set(seeds))
    for fanout, hop in zip((3, 4), reversed(found.hops), strict=True):
        reached = rows
        for row in range(rows):
            node, count = int(found.nodes[row]), int(hop.counts[row])
            assert hop.degrees[row] == len(_neighbors(node))
            assert count == min(len(_neighbors(node)), fanout)
            edges = hop.edges[row, :count]
            assert len(set(edges.tolist())) == count
            assert ((edges >= GRAPH.indptr[node]) & (edges < GRAPH.indptr[node + 1])).all()
            np.testing.assert_array_equal(found.nodes[hop.indices[row, :count]], GRAPH.indices[edges])
            reached = max(reached, int(hop.indices[row].max()) + 1)
        assert not hop.counts[rows:].any()
        rows = reached
    assert rows == valid


def test_rows_with_no_more_than_the_fanout_keep_all_in_order() -> None:
    most = int(GRAPH.degrees.max())
    found = NeighborSampler(GRAPH, (most,)).sample(np.arange(300))
    (hop,) = found.hops
    for row, count in enumerate(hop.counts):
        assert found.nodes[hop.indices[row, :count]].tolist() == _neighbors(row)


def test_shapes_depend_on_the_batch_size_alone() -> None:
    sampler = NeighborSampler(GRAPH, (4, 3))
    assert sampler.capacities(10) == (200, 40, 10)
    assert sampler.capacities(1000) == (300, 300, 300)
    shapes = set()
    for seeds in (np.arange(10), np.full(10, 7), np.arange(290, 300)):
        found = sampler.sample(seeds)
        shapes.add((found.nodes.shape, found.seeds.shape, *(hop.indices.shape for hop in found.hops)))
    assert shapes == {((200,), (10,), (40, 4), (10, 3))}


def test_a_batch_can_be_made_again_and_another_differs() -> None:
    first, again = (NeighborSampler(GRAPH, (4, 3), seed=5).sample(np.arange(40), batch=9) for _ in range(2))
    np.testing.assert_array_equal(first.nodes, again.nodes)
    np.testing.assert_array_equal(first.hops[0].edges, again.hops[0].edges)
    for seed, batch in ((5, 10), (6, 9)):
        other = NeighborSampler(GRAPH, (4, 3), seed=seed).sample(np.arange(40), batch=batch)
        assert (other.hops[1].edges != first.hops[1].edges).any()


def test_a_node_draws_the_same_whatever_else_is_in_the_batch() -> None:
    sampler = NeighborSampler(GRAPH, (3,), seed=5)
    alone, among = sampler.sample(np.array([11]), batch=1), sampler.sample(np.arange(30), batch=1)
    np.testing.assert_array_equal(alone.hops[0].edges[0], among.hops[0].edges[11])


def test_every_subset_of_neighbours_is_equally_likely() -> None:
    draws = 6000  # as many nodes with five neighbours each
    rows = np.repeat(np.arange(draws), 5)
    sampler = NeighborSampler(Adjacency.from_edges(rows, rows, shape=(draws, draws)), (2,))
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for pair in (sampler.sample(np.arange(draws)).hops[0].edges % 5).tolist():
        counts[tuple(pair)] += 1
    expected = draws / len(counts)
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 27.9  # chi-square, 9 degrees, p = 0.001


def test_nodes_without_neighbours_and_a_graph_without_edges() -> None:
    empty = Adjacency.from_edges(np.zeros(0, int), np.zeros(0, int), shape=(5, 5))
    found = NeighborSampler(empty, (3, 2)).sample(np.array([4, 4]))
    assert int(found.valid) == 1
    np.testing.assert_array_equal(found.nodes[found.seeds], [4, 4])
    assert not any(hop.counts.any() for hop in found.hops)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NeighborSampler(GRAPH, ()), "outermost first; got"),
        (lambda: NeighborSampler(GRAPH, (5, 0)), "at least 1 each"),
        (lambda: NeighborSampler(GRAPH, (2,)).sample(np.array([300])), r"node ids in \[0, 300\)"),
        (lambda: NeighborSampler(GRAPH, (2,)).sample(np.array([], int)), "at least one"),
        (lambda: NeighborSampler(Adjacency.from_edges([2], [0], shape=(2, 3)), (1,)), "must be square"),
    ],
)
def test_says_what_is_wrong(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
