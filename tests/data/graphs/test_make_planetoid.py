"""The bundled Cora is made from its source by a script that runs nothing of what pickles name."""

import os
import pathlib
import pickle
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse

import scalejax.data.bundled
from scalejax.data import graphs
from scalejax.data.bundled import make_planetoid
from scalejax.errors import UserError

NODES, WORDS, TRAIN, KNOWN = 12, 5, 2, 7
TESTED = [11, 7, 9, 8]  # node 10 has no row anywhere


@pytest.fixture
def source(tmp_path: pathlib.Path) -> tuple[pathlib.Path, np.ndarray, np.ndarray]:
    """A graph in the form of Planetoid, its features and its labels."""
    rng = np.random.default_rng(0)
    words = (rng.random((NODES, WORDS)) < 0.4).astype(np.float32)
    labels = rng.integers(0, 3, NODES)
    words[10], labels[10] = 0, -1
    classes = np.eye(3, dtype=np.int32)[labels]
    graph = defaultdict(list, {0: [1, 1, 0], 1: [0], 2: [5], 3: [], 11: [10]})
    parts = {
        "x": scipy.sparse.csr_matrix(words[:TRAIN]),
        "y": classes[:TRAIN],
        "allx": scipy.sparse.csr_matrix(words[:KNOWN]),
        "ally": classes[:KNOWN],
        "tx": scipy.sparse.csr_matrix(words[TESTED]),
        "ty": classes[TESTED],
        "graph": graph,
    }
    for part, value in parts.items():
        (tmp_path / f"ind.small.{part}").write_bytes(pickle.dumps(value, protocol=3))
    (tmp_path / "ind.small.test.index").write_text("".join(f"{node}\n" for node in TESTED))
    return tmp_path, words, labels


def test_rows_go_to_their_nodes_and_edges_both_ways(source: tuple[pathlib.Path, np.ndarray, np.ndarray]) -> None:
    folder, words, labels = source
    np.savez(folder / "small.npz", **make_planetoid.read(folder, "small"))  # type: ignore[arg-type]
    graph = graphs.read_npz(folder / "small.npz")
    np.testing.assert_array_equal(graph.features, words)
    np.testing.assert_array_equal(graph.labels, labels)
    found = sorted(zip(graph.adjacency.indices.tolist(), graph.adjacency.rows.tolist(), strict=True))
    assert found == [(0, 1), (1, 0), (2, 5), (5, 2), (10, 11), (11, 10)]
    np.testing.assert_array_equal(graph.splits["train"], np.arange(TRAIN))
    np.testing.assert_array_equal(graph.splits["test"], sorted(TESTED))


class _Trap:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("sprung"),))


def test_names_that_are_no_arrays_end_the_reading(
    source: tuple[pathlib.Path, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = source
    monkeypatch.chdir(folder)
    (folder / "ind.small.graph").write_bytes(pickle.dumps({0: [_Trap()]}))
    with pytest.raises(UserError, match=r"ind\.small\.graph: is no file of Planetoid .*Path.touch"):
        make_planetoid.read(folder, "small")
    assert not (folder / "sprung").exists()
    (folder / "ind.small.ty").unlink()
    with pytest.raises(UserError, match=r"ind\.small\.ty: is missing"):
        make_planetoid.read(folder, "small")


@pytest.mark.skipif("PLANETOID" not in os.environ, reason="set PLANETOID to the folder `data` of a clone of Planetoid")
def test_the_bundled_file_is_what_the_source_gives(tmp_path: pathlib.Path) -> None:
    arrays = make_planetoid.read(pathlib.Path(os.environ["PLANETOID"]), "cora")
    with np.load(pathlib.Path(scalejax.data.bundled.__file__).parent / "cora.npz") as bundled:
        assert list(bundled) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(bundled[name], array, strict=True)
