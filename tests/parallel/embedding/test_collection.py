"""Lookup and update against literal NumPy float64 and against optax on the full table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embedding_cases import (
    batch,
    device_features,
    numpy_lookup,
    numpy_stack,
    numpy_unstack,
    numpy_update,
    random_logical,
    schema_of,
    tables_of,
)

from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adagrad, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

ROOM = Exchange(capacity_factor=8.0)
BATCH = 16


def collection(tables, devices, **shape):
    mesh = meshes.make_mesh(MeshShape(**shape), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, exchange=ROOM)


def step_of(tables, devices, host, grads, steps, **shape):
    """(logical state after `steps` steps with given gradients, faults), NumPy."""
    on = collection(tables, devices, **shape)

    @jax.jit
    def step(state, features, grads):
        _, routing = on.lookup(state, features)
        return on.update(state, routing, grads, 1.0)

    state, features = numpy_stack(on, random_logical(on)), device_features(on, host, BATCH)
    for _ in range(steps):
        state = step(state, features, grads)
    return numpy_unstack(on, state), np.asarray(on.faults(state))


def smooth(embedded):
    """Some gradient that differs from occurrence to occurrence and equals itself on every mesh."""
    return {name: jnp.sin(40 * x) + 0.3 for name, x in embedded.items()}


@pytest.mark.default_cases
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_equals_numpy(devices, weighted):
    tables = tables_of(RowwiseAdagrad(learning_rate=0.1))
    host = batch(BATCH, weighted=weighted)
    on = collection(tables, devices)
    logical = random_logical(on)
    embedded, routing = jax.jit(on.lookup)(numpy_stack(on, logical), device_features(on, host, BATCH))
    assert set(embedded) == set(host.keys)
    expected = numpy_lookup(tables, logical, host)
    for name, value in embedded.items():
        assert value.sharding.is_equivalent_to(meshes.everywhere(on.mesh), value.ndim)
        # float32 sums of a few numbers of size 0.3
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert not np.asarray(routing.faults).any()


@pytest.mark.parametrize(
    ("optimizer", "weighted"),
    [
        pytest.param(Sgd(learning_rate=0.1, weight_decay=0.01), True, marks=pytest.mark.slow),
        (RowwiseAdagrad(learning_rate=0.1, weight_decay=0.01), True),
        pytest.param(Adagrad(learning_rate=0.1), False, marks=pytest.mark.slow),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else f"weighted={value}",
)
def test_update_equals_numpy_and_is_equal_to_the_bit_on_any_mesh(optimizer, weighted):
    tables = tables_of(optimizer)
    host = batch(BATCH, weighted=weighted)
    rng = np.random.default_rng(5)
    # Given, not computed: the gradient of a pooled float32 vector may differ in its last bit from mesh to mesh.
    grads = {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in numpy_lookup(tables, random_logical(collection(tables, 1)), host).items()
    }
    before = random_logical(collection(tables, 1))
    after, faults = step_of(tables, 1, host, grads, steps=2)
    assert not faults.any()
    for devices, shape in ((8, {"replica": 2, "tensor": 2}),):
        jax.tree.map(np.testing.assert_array_equal, step_of(tables, devices, host, grads, steps=2, **shape)[0], after)

    wide, narrow, touched = before, before, {}
    for _ in range(2):
        wide, touched = numpy_update(tables, wide, host, grads)
        narrow, _ = numpy_update(tables, narrow, host, grads, np.float32)
    jax.tree.map(np.testing.assert_array_equal, after, narrow)  # the same roundings in the same order
    for table in tables:
        untouched = np.setdiff1d(np.arange(table.rows), [*touched[table.name]])
        for leaf, value in after[table.name].items():
            # two float32 steps; AdaGrad divides sums that nearly cancel by their own size
            np.testing.assert_allclose(value, wide[table.name][leaf], rtol=2e-4, atol=2e-5, err_msg=table.name)
            np.testing.assert_array_equal(value[untouched], before[table.name][leaf][untouched])
        assert (after[table.name]["rows"] != before[table.name]["rows"]).any(axis=1).sum() == len(touched[table.name])


@pytest.mark.slow
def test_the_rest_of_the_program_does_not_change_the_bits_of_an_update():
    tables = tables_of(Adagrad(learning_rate=0.1, weight_decay=0.01))
    host, on = batch(BATCH, weighted=True), collection(tables, 1)
    state, features = numpy_stack(on, random_logical(on)), device_features(on, host, BATCH)
    grads = {name: jnp.sin(jnp.arange(x.size)).reshape(x.shape) for name, x in _shapes(on, features).items()}

    def step(state):
        _, routing = on.lookup(state, features)
        return on.update(state, routing, grads)

    once = jax.jit(step)
    jax.tree.map(np.testing.assert_array_equal, once(once(state)), jax.jit(lambda s: step(step(s)))(state))


def _shapes(on, features):
    return jax.eval_shape(on.lookup, on.abstract_state(), features)[0]


@pytest.mark.default_cases("Adagrad")
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
        return sum(jnp.sin(x * 3).sum() for x in embedded.values())

    @jax.jit
    def sparse_step(state):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, jax.grad(loss)(embedded))

    logical = random_logical(on)
    for leaves in logical.values():
        if "accumulator" in leaves:
            leaves["accumulator"][:] = 0.1
    state = numpy_stack(on, logical)
    full = {name: leaves["rows"] for name, leaves in logical.items()}
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
    for name, leaves in numpy_unstack(on, state).items():
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


@pytest.mark.slow
def test_equal_keys_give_equal_tables_on_any_mesh():
    tables = tables_of(RowwiseAdagrad(initial_accumulator=0.5))
    each = [collection(tables, n) for n in (1, 8)]
    logical = [numpy_unstack(on, on.init(jax.random.key(3))) for on in each]
    rows = np.asarray(logical[0]["shared"]["rows"])
    assert abs(rows).max() <= tables[0].rows ** -0.5
    assert len(np.unique(rows)) > 0.99 * rows.size
    other = numpy_unstack(each[0], each[0].init(jax.random.key(4)))
    assert not np.array_equal(rows, other["shared"]["rows"])


def test_bfloat16_rows_are_updated_in_float32():
    table = TableConfig(name="t", rows=13, dim=2, features=("one",), dtype="bfloat16", optimizer=Sgd(learning_rate=1.0))
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
    embedded, state = step(numpy_stack(on, logical), device_features(on, host, BATCH))
    assert embedded["one"].dtype == jnp.float32
    assert float(numpy_unstack(on, state)["t"]["rows"][0, 0]) == 1 - 16 * 2.0**-9


@pytest.mark.slow
def test_a_donated_state_is_updated_in_place():
    on = collection(tables_of(RowwiseAdagrad()), 8)
    features = device_features(on, batch(BATCH), BATCH)

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, smooth(embedded))

    state = numpy_stack(on, random_logical(on))
    compiled = jax.jit(step, donate_argnums=0).lower(state, features).compile()
    per_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == per_device
    compiled(state, features)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
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
    from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan

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
