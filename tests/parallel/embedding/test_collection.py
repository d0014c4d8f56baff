"""Lookup and update against literal NumPy float64 and against optax on the full table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embedding_cases import batch, device_features, numpy_lookup, numpy_update, schema_of, tables_of
from jax.sharding import PartitionSpec as P

from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adagrad, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan import Exchange
from scalejax.parallel.mesh import MeshShape

ROOM = Exchange(capacity_factor=8.0)
BATCH = 16


def collection(tables, devices, **shape):
    mesh = meshes.make_mesh(MeshShape(**shape), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, exchange=ROOM)


def step_of(tables, devices, host, grads_of, weighted=False, steps=1, **shape):
    """(embedded, logical state before, logical state after, faults), all NumPy."""
    on = collection(tables, devices, **shape)
    features = device_features(on, host, BATCH)

    @jax.jit
    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads_of(embedded), 1.0)

    state = on.init(jax.random.key(7))
    before = on.to_logical(state)
    embedded = None
    for _ in range(steps):
        embedded, state = step(state, features)
    return jax.tree.map(np.asarray, (embedded, before, on.to_logical(state), on.faults(state)))


def smooth(embedded):
    """Some gradient that differs from occurrence to occurrence and equals itself on every mesh."""
    return {name: jnp.sin(40 * x) + 0.3 for name, x in embedded.items()}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_equals_numpy(devices, weighted):
    tables = tables_of(RowwiseAdagrad(learning_rate=0.1))
    host = batch(BATCH, weighted=weighted)
    on = collection(tables, devices)
    state = on.init(jax.random.key(7))
    embedded, routing = jax.jit(on.lookup)(state, device_features(on, host, BATCH))
    assert set(embedded) == set(host.keys)
    expected = numpy_lookup(tables, jax.tree.map(np.asarray, on.to_logical(state)), host)
    for name, value in embedded.items():
        assert value.sharding.spec[0] == P(meshes.AXES)[0]
        # float32 sums of a few numbers of size 0.3
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert not np.asarray(routing.faults).any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(learning_rate=0.1, weight_decay=0.01),
        Adagrad(learning_rate=0.1),
        RowwiseAdagrad(learning_rate=0.1, weight_decay=0.01, initial_accumulator=0.1),
    ],
    ids=lambda o: type(o).__name__,
)
def test_update_equals_numpy_and_is_equal_to_the_bit_on_any_mesh(optimizer, weighted):
    tables = tables_of(optimizer)
    host = batch(BATCH, weighted=weighted)
    # Gradients of given values: those of a pooled float32 vector could differ in its last bit.
    rng = np.random.default_rng(5)
    fixed: dict[str, np.ndarray] = {}

    def given(embedded):
        for name, x in embedded.items():
            if name not in fixed:
                fixed[name] = rng.normal(size=x.shape).astype(np.float32)
        return {name: jnp.asarray(fixed[name]) for name in embedded}

    results = [step_of(tables, n, host, given, steps=2) for n in (1, 2, 8)]
    results.append(step_of(tables, 8, host, given, steps=2, replica=2, tensor=2))
    _, before, after, faults = results[0]
    assert not faults.any()
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other[1:], results[0][1:])

    expected = jax.tree.map(lambda a: a.astype(np.float64), before)
    touched: dict[str, set[int]] = {}
    for _ in range(2):
        expected, touched = numpy_update(tables, expected, host, fixed)
    for table in tables:
        for leaf, value in after[table.name].items():
            # two float32 steps of size 0.1; AdaGrad's first step is a sign, large where a sum nearly cancels
            np.testing.assert_allclose(value, expected[table.name][leaf], rtol=2e-4, atol=2e-5, err_msg=table.name)
            untouched = np.setdiff1d(np.arange(table.rows), [*touched[table.name]])
            np.testing.assert_array_equal(value[untouched], before[table.name][leaf][untouched])
            if leaf == "rows":
                assert (value != before[table.name][leaf]).any()


@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [
        (Sgd(learning_rate=0.1), optax.sgd(0.1)),
        # optax adds eps inside the root: with a negligible one both are the same formula
        (
            Adagrad(learning_rate=0.1, eps=1e-30, initial_accumulator=0.1),
            optax.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-30),
        ),
    ],
    ids=["Sgd", "Adagrad"],
)
def test_update_equals_the_dense_optimizer_in_double_precision(optimizer, dense, x64):
    tables = tuple(dataclasses.replace(t, dtype="float64") for t in tables_of(optimizer))
    host = batch(BATCH, weighted=True)
    on = collection(tables, 8)
    features = device_features(on, host, BATCH)

    def loss(embedded):
        return sum((jnp.sin(x) * (1 + jnp.arange(x.shape[-1]))).sum() for x in embedded.values())

    @jax.jit
    def sparse_step(state):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, jax.grad(loss)(embedded))

    state = on.init(jax.random.key(7))
    full = {name: np.asarray(leaves["rows"]) for name, leaves in on.to_logical(state).items()}
    index = dense_index(tables, host)

    @jax.jit
    def dense_step(full, opt_state):
        def objective(full):
            return loss({f: dense_embed(full[t], *rest) for f, (t, *rest) in index.items()})

        updates, opt_state = dense.update(jax.grad(objective)(full), opt_state, full)
        return optax.apply_updates(full, updates), opt_state

    opt_state = dense.init(full)
    for _ in range(3):
        state = sparse_step(state)
        full, opt_state = dense_step(full, opt_state)
    for name, leaves in on.to_logical(state).items():
        np.testing.assert_allclose(leaves["rows"], full[name], rtol=0, atol=1e-12)  # float64 rounding


def dense_index(tables, host):
    """feature -> (table, matrix int[B, most ids], weights with zeros at padding, pooling)."""
    index, ends = {}, np.cumsum(host.lengths.sum(axis=1))
    for table in tables:
        for name in table.features:
            f = host.keys.index(name)
            lengths = host.lengths[f]
            ids = np.zeros((len(lengths), max(1, lengths.max())), np.int32)
            weights = np.zeros(ids.shape)
            filled = np.arange(ids.shape[1]) < lengths[:, None]
            span = slice(ends[f] - lengths.sum(), ends[f])
            ids[filled] = host.values[span]
            weights[filled] = 1.0 if host.weights is None else host.weights[span]
            if table.pooling == "mean":
                weights /= np.maximum(lengths, 1)[:, None]
            index[name] = (table.name, ids, weights, table.pooling)
    return index


def dense_embed(table, ids, weights, pooling):
    rows = table[ids] * weights[:, :, None]
    return rows if pooling == "none" else rows.sum(axis=1)


def test_equal_keys_give_equal_tables_on_any_mesh():
    tables = tables_of(RowwiseAdagrad(initial_accumulator=0.5))
    states = [collection(tables, n).init(jax.random.key(3)) for n in (1, 8)]
    logical = [collection(tables, n).to_logical(s) for n, s in zip((1, 8), states, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *logical)
    rows = np.asarray(logical[0]["shared"]["rows"])
    assert abs(rows).max() <= tables[0].rows ** -0.5
    assert len(np.unique(rows)) > 0.99 * rows.size
    other = collection(tables, 1).to_logical(collection(tables, 1).init(jax.random.key(4)))
    assert not np.array_equal(rows, other["shared"]["rows"])


def test_bfloat16_rows_are_updated_in_float32():
    table = TableConfig(
        name="t", rows=13, dim=2, features=("one",), dtype="bfloat16", optimizer=Sgd(learning_rate=1.0)
    )
    on = collection((table,), 1)
    host = batch(BATCH)
    host = dataclasses.replace(
        host, keys=("one",), values=np.zeros(BATCH, np.int64), lengths=np.ones((1, BATCH), np.int32), weights=None
    )

    @jax.jit
    def step(state, features):
        embedded, routing = on.lookup(state, features)
        # 16 gradients of 2^-9: each alone is below half an ulp of a bfloat16 1.0, their sum is not
        return embedded, on.update(state, routing, jax.tree.map(lambda x: jnp.full_like(x, 2.0**-9), embedded))

    logical = {"t": {"rows": jnp.ones((13, 2), jnp.bfloat16)}}
    embedded, state = step(on.from_logical(logical), device_features(on, host, BATCH))
    assert embedded["one"].dtype == jnp.float32
    assert float(on.to_logical(state)["t"]["rows"][0, 0]) == 1 - 16 * 2.0**-9


def test_a_donated_state_is_updated_in_place():
    on = collection(tables_of(RowwiseAdagrad()), 8)
    features = device_features(on, batch(BATCH), BATCH)

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, smooth(embedded))

    state = on.init(jax.random.key(0))
    compiled = jax.jit(step, donate_argnums=0).lower(state, features).compile()
    per_device = sum(x.nbytes for x in jax.tree.leaves(state)) // 8
    assert compiled.memory_analysis().alias_size_in_bytes == per_device
    compiled(state, features)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_ids_and_rows_travel_by_all_to_all_and_memory_falls_with_devices():
    table = TableConfig(name="t", rows=8192, dim=32, features=("a", "b"))
    arguments, temporary = [], []
    for devices in (2, 4, 8):
        on = EmbeddingCollection(
            tables=(table,), mesh=meshes.make_mesh(MeshShape(), jax.devices()[:devices]), exchange=Exchange()
        )
        schema = schema_of({"a": 1, "b": 3}, rows=8192)
        features = device_features(on, None, 1024, schema=schema)

        def step(state, features, on=on):
            embedded, routing = on.lookup(state, features)
            return on.update(state, routing, smooth(embedded))

        compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
        text = compiled.as_text()
        assert "all-to-all" in text
        assert "all-gather" not in text
        assert "all-reduce" not in text
        memory = compiled.memory_analysis()
        arguments.append(memory.argument_size_in_bytes)
        temporary.append(memory.temp_size_in_bytes)
    # 1/N: twice the devices, half the bytes, apart from the slack of the buckets
    for sizes in (arguments, temporary):
        assert sizes[1] < 0.6 * sizes[0]
        assert sizes[2] < 0.6 * sizes[1]


def test_plans_and_tables_that_do_not_exist_are_refused():
    from scalejax.errors import UserError
    from scalejax.parallel.embedding.plan import ShardingPlan, TablePlan

    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:1])
    tables = tables_of(Sgd())
    with pytest.raises(UserError, match="kind 'diagonal'; known kinds: row_wise"):
        EmbeddingCollection(
            tables=tables, mesh=mesh, plan=ShardingPlan(tables=(TablePlan(table="shared", kind="diagonal"),))
        )
    with pytest.raises(UserError, match="no table 'absent'"):
        EmbeddingCollection(tables=tables, mesh=mesh, plan=ShardingPlan(tables=(TablePlan(table="absent"),)))
    with pytest.raises(ValueError, match="a feature belongs to one table; one"):
        EmbeddingCollection(tables=(*tables, TableConfig(name="x", rows=1, dim=1, features=("one",))), mesh=mesh)
