"""FBGEMM's table-batched embeddings and ours: the same lookups and the same tables over 20 steps.

Its CPU build (1.8.0) has exact SGD, exact AdaGrad and exact row-wise AdaGrad, weight decay of the last one alone and
where a table has several features, and takes max_norm without effect. For the optimizers that it has on GPUs only,
tests/parallel/embedding/update/test_optimizer_formulas.py follows the formulas of its kernels in float64; Adam has a
peer of its own in torch here.
"""

import warnings

import jax
import numpy as np
import pytest

pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed; benchmarks/peers.sh installs it")

import torch
from embedding_cases import device_features, numpy_stack, numpy_unstack, random_logical

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adagrad, Adam, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of operators that its CPU build lacks
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )

# The peer warns of what it and torch will do without.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BATCH, STEPS, RATE, DECAY = 24, 20, 0.05, 0.02
TABLES = {"pages": (1100, ("seen", "liked")), "topics": (50, ("topic", "subject"))}
# Two features on each table: where there is one the CPU build of 1.8.0 leaves weight decay out.
FEATURES = {feature: rows for rows, features in TABLES.values() for feature in features}

OPTIMIZERS = {
    "sgd": (Sgd(learning_rate=RATE), OptimType.EXACT_SGD, WeightDecayMode.NONE),
    "adagrad": (Adagrad(learning_rate=RATE), OptimType.EXACT_ADAGRAD, WeightDecayMode.NONE),
    "rowwise": (RowwiseAdagrad(learning_rate=RATE), OptimType.EXACT_ROWWISE_ADAGRAD, WeightDecayMode.NONE),
    "rowwise l2": (
        RowwiseAdagrad(learning_rate=RATE, weight_decay=DECAY),
        OptimType.EXACT_ROWWISE_ADAGRAD,
        WeightDecayMode.L2,
    ),
    "rowwise decoupled": (
        RowwiseAdagrad(learning_rate=RATE, weight_decay=DECAY, weight_decay_mode="decoupled"),
        OptimType.EXACT_ROWWISE_ADAGRAD,
        WeightDecayMode.DECOUPLE,
    ),
}


def batches(pooling, weighted, widths):
    """(host batch, gradients by feature), with empty bags and ids that repeat."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = np.full((4, BATCH), 2) if pooling == "none" else rng.integers(0, 5, (4, BATCH))
        values = np.concatenate(
            [rng.zipf(1.3, own.sum()) % rows for own, rows in zip(lengths, FEATURES.values(), strict=True)]
        )
        weights = rng.normal(size=values.size).astype(np.float32) if weighted else None
        shape = (BATCH, 2) if pooling == "none" else (BATCH,)
        grads = {name: rng.normal(size=(*shape, widths[name])).astype(np.float32) for name in FEATURES}
        yield KeyedJagged(tuple(FEATURES), values, lengths.astype(np.int32), weights), grads


def collection(optimizer, pooling, dims, devices):
    tables = tuple(
        TableConfig(name=n, rows=rows, dim=dims[n], features=f, pooling=pooling, optimizer=optimizer)
        for n, (rows, f) in TABLES.items()
    )
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(capacity_factor=8.0))


def run(on, pooling, given, logical, check):
    """Logical state after all batches; `check` sees what each step looked up."""
    schema = Schema(
        categorical=tuple(
            Categorical(name=n, rows=r, length=2 if pooling == "none" else None, capacity=8)
            for n, r in FEATURES.items()
        )
    )

    @jax.jit
    def step(state, features, grads):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads)

    state = numpy_stack(on, logical)
    for host, grads in given:
        embedded, state = step(state, device_features(on, host, BATCH, schema=schema), grads)
        check(host, grads, embedded)
    return numpy_unstack(on, state)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_agree(name, weighted, pooling):
    if pooling == "none" and weighted:
        pytest.skip("the peer has no weights without pooling")
    ours, theirs, decay = OPTIMIZERS[name]
    dims = {"pages": 16, "topics": 16 if pooling == "none" else 8}  # without pooling the peer wants one width
    on = collection(ours, pooling, dims, 8)
    logical = random_logical(on)
    for leaves in logical.values():
        if "accumulator" in leaves:
            leaves["accumulator"][...] = 0  # where the peer begins
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dims[n], EmbeddingLocation.HOST, ComputeDevice.CPU) for n, (rows, _) in TABLES.items()],
        feature_table_map=[0, 0, 1, 1],
        optimizer=theirs,
        learning_rate=RATE,
        eps=1e-8,
        weight_decay=0.0 if decay is WeightDecayMode.NONE else DECAY,
        weight_decay_mode=decay,
        pooling_mode=PoolingMode[pooling.upper() if not (weighted and pooling == "mean") else "SUM"],
    )
    for weight, n in zip(peer.split_embedding_weights(), TABLES, strict=True):
        weight.copy_(torch.from_numpy(logical[n]["rows"]))

    def check(host, grads, embedded):
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(host.lengths)]))
        weights = host.weights
        if weighted and pooling == "mean":
            # By its own forward a weighted mean is a sum with weights w / L; the gradient of its MEAN is another one.
            weights = weights / np.repeat(host.lengths.reshape(-1), host.lengths.reshape(-1)).astype(np.float32)
        weights = None if weights is None else torch.from_numpy(weights)
        out = peer(torch.from_numpy(host.values), offsets, per_sample_weights=weights)
        if pooling == "none":  # ids x width, feature after feature
            mine = np.concatenate([np.asarray(embedded[f]).reshape(-1, 16) for f in FEATURES])
            given = np.concatenate([grads[f].reshape(-1, 16) for f in FEATURES])
        else:
            mine = np.concatenate([np.asarray(embedded[f]) for f in FEATURES], axis=1)
            given = np.concatenate([grads[f] for f in FEATURES], axis=1)
        # float32 on both sides; gradients of a row are added in another order, and AdaGrad divides them by their size
        np.testing.assert_allclose(mine, out.detach().numpy(), rtol=2e-5, atol=2e-5)
        out.backward(torch.from_numpy(given))

    widths = {f: dims[n] for n, (_, features) in TABLES.items() for f in features}
    after = run(on, pooling, batches(pooling, weighted, widths), logical, check)
    states = peer.split_optimizer_states()
    for number, n in enumerate(TABLES):
        rows = peer.split_embedding_weights()[number].numpy()
        np.testing.assert_allclose(after[n]["rows"], rows, rtol=2e-5, atol=2e-5)
        assert abs(rows - logical[n]["rows"]).max() > 0.1
        if "accumulator" in after[n]:
            np.testing.assert_allclose(after[n]["accumulator"], states[number][0].numpy(), rtol=2e-5, atol=1e-6)


def test_a_weighted_mean_is_over_the_number_of_ids_and_only_our_gradient_is_that_of_it():
    def one(pooling):
        peer = SplitTableBatchedEmbeddingBagsCodegen(
            [(3, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=OptimType.EXACT_SGD,
            learning_rate=1.0,
            pooling_mode=pooling,
        )
        (rows,) = peer.split_embedding_weights()
        rows.copy_(torch.arange(24.0).reshape(3, 8))
        before = rows.clone()
        out = peer(torch.tensor([1, 2]), torch.tensor([0, 2]), per_sample_weights=torch.tensor([0.5, 4.0]))
        out.backward(torch.ones_like(out))
        return before, out.detach(), before - peer.split_embedding_weights()[0]

    rows, out, moved = one(PoolingMode.MEAN)
    np.testing.assert_array_equal(out[0], (0.5 * rows[1] + 4 * rows[2]) / 2)
    # Its CPU kernel forgets to divide; ours divides (test_known_pains). Once this fails, compare with MEAN above.
    np.testing.assert_array_equal(moved[1:, 0], [0.5, 4.0])


@pytest.mark.parametrize("kind", ["LAMB", "ADAM", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB"])
def test_optimizers_that_the_peer_has_not_on_a_cpu_are_still_those(kind):
    # Once one of them is there it wants a comparison above.
    with pytest.raises(AssertionError, match="not supported in CPU mode"):
        SplitTableBatchedEmbeddingBagsCodegen(
            [(10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=OptimType[kind]
        )


def test_adam_of_touched_rows_agrees_with_the_sparse_adam_of_torch():
    # torch adds eps before it takes the bias out of the second moment: with a negligible one both are the same formula.
    on = collection(Adam(learning_rate=RATE, eps=1e-20), "sum", {"pages": 16, "topics": 8}, 8)
    logical = random_logical(on)
    for leaves in logical.values():
        leaves["moment1"][...], leaves["moment2"][...] = 0, 0
    bags = {
        n: torch.nn.EmbeddingBag(rows, logical[n]["rows"].shape[1], mode="sum", sparse=True)
        for n, (rows, _) in TABLES.items()
    }
    for n, bag in bags.items():
        bag.weight.data.copy_(torch.from_numpy(logical[n]["rows"]))
    adam = torch.optim.SparseAdam([bag.weight for bag in bags.values()], lr=RATE, eps=1e-20)

    def check(host, grads, embedded):
        adam.zero_grad()
        for n, (_, features) in TABLES.items():
            for f in features:
                one = host[f]
                offsets = torch.from_numpy(one.offsets(f)[:-1])
                out = bags[n](torch.from_numpy(one.values), offsets)
                np.testing.assert_allclose(np.asarray(embedded[f]), out.detach().numpy(), rtol=2e-5, atol=2e-5)
                out.backward(torch.from_numpy(grads[f]))
        adam.step()

    widths = {"seen": 16, "liked": 16, "topic": 8, "subject": 8}
    after = run(on, "sum", batches("sum", False, widths), logical, check)
    for n, bag in bags.items():
        # A first gradient that nearly cancels is divided by its own size, and a few numbers may be off by more.
        np.testing.assert_allclose(after[n]["rows"], bag.weight.detach().numpy(), rtol=1e-4, atol=1e-4)
