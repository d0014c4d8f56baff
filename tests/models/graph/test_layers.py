"""Each network against its equations in NumPy, over whole, sampled and mini-batched graphs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.data import graphs
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import SparsePlan, spmm
from scalejax.models.graph import (
    GatConfig,
    GcnConfig,
    GraphSageConfig,
    NodeTask,
    Sampling,
    graph_of,
    of_hop,
    of_host,
    presampled,
)
from scalejax.models.graph.aggregation import attend, draws_of
from scalejax.models.graph.task import cross_entropy
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import MeshShape, everywhere, make_mesh

NODES, FEATURES, CLASSES = 24, 6, 3
CONFIGS = {
    "gcn": GcnConfig(hidden=5),
    "sage": GraphSageConfig(hidden=5),
    "gat": GatConfig(hidden=4, heads=2, out_heads=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_on_eight_devices_equal_one_with_gradients(name: str) -> None:
    a, x, model = _setup(name)  # 24 nodes, 3 a device
    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    graph, blocks = of_host(a), graph_of(a, None, mesh)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(NODES, CLASSES)), jnp.float32)
    structure, state = nnx.split(model)

    def run(read: Any, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def weighted(state: Any, x: jax.Array, read: Any) -> tuple[jax.Array, jax.Array]:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                logits = nnx.merge(structure, state)(x, read)
            return (logits * weights).sum(), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(weighted, has_aux=True))(state, x, read)
        return logits, jax.tree.leaves(grads)

    (want, want_grads), (got, got_grads) = run(graph, x), run(blocks, jax.device_put(x, everywhere(mesh)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for one, other in zip(want_grads, got_grads, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=1e-5)


def test_blocks_ask_for_their_mesh() -> None:
    a, x, model = _setup("gcn")
    with pytest.raises(UserError, match="needs the mesh that it was cut for"):
        model(x, graph_of(a, None, make_mesh(MeshShape())))


def _adjacency(name: str) -> graphs.Adjacency:
    """With an empty row and a repeated edge for GraphSAGE; loops and weights for GCN, loops for GAT."""
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, NODES, (2, 90))
    receivers[receivers == 7] = 8
    senders, receivers = np.append(senders, senders[:3]), np.append(receivers, receivers[:3])
    a = graphs.Adjacency.from_edges(senders, receivers, shape=(NODES, NODES))
    if name == "sage":
        return a
    return a.with_self_loops().normalized("symmetric") if name == "gcn" else a.with_self_loops()


def _setup(name: str) -> tuple[graphs.Adjacency, np.ndarray, Any]:
    a = _adjacency(name)
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=a.values is not None)
    model: Any = CONFIGS[name].build(schema, nnx.Rngs(3), Dtypes())
    rng = np.random.default_rng(1)
    # Biases start at 0, where a mistake would not show.
    for layer in model.layers:
        layer.bias[...] = jnp.asarray(rng.normal(size=layer.bias.shape), jnp.float32)
    return a, rng.normal(size=(NODES, FEATURES)).astype(np.float32), model


def _run(model: Any, *args: Any) -> jax.Array:
    """One program: operation by operation, compilation takes most of the time."""
    return jax.jit(lambda *arrays: model(*arrays))(*args)


def _params(layer: Any) -> dict[str, np.ndarray]:
    return {"/".join(map(str, k)): np.asarray(v[...], np.float64) for k, v in nnx.to_flat_state(nnx.state(layer))}


def _gcn(layer: Any, x: np.ndarray, a: graphs.Adjacency) -> np.ndarray:
    p, dense = _params(layer), np.zeros((NODES, NODES))
    np.add.at(dense, (a.rows, a.indices), a.weights())
    return dense @ x @ p["kernel"] + p["bias"]


def _sage(layer: Any, x: np.ndarray, a: graphs.Adjacency) -> np.ndarray:
    p = _params(layer)
    rows = [a.indices[a.indptr[i] : a.indptr[i + 1]] for i in range(NODES)]
    mean = np.stack([x[r].mean(0) if r.size else np.zeros(x.shape[1]) for r in rows])
    return x @ p["own"] + mean @ p["neighbors"] + p["bias"]


def _gat(layer: Any, x: np.ndarray, a: graphs.Adjacency) -> np.ndarray:
    p = _params(layer)
    heads, width = p["source"].shape
    h = (x @ p["kernel"]).reshape(NODES, heads, width)
    out = np.zeros((NODES, heads, width))
    for i in range(NODES):
        for head in range(heads):
            row = a.indices[a.indptr[i] : a.indptr[i + 1]]
            e = h[row, head] @ p["source"][head] + h[i, head] @ p["target"][head]
            e = np.exp(np.where(e > 0, e, 0.2 * e))
            out[i, head] = (e / e.sum()) @ h[row, head]
    joined = out.reshape(NODES, -1) if layer.combine == "concatenate" else out.mean(1)
    return joined + p["bias"]


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


_ORACLES = {"gcn": (_gcn, lambda x: np.maximum(x, 0)), "sage": (_sage, lambda x: np.maximum(x, 0)), "gat": (_gat, _elu)}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_equations(name: str) -> None:
    a, x, model = _setup(name)
    layer, between = _ORACLES[name]
    want = layer(model.layers[1], between(layer(model.layers[0], x.astype(np.float64), a)), a)
    np.testing.assert_allclose(_run(model, x, of_host(a)), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_width_above_every_degree_reads_the_whole_graph(name: str) -> None:
    a, x, model = _setup(name)
    sampled = presampled(a, Sampling(width=int(a.degrees.max()) + 1))
    np.testing.assert_allclose(_run(model, x, sampled), _run(model, x, of_host(a)), rtol=1e-5, atol=1e-6)


def _hops(a: graphs.Adjacency, found: graphs.Neighborhood) -> tuple[Any, ...]:
    sizes = (found.nodes.shape[0], *(hop.indices.shape[0] for hop in found.hops))
    values = None if a.values is None else jnp.asarray(a.values)
    arrays = [{k: jnp.asarray(v.astype(np.int32)) for k, v in vars(hop).items()} for hop in found.hops]
    return tuple(of_hop(**hop, sources=n, values=values) for hop, n in zip(arrays, sizes[:-1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_mini_batches_with_all_neighbours_equal_the_whole_graph_with_gradients(name: str) -> None:
    a, x, model = _setup(name)
    most = int(a.degrees.max())
    seeds = np.array([7, 3, 3, 20, 11])  # node 7 has no neighbours but itself, node 3 comes twice
    found = graphs.NeighborSampler(a, (most, most)).sample(seeds)
    graph, hops = of_host(a), _hops(a, found)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(seeds.size, CLASSES)), jnp.float32)

    structure, state = nnx.split(model)

    def run(nodes: Any, read: Any, rows: Any) -> tuple[jax.Array, list[jax.Array]]:
        def weighted(state: Any) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(structure, state)(nodes, read)[rows]
            return (logits * weights).sum(), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(weighted, has_aux=True))(state)
        return logits, jax.tree.leaves(grads)

    (want, want_grads), (got, got_grads) = run(x, graph, seeds), run(x[found.nodes], hops, found.seeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for one, other in zip(want_grads, got_grads, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_padding_around_a_mini_batch_changes_nothing() -> None:
    a, x, model = _setup("gcn")
    sampler = graphs.NeighborSampler(a, (3, 2), seed=1)
    few, many = sampler.sample(np.array([3])), sampler.sample(np.array([3] * 9))
    assert few.nodes.shape != many.nodes.shape
    logits = [_run(model, x[f.nodes], _hops(a, f))[f.seeds] for f in (few, many)]
    np.testing.assert_allclose(logits[1], np.broadcast_to(logits[0], (9, CLASSES)), rtol=1e-6)


def test_sampled_weights_are_scaled_by_what_was_left_out() -> None:
    a, x, _ = _setup("gcn")
    for rescale in ("degree", "none"):
        sampled = presampled(a, Sampling(width=3, strategy="bucket", rescale=rescale))
        want = np.zeros((NODES, FEATURES))
        for i in range(NODES):
            n = int(a.degrees[i])
            edges = slice(a.indptr[i], a.indptr[i] + min(n, 3))
            scale = n / min(n, 3) if rescale == "degree" else 1.0
            want[i] = scale * (a.weights()[edges] @ x[a.indices[edges]])
        np.testing.assert_allclose(spmm(sampled, x), want, rtol=1e-5, atol=1e-6)


def test_drawn_edges_of_few_slots_are_summed_as_such() -> None:
    rng = np.random.default_rng(0)
    receivers = np.repeat(np.arange(NODES), 5)
    a = graphs.Adjacency.from_edges(rng.integers(0, NODES, 5 * NODES), receivers, shape=(NODES, NODES))
    drawn = Sampling(width=3, strategy="bucket")
    for graph in (presampled(a, drawn), graph_of(a, drawn)):
        assert isinstance(graph, SparsePlan)
        assert graph.balance.slots == 3
        x = np.eye(NODES, dtype=np.float32)
        want = np.zeros((NODES, NODES))
        np.add.at(want, (np.repeat(np.arange(NODES), 3), a.indices.reshape(NODES, 5)[:, :3].ravel()), 1)
        np.testing.assert_array_equal(spmm(graph, x), want)
    assert of_host(a).balance.slots is None


def test_dropout_needs_a_key_and_follows_it() -> None:
    a, x, model = _setup("gcn")
    graph = of_host(a)
    run = jax.jit(lambda key: model(x, graph, key=key))
    first, again, other = (run(jax.random.key(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != _run(model, x, graph)).any()


def test_devices_drop_other_weights_of_attention() -> None:
    mesh, nodes = make_mesh(MeshShape()), np.arange(NODES)
    loops = graphs.Adjacency.from_edges(nodes, nodes, shape=(NODES, NODES))  # equal blocks, a weight of 1 for each head
    options: dict[str, Any] = {"slope": 0.2, "rate": 0.5, "key": jax.random.key(0)}

    def run(blocks: Any) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return attend(blocks, jnp.ones((NODES, 16, 1)), *2 * [jnp.zeros((NODES, 16))], **options)

    found = np.asarray(jax.jit(run)(graph_of(loops, None, mesh))).reshape(mesh.size, -1)
    np.testing.assert_array_equal(np.unique(found), [0, 2])
    assert len(np.unique(found, axis=0)) == mesh.size


def test_compute_dtype_is_that_of_the_logits() -> None:
    a = _adjacency("sage")
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=False)
    x = jnp.ones((NODES, FEATURES))
    for name in ("sage", "gat"):
        model: Any = CONFIGS[name].build(schema, nnx.Rngs(0), Dtypes(compute=jnp.bfloat16))
        assert jax.eval_shape(model, x, of_host(a.with_self_loops())).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_costs_each_matrix_once_a_node(name: str) -> None:
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=name == "gcn")
    model = CONFIGS[name].build(schema, nnx.Rngs(0), Dtypes())
    flat = {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(nnx.state(model))}
    matrices = [v for k, v in flat.items() if not k.endswith("bias")]
    assert CONFIGS[name].task(schema).flops_per_step(10) == 60 * sum(v.size for v in matrices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sampling(width=0), "width must be at least 1; got 0"),
        (
            lambda: GcnConfig().task(GraphSchema(4, 2, 2, weighted=False)),
            "Set data.normalization to symmetric or right",
        ),
        (lambda: GraphSageConfig().task(GraphSchema(4, 2, 2, weighted=True)), "Set data.normalization=none"),
        (lambda: GatConfig().task(GraphSchema(4, 2, 2, weighted=True)), "Set data.normalization=none"),
        (
            lambda: Sampling(width=2, draws=2),
            "draws must be at most 1, as many as differ with strategy 'fastrand' and prime=577; got 2",
        ),
        (lambda: Sampling(width=2, prime=None, draws=11), "draws must be at most 10"),
        (lambda: Sampling(width=2, draws=0), "draws must be at least 1; got 0"),
        (lambda: Sampling(width=None), "width must be a number of edges for strategy 'fastrand'; got None"),
        (lambda: Sampling(strategy="rate"), r"wants a rate in \[0.0001, 1\]; got None"),
        (lambda: Sampling(rescale="mean"), "rescale must be one of degree, none; got 'mean'"),  # type: ignore[arg-type]
        (lambda: GcnConfig(layers=0), "GcnConfig: layers must be at least 1; got 0"),
        (lambda: GraphSageConfig(hidden=0), "GraphSageConfig: hidden must be at least 1; got 0"),
        (lambda: GatConfig(layers=0), "GatConfig: layers must be at least 1; got 0"),
        (lambda: GatConfig(out_heads=0), "GatConfig: out_heads must be at least 1; got 0"),
        (lambda: GatConfig(dropout=1.0), r"GatConfig: dropout must lie in \[0, 1\); got 1.0"),
        (
            lambda: _setup("gcn")[2](np.ones((NODES, FEATURES)), (of_host(_adjacency("gcn")),)),
            "2 layers and got 1 graph",
        ),
        (lambda: Sampling(width=2, strategy="buckets"), "strategy must be one of"),  # type: ignore[arg-type]
    ],
)
def test_says_what_is_wrong(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_the_loss_of_tasks_is_binary_cross_entropy_over_the_labels_that_are_known() -> None:
    logits = np.array([[2.0, -1.0, 40.0], [0.5, 100.0, -300.0]])
    labels = np.array([[1, 0, -1], [0, 1, 0]], np.int32)
    (total, count), grads = jax.value_and_grad(cross_entropy, has_aux=True)(jnp.asarray(logits, jnp.float32), labels)
    shares = 1 / (1 + np.exp(-logits[labels >= 0]))
    known = labels[labels >= 0]
    np.testing.assert_allclose(total, -np.log(np.where(known == 1, shares, 1 - shares)).sum(), rtol=1e-6)
    assert count == 5
    wanted = np.zeros((2, 3))
    wanted[labels >= 0] = shares - known
    np.testing.assert_allclose(grads, wanted, rtol=1e-5, atol=1e-7)


def test_edges_are_not_drawn_twice() -> None:
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=True)
    graph = graphs.NodeGraph(_adjacency("gcn"), np.ones((NODES, FEATURES), np.float32))
    drawn = NodeTask(config=dataclasses.replace(GcnConfig(), train_sampling=Sampling(width=2)), schema=schema)
    mesh = make_mesh(None)
    with pytest.raises(UserError, match="both draw the edges"):
        drawn.place(graph, (2, 2), mesh)
    with pytest.raises(UserError, match="one number for each of the 2 layers"):
        NodeTask(config=GcnConfig(), schema=schema).place(graph, (2, 2, 2), mesh)


@pytest.mark.parametrize("strategy", ["fastrand", "quadratic_residue"])
def test_every_draw_has_a_seed_of_its_own_and_epochs_take_them_in_turn(strategy: Any) -> None:
    a = _adjacency("gcn")
    drawn = Sampling(width=3, strategy=strategy, prime=None, seed=4, draws=3)
    draws = draws_of(a, drawn)
    one = jax.jit(lambda epoch: draws.of_epoch(epoch).csr.indices)  # type: ignore[union-attr]
    edges = [np.asarray(one(np.int32(epoch))) for epoch in range(5)]
    for epoch, found in enumerate(edges):
        alone = presampled(a, dataclasses.replace(drawn, seed=4 + epoch % 3, draws=1)).csr.indices
        np.testing.assert_array_equal(found[: len(alone)], alone)
    assert (edges[0] != edges[1]).any()
    assert (edges[1] != edges[2]).any()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fastrand", "quadratic_residue"])
def test_epochs_read_the_draws_in_turn(strategy: Any) -> None:
    a, x, _ = _setup("gcn")
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=True)
    drawn = Sampling(width=3, strategy=strategy, prime=None, seed=4, draws=3)
    config = GcnConfig(train_sampling=drawn, eval_sampling=drawn)
    placed = NodeTask(config=config, schema=schema).place(graphs.NodeGraph(a, x), (), make_mesh(None))
    product = jax.jit(lambda epoch: spmm(placed.train.of_epoch(epoch), x))  # type: ignore[union-attr]
    wanted = [spmm(presampled(a, dataclasses.replace(drawn, seed=seed, draws=1)), x) for seed in (4, 5, 6)]
    assert not np.allclose(wanted[0], wanted[1])
    for epoch in (0, 1, 2, 4):
        np.testing.assert_allclose(product(epoch), wanted[epoch % 3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(spmm(placed.score, x), wanted[0], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_a_rate_may_be_what_limits_a_row() -> None:
    a = _adjacency("gcn")
    half = presampled(a, Sampling(width=None, strategy="rate_stride", rate=0.5))
    np.testing.assert_array_equal(half.degrees(), -(-a.degrees // 2))


def test_training_and_scoring_may_read_different_edges() -> None:
    schema = GraphSchema(NODES, FEATURES, CLASSES, weighted=True)
    graph = graphs.NodeGraph(_adjacency("gcn"), np.ones((NODES, FEATURES), np.float32))
    config = GcnConfig(train_sampling=Sampling(width=2), eval_sampling=None)
    placed = NodeTask(config=config, schema=schema).place(graph, (), make_mesh(None))
    assert isinstance(placed.train, SparsePlan)
    assert isinstance(placed.score, SparsePlan)
    assert placed.train.nnz == np.minimum(graph.adjacency.degrees, 2).sum()
    assert placed.score.nnz == graph.adjacency.num_edges
