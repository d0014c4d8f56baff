"""PyTorch Geometric's layers and ours on one graph and shared weights."""

from typing import Any

import pytest

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed; benchmarks/peers.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from scalejax.data import graphs
from scalejax.models.graph import GatLayer, GcnLayer, SageLayer, of_host

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

NODES, INPUTS, OUTPUTS = 200, 12, 7


@pytest.fixture(scope="module")
def adjacency() -> graphs.Adjacency:
    """Directed, with weights, some loops, hubs and empty rows, no edge twice."""
    a = graphs.power_law(NODES, 1500, exponent=2.3, seed=1)
    pairs = np.unique(a.rows * NODES + a.indices)
    weights = np.random.default_rng(0).uniform(0.2, 2.0, pairs.size)
    found = graphs.Adjacency.from_edges(pairs % NODES, pairs // NODES, shape=(NODES, NODES), values=weights)
    assert (found.degrees == 0).any()
    assert (found.rows == found.indices).any()
    return found


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NODES, INPUTS)).astype(np.float32)


def _edges(a: graphs.Adjacency) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(np.stack([a.indices, a.rows])), torch.tensor(a.weights())


def _param(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


def _dense(rows: Any, columns: Any, values: Any) -> np.ndarray:
    dense = np.zeros((NODES, NODES))
    np.add.at(dense, (rows, columns), values)
    return dense


def test_symmetric_normalisation_is_theirs(adjacency: graphs.Adjacency) -> None:
    ours = adjacency.with_self_loops().normalized("symmetric")
    (sources, targets), weights = gcn_norm(*_edges(adjacency), NODES, add_self_loops=True)
    got, want = _dense(ours.rows, ours.indices, ours.weights()), _dense(targets, sources, weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_gcn_layer_and_its_gradients_are_theirs(adjacency: graphs.Adjacency, x: np.ndarray) -> None:
    peer = GCNConv(INPUTS, OUTPUTS)
    torch.nn.init.normal_(peer.bias)
    layer = GcnLayer(INPUTS, OUTPUTS, nnx.Rngs(0), dropout=0.0)
    layer.kernel[...], layer.bias[...] = _param(peer.lin.weight).T, _param(peer.bias)
    graph = of_host(adjacency.with_self_loops().normalized("symmetric"))
    inputs = torch.tensor(x, requires_grad=True)
    want = peer(inputs, *_edges(adjacency))
    np.testing.assert_allclose(layer(x, graph), want.detach().numpy(), rtol=1e-5, atol=1e-5)
    (want**2).sum().backward()
    d_layer, d_x = nnx.grad(lambda layer, x: (layer(x, graph) ** 2).sum(), argnums=(0, 1))(layer, jnp.asarray(x))
    assert inputs.grad is not None
    np.testing.assert_allclose(d_x, inputs.grad.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_layer["kernel"][...], peer.lin.weight.grad.T.numpy(), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(d_layer["bias"][...], peer.bias.grad.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("outputs", [5, 30])  # aggregated after and before the product
def test_sage_layer_is_theirs(outputs: int, adjacency: graphs.Adjacency, x: np.ndarray) -> None:
    peer = SAGEConv(INPUTS, outputs, aggr="mean")
    layer = SageLayer(INPUTS, outputs, nnx.Rngs(0), dropout=0.0)
    layer.neighbors[...], layer.own[...] = _param(peer.lin_l.weight).T, _param(peer.lin_r.weight).T
    layer.bias[...] = _param(peer.lin_l.bias)
    unweighted = graphs.Adjacency(adjacency.indptr, adjacency.indices, None, adjacency.shape)
    want = peer(torch.tensor(x), _edges(adjacency)[0]).detach().numpy()
    np.testing.assert_allclose(layer(x, of_host(unweighted)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combine", ["concatenate", "mean"])
def test_gat_layer_is_theirs(combine: Any, adjacency: graphs.Adjacency, x: np.ndarray) -> None:
    peer = GATConv(INPUTS, OUTPUTS, heads=3, concat=combine == "concatenate")
    torch.nn.init.normal_(peer.bias)
    layer = GatLayer(INPUTS, 3, OUTPUTS, nnx.Rngs(0), combine=combine, slope=0.2, dropout=0.0)
    layer.kernel[...], layer.bias[...] = _param(peer.lin.weight).T, _param(peer.bias)
    layer.source[...], layer.target[...] = _param(peer.att_src)[0], _param(peer.att_dst)[0]
    unweighted = graphs.Adjacency(adjacency.indptr, adjacency.indices, None, adjacency.shape)
    want = peer(torch.tensor(x), _edges(adjacency)[0]).detach().numpy()
    np.testing.assert_allclose(layer(x, of_host(unweighted.with_self_loops())), want, rtol=1e-4, atol=1e-5)
