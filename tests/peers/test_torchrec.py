"""A TorchRec run goes on here: rows and row-wise statistics of 100 more steps agree, and move from 8 devices to 3."""

import jax
import numpy as np
import pytest

pytest.importorskip("torchrec", reason="torchrec is not installed; benchmarks/peers.sh installs it")

import torch
from embedding_cases import device_features, numpy_unstack
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.stored import torchrec
from scalejax.parallel.mesh import MeshShape

# The peer warns of what it and torch will do without.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BATCH, RATE = 24, 0.05
CONFIGS = [
    EmbeddingBagConfig(name="pages", embedding_dim=16, num_embeddings=1100, feature_names=["seen", "liked"]),
    EmbeddingBagConfig(
        name="topics", embedding_dim=8, num_embeddings=50, feature_names=["topic"], pooling=PoolingType.MEAN
    ),
]
ROWS = {"seen": 1100, "liked": 1100, "topic": 50}


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        lengths = rng.integers(0, 5, 3 * BATCH)
        values = np.concatenate(
            [rng.integers(0, rows, lengths[i * BATCH : (i + 1) * BATCH].sum()) for i, rows in enumerate(ROWS.values())]
        )
        grads = rng.normal(size=(BATCH, 40)).astype(np.float32)
        yield (
            KeyedJaggedTensor.from_lengths_sync(
                keys=list(ROWS), values=torch.from_numpy(values), lengths=torch.from_numpy(lengths)
            ),
            grads,
        )


def test_100_steps_go_on_from_a_checkpoint_and_from_8_devices_to_3(process_group):
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=CONFIGS)
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": RATE})
    sharders = [EmbeddingBagCollectionSharder()]
    only = {c.name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]) for c in CONFIGS}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"), constraints=only)
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=planner.plan(module, sharders), sharders=sharders
    )
    for features, grads in batches(20):
        model(features).values().backward(torch.from_numpy(grads))

    tables = torchrec.tables(CONFIGS, RowwiseAdagrad(learning_rate=RATE, eps=1e-8))
    logical = torchrec.read_state([model.state_dict()], [model.fused_optimizer.state_dict()], tables)
    logical = {name: {leaf: x.copy() for leaf, x in leaves.items()} for name, leaves in logical.items()}
    assert (logical["pages"]["accumulator"] > 0).any()
    schema = Schema(categorical=tuple(Categorical(name=n, rows=r, length=None, capacity=8) for n, r in ROWS.items()))

    def on(devices):
        mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices])
        return EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(capacity_factor=8.0))

    def steps(collection, state, given):
        @jax.jit
        def step(state, features, grads):
            embedded, routing = collection.lookup(state, features)
            return embedded, collection.update(state, routing, grads)

        for features, grads, expected in given:
            host = KeyedJagged.from_torchrec(features)
            cut = dict(zip(ROWS, np.split(grads, [16, 32], axis=1), strict=True))
            embedded, state = step(state, device_features(collection, host, BATCH, schema=schema), cut)
            ours = np.concatenate([np.asarray(embedded[name]) for name in ROWS], axis=1)
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
        return state

    given = []
    for features, grads in batches(100):
        out = model(features).values()
        given.append((features, grads, out.detach().numpy().copy()))
        out.backward(torch.from_numpy(grads))
    many, few = on(8), on(3)
    state = steps(many, many.from_logical(logical), given[:60])
    moved = few.from_logical(numpy_unstack(many, state))
    after = numpy_unstack(few, steps(few, moved, given[60:]))
    expected = torchrec.read_state([model.state_dict()], [model.fused_optimizer.state_dict()], tables)
    for name, leaves in expected.items():
        for leaf, value in leaves.items():
            np.testing.assert_allclose(after[name][leaf], value, rtol=1e-5, atol=1e-5, err_msg=f"{name} {leaf}")
