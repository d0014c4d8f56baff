"""Every row optimizer, with every weight decay and longest row, follows its published formula over 20 steps.

The formulas are written out once more, number by number in NumPy float64, as FBGEMM's kernels state them (for GPU,
where
its CPU build has no such optimizer: Adam, partial row-wise Adam, LAMB, partial row-wise LAMB, LARS-SGD). `iter` counts
the steps of all tables. With 64-bit rows nothing but the order of additions is left to differ.
"""

import jax
import numpy as np
import optax
import pytest
from embedding_cases import device_features, numpy_stack, numpy_unstack, random_logical

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import (
    Adagrad,
    Adam,
    Lamb,
    LarsSgd,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    Sgd,
    TableConfig,
)
from scalejax.parallel.mesh import MeshShape

ROWS, DIM, BATCH, IDS, STEPS = 9, 20, 8, 2, 20
DECAY = {"weight_decay": 0.03}
APART = {"weight_decay": 0.03, "weight_decay_mode": "decoupled"}


def _sgd(row, grad, rate, _):
    row["rows"] -= rate * grad


def _adagrad(row, grad, rate, _, eps=1e-8):
    row["accumulator"] += grad**2
    row["rows"] -= rate * grad / (np.sqrt(row["accumulator"]) + eps)


def _rowwise(row, grad, rate, _, eps=1e-8):
    row["accumulator"] += sum(g * g for g in grad) / len(grad)
    row["rows"] -= rate / (np.sqrt(row["accumulator"]) + eps) * grad


def _moments(row, grad, step, *, by_row, beta1=0.9, beta2=0.999, eps=1e-8):
    square = sum(g * g for g in grad) / len(grad) if by_row else grad * grad
    row["moment1"] += (1 - beta1) * (grad - row["moment1"])
    row["moment2"] += (1 - beta2) * (square - row["moment2"])
    return row["moment1"] / (1 - beta1**step) / (np.sqrt(row["moment2"] / (1 - beta2**step)) + eps)


def _adam(row, grad, rate, step):
    row["rows"] -= rate * _moments(row, grad, step, by_row=False)


def _partial_adam(row, grad, rate, step):
    row["rows"] -= rate * _moments(row, grad, step, by_row=True)


def _lamb(row, grad, rate, step, *, by_row=False, decay=0.03):
    direction = _moments(row, grad, step, by_row=by_row) + decay * row["rows"]
    row["rows"] -= rate * np.linalg.norm(row["rows"]) / np.linalg.norm(direction) * direction


def _partial_lamb(row, grad, rate, step):
    _lamb(row, grad, rate, step, by_row=True)


def _lars(row, grad, rate, _, *, decay=0.03, eta=0.001, momentum=0.9):
    length = np.linalg.norm(row["rows"])
    adjusted = rate * eta * length / (np.linalg.norm(grad) + decay * length)
    row["momentum"] *= momentum
    row["momentum"] += adjusted * (grad + decay * row["rows"])
    row["rows"] -= row["momentum"]


OPTIMIZERS = {
    "sgd": (Sgd(learning_rate=0.1), _sgd),
    "sgd_l2": (Sgd(learning_rate=0.1, **DECAY), _sgd),
    "sgd_decoupled": (Sgd(learning_rate=0.1, **APART), _sgd),
    "sgd_longest": (Sgd(learning_rate=0.1, max_norm=0.7), _sgd),
    "adagrad": (Adagrad(learning_rate=0.1), _adagrad),
    "adagrad_l2": (Adagrad(learning_rate=0.1, **DECAY), _adagrad),
    "adagrad_decoupled": (Adagrad(learning_rate=0.1, **APART), _adagrad),
    "rowwise": (RowwiseAdagrad(learning_rate=0.1), _rowwise),
    "rowwise_l2": (RowwiseAdagrad(learning_rate=0.1, **DECAY), _rowwise),
    "rowwise_decoupled": (RowwiseAdagrad(learning_rate=0.1, **APART), _rowwise),
    "rowwise_longest": (RowwiseAdagrad(learning_rate=0.1, max_norm=0.7), _rowwise),
    "adam": (Adam(learning_rate=0.1), _adam),
    "adam_l2": (Adam(learning_rate=0.1, **DECAY), _adam),
    "adam_decoupled": (Adam(learning_rate=0.1, **APART), _adam),
    "partial_adam": (PartialRowwiseAdam(learning_rate=0.1, **APART), _partial_adam),
    "lamb": (Lamb(learning_rate=0.1, **DECAY), _lamb),
    "partial_lamb": (PartialRowwiseLamb(learning_rate=0.1, **DECAY), _partial_lamb),
    "lars": (LarsSgd(learning_rate=30.0, **DECAY), _lars),
}


def _expected(name, leaves, ids, grads, scales):
    optimizer, formula = OPTIMIZERS[name]
    own_decay = isinstance(optimizer, Lamb | LarsSgd)
    for step, scale in enumerate(scales, start=1):
        rate = optimizer.learning_rate * scale
        sums = np.zeros((ROWS, DIM))
        np.add.at(sums, ids[step - 1].reshape(-1), np.repeat(grads[step - 1], IDS, axis=0))
        for number in np.unique(ids[step - 1]):
            row = {leaf: array[number : number + 1].reshape(-1) for leaf, array in leaves.items()}  # views
            grad = sums[number]
            if optimizer.weight_decay and not own_decay:
                if optimizer.weight_decay_mode == "l2":
                    grad = grad + optimizer.weight_decay * row["rows"]
                else:
                    row["rows"] *= 1 - rate * optimizer.weight_decay
            formula(row, grad, rate, step)
            if optimizer.max_norm is not None:
                row["rows"] *= min(1.0, optimizer.max_norm / np.linalg.norm(row["rows"]))
    return leaves


def _collection(optimizers):
    tables = tuple(
        TableConfig(name=name, rows=ROWS, dim=DIM, features=(name,), dtype="float64", optimizer=optimizer)
        for name, optimizer in optimizers.items()
    )
    return EmbeddingCollection(tables=tables, mesh=meshes.make_mesh(MeshShape(), jax.devices()[:1]))


def _run(on, logical, ids, grads, scales):
    names = [table.name for table in on.tables]
    schema = Schema(categorical=tuple(Categorical(name=name, rows=ROWS, length=IDS) for name in names))

    @jax.jit
    def step(state, features, grads, scale):
        _, routing = on.lookup(state, features)
        return on.update(state, routing, grads, scale)

    state = numpy_stack(on, logical)
    for number, scale in enumerate(scales):
        values = np.concatenate([ids[name][number].reshape(-1) for name in names])
        host = KeyedJagged(tuple(names), values, np.full((len(names), BATCH), IDS, np.int32))
        features = device_features(on, host, BATCH, schema=schema)
        state = step(state, features, {name: grads[name][number] for name in names}, scale)
    return numpy_unstack(on, state)


def test_twenty_steps_of_every_optimizer_follow_its_formula(x64):
    on = _collection({name: optimizer for name, (optimizer, _) in OPTIMIZERS.items()})
    rng = np.random.default_rng(2)
    logical = random_logical(on)
    ids = {name: rng.zipf(1.5, (STEPS, BATCH, IDS)) % (ROWS - 1) for name in OPTIMIZERS}  # nobody names the last row
    grads = {name: rng.normal(size=(STEPS, BATCH, DIM)) for name in OPTIMIZERS}
    scales = 1 / np.sqrt(1 + np.arange(STEPS))  # a schedule
    got = _run(on, logical, ids, grads, scales)
    for name in OPTIMIZERS:
        before = {leaf: array.copy() for leaf, array in logical[name].items()}
        expected = _expected(name, logical[name], ids[name], grads[name], scales)
        for leaf, value in expected.items():
            np.testing.assert_allclose(got[name][leaf], value, rtol=1e-10, atol=1e-12, err_msg=f"{name} {leaf}")
            np.testing.assert_array_equal(got[name][leaf][-1], before[leaf][-1])
        assert abs(expected["rows"] - before["rows"]).max() > 0.05, name
        if OPTIMIZERS[name][0].max_norm is not None:
            lengths = np.linalg.norm(got[name]["rows"][np.unique(ids[name])], axis=1)
            assert (lengths < 0.7 + 1e-12).all()
            assert (abs(lengths - 0.7) < 1e-12).any()  # the limit was met


@pytest.mark.slow
def test_an_optimizer_of_touched_rows_is_the_dense_one_where_every_row_is_touched(x64):
    dense = {
        "sgd": (Sgd(learning_rate=0.1), optax.sgd(0.1)),
        "adam": (Adam(learning_rate=0.1), optax.adam(0.1)),
        # optax adds eps inside the root; a negligible one makes both the same formula
        "adagrad": (
            Adagrad(learning_rate=0.1, eps=1e-30),
            optax.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-30),
        ),
        "lamb": (Lamb(learning_rate=0.1, weight_decay=0.03), optax.lamb(0.1, eps=1e-8, weight_decay=0.03)),
    }
    on = _collection({name: ours for name, (ours, _) in dense.items()})
    rng = np.random.default_rng(3)
    logical = random_logical(on)
    for leaves in logical.values():
        for leaf, array in leaves.items():
            array[...] = array if leaf == "rows" else 0.1 if leaf == "accumulator" else 0.0
    every = np.stack([rng.permutation(np.arange(BATCH * IDS) % ROWS) for _ in range(5)]).reshape(5, BATCH, IDS)
    some = every.copy()
    some[1:] %= ROWS - 1  # after the first step the last row is left alone
    grads = {name: rng.normal(size=(5, BATCH, DIM)) for name in dense}
    full = _run(on, logical, dict.fromkeys(dense, every), grads, np.ones(5))
    part = _run(on, logical, dict.fromkeys(dense, some), grads, np.ones(5))
    for name, (_, transformation) in dense.items():
        for ids, got in ((every, full), (some, part)):
            # A row is one parameter: LAMB's norms are those of a row.
            rows = {n: row for n, row in enumerate(logical[name]["rows"])}
            opt_state = transformation.init(rows)
            for step in range(5):
                sums = np.zeros((ROWS, DIM))
                np.add.at(sums, ids[step].reshape(-1), np.repeat(grads[name][step], IDS, axis=0))
                updates, opt_state = transformation.update(dict(enumerate(sums)), opt_state, rows)
                rows = optax.apply_updates(rows, updates)
            difference = abs(got[name]["rows"] - np.stack([rows[n] for n in range(ROWS)])).max()
            if ids is every or name in ("sgd", "adagrad"):
                assert difference < 1e-12, name
            else:  # moments of the row that was left alone would have moved it
                assert difference > 1e-3, name


@pytest.mark.parametrize(
    "optimizer", [Lamb(learning_rate=0.1), PartialRowwiseLamb(learning_rate=0.1), LarsSgd(eta=0.5)]
)
def test_a_row_of_zeros_is_moved_by_its_gradient(x64, optimizer):
    # The formula's ratio |w| / |d| would keep it where it is for ever.
    on = _collection({"t": optimizer})
    logical = {"t": {leaf: np.zeros(x.shape, x.dtype) for leaf, x in on.abstract_logical()["t"].items()}}
    ids, grads = np.zeros((1, BATCH, IDS), np.int64), np.ones((1, BATCH, DIM))
    rows = _run(on, logical, {"t": ids}, {"t": grads}, np.ones(1))["t"]["rows"]
    assert (rows[0] < -1e-3).all()
    assert not rows[1:].any()
