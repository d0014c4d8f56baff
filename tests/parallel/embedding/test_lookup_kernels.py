"""Lookups by the Triton kernels, interpreted, against XLA's; what may be named where."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import OPTIMIZERS, batch, device_features, plan_of, wide_tables
from jax.experimental import pallas as pl

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding import lookup_kernels
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

BATCH = 8
ROW, BAG, POOL, BOTH = "gather_rows", "bag", "pool_rows", "gather_and_pool_rows"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Devices say that they are GPUs, and kernels are interpreted."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, interpret, **rest: call(*args, interpret=True, **rest))
    monkeypatch.setattr(lookup_kernels, "platform_of", lambda mesh: "gpu")
    yield
    jax.clear_caches()


def looked_up(devices, kind, *, weighted, implementation, hosts=1):
    """(rows of all features, names of the kernels of the program)."""
    tables, host = wide_tables(OPTIMIZERS["sgd"]), batch(BATCH, weighted=weighted)
    mesh = meshes.make_mesh(MeshShape(replica=hosts), jax.devices()[:devices])
    exchange = Exchange(capacity_factor=8.0, route="two_level" if hosts > 1 else "flat")
    on = EmbeddingCollection(
        tables=tables, mesh=mesh, plan=plan_of(kind, tables), exchange=exchange, implementation=implementation
    )
    features, state = device_features(on, host, BATCH), on.init(jax.random.key(0))
    look = jax.jit(lambda state, features: on.lookup(state, features)[0])
    names = set(re.findall(r"name=embedding_(\w+)", str(look.trace(state, features).jaxpr)))
    return look(state, features), names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "devices", "hosts", "weighted", "kernels"),
    [
        ("row_wise", 1, 1, False, {ROW, BAG}),
        ("row_wise", 1, 1, True, {ROW, POOL}),
        ("row_wise", 2, 1, False, {ROW, POOL}),
        ("table_wise", 2, 1, False, {ROW, BOTH}),
        ("table_wise", 2, 1, True, {ROW, POOL}),
        ("table_row_wise", 4, 2, False, {ROW, BOTH}),
        ("column_wise", 2, 1, False, {ROW, BOTH}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_kernels_give_the_bits_of_xla_on_a_cpu_wherever_rows_lie(as_on_a_gpu, kind, devices, hosts, weighted, kernels):
    """Which adds the rows of a bag one by one, as they do."""
    ours, names = looked_up(devices, kind, weighted=weighted, implementation=None, hosts=hosts)
    theirs, none = looked_up(devices, kind, weighted=weighted, implementation="xla", hosts=hosts)
    assert (names, none) == (kernels, set())
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def tables(**config):
    return (TableConfig(**{"name": "t", "rows": 100, "dim": 64, "features": ("f",), **config}),)


def mesh_of(devices=1):
    return meshes.make_mesh(MeshShape(), jax.devices()[:devices])


def test_a_cpu_takes_xla():
    (stack,) = EmbeddingCollection(tables=tables(), mesh=mesh_of()).stacks
    assert lookup_kernels.choose(None, stack, mesh_of()) == "xla"


def test_a_gpu_takes_xla_for_a_dtype_that_the_kernel_lacks(monkeypatch):
    monkeypatch.setattr(lookup_kernels, "platform_of", lambda mesh: "gpu")
    with jax.enable_x64(True):
        (stack,) = EmbeddingCollection(tables=tables(dtype="float64"), mesh=mesh_of()).stacks
        assert lookup_kernels.choose(None, stack, mesh_of()) == "xla"
    (stack,) = EmbeddingCollection(tables=tables(dtype="bfloat16"), mesh=mesh_of()).stacks
    assert stack.dtype == jnp.bfloat16
    assert lookup_kernels.choose(None, stack, mesh_of()) == "pallas_gpu"


@pytest.mark.parametrize(
    ("implementation", "platform", "config", "message"),
    [
        ("pallas_gpu", "cpu", {}, "is for devices of the platform 'gpu'; these are of 'cpu'"),
        ("pallas_tpu", "gpu", {}, "is for devices of the platform 'tpu'; these are of 'gpu'"),
        ("pallas_gpu", "gpu", {"dtype": "float64"}, "'t' is of float64. Use --set tables.implementation=xla"),
        ("pallas_tpu", "tpu", {}, "'t' has rows of 64 in float32 there"),
        ("pallas_tpu", "tpu", {"dim": 128, "dtype": "bfloat16"}, "'t' has rows of 128 in bfloat16 there"),
        ("triton", "gpu", {}, "tables.implementation must be one of None, xla, pallas_gpu, pallas_tpu; got 'triton'"),
    ],
)
def test_a_name_is_refused_where_it_cannot_be(monkeypatch, implementation, platform, config, message):
    monkeypatch.setattr(lookup_kernels, "platform_of", lambda mesh: platform)
    with pytest.raises(UserError, match=re.escape(message)):
        EmbeddingCollection(tables=tables(**config), mesh=mesh_of(), implementation=implementation)
