"""DLRM, DCNv2 and logistic regression against literal NumPy forms and published counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.wukong import Important, NarrowGroup, WukongConfig
from scalejax.numerics.dtypes import Dtypes

F64 = Dtypes(jnp.float64, jnp.float64)


def oracle_mlp(p, x, last="linear"):
    for i in range(len(p["layers"])):
        x = x @ p["layers"][i]["kernel"] + p["layers"][i]["bias"]
        x = np.maximum(x, 0) if i < len(p["layers"]) - 1 or last == "relu" else x
    return x


def oracle_dlrm(p, schema, embedded, dense):
    v = [oracle_mlp(p["bottom"], dense, "relu")] if schema.dense else []
    x = v + [embedded[f] for f in schema.keys]
    z = [np.dot(x[i], x[j]) for i in range(len(x)) for j in range(i)]
    return oracle_mlp(p["top"], np.concatenate([*v, z]))


def oracle_dcnv2(p, schema, embedded, dense):
    v = [oracle_mlp(p["bottom"], dense, "relu")] if schema.dense else []
    x0 = np.concatenate(v + [embedded[f] for f in schema.keys])
    x = x0
    for i in range(len(p["crosses"])):
        cross = p["crosses"][i]
        inner = x @ cross["down"] if "down" in cross else x
        x = x0 * (inner @ cross["affine"]["kernel"] + cross["affine"]["bias"]) + x
    return oracle_mlp(p["deep"], x)


def oracle_logistic(p, schema, embedded, dense):
    return p["bias"] + dense @ p["weight"] + sum(embedded[f] for f in schema.keys)


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["dense", "no_dense"])
@pytest.mark.parametrize(
    ("config", "oracle"),
    [
        (DlrmConfig(dim=4, bottom_hidden=(6, 5), top_hidden=(7, 5)), oracle_dlrm),
        (DcnV2Config(dim=4, bottom_hidden=(6, 5), deep_hidden=(7, 5)), oracle_dcnv2),
        (DcnV2Config(dim=4, bottom_hidden=(6, 5), deep_hidden=(7,), cross_layers=3, cross_rank=2), oracle_dcnv2),
        (LogisticConfig(), oracle_logistic),
    ],
    ids=["dlrm", "dcnv2", "dcnv2_low_rank", "logistic"],
)
def test_forward_matches_a_literal_numpy_form(
    config, oracle, columns, schema, examples, randomised, numpy_parameters, x64
):
    schema = dataclasses.replace(schema, dense=schema.dense if columns == "dense" else ())
    task = config.task(schema)
    model = randomised(task.init(nnx.Rngs(0), F64))
    batch = examples(task, size=3)
    embedded = batch.embedded
    graph, state = nnx.split(model)
    logits = jax.jit(lambda s, e, d: nnx.merge(graph, s)(e, d))(state, embedded, batch["dense"])
    for b in range(3):
        one = {f: np.asarray(v[b]) for f, v in embedded.items()}
        want = oracle(numpy_parameters(model), schema, one, np.asarray(batch["dense"][b], float))
        np.testing.assert_allclose(logits[b], want, rtol=1e-10, atol=1e-12)  # float64 round-off


def test_logistic_tables_hold_one_zero_per_task(schema):
    tables = LogisticConfig().task(schema).tables()
    assert {(t.dim, t.init_scale) for t in tables} == {(2, 0.0)}


@pytest.mark.slow
def test_dropout_acts_only_with_a_key(schema, examples):
    for config in (DlrmConfig(dim=4, top_hidden=(9,), dropout=0.5), DcnV2Config(dim=4, deep_hidden=(9,), dropout=0.5)):
        task = config.task(schema)
        model = task.init(nnx.Rngs(0), Dtypes())
        batch = examples(task, dtype=np.float32)
        embedded = batch.embedded
        plain = model(embedded, batch["dense"])
        assert np.array_equal(plain, model(embedded, batch["dense"]))
        assert not np.array_equal(plain, model(embedded, batch["dense"], key=jax.random.key(0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DlrmConfig(dim=0), "DlrmConfig: dim must be .* at least 1; got 0"),
        (lambda: DcnV2Config(cross_layers=-3), "DcnV2Config: cross_layers must be .* at least 0; got -3"),
        (lambda: DcnV2Config(cross_rank=0), "DcnV2Config: cross_rank must be .* at least 1; got 0"),
        (lambda: Important(feature="a", vectors=0), "Important: vectors must be .* at least 1; got 0"),
        (lambda: NarrowGroup(features=("a",), dim=0), "NarrowGroup: dim must be .* at least 1; got 0"),
        (lambda: NarrowGroup(features=(), dim=4), "NarrowGroup: features must name at least one feature"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_the_name_of_their_field(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (DlrmConfig, "top_hidden"),
        (DlrmConfig, "bottom_hidden"),
        (DcnV2Config, "deep_hidden"),
        (WukongConfig, "head_hidden"),
        (WukongConfig, "fmb_hidden"),
        (WukongConfig, "attention_hidden"),
        (NarrowGroup, "hidden"),
    ],
)
def test_hidden_widths_below_one_are_refused_by_the_name_of_their_field(config, field):
    needed = {"features": ("a",), "dim": 2} if config is NarrowGroup else {}
    for widths, got in {(0,): "0", (-4, 3): "-4", 8: "8"}.items():
        with pytest.raises(UserError, match=f"{config.__name__}: {field} must be .*; got {got}"):
            config(**needed, **{field: widths})
    assert getattr(config(**needed, **{field: ()}), field) == ()


def test_one_vector_without_dense_features_has_no_pair():
    one = Schema(categorical=(Categorical(name="a", rows=4),))
    with pytest.raises(UserError, match=r"^DlrmConfig: .* needs two vectors or dense features; got 1 and no dense"):
        DlrmConfig(dim=4).task(one).dense_parameters()
    beside = dataclasses.replace(one, dense=("x",))
    assert DlrmConfig(dim=4).task(beside).dense_parameters() > 0
    assert DcnV2Config(dim=4).task(one).dense_parameters() > 0
