import gzip
import pathlib
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax.data import graphs
from scalejax.errors import UserError


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def test_cora_is_bundled_with_its_published_sizes() -> None:
    cora = graphs.read_planetoid()
    assert cora.features is not None
    assert cora.labels is not None
    assert (cora.num_nodes, cora.adjacency.num_edges, cora.num_classes) == (2708, 10556, 7)
    assert cora.features.shape == (2708, 1433)
    assert set(np.unique(cora.features)) == {0.0, 1.0}
    assert int(cora.features.sum()) == 49_216
    assert {split: nodes.size for split, nodes in cora.splits.items()} == {
        "train": 140,
        "validation": 500,
        "test": 1000,
    }
    np.testing.assert_array_equal(np.bincount(cora.labels[cora.splits["train"]]), [20] * 7)
    both = cora.adjacency.with_reverse()
    np.testing.assert_array_equal(both.indices, cora.adjacency.indices)
    assert cora.adjacency.without_self_loops().num_edges == 10_556


def test_npz_gives_back_what_was_written(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 9, (2, 40))
    adjacency = graphs.Adjacency.from_edges(senders, receivers, shape=(9, 9), values=rng.random(40))
    labels = np.array([0, 1, 2, -1, 0, 1, 2, 0, 1], np.int32)
    splits = {"train": np.array([0, 1]), "test": np.array([8])}
    graph = graphs.NodeGraph(adjacency, rng.random((9, 4)).astype(np.float32), labels, splits)
    graphs.write_npz(tmp_path / "g.npz", graph)
    assert graphs.read_npz(tmp_path / "g.npz").fingerprint() == graph.fingerprint()


@pytest.mark.parametrize("known", [{"features": np.ones((4, 2))}, {"labels": np.zeros(4, int)}, {}])
def test_nodes_without_edges_at_the_end_are_known_by_what_is_said_of_them(known, tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "g.npz", edge_src=np.array([0, 1]), edge_dst=np.array([1, 2]), **known)
    assert graphs.read_npz(tmp_path / "g.npz").num_nodes == (4 if known else 3)


def test_npz_with_pickled_objects_is_refused_unread(tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "bad.npz", edge_src=np.array([{}, {}], object), edge_dst=np.zeros(2, int), allow_pickle=True)
    with pytest.raises(UserError, match="not a complete npz of plain numbers"):
        graphs.read_npz(tmp_path / "bad.npz")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 nothing more")
    with pytest.raises(UserError, match="not a complete npz"):
        graphs.read_npz(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", rows=np.zeros(2, int))
    with pytest.raises(UserError, match="no array 'edge_src', only rows"):
        graphs.read_npz(tmp_path / "other.npz")


def test_a_folder_of_several_graphs_is_refused(tmp_path: pathlib.Path) -> None:
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, **_PLAIN)  # type: ignore[arg-type]
    for read in (graphs.read_npz, graphs.read_edge_list):
        with pytest.raises(UserError, match=r"holds 2 files, and a graph is one. Name it, for example .*a\.npz"):
            read(tmp_path)


_PLAIN = {
    "edge_src": np.array([0, 1]),
    "edge_dst": np.array([1, 2]),
    "features": np.ones((3, 2)),
    "labels": np.array([0, 1, -1]),
    "train_idx": np.array([0]),
}
_ROWS = {"feat_indptr": np.array([0, 1, 1, 2]), "feat_indices": np.array([0, 1]), "feat_values": np.ones(2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_src": np.array([0, 9]), "num_nodes": 3}, r"senders must lie in \[0, 3\); got 0 to 9"),
        ({"edge_src": np.array(["a", "b"])}, "senders must be integers"),
        ({"num_nodes": -1}, "num_nodes must be one whole number of at least 0; got -1"),
        ({"num_nodes": np.array([3, 3])}, r"num_nodes must be one whole number.*got \[3 3\]"),
        ({"edge_weight": np.array([1, np.nan])}, "values must be finite; that of the edge from 1 to 2 is nan"),
        ({"edge_weight": np.array(["1", "2"])}, "edge_weight must be numbers; got <U1"),
        ({"features": np.ones(3)}, r"features must be \[N, F\]"),
        ({"features": np.ones((3, 0))}, r"features must be \[N, F\] with F of at least 1"),
        ({"features": np.array([["a"], ["b"], ["c"]])}, "features must be numbers; got <U1"),
        ({"labels": np.array([0, 0.5, 1])}, "labels must be whole numbers; got 0.5 among them"),
        ({"labels": np.array([0, np.nan, 1])}, "labels must be whole numbers; got nan among them"),
        ({"labels": np.array([0, -2, 1])}, "labels must be classes from 0 on.*got -2 among them"),
        (
            {"labels": np.array([[0], [2], [1]])},
            r"of T tasks.*got \[3, 1\] from 0 to 2. Write one class a node as \[N\]",
        ),
        ({"labels": np.zeros((3, 0), int)}, r"of T tasks, at least one.*got \[3, 0\]"),
        ({"labels": np.zeros((3, 1, 1), int)}, r"labels must be \[N\], classes, or \[N, T\], tasks; got \[3, 1, 1\]"),
        ({"train_idx": np.array([True, False, False])}, r"train_idx must be numbers of nodes.*np\.flatnonzero\(mask\)"),
        ({"train_idx": np.array([[0]])}, "train_idx must be numbers of nodes"),
        ({"train_idx": np.array([3])}, r"split 'train' names nodes outside \[0, 3\)"),
        (_ROWS | {"feat_indptr": np.array([0, 2, 1, 2])}, "features in compressed rows.*never fall"),
        (_ROWS | {"feat_indices": np.array([0, 5]), "num_features": 2}, r"compressed rows.*\[0, 2\); got 0 to 5"),
        (_ROWS | {"feat_values": np.ones(3)}, "compressed rows.*one per edge"),
    ],
)
def test_says_what_is_wrong_in_an_npz(change: dict[str, np.ndarray], message: str, tmp_path: pathlib.Path) -> None:
    kept = {name: array for name, array in _PLAIN.items() if name != "features" or "feat_indptr" not in change}
    np.savez(tmp_path / "g.npz", **(kept | change))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"g\.npz: .*{message}"):
        graphs.read_planetoid(tmp_path / "g.npz")


class _Trap:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("sprung"),))


@pytest.mark.parametrize("name", ["ind.cora.x", "ind.citeseer.graph", "trans.pubmed.ty"])
def test_pickles_of_planetoid_are_refused_by_name_and_never_run(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / name).write_bytes(pickle.dumps(_Trap()))
    for path in ("raw", f"raw/{name}"):
        graph = name.split(".")[1]
        with pytest.raises(UserError, match=rf"{name}: is a Python pickle.*make_planetoid raw {graph} {graph}\.npz"):
            graphs.read_planetoid(path)
    assert not (tmp_path / "sprung").exists()


def _ogb(place: pathlib.Path) -> None:
    _write(place / "raw/edge.csv.gz", "0,1\n2,1\n3,0\n")
    _write(place / "raw/num-node-list.csv.gz", "4\n")
    _write(place / "raw/num-edge-list.csv.gz", "3\n")
    _write(place / "raw/node-feat.csv.gz", "0.5,1\n-2,0\n0,0\n1,3\n")
    _write(place / "raw/node-label.csv.gz", "2\n0\nnan\n1\n")
    for name, nodes in {"train": "0\n1\n", "valid": "3\n", "test": "1\n"}.items():
        _write(place / f"split/time/{name}.csv.gz", nodes)


def test_ogb_folder_is_read_as_written_or_both_ways(tmp_path: pathlib.Path) -> None:
    _ogb(tmp_path)
    graph = graphs.read_ogb(tmp_path, edges="as-written")
    np.testing.assert_array_equal(graph.adjacency.indptr, [0, 1, 3, 3, 3])
    np.testing.assert_array_equal(graph.adjacency.indices, [3, 0, 2])
    np.testing.assert_array_equal(graph.features, np.array([[0.5, 1], [-2, 0], [0, 0], [1, 3]], np.float32))
    np.testing.assert_array_equal(graph.labels, [2, 0, -1, 1])
    np.testing.assert_array_equal(graph.splits["validation"], [3])
    both = graphs.read_ogb(tmp_path, edges="both-ways").adjacency
    np.testing.assert_array_equal(both.indptr, [0, 2, 4, 5, 6])
    np.testing.assert_array_equal(both.indices, [1, 3, 0, 2, 1, 0])


def test_ogb_binary_form_gives_the_same_graph(tmp_path: pathlib.Path) -> None:
    _ogb(tmp_path / "text")
    raw = tmp_path / "binary" / "raw"
    raw.mkdir(parents=True)
    features = np.array([[0.5, 1], [-2, 0], [0, 0], [1, 3]], np.float32)
    edges = np.array([[0, 2, 3], [1, 1, 0]])
    np.savez(raw / "data.npz", edge_index=edges, num_nodes_list=[4], num_edges_list=[3], node_feat=features)
    np.savez(raw / "node-label.npz", node_label=np.array([[2], [0], [np.nan], [1]], np.float32))
    (tmp_path / "text" / "split").rename(tmp_path / "binary" / "split")
    a = graphs.read_ogb(tmp_path / "binary", edges="as-written")
    (tmp_path / "binary" / "split").rename(tmp_path / "text" / "split")
    assert a.fingerprint() == graphs.read_ogb(tmp_path / "text", edges="as-written").fingerprint()


def test_ogb_labels_of_several_tasks_stay_several(tmp_path: pathlib.Path) -> None:
    _ogb(tmp_path)
    _write(tmp_path / "raw/node-label.csv.gz", "1,0\n0,0\n1,1\n0,1\n")
    graph = graphs.read_ogb(tmp_path, edges="as-written")
    np.testing.assert_array_equal(graph.labels, [[1, 0], [0, 0], [1, 1], [0, 1]])
    graphs.write_npz(tmp_path / "g.npz", graph)
    np.testing.assert_array_equal(graphs.read_npz(tmp_path / "g.npz").labels, graph.labels)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["text", "binary"])
def test_nodes_without_features_get_the_mean_of_the_edges_that_they_read(form: str, tmp_path: pathlib.Path) -> None:
    _ogb(tmp_path)  # 0 -> 1, 2 -> 1, 3 -> 0
    (tmp_path / "raw/node-feat.csv.gz").unlink()
    _write(tmp_path / "raw/edge-feat.csv.gz", "1,0\n4,0.5\n-3,2\n")
    if form == "binary":
        sizes = {"num_nodes_list": [4], "num_edges_list": [3]}
        features = np.array([[1, 0], [4, 0.5], [-3, 2]], np.float32)
        np.savez(tmp_path / "raw/data.npz", edge_index=[[0, 2, 3], [1, 1, 0]], edge_feat=features, **sizes)  # type: ignore[arg-type]
    one = graphs.read_ogb(tmp_path, edges="as-written")
    np.testing.assert_array_equal(one.features, np.array([[-3, 2], [2.5, 0.25], [0, 0], [0, 0]], np.float32))
    both = graphs.read_ogb(tmp_path, edges="both-ways")
    np.testing.assert_array_equal(both.features, np.array([[-1, 1], [2.5, 0.25], [4, 0.5], [-3, 2]], np.float32))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "raw/edge.csv.gz").unlink(), "edge.csv.gz: is missing"),
        (lambda p: (p / "raw/edge.csv.gz").write_bytes(gzip.compress(b"0,1\n" * 99)[:-9]), "no complete gzipped table"),
        (lambda p: _write(p / "raw/edge.csv.gz", "0,x\n1,2\n3,0\n"), "no complete gzipped table of numbers"),
        (lambda p: _write(p / "raw/num-edge-list.csv.gz", "7\n"), "must have 7 lines of 2 numbers"),
        (lambda p: _write(p / "raw/num-node-list.csv.gz", "4\n4\n"), "holds 2 graphs"),
        (lambda p: _write(p / "raw/edge.csv.gz", "0,1\n9,1\n3,0\n"), "senders must lie in"),
        (lambda p: _write(p / "raw/node-feat.csv.gz", "1\n1\n"), "features must have 4 rows; got 2"),
        (lambda p: _write(p / "split/random/train.csv.gz", "1\n"), "several splits: random, time"),
        (lambda p: _write(p / "split/time/train.csv.gz", "2\n"), "node 2 of split 'train' has no label"),
        (lambda p: _write(p / "raw/edge.csv.gz", "0,1\n2,0.5\n3,0\n"), r"edge\.csv\.gz, line 2: 0\.5 is no node"),
        (lambda p: _write(p / "raw/node-label.csv.gz", "2\n0.5\n1\n1\n"), "must hold classes, whole numbers; got 0.5"),
        (
            lambda p: _write(p / "raw/node-label.csv.gz", "1,2\n0,0\n1,1\n1,0\n"),
            r"0 or 1 each.*got \[4, 2\] from 0 to 2",
        ),
        (
            lambda p: ((p / "raw/node-feat.csv.gz").unlink(), _write(p / "raw/edge-feat.csv.gz", "1\n2\n")),
            r"features of edges must be one row for each of the 3 edges; got \[2, 1\]",
        ),
    ],
)
def test_says_what_is_wrong_with_an_ogb_folder(damage, message: str, tmp_path: pathlib.Path) -> None:
    _ogb(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        graphs.read_ogb(tmp_path, edges="as-written")


@pytest.mark.parametrize("name", ["edges.txt", "edges.tsv.gz"])
def test_edge_list_with_comments_separators_and_weights(name: str, tmp_path: pathlib.Path) -> None:
    _write(tmp_path / name, "# from SNAP\n% or Konect\n3\t0\t0.5\n\n1 2 2\n0,2,1e-1\n")
    a = graphs.read_edge_list(tmp_path / name)
    np.testing.assert_array_equal(a.indptr, [0, 1, 1, 3, 3])
    np.testing.assert_array_equal(a.indices, [3, 1, 0])
    np.testing.assert_array_equal(a.weights(), np.array([0.5, 2, 0.1], np.float32))
    assert graphs.read_edge_list(tmp_path / name, num_nodes=9).shape == (9, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n2\n", "line 2: has 1 fields"),
        ("0 1 2 3\n", "line 1: has 4 fields"),
        ("0 1\n1 a\n", "line 2: 'a' is not a node"),
        ("0 1 1\n1 2 heavy\n", "line 2: 'heavy' is not a weight"),
        ("# nothing\n", "holds no edges"),
        ("0 -1\n", "receivers must lie in"),
        ("0 1 1\n1 2 inf\n", "values must be finite; that of the edge from 1 to 2 is inf"),
        ("0 99999999999999999999\n", "line 1: '99999999999999999999' is not a node"),
    ],
)
def test_says_which_line_is_no_edge(text: str, message: str, tmp_path: pathlib.Path) -> None:
    _write(tmp_path / "e.txt", text)
    with pytest.raises(UserError, match=message):
        graphs.read_edge_list(tmp_path / "e.txt")


def test_parquet_columns_are_edges(tmp_path: pathlib.Path) -> None:
    table = pa.table({"src": [3, 1, 0], "dst": [0, 2, 2], "w": [0.5, 2.0, 0.1]})
    pq.write_table(table, tmp_path / "e.parquet")
    a = graphs.read_edge_parquet(tmp_path / "e.parquet", source="src", destination="dst", weight="w")
    np.testing.assert_array_equal(a.indices, [3, 1, 0])
    np.testing.assert_array_equal(a.weights(), np.array([0.5, 2, 0.1], np.float32))
    with pytest.raises(UserError, match="no column 'source', only src, dst, w"):
        graphs.read_edge_parquet(tmp_path / "e.parquet")


def test_features_that_are_not_finite_are_refused() -> None:
    adjacency = graphs.Adjacency.from_edges([0], [1], shape=(2, 2))
    with pytest.raises(UserError, match="features must be finite; those of node 1"):
        graphs.NodeGraph(adjacency, np.array([[0.0], [np.nan]], np.float32))
