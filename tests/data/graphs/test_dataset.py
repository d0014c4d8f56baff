import dataclasses
import itertools
import pathlib

import numpy as np
import pytest

from scalejax.data import graphs
from scalejax.errors import UserError


def test_the_bundled_graph_is_ready_for_a_gcn() -> None:
    data = graphs.NodeData().build()
    assert data.schema == graphs.GraphSchema(2708, 1433, 7, weighted=True)
    assert data.graph.adjacency.num_edges == 10_556 + 2708
    np.testing.assert_allclose(data.graph.features.sum(1), 1, rtol=1e-5)  # type: ignore[union-attr]
    batch = next(data.train_batches())
    assert (len(batch), batch.neighborhoods) == (140, ())
    np.testing.assert_array_equal(batch.nodes, np.arange(140))


def test_mini_batches_visit_every_node_once_an_epoch_and_go_on_anywhere() -> None:
    data = graphs.NodeData(fanouts=(3, 2), batch_size=35, normalization="none").build()
    batches = list(itertools.islice(data.train_batches(), 8))
    epochs = [np.concatenate([b.nodes for b in batches[i : i + 4]]) for i in (0, 4)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(140))
    assert (epochs[0] != epochs[1]).any()
    again = next(data.train_batches(start_example=5 * 35))
    np.testing.assert_array_equal(again.nodes, batches[5].nodes)
    np.testing.assert_array_equal(again.neighborhoods[0].nodes, batches[5].neighborhoods[0].nodes)
    assert [b.epoch for b in batches] == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(again.labels, data.graph.labels[again.nodes])  # type: ignore[index]


def test_a_batch_over_the_end_of_an_epoch_may_hold_a_node_twice() -> None:
    data = graphs.NodeData(fanouts=(2,), batch_size=200).build()
    batch = next(data.train_batches())
    (around,) = batch.neighborhoods
    assert np.unique(batch.nodes).size == 140
    np.testing.assert_array_equal(around.nodes[around.seeds], batch.nodes)


def test_parts_of_a_mini_batch_draw_what_the_whole_draws() -> None:
    data = graphs.NodeData(fanouts=(3,), batch_size=12).build()
    whole, parts = (next(data.train_batches(parts=parts)) for parts in (1, 4))
    np.testing.assert_array_equal(whole.nodes, parts.nodes)
    assert len({part.nodes.shape for part in parts.neighborhoods}) == 1

    def drawn(around: graphs.Neighborhood) -> list[list[int]]:
        (hop,) = around.hops
        return [hop.edges[seed, : hop.counts[seed]].tolist() for seed in around.seeds]

    assert [edges for part in parts.neighborhoods for edges in drawn(part)] == drawn(whole.neighborhoods[0])


def test_a_batch_of_the_whole_split_knows_its_epoch() -> None:
    data = graphs.NodeData().build()
    assert [b.epoch for b in itertools.islice(data.train_batches(start_example=2 * 140), 3)] == [2, 3, 4]


def test_the_fingerprint_knows_graph_order_and_fanouts() -> None:
    base = graphs.NodeData(fanouts=(2, 2))
    prints = {
        dataclasses.replace(base, **change).build().fingerprint()
        for change in ({}, {"seed": 1}, {"fanouts": (3, 2)}, {"normalization": "right"}, {"self_loops": "keep"})
    }
    assert len(prints) == 5
    assert base.build().fingerprint() in prints


def test_a_graph_that_cannot_be_trained_on_is_refused(tmp_path: pathlib.Path) -> None:
    cora = graphs.read_planetoid()
    for change, message in (
        ({"features": None}, "has no features"),
        ({"labels": None}, "has no labels"),
        ({"splits": {}}, "has no splits"),
        ({"splits": {"test": np.array([1])}}, "no training nodes"),
    ):
        graphs.write_npz(tmp_path / "g.npz", dataclasses.replace(cora, **change))
        with pytest.raises(UserError, match=message):
            graphs.NodeData(path=str(tmp_path / "g.npz")).build()
    with pytest.raises(UserError, match=r'format="ogb" needs data\.path'):
        graphs.NodeData(format="ogb").build()
    with pytest.raises(UserError, match=r"must be counts, at least 0 each; got -1.*--set data\.features=as-is"):
        graphs.row_normalized(np.array([[3.0, -1.0]]))


def test_labels_of_tasks_come_with_their_nodes() -> None:
    cora = graphs.read_planetoid()
    labels = np.random.default_rng(0).integers(-1, 2, (2708, 5)).astype(np.int32)
    labels[:, 0] = 1  # every node has a label
    several = dataclasses.replace(cora, labels=labels)
    data = graphs.NodeDataSet(several, batch_size=4, fanouts=(2,))
    assert data.schema == graphs.GraphSchema(2708, 1433, 5, weighted=False, labels="tasks")
    batch = next(data.train_batches())
    np.testing.assert_array_equal(batch.labels, labels[batch.nodes])
    np.testing.assert_array_equal(data.whole("test").labels, labels[cora.splits["test"]])
    assert data.fingerprint() != graphs.NodeDataSet(cora, batch_size=4, fanouts=(2,)).fingerprint()
    unknown = labels.copy()
    unknown[several.splits["test"][3]] = -1
    with pytest.raises(UserError, match=f"node {several.splits['test'][3]} of split 'test' has no label"):
        dataclasses.replace(several, labels=unknown)


def test_each_process_draws_its_own_parts() -> None:
    data = graphs.NodeData(fanouts=(3, 2), batch_size=12).build()
    whole = next(data.train_batches(parts=4))
    of_each = [next(data.train_batches(parts=4, local_parts=own)) for own in ([0, 3], [1, 2])]
    drawn = [part for batch in of_each for part in batch.neighborhoods]
    assert [len(batch.neighborhoods) for batch in of_each] == [2, 2]
    for batch in of_each:
        np.testing.assert_array_equal(batch.nodes, whole.nodes)
    for one, number in zip(drawn, (0, 3, 1, 2), strict=True):
        other = whole.neighborhoods[number]
        np.testing.assert_array_equal(one.nodes, other.nodes)
        np.testing.assert_array_equal(one.hops[0].edges, other.hops[0].edges)
