"""TorchRec's EmbeddingBagCollection and EmbeddingCollection look up what ours does, and so do their gradients."""

import jax
import numpy as np
import pytest

pytest.importorskip("torchrec", reason="torchrec is not installed; benchmarks/peers.sh installs it")

import torch
from embedding_cases import device_features, numpy_stack, numpy_unstack, random_logical
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec import EmbeddingCollection as SequenceCollection

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Sgd
from scalejax.parallel.embedding.plan.sharding_plan import KINDS, Exchange, ShardingPlan, TablePlan
from scalejax.parallel.embedding.stored import torchrec
from scalejax.parallel.mesh import MeshShape

# The peer warns of what it and torch will do without.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BATCH, RATE = 24, 0.25
FEATURES = {"seen": 1100, "liked": 1100, "topic": 50, "day": 7}


def features(weighted, fixed):
    rng = np.random.default_rng(1)
    lengths = np.full((4, BATCH), 3) if fixed else rng.integers(0, 5, (4, BATCH))
    lengths[1, :5] = 3 if fixed else 0
    values = np.concatenate(
        [rng.zipf(1.2, own.sum()) % rows for own, rows in zip(lengths, FEATURES.values(), strict=True)]
    )
    weights = torch.from_numpy(rng.normal(size=values.size).astype(np.float32)) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.reshape(-1)),
        weights=weights,
    )


def compare(configs, module, names, theirs, given, kind, fixed=False):
    """Lookups are equal and one step of SGD moves the rows by what autograd says."""
    tables = torchrec.tables(configs, Sgd(learning_rate=RATE))
    columns = 2 if kind in ("column_wise", "table_column_wise", "grid") else 1
    plan = ShardingPlan(tables=tuple(TablePlan(table=t.name, kind=kind, columns=columns) for t in tables))
    mesh = meshes.make_mesh(MeshShape(replica=2), jax.devices()[:8])
    on = EmbeddingCollection(tables=tables, mesh=mesh, plan=plan, exchange=Exchange(capacity_factor=8.0))
    logical = random_logical(on)
    parameters = {key.split(".")[-2]: p for key, p in module.named_parameters()}
    for name, parameter in parameters.items():
        parameter.data.copy_(torch.from_numpy(logical[name]["rows"]))
    schema = Schema(
        categorical=tuple(
            Categorical(name=n, rows=r, length=3 if fixed else None, max_length=None if fixed else 4)
            for n, r in FEATURES.items()
        )
    )
    device = device_features(on, KeyedJagged.from_torchrec(given), BATCH, schema=schema)
    order = []

    @jax.jit
    def lookup(state, features):
        embedded, routing = on.lookup(state, features)
        order.extend(embedded)  # what leaves a jitted function is sorted by name
        return embedded, routing

    embedded, routing = lookup(numpy_stack(on, logical), device)
    assert order == names
    out = theirs(module(given))
    rng = np.random.default_rng(2)
    grads = {name: rng.normal(size=value.shape).astype(np.float32) for name, value in out.items()}
    for name, value in out.items():
        # a bag of four float32 numbers, added in the same or another order
        np.testing.assert_allclose(np.asarray(embedded[name]), value.detach().numpy(), rtol=1e-5, atol=1e-6)
    torch.autograd.backward(list(out.values()), [torch.from_numpy(grads[name]) for name in out])
    after = numpy_unstack(on, jax.jit(on.update)(numpy_stack(on, logical), routing, grads))
    for name, parameter in parameters.items():
        expected = logical[name]["rows"] - RATE * parameter.grad.numpy()
        np.testing.assert_allclose(after[name]["rows"], expected, rtol=1e-5, atol=1e-5)
        assert abs(expected - logical[name]["rows"]).max() > 0.1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bags_agree_under_every_kind(kind, weighted):
    configs = [
        EmbeddingBagConfig(name="pages", embedding_dim=32, num_embeddings=1100, feature_names=["seen", "liked"]),
        EmbeddingBagConfig(
            name="topics",
            embedding_dim=64,
            num_embeddings=50,
            feature_names=["topic"],
            pooling=PoolingType.SUM if weighted else PoolingType.MEAN,  # the peer weighs sums only
        ),
        EmbeddingBagConfig(name="days", embedding_dim=32, num_embeddings=7, feature_names=["day"]),
    ]
    module = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    given = features(weighted, fixed=False)
    compare(configs, module, list(FEATURES), lambda out: dict(out.to_dict()), given, kind)


@pytest.mark.parametrize(
    ("kind", "fixed"), [("row_wise", True), ("row_wise", False), ("table_wise", False), ("grid", False)]
)
def test_sequences_agree(kind, fixed):
    configs = [
        EmbeddingConfig(name="pages", embedding_dim=32, num_embeddings=1100, feature_names=["seen", "liked"]),
        EmbeddingConfig(name="topics", embedding_dim=32, num_embeddings=50, feature_names=["topic"]),
        EmbeddingConfig(name="days", embedding_dim=32, num_embeddings=7, feature_names=["day"]),
    ]
    module = SequenceCollection(tables=configs)

    def rows(out):
        return {name: jagged.to_padded_dense(3 if fixed else 4) for name, jagged in out.items()}

    compare(configs, module, list(FEATURES), rows, features(False, fixed=fixed), kind, fixed=fixed)
