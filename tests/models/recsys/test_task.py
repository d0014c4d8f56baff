"""The loss that every click model shares."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.task import bce_with_logits
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.protocols import ModelConfig
from scalejax.train.task import Batch, Keys, whole

WUKONG = WukongConfig(
    dim=4, layers=1, fm_outputs=2, lcb_outputs=2, rank=2, fmb_hidden=(5,), head_hidden=(), bottom_hidden=()
)
DLRM = DlrmConfig(dim=4, bottom_hidden=(6,), top_hidden=(5,))
DCNV2 = DcnV2Config(dim=4, deep_hidden=(5,), bottom_hidden=(6,), cross_rank=3)
CONFIGS = [WUKONG, DLRM, DCNV2, LogisticConfig()]


def loss_of(task, model, batch, keys=None):
    return task.loss(model, batch, keys=keys, gather=whole)


def with_fields(batch, **fields):
    return dataclasses.replace(batch, fields={**batch.fields, **fields})


def test_cross_entropy_equals_its_definition_and_stays_finite(x64):
    logits = np.array([-30.0, -2.0, 0.0, 3.0, 30.0])
    for label in (0.0, 1.0, 0.3):
        want = label * np.logaddexp(0, -logits) + (1 - label) * np.logaddexp(0, logits)
        got, slope = jax.vmap(jax.value_and_grad(bce_with_logits), in_axes=(0, None))(jnp.asarray(logits), label)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        np.testing.assert_allclose(slope, 1 / (1 + np.exp(-logits)) - label, rtol=1e-12, atol=1e-15)
    value, slope = jax.value_and_grad(lambda z: bce_with_logits(z, jnp.asarray(0.0)))(jnp.asarray(1e4))
    assert (value, slope) == (1e4, 1.0)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_tables_are_pooled_as_the_config_says(config, pooling, schema):
    tables = dataclasses.replace(config, pooling=pooling).tables(schema)
    assert {table.pooling for table in tables} == {pooling}


@pytest.mark.default_cases("DlrmConfig")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_loss_is_the_weighted_sum_of_the_mean_over_tasks(config, schema, examples, randomised, x64):
    task = config.task(schema)
    assert isinstance(config, ModelConfig)
    graph, state = nnx.split(randomised(task.init(nnx.Rngs(0), Dtypes(jnp.float64, jnp.float64))))
    batch = examples(task)
    found = jax.jit(lambda s, b: loss_of(task, nnx.merge(graph, s), b))(state, batch)
    z = np.asarray(nnx.merge(graph, state)(batch.embedded, batch["dense"]))
    y, w = np.asarray(batch["labels"], float), np.asarray(batch["weights"], float)
    each = np.logaddexp(0, z) - y * z
    np.testing.assert_allclose(found.sum, (w[:, None] * each).sum() / 2, rtol=1e-12)
    np.testing.assert_allclose(task.weight(batch), w.sum(), rtol=1e-6)  # float32 weights
    np.testing.assert_allclose(found.weight, w.sum(), rtol=1e-12)
    assert found.sum.dtype == found.weight.dtype == jnp.float64
    assert found.outputs["logits"].dtype == jnp.float32
    assert found.outputs["logits"].shape == (6, 2)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_padding_of_weight_zero_adds_nothing_to_loss_or_gradient(config, schema, examples):
    task = config.task(schema)
    graph, state = nnx.split(task.init(nnx.Rngs(0), Dtypes()))
    batch = examples(task, dtype=np.float32)

    @jax.jit
    def gradient(batch):
        def value(s, e):
            return loss_of(task, nnx.merge(graph, s), dataclasses.replace(batch, embedded=e)).sum

        return jax.grad(value, argnums=(0, 1))(state, batch.embedded)

    half = with_fields(batch, weights=batch["weights"].at[3:].set(0.0))
    dense, rows = gradient(half)
    changed = with_fields(half, dense=batch["dense"].at[3:].add(1.0))
    for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(gradient(changed)[0]), strict=True):
        assert np.array_equal(a, b)
    assert all(not np.any(g[3:]) for g in jax.tree.leaves(rows))


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_strict_promotion_holds_and_gradients_are_finite(config, dtype, schema, examples, strict_promotion):
    task = config.task(schema)
    graph, state = nnx.split(task.init(nnx.Rngs(0), Dtypes(compute=dtype)))
    batch = examples(task, dtype=np.float32)

    @jax.jit
    def step(state, embedded):
        keys = Keys(jax.random.key(1), jax.random.key(0))

        def value(s, e):
            return loss_of(task, nnx.merge(graph, s), dataclasses.replace(batch, embedded=e), keys).sum

        return jax.value_and_grad(value, argnums=(0, 1))(state, embedded)

    value, gradients = step(state, batch.embedded)
    assert value.dtype == jnp.float32
    assert all(np.isfinite(g).all() and g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_counts_equal_the_real_model(config, schema, examples, dot_flops):
    task = config.task(schema)
    graph, state = nnx.split(task.init(nnx.Rngs(0), Dtypes()))
    batch = examples(task, size=4, dtype=np.float32)
    assert sum(p.size for p in jax.tree.leaves(state)) == task.dense_parameters()
    forward = dot_flops(jax.make_jaxpr(lambda s, b: loss_of(task, nnx.merge(graph, s), b).sum)(state, batch))
    assert 3 * forward == 4 * task.flops_per_example()


@pytest.mark.default_cases("dlrm")
@pytest.mark.parametrize(
    "config",
    [*CONFIGS, dataclasses.replace(WUKONG, fm="attentive"), dataclasses.replace(WUKONG, fm="plain")],
    ids=["wukong", "dlrm", "dcnv2", "logistic", "wukong_attentive", "wukong_plain"],
)
def test_a_sharded_batch_needs_no_collective_but_the_sums_and_gives_the_same_gradient(config, schema, examples, x64):
    """A reshape that merges the batch into a leading axis would show up as an all-gather."""
    task = config.task(schema)
    graph, state = nnx.split(task.init(nnx.Rngs(0), Dtypes(jnp.float64, jnp.float64)))
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    over_batch, everywhere = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    batch = examples(task, size=16)

    def step(state, embedded, fields):
        def value(s, e):
            return loss_of(task, nnx.merge(graph, s), Batch(fields, e)).sum

        return jax.value_and_grad(value, argnums=(0, 1))(state, embedded)

    args = (state, batch.embedded, batch.fields)
    placed = jax.device_put(args, (everywhere, over_batch, over_batch))
    compiled = jax.jit(step, out_shardings=(everywhere, (everywhere, over_batch))).lower(*placed).compile()
    kinds = set(re.findall(r"(all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text() or ""))
    assert kinds == {"all-reduce"}
    for a, b in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # sums over the batch in another order
