"""A model that attends over lists of any length: what it sees of them, in parts, ahead of time, deduplicated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changes import changed
from flax import nnx

from scalejax import optim
from scalejax.data import FlightsData
from scalejax.data.examples.batch import ClickBatch as HostBatch
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.models.recsys.task import bce_with_logits
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures, RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Gradients, Placement, Tables
from scalejax.train.metrics.click import ClickQuality
from scalejax.train.runs import binding
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIZE, DIM = 32, 8
SCHEMA = Schema(
    categorical=(
        Categorical(name="clicks", rows=41, length=None, max_length=6, capacity=5.0),
        Categorical(name="views", rows=29, length=None, max_length=3),
        Categorical(name="last", rows=29, length=2),
    )
)


class Attention(nnx.Module):
    """The sum over features of softmax(rows . query)-weighted sums of rows, added up: one logit."""

    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.Param(jax.random.normal(rngs.params(), (DIM,)), logical_axes=(None,))

    def __call__(self, embedded: dict[str, jax.Array], lengths: dict[str, jax.Array]) -> jax.Array:
        total = jnp.zeros(())
        for name, rows in sorted(embedded.items()):  # B L D
            used = jnp.arange(rows.shape[1])[None, :] < lengths[name][:, None]
            shares = jnp.where(used, jnp.exp(rows @ self.query[...]), 0)
            shares = shares / jnp.maximum(shares.sum(axis=1, keepdims=True), 1e-9)
            total = total + (shares[..., None] * rows).sum(axis=(1, 2))
        return total[:, None]  # B 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTask(TaskBase):
    """Attention bound to a schema."""

    schema: Schema

    def fields(self) -> dict[str, Field]:
        return {"labels": Field(shape=(1,), dtype="float32"), "weights": Field(shape=(), dtype="float32")}

    def tables(self) -> tuple[TableConfig, ...]:
        rows = {feature.name: feature.rows or 0 for feature in self.schema.categorical}
        common: dict[str, Any] = {"dim": DIM, "pooling": "none"}
        return (
            TableConfig(name="clicks", rows=rows["clicks"], features=("clicks",), **common),
            TableConfig(name="views", rows=rows["views"], features=("views", "last"), **common),
        )

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        return Attention(rngs)

    def loss(self, model: Any, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        logits = model(batch.embedded, batch.lengths)
        losses = bce_with_logits(logits, batch["labels"])[:, 0] * batch["weights"]
        return Loss(losses.sum(), batch["weights"].sum(), outputs={"logits": logits})

    def metrics(self) -> tuple[ClickQuality, ...]:
        return (ClickQuality(tasks=("label",)),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionModel:
    """Its config."""

    def task(self, schema: Schema) -> AttentionTask:
        return AttentionTask(schema=schema)


def batches(count, schema=SCHEMA):
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = np.stack([rng.integers(0, 7, SIZE), rng.integers(0, 4, SIZE), np.full(SIZE, 2)]).astype(np.int32)
        lengths[0, ::2] = np.minimum(lengths[0, ::2], 3)  # 5 on average are room enough
        counts = lengths.sum(axis=1)
        ids = [rng.integers(0, feature.rows or 60, n) for feature, n in zip(schema.categorical, counts, strict=True)]
        features = KeyedJagged(schema.keys, np.concatenate(ids), lengths)
        half = features.take(np.repeat(np.arange(SIZE // 2), 2))  # every list twice
        labels = rng.integers(0, 2, (SIZE, 1)).astype(np.float32)
        yield HostBatch(half, np.zeros((SIZE, 0), np.float32), labels, np.ones(SIZE, np.float32))


ALL = MeshShape()


@functools.cache
def build(devices, schema=SCHEMA, mesh=ALL, **changes):
    experiment = Experiment(
        model=AttentionModel(),
        data=FlightsData(batch_size=SIZE),
        steps=4,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-2)),
        strategy=Fsdp(sharding="NO_SHARD"),
        tables=Tables(optimizer=RowwiseAdagrad(learning_rate=0.1)),
        gradients=Gradients(microbatch="cache"),
        placement=Placement(mesh=mesh),
    )
    return binding.bind(changed(experiment, **changes), schema, make_mesh(mesh, jax.devices()[:devices]))


def literally(built, state, batch):
    """Logits in float64 by loops over the lists as they are: no positions, no zeros, no masks."""
    query = np.asarray(next(iter(state.params.values())), np.float64)
    logical = built.collection.to_logical(state.tables)
    rows_of = {f: np.asarray(logical[t.name]["rows"], np.float64) for t in built.collection.tables for f in t.features}
    logits = np.zeros(SIZE)
    for name, lists in batch.features.to_lists().items():
        for example, ids in enumerate(lists):
            if ids:
                rows = rows_of[name][ids]
                shares = np.exp(rows @ query)
                logits[example] += (shares / shares.sum()) @ rows.sum(axis=1)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "mesh", "microbatch"),
    [(4, MeshShape(fsdp=2, tensor=2), 8), (1, ALL, 8)],
)
def test_attention_over_positions_is_attention_over_the_lists(devices, mesh, microbatch):
    built = build(devices, mesh=mesh, gradients__microbatch=microbatch)
    assert built.parts(SIZE) > 1
    state, moved = built.init(), []
    for batch in batches(2):
        logits = literally(built, state, batch)
        losses = np.log1p(np.exp(logits)) - batch.labels[:, 0] * logits
        scored = built.eval_step(state, convert.to_device(batch, built, "scoring"))
        # float32 sums of a dozen numbers of size 0.2
        np.testing.assert_allclose(scored.outputs["logits"][:, 0], logits, rtol=1e-5, atol=1e-6)
        state, loss = built.train_step(state, convert.to_device(batch, built))
        moved.append(abs(literally(built, state, batch) - logits).max())
        np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
        assert not np.asarray(scored.faults).any()
    assert min(moved) > 0.1  # rows learn
    assert not np.asarray(built.faults(state)).any()


HASHED = dataclasses.replace(
    SCHEMA, categorical=(dataclasses.replace(SCHEMA["clicks"], rows=None), *SCHEMA.categorical[1:])
)


def stepwise(built, batches):
    """Losses of some steps, one after the other, and the state after them."""
    state, losses = built.init(), []
    for batch in batches:
        state, loss = built.train_step(state, batch)
        losses.append(float(loss))
    return losses, state


def pipelined(built, batches):
    """The same with the ids of the next batch a step ahead."""
    state, losses = built.init(), []
    ahead = built.look_ahead(state, batches[0])
    for batch, coming in zip(batches, [*batches[1:], batches[0]], strict=True):
        state, loss, ahead = built.pipelined_step(state, batch, ahead, coming)
        losses.append(float(loss))
    return losses, state


def held(built, state):
    assert not np.asarray(built.faults(state)).any()
    return jax.tree.map(np.asarray, built.collection.to_stored(state.tables))


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_lists_whose_ids_travel_a_step_ahead_change_no_bit():
    built = build(1, mesh=ALL, gradients__microbatch=8)
    host = [convert.to_device(batch, built) for batch in batches(3)]
    (losses, state), (other, after) = stepwise(built, host), pipelined(built, host)
    assert losses == other
    jax.tree.map(np.testing.assert_array_equal, held(built, state), held(built, after))


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_ids_a_step_ahead_id_maps_and_deduplicated_lists_change_no_bit():
    maps = (MappedFeatures(features=("clicks",), id_map=IdMapConfig(rows=1 + 48, ways=1)),)
    groups = (DedupGroup(features=("clicks", "views"), rows_per_example=0.75),)
    host, states = [*batches(3, HASHED)], {}
    for name, dedup in (("plain", ()), ("deduplicated", groups)):
        built = build(8, HASHED, tables__id_maps=maps, tables__dedup=dedup, tables__accumulate="exact")
        on_device = [convert.to_device(batch, built) for batch in host]
        assert (on_device[0].features.inverse is not None) == bool(dedup)
        losses, state = (pipelined if dedup else stepwise)(built, on_device)
        states[name] = losses, held(built, state)
    jax.tree.map(np.testing.assert_array_equal, states["plain"], states["deduplicated"])
