"""How gradients add up: in order by default, in fixed point where no order shall matter; and stochastic rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import (
    OPTIMIZERS,
    batch,
    device_features,
    given_grads,
    numpy_stack,
    numpy_unstack,
    plan_of,
    random_logical,
    wide_tables,
)

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

BATCH = 16


def collection(tables, devices, kind="row_wise", replica=1, **more):
    mesh = meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:devices])
    room = Exchange(capacity_factor=8.0)
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan_of(kind, tables), **{"exchange": room, **more})


def after(on, host, grads, steps=2, logical=None):
    @jax.jit
    def step(state, features, grads):
        _, routing = on.lookup(state, features)
        return on.update(state, routing, grads)

    state = numpy_stack(on, random_logical(on) if logical is None else logical)
    for _ in range(steps):
        state = step(state, device_features(on, host, BATCH), grads)
    return numpy_unstack(on, state)


def permuted(host, grads, order):
    """The same examples in another order, with their gradients."""
    ends = np.cumsum(host.lengths.sum(axis=1))
    values, weights = [], []
    for f in range(len(host.keys)):
        offsets = np.concatenate([[0], np.cumsum(host.lengths[f])]) + ends[f] - host.lengths[f].sum()
        spans = [slice(offsets[e], offsets[e + 1]) for e in order]
        values += [host.values[span] for span in spans]
        weights += [host.weights[span] for span in spans]
    moved = KeyedJagged(host.keys, np.concatenate(values), host.lengths[:, order], np.concatenate(weights))
    return moved, {name: g[order] for name, g in grads.items()}


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("row_wise", 8),
        ("data_parallel", 2),
        ("grid", 8),
    ],
)
def test_exact_sums_do_not_see_the_order_of_the_batch_nor_the_mesh(kind, devices):
    tables, host = wide_tables(OPTIMIZERS["rowwise"]), batch(BATCH, weighted=True)
    grads = given_grads(tables, host)
    expected = after(collection(tables, 1, accumulate="exact"), host, grads)
    on = collection(tables, devices, kind, replica=2, accumulate="exact")
    equal(after(on, host, grads), expected)
    order = np.random.default_rng(0).permutation(BATCH)
    equal(after(on, *permuted(host, grads, order)), expected)
    ordered = after(collection(tables, 1), host, grads)
    for name, leaves in expected.items():
        # One part in 2^22 of the largest gradient of a row, twice, then divided by its own size.
        np.testing.assert_allclose(leaves["rows"], ordered[name]["rows"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ordered_sums_do_see_the_order_of_the_batch():
    # The control: otherwise the test above would show nothing.
    tables, host = wide_tables(OPTIMIZERS["rowwise"]), batch(BATCH, weighted=True)
    grads, on = given_grads(tables, host), collection(wide_tables(OPTIMIZERS["rowwise"]), 1)
    one = after(on, host, grads)
    other = after(on, *permuted(host, grads, np.random.default_rng(0).permutation(BATCH)))
    assert any((one[t]["rows"] != other[t]["rows"]).any() for t in one)
    with pytest.raises(ValueError, match="accumulate must be one of ordered, exact; got 'fast'"):
        collection(tables, 1, accumulate="fast")
    double = tuple(dataclasses.replace(table, dtype="float64") for table in tables)
    with pytest.raises(
        UserError, match=r"table 'shared' is of float64. Use accumulate='ordered' .*tables.dtype=float32"
    ):
        collection(double, 1, accumulate="exact")


FOUR = ((8, "grid"), (2, "data_parallel"), (8, "row_wise"), (4, "table_wise"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "places"),
    [("bfloat16", FOUR[:1]), ("float16", FOUR)],
    ids=["bfloat16", "float16"],
)
def test_stochastic_rounding_is_the_same_on_every_mesh_and_differs_from_nearest(dtype, places):
    tables = tuple(dataclasses.replace(t, dtype=dtype) for t in wide_tables(OPTIMIZERS["rowwise"]))
    host = batch(BATCH)
    grads = given_grads(tables, host)
    one = after(collection(tables, 1), host, grads)
    for devices, kind in places:
        equal(after(collection(tables, devices, kind, replica=2), host, grads), one)
    nearest = tuple(dataclasses.replace(t, rounding="nearest") for t in tables)
    other = after(collection(nearest, 1), host, grads)
    for name, leaves in one.items():
        unit = float(jnp.finfo(dtype).eps)
        rows, near = leaves["rows"].astype(np.float32), other[name]["rows"].astype(np.float32)
        np.testing.assert_allclose(rows, near, rtol=4 * unit, atol=4 * unit)
    assert (one["big"]["rows"] != other["big"]["rows"]).any()


def test_small_updates_of_a_bfloat16_table_add_up():
    table = TableConfig(
        name="t", rows=13, dim=64, features=("one",), dtype="bfloat16", optimizer=Sgd(learning_rate=1.0)
    )
    host = KeyedJagged(("one",), np.zeros(BATCH, np.int64), np.ones((1, BATCH), np.int32))
    grads = {"one": np.full((BATCH, 64), 2.0**-12 / BATCH, np.float32)}  # 2^-12 a step, an eighth of half a unit
    got = {}
    for rounding in ("stochastic", "nearest"):
        on = collection((dataclasses.replace(table, rounding=rounding),), 1)
        start = {"t": {"rows": jnp.ones((13, 64), jnp.bfloat16)}}
        got[rounding] = after(on, host, grads, steps=64, logical=start)["t"]["rows"].astype(np.float32)
    assert (got["nearest"][0] == 1).all()
    moved = 1 - got["stochastic"][0].mean()
    # 64 steps of 2^-12; a unit below 1 is 2^-8, so the mean of 64 columns is off by about 2^-8 / 2 / sqrt(64) x 2.
    assert abs(moved - 64 * 2.0**-12) < 4 * 2.0**-8 / 2 / 8 * 2
    # Each step draws anew: a column moves by one unit in a sixteenth of 64 steps, not in all of them or none.
    assert 2 * 2.0**-8 < (1 - got["stochastic"][0]).max() < 16 * 2.0**-8
    assert (got["stochastic"][1:] == 1).all()


def test_overflow_ids_are_counted_and_left_out_where_that_is_chosen():
    table = TableConfig(name="t", rows=64, dim=4, features=("one",), optimizer=RowwiseAdagrad(learning_rate=0.1))
    host = KeyedJagged(("one",), np.full(1024, 8), np.ones((1, 1024), np.int32))
    on = collection((table,), 8, exchange=Exchange(capacity_factor=1.0, overflow="count"))
    from embedding_cases import schema_of

    features = device_features(on, host, 1024, schema=schema_of({"one": 1}, rows=64))
    state = numpy_stack(on, random_logical(on))
    embedded, routing = jax.jit(on.lookup)(state, features)
    counts = np.asarray(on.faults(jax.jit(on.update)(state, routing, embedded)))
    room = 8 + 128 // 8  # a fair share and the slack, on each of 8 devices
    assert counts.tolist() == [0, 8 * (128 - room)]
    assert (np.asarray(embedded["one"]) == 0).all(axis=1).sum() == counts[1]
    on.check_faults(counts)
    with pytest.raises(Exception, match="had no room"):
        collection((table,), 8, exchange=Exchange(capacity_factor=1.0)).check_faults(counts)
