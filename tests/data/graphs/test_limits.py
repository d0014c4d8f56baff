"""Numbers that graphs cannot hold, and sizes that would take a machine's memory for nothing."""

import pathlib

import numpy as np
import pytest

from scalejax.data.graphs import Adjacency, NodeGraph, read_edge_list, read_npz
from scalejax.data.graphs.npz import from_arrays
from scalejax.errors import UserError

EDGES = {"edge_src": np.array([0, 1]), "edge_dst": np.array([1, 2])}


def test_a_label_beyond_int32_is_refused_and_not_taken_for_class_0() -> None:
    with pytest.raises(UserError, match=r"labels must be classes below 2\*\*31; got 1099511627776, that of node 1"):
        from_arrays(EDGES | {"labels": np.array([0, 2**40, 1])}, "graph.npz")
    with pytest.raises(UserError, match="labels must be whole numbers"):
        from_arrays(EDGES | {"labels": np.array([0, 2**64 - 1, 1], np.uint64)}, "graph.npz")
    edges = Adjacency.from_edges([0, 1], [1, 2], shape=(3, 3))
    with pytest.raises(UserError, match="got 1099511627776"):
        NodeGraph(edges, labels=np.array([0, 2**40, 1]))


def test_a_number_beyond_float32_is_refused_by_row_and_column() -> None:
    features = np.ones((3, 4))
    features[1, 2] = 1e300
    with pytest.raises(UserError, match=r"features: 1e\+300 in row 1, column 2 is beyond float32"):
        from_arrays(EDGES | {"features": features}, "graph.npz")
    with pytest.raises(UserError, match=r"edge_weight: -1e\+39 in row 1 is beyond float32"):
        from_arrays(EDGES | {"edge_weight": np.array([1, -1e39])}, "graph.npz")


@pytest.mark.parametrize("highest", [2**31, 2**40, 2**62])
def test_a_huge_node_id_is_refused_before_memory_is_taken(highest: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "edges.txt").write_text(f"0 1\n1 {highest}\n")
    message = "nodes are too many for 2 edges"
    with pytest.raises(UserError, match=message):
        read_edge_list(tmp_path / "edges.txt")
    np.savez(tmp_path / "a.npz", edge_src=[0, 1], edge_dst=[1, highest])
    with pytest.raises(UserError, match=message):
        read_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **EDGES, num_nodes=highest)
    with pytest.raises(UserError, match=message):
        read_npz(tmp_path / "a.npz")


def test_node_ids_may_be_unsigned_and_edges_may_be_none() -> None:
    assert from_arrays({name: array.astype(np.uint64) for name, array in EDGES.items()}, "graph.npz").num_nodes == 3
    assert from_arrays({"edge_src": np.zeros(0, np.uint64), "edge_dst": np.zeros(0, np.uint64)}, "").num_nodes == 0


def test_features_in_compressed_rows_may_not_be_nearly_all_zero_and_huge() -> None:
    sparse = {"feat_indptr": np.array([0] + [1] * 9), "feat_indices": np.array([0]), "feat_values": np.ones(1)}
    with pytest.raises(UserError, match="features of 9 nodes would be 10,000,000 wide"):
        from_arrays(EDGES | sparse | {"num_features": np.array(10_000_000)}, "graph.npz")
    with pytest.raises(UserError, match="the width of features: 1,099,511,627,776 nodes are too many"):
        from_arrays(EDGES | sparse | {"num_features": np.array(2**40)}, "graph.npz")


def test_one_long_word_does_not_make_every_field_as_long(tmp_path: pathlib.Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n" * 9 + "1 " + "9" * 500)
    with pytest.raises(UserError, match="line 10: 500 characters are not a node"):
        read_edge_list(tmp_path / "edges.txt")
