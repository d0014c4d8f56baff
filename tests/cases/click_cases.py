"""A small click model with tables of one id, of several, and of any number of them, trained a little by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.inference.recommendation import click_model
from scalejax.models.recsys import dcnv2, dlrm, logistic, wukong
from scalejax.numerics.dtypes import Dtypes

DIM = 16
SCHEMA = Schema(
    categorical=(
        Categorical(name="user", rows=300),
        Categorical(name="shown", rows=50, length=2),
        Categorical(name="pages", rows=120, length=None, capacity=4.0),
    ),
    dense=("price", "age", "hour"),
)
MODELS = {
    "dlrm": dlrm.DlrmConfig(dim=DIM, bottom_hidden=(24,), top_hidden=(32, 16), pooling="mean"),
    "wukong": wukong.WukongConfig(
        dim=DIM,
        layers=2,
        fm_outputs=4,
        lcb_outputs=4,
        rank=4,
        fmb_hidden=(16,),
        head_hidden=(16,),
        bottom_hidden=(16,),
    ),
    "dcnv2": dcnv2.DcnV2Config(dim=DIM, bottom_hidden=(16,), deep_hidden=(16,), cross_rank=8),
    "logistic": logistic.LogisticConfig(),
}


def model(name="dlrm", seed=0):
    """A model with weights that were drawn, scaled so that its scores are spread."""
    task = MODELS[name].task(SCHEMA)
    rng = np.random.default_rng(seed)
    tables = {c.name: rng.normal(size=(c.rows, c.dim)).astype(np.float32) * 0.3 for c in task.tables()}
    for rows in tables.values():
        rows[::7] *= 20.0 ** -rng.random((len(rows[::7]), 1)).astype(np.float32)
        rows[3] = 0
    built = task.init(nnx.Rngs(seed), Dtypes())
    shape = click_model.ModelShape.of(built)
    params = {n: np.array(p) for n, p in shape.split(built).items()}
    for value in params.values():  # biases and what starts at zero
        value += 0.05 * rng.normal(size=value.shape).astype(np.float32)
    return click_model.bind(task, tables, params, step=7)


def batch(examples=64, seed=0, labels=None):
    rng = np.random.default_rng(seed)
    lengths = np.stack([np.ones(examples), np.full(examples, 2), rng.integers(0, 5, examples)]).astype(np.int32)
    values = [rng.integers(0, f.rows, own.sum()) for f, own in zip(SCHEMA.categorical, lengths, strict=True)]
    features = KeyedJagged(SCHEMA.keys, np.concatenate(values).astype(np.int32), lengths)
    dense = rng.normal(size=(examples, 3)).astype(np.float32)
    made = np.zeros((examples, 1), np.float32) if labels is None else labels
    return ClickBatch(features, dense, made, np.ones(examples, np.float32))


def labelled(model, examples=1024, seed=0, size=256):
    """Examples whose labels are drawn from the model's own scores: it is right, and NE is below 1."""
    rng = np.random.default_rng(seed + 100)
    batches = []
    for i in range(examples // size):
        one = batch(size, seed=1000 * seed + i)
        scores = np.asarray(model.score(*model.arrays, click_model.inputs_of(one, SCHEMA)))
        drawn = (rng.random(scores.shape) < 1 / (1 + np.exp(-scores))).astype(np.float32)
        batches.append(dataclasses.replace(one, labels=drawn))
    return click_model.labelled(iter(batches), SCHEMA)


def by_hand(model, one):
    """Logits of a batch from the arrays: pooling in NumPy, example by example, and the model's own module."""
    features, embedded = one.features, {}
    lists = features.to_lists()
    for config in model.configs:
        rows = model.tables[config.name].astype(np.float64)
        for feature in config.features:
            pooled = [
                rows[ids].sum(0) / (max(len(ids), 1) if config.pooling == "mean" else 1) for ids in lists[feature]
            ]
            embedded[feature] = jnp.asarray(np.stack(pooled).astype(np.float32))
    params = {name: jnp.asarray(value) for name, value in model.params.items()}
    module = model.shape.merge(params)
    return np.asarray(jax.jit(lambda e, d: module(e, d, key=None))(embedded, jnp.asarray(one.dense)))  # pyright: ignore
