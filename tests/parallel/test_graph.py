"""Graphs cut over eight devices: results are those of one device, to the bit, and gradients its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_cases import random_csr

from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm import Csr, presample, quantize_rows, sampled_spmm, sparse_plan, spmm
from scalejax.parallel.graph import pad_nodes, shard_draws, shard_graph, sharded_spmm
from scalejax.parallel.mesh import MeshShape, everywhere, make_mesh
from scalejax.plan.compiled import collectives

DEVICES = 8
DEGREES = (0, 1, 3, 7, 300, 0, 0, 12, 5, 2000, 0, 0, 0, 0, 0, 4, 4, 4, 70000, 1, 256)
"""21 rows in blocks of three: some blocks have a row in two passes, one in three, one has no edges at all."""


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(fsdp=4, tensor=2))


def _problem(columns=50):
    csr = random_csr(0, degrees=DEGREES, columns=columns)
    h = np.random.default_rng(1).standard_normal((columns, 6)).astype(np.float32)
    return csr, h


def _on_mesh(h, mesh):
    return jax.device_put(pad_nodes(jnp.asarray(h), DEVICES), everywhere(mesh))


@pytest.mark.default_cases("halo-native-sum", "all_gather-xla-sum")
@pytest.mark.parametrize(
    ("exchange", "implementation", "reduce"),
    [
        ("halo", "native", "sum"),
        ("all_gather", "native", "mean"),
        ("halo", "xla", "mean"),
        ("all_gather", "xla", "sum"),
    ],
)
def test_eight_devices_equal_one(mesh, exchange, implementation, reduce):
    csr, h = _problem()
    graph = shard_graph(csr, DEVICES, exchange=exchange, mesh=mesh)
    options = {"reduce": reduce, "implementation": implementation}
    out = jax.jit(lambda g, h: sharded_spmm(g, h, mesh=mesh, **options))(graph, _on_mesh(h, mesh))
    alone = jax.jit(lambda p, h: spmm(p, h, **options))(sparse_plan(csr), h)
    assert out.sharding.is_equivalent_to(everywhere(mesh), 2)
    if implementation == "native":
        np.testing.assert_array_equal(out[: csr.shape[0]], alone)
    np.testing.assert_allclose(out[: csr.shape[0]], alone, rtol=1e-5, atol=1e-4)
    assert not np.asarray(out[csr.shape[0] :]).any()


@pytest.mark.default_cases("halo-native")
@pytest.mark.parametrize(
    ("exchange", "implementation"), [("halo", "native"), ("all_gather", "native"), ("halo", "xla")]
)
def test_gradients_of_eight_devices_are_those_of_one(mesh, exchange, implementation, x64):
    csr, h = _problem()
    h = h.astype(np.float64)
    graph = shard_graph(csr, DEVICES, exchange=exchange, mesh=mesh)

    def loss(g, h):
        return jnp.sin(sharded_spmm(g, h, mesh=mesh, reduce="mean", implementation=implementation)).sum()

    got = jax.jit(jax.grad(loss, 1))(graph, _on_mesh(h, mesh))
    expected = jax.grad(lambda h: jnp.sin(spmm(sparse_plan(csr), h, reduce="mean")).sum())(jnp.asarray(h))
    np.testing.assert_allclose(got[: csr.shape[1]], expected, rtol=1e-9, atol=1e-12)
    assert not np.asarray(got[csr.shape[1] :]).any()


def test_picked_edges_are_cut_like_a_graph(mesh):
    csr, h = _problem()
    picked = presample(csr, 8, strategy="fastrand")
    run = jax.jit(lambda g, h: sharded_spmm(g, h, mesh=mesh, reduce="mean"))
    out = run(shard_graph(picked, DEVICES, mesh=mesh), _on_mesh(h, mesh))
    np.testing.assert_allclose(out[: csr.shape[0]], sampled_spmm(picked, h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("exchange", ["halo", "all_gather"])
def test_features_in_int8_travel_as_they_are(mesh, exchange):
    csr, h = _problem()
    graph = shard_graph(csr, DEVICES, exchange=exchange, mesh=mesh)
    rows = jax.device_put(pad_nodes(quantize_rows(jnp.asarray(h)), DEVICES), everywhere(mesh))
    run = jax.jit(lambda g, h: sharded_spmm(g, h, mesh=mesh)).lower(graph, rows).compile()
    np.testing.assert_array_equal(
        run(graph, rows)[: csr.shape[0]], spmm(sparse_plan(csr), quantize_rows(jnp.asarray(h)))
    )
    name = {"halo": "all-to-all", "all_gather": "all-gather"}[exchange]
    assert [line for line in run.as_text().splitlines() if f" {name}(" in line and " s8[" in line]


def test_draws_in_blocks_are_read_one_at_a_time(mesh):
    csr, h = _problem()
    draws = [presample(csr, 8, strategy="quadratic_residue", seed=seed).to_csr() for seed in range(3)]
    blocks = shard_draws(draws, DEVICES, mesh=mesh)

    def of_draw(blocks, h, draw):
        return sharded_spmm(jax.tree.map(lambda array: array[:, draw], blocks), h, mesh=mesh)

    run = jax.jit(of_draw)
    for number, draw in enumerate(draws):
        out = run(blocks, _on_mesh(h, mesh), number)
        np.testing.assert_array_equal(out[: csr.shape[0]], spmm(sparse_plan(draw), h))


def test_a_halo_moves_what_edges_name_and_a_gather_all(mesh):
    # A ring of 64 nodes: each block of 8 reads one node of the block before it and one of that behind it.
    nodes = np.arange(64)
    csr = Csr.from_edges(np.r_[(nodes - 1) % 64, (nodes + 1) % 64], np.r_[nodes, nodes], shape=(64, 64))
    h = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
    moved = {}
    for exchange in ("halo", "all_gather"):
        graph = shard_graph(csr, DEVICES, exchange=exchange, mesh=mesh)
        run = jax.jit(lambda g, h: sharded_spmm(g, h, mesh=mesh)).lower(graph, _on_mesh(h, mesh)).compile()
        np.testing.assert_array_equal(run(graph, _on_mesh(h, mesh)), spmm(sparse_plan(csr), h))
        moved[exchange] = (graph.rows_fetched, {found.kind for found in collectives.explain_sharding(run, mesh)})
    assert moved == {"halo": (7, {"all-to-all"}), "all_gather": (56, {"all-gather"})}


def test_one_block_is_the_graph_itself():
    csr, h = _problem()
    alone = make_mesh(MeshShape(fsdp=1), jax.devices()[:1])
    out = jax.jit(lambda g, h: sharded_spmm(g, h, mesh=alone))(shard_graph(csr, 1, mesh=alone), jnp.asarray(h))
    np.testing.assert_array_equal(out, spmm(sparse_plan(csr), h))


def test_what_does_not_fit_the_mesh_is_refused(mesh):
    csr, h = _problem()
    with pytest.raises(UserError, match="must be the 8 of the mesh; got 4"):
        shard_graph(csr, 4, mesh=mesh)
    with pytest.raises(UserError, match="cut for 4 devices"):
        sharded_spmm(shard_graph(csr, 4), h, mesh=mesh)
    with pytest.raises(UserError, match=r"56 rows.*got \[50, 6\]\. Pass pad_nodes"):
        sharded_spmm(shard_graph(csr, 8), h, mesh=mesh)
    with pytest.raises(UserError, match="exchange must be"):
        shard_graph(csr, 8, exchange="ring")
    for devices in (0, 2.0):
        with pytest.raises(UserError, match="devices must be at least 1"):
            shard_graph(csr, devices)
    with pytest.raises(UserError, match="must be a Csr or Ell; got SparsePlan"):
        shard_graph(sparse_plan(csr), 8)
    with pytest.raises(UserError, match="must be a ShardedGraph; got SparsePlan"):
        sharded_spmm(sparse_plan(csr), h, mesh=mesh)
    with pytest.raises(UserError, match="must have edges"):
        shard_graph(random_csr(0, degrees=[0, 0]), 2)
