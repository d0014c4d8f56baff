"""Objects of SciPy, and stand-ins for those of PyG, as graphs."""

import types
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from scalejax.data.graphs import from_pyg, from_scipy
from scalejax.errors import UserError


class Tensor:
    """As much of a tensor on a device, with a gradient, as there is to copy from."""

    def __init__(self, values: Any, where: str = "graph") -> None:
        self._values, self._where = np.asarray(values), where

    def detach(self) -> "Tensor":
        return Tensor(self._values, "device")

    def cpu(self) -> "Tensor":
        assert self._where == "device"
        return Tensor(self._values, "host")

    def numpy(self) -> np.ndarray:
        assert self._where == "host"
        return self._values


def data(**changed: Any) -> types.SimpleNamespace:
    given = {
        "edge_index": [[0, 1, 2, 0], [1, 2, 0, 2]],
        "x": np.eye(3),
        "y": [0, 1, 1],
        "train_mask": [True, False, False],
        "val_mask": [False, True, False],
        "test_mask": [False, False, True],
    }
    tensors = {name: Tensor(value) for name, value in (given | changed).items() if value is not None}
    return types.SimpleNamespace(num_nodes=3, edge_attr=None, **tensors)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil"])
def test_a_matrix_of_scipy_multiplies_as_it_did(form: str) -> None:
    matrix = scipy.sparse.random_array((6, 4), density=0.5, rng=np.random.default_rng(0), format=form)
    ours = from_scipy(matrix)
    dense = np.zeros(ours.shape)
    np.add.at(dense, (ours.rows, ours.indices), ours.weights())
    np.testing.assert_allclose(dense, matrix.toarray(), rtol=1e-6)
    assert ours.shape == (6, 4)


def test_a_matrix_of_booleans_has_edges_without_weights() -> None:
    assert from_scipy(scipy.sparse.csr_array(np.eye(3, dtype=bool))).values is None


def test_a_dense_matrix_and_an_entry_beyond_float32_are_refused() -> None:
    with pytest.raises(UserError, match=r"got ndarray. Of a dense one: scipy\.sparse\.csr_array"):
        from_scipy(np.eye(3))
    with pytest.raises(UserError, match=r"1e\+300 in row 0 is beyond float32"):
        from_scipy(scipy.sparse.csr_array(np.diag([1e300, 1])))


def test_data_of_pyg_becomes_a_graph() -> None:
    graph = from_pyg(data(edge_weight=[1.0, 2.0, 3.0, 4.0]))
    assert list(zip(graph.adjacency.indices, graph.adjacency.rows, graph.adjacency.weights(), strict=True)) == [
        (2, 0, 3.0), (0, 1, 1.0), (1, 2, 2.0), (0, 2, 4.0),
    ]  # fmt: skip
    np.testing.assert_array_equal(graph.features, np.eye(3))
    assert graph.labels is not None
    assert (graph.labels.dtype, graph.labels.tolist()) == (np.int32, [0, 1, 1])
    assert {split: nodes.tolist() for split, nodes in graph.splits.items()} == {
        "train": [0], "validation": [1], "test": [2],
    }  # fmt: skip


def test_labels_of_one_column_are_classes_and_of_several_are_tasks() -> None:
    one, several = (from_pyg(data(y=y)).labels for y in ([[0], [2], [1]], [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    assert one is not None
    assert several is not None
    assert (one.tolist(), several.tolist()) == ([0, 2, 1], [[0, 1], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"edge_index": None}, r"must have edge_index \[2, E\]; got none"),
        ({"train_mask": np.ones((3, 10), bool)}, r"train_mask must be bool\[N\]; got bool\[3, 10\].*\[:, 0\]"),
        ({"y": [0.5, 1.0, 2.0]}, "labels must be whole numbers; got 0.5"),
        ({"x": np.ones((4, 2))}, "features must have 3 rows; got 4"),
    ],
)
def test_data_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_pyg(data(**changed))
