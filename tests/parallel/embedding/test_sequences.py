"""Unpooled features of any length: rows in order and zeros behind them, by literal loops; what travels; what is
refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import placed, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import IdMapConfig, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

SIZE, ROWS, DIM, RATE = 24, 29, 8, 0.25
SCHEMA = Schema(
    categorical=(
        Categorical(name="clicks", rows=ROWS, length=None, max_length=6, capacity=5.5),
        Categorical(name="views", rows=ROWS, length=None, max_length=3),
        Categorical(name="pair", rows=ROWS, length=2),
    )
)
TABLES = (
    TableConfig(
        name="items",
        rows=ROWS,
        dim=DIM,
        features=("clicks", "views"),
        pooling="none",
        optimizer=Sgd(learning_rate=RATE),
    ),
    TableConfig(
        name="pairs", rows=ROWS, dim=DIM, features=("pair",), pooling="none", optimizer=Sgd(learning_rate=RATE)
    ),
)
POSITIONS = {"clicks": 6, "views": 3, "pair": 2}


def on(tables, devices, kind="row_wise", **more):
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices])
    room = Exchange(capacity_factor=8.0)
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan_of(kind, tables), **{"exchange": room, **more})


def on_device(each, host, schema=SCHEMA):
    layout = each.layout(schema, host.num_examples)
    return placed(each, each.pack(host, each.mesh.size, layout))


@functools.cache
def batch():
    """Lists from empty ones to the longest that there may be, few different ids, weights."""
    rng = np.random.default_rng(0)
    lengths = np.stack([rng.integers(0, most + 1, SIZE) for most in (6, 3, 2)]).astype(np.int32)
    lengths[:, :3], lengths[:, 3], lengths[2] = 0, (6, 3, 2), 2
    ids = rng.zipf(1.4, lengths.sum()) % ROWS
    return KeyedJagged(SCHEMA.keys, ids, lengths, rng.normal(size=ids.size).astype(np.float32))


def gradients(host):
    """Of every position; those without a row have no number."""
    rng = np.random.default_rng(1)
    grads = {name: rng.normal(size=(SIZE, most, DIM)).astype(np.float32) for name, most in POSITIONS.items()}
    for f, name in enumerate(host.keys):
        for example in range(SIZE):
            grads[name][example, host.lengths[f, example] :] = np.nan
    return grads


def rows_of(table):
    return np.random.default_rng(2).uniform(-1, 1, (table.rows, table.dim)).astype(np.float32)


def literally():
    """(embedded, rows after a step of SGD) by loops in float32: one list after the other, one number at a time."""
    host, ends, grads = batch(), np.cumsum(batch().lengths.reshape(-1)), gradients(batch())
    embedded, after = {}, {}
    assert host.weights is not None
    for table in TABLES:
        before = rows_of(table)
        sums = {}
        for example in range(SIZE):
            for name in table.features:
                f = host.keys.index(name)
                embedded.setdefault(name, np.zeros((SIZE, POSITIONS[name], DIM), np.float32))
                count = host.lengths[f, example]
                first = ends[f * SIZE + example] - count
                for position in range(count):
                    row, weight = host.values[first + position], host.weights[first + position]
                    embedded[name][example, position] = weight * before[row]
                    part = weight * grads[name][example, position]
                    sums[row] = sums[row] + part if row in sums else part
        after[table.name] = before.copy()
        for row, total in sums.items():
            after[table.name][row] = before[row] - np.float32(RATE) * total
    return embedded, after


def step_of(each):
    @jax.jit
    def step(state, features, grads):
        embedded, routing = each.lookup(state, features)
        return embedded, each.lengths(features), each.update(state, routing, grads)

    return step


def fresh(each):
    leaves = {
        table.name: {
            name: rows_of(table) if name == "rows" else np.full(leaf.shape, 0.5, leaf.dtype)
            for name, leaf in each.abstract_logical()[table.name].items()
        }
        for table in each.tables
    }
    return each.from_logical(leaves)


def rows_after(each, state):
    return {name: np.asarray(leaves["rows"]) for name, leaves in each.to_logical(state).items()}


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        (3, "row_wise"),
        (8, "table_wise"),
        (3, "data_parallel"),
    ],
)
def test_rows_stand_in_order_and_zeros_behind_them(devices, kind):
    each = on(TABLES, devices, kind)
    embedded, lengths, state = step_of(each)(fresh(each), on_device(each, batch()), gradients(batch()))
    expected, after = literally()
    equal(dict(embedded), expected)
    equal(rows_after(each, state), after)
    for f, name in enumerate(batch().keys):
        np.testing.assert_array_equal(lengths[name], batch().lengths[f])
        assert lengths[name].sharding.is_equivalent_to(embedded[name].sharding, 1)
    assert not np.asarray(each.faults(state)).any()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 8])
def test_exact_sums_are_the_same_on_any_mesh_for_any_order_of_examples(devices):
    one, each = on(TABLES, 1, accumulate="exact"), on(TABLES, devices, accumulate="exact")
    _, _, expected = step_of(one)(fresh(one), on_device(one, batch()), gradients(batch()))
    order = np.random.default_rng(3).permutation(SIZE)
    moved = {name: g[order] for name, g in gradients(batch()).items()}
    _, _, state = step_of(each)(fresh(each), on_device(each, batch().take(order)), moved)
    equal(rows_after(each, state), rows_after(one, expected))
    for name, rows in literally()[1].items():
        # A sum in fixed point is within 2^-22 of the largest gradient of a row.
        np.testing.assert_allclose(rows_after(one, expected)[name], rows, rtol=0, atol=1e-5)


LENGTH = 3
TWICE = {
    "fixed": Schema(categorical=tuple(Categorical(name=n, rows=ROWS, length=LENGTH) for n in ("a", "b"))),
    "jagged": Schema(
        categorical=tuple(Categorical(name=n, rows=ROWS, length=None, max_length=LENGTH) for n in ("a", "b"))
    ),
}
SHARED = (
    TableConfig(
        name="t", rows=ROWS, dim=DIM, features=("a", "b"), pooling="none", optimizer=RowwiseAdagrad(learning_rate=0.1)
    ),
)


@functools.cache
def both(devices, kind):
    each = on(SHARED, devices, kind)
    return each, fresh(each), step_of(each)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "kind"), [(1, "row_wise"), (3, "row_wise"), (8, "table_wise")])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.integers(1, ROWS))
def test_a_fixed_length_given_as_the_longest_one_changes_no_bit(devices, kind, seed, most):
    each, state, step = both(devices, kind)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, most, 2 * SIZE * LENGTH)
    host = KeyedJagged(
        ("a", "b"), ids, np.full((2, SIZE), LENGTH, np.int32), rng.normal(size=ids.size).astype(np.float32)
    )
    grads = {name: rng.normal(size=(SIZE, LENGTH, DIM)).astype(np.float32) for name in ("a", "b")}
    found = []
    for schema in TWICE.values():
        embedded, lengths, after = step(state, on_device(each, host, schema), grads)
        found.append((dict(embedded), lengths, after))
    equal(*found)


MAPPED = IdMapConfig(rows=1 + 24, ways=1, policy="lru")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "accumulate"),
    [
        (3, "exact"),
        (8, "ordered"),
    ],
)
def test_deduplicated_lists_give_the_same_rows_and_lengths_and_exact_sums(devices, accumulate):
    groups = (DedupGroup(features=("clicks", "views"), rows_per_example=0.6),)
    host = batch().take(np.repeat(np.arange(SIZE // 2), 2))
    grads, each = gradients(host), on(TABLES, devices, accumulate=accumulate)
    layout = each.layout(SCHEMA, SIZE, groups)
    packed = each.pack_deduplicated(deduplicate(host, (groups[0].features,)), devices, layout, groups)
    assert packed is not None
    assert packed.values.shape[1] < each.pack(host, devices, each.layout(SCHEMA, SIZE)).values.shape[1]
    step = step_of(each)
    embedded, lengths, state = step(fresh(each), placed(each, packed), grads)
    plain, plain_lengths, after = step(fresh(each), on_device(each, host), grads)
    equal((dict(embedded), lengths), (dict(plain), plain_lengths))
    # In order, the gradients of the examples of a list are added before they travel: another order of a dozen numbers.
    tolerance = 1e-5 if accumulate == "ordered" else 0
    for name, rows in rows_after(each, after).items():
        np.testing.assert_allclose(rows_after(each, state)[name], rows, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(lengths["clicks"], host.lengths[0])


def sent(schema, kind):
    """Shapes of float32 and int32 that the collectives of a step carry."""
    each = on(SHARED[:1], 8, kind)
    lengths = np.stack([np.full(64, 2), np.full(64, 2)]).astype(np.int32)
    host = KeyedJagged(("a", "b"), np.arange(256) % ROWS, lengths)
    features = on_device(each, host, schema)

    def whole(state, features):
        embedded, routing = each.lookup(state, features)
        return each.update(state, routing, jax.tree.map(jnp.sin, embedded))

    text = jax.jit(whole).lower(each.abstract_state(), features).as_text()
    return sorted(re.findall(r'"stablehlo\.(all_\w+)".*-> tensor<([0-9x]+x[fi]32)>', text))


@pytest.mark.default_cases("row_wise")
@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel"])
def test_only_slots_travel_and_never_positions(kind):
    few, many = (
        Schema(
            categorical=tuple(Categorical(name=n, rows=ROWS, length=None, max_length=m, capacity=2) for n in ("a", "b"))
        )
        for m in (2, 500)
    )
    shapes = sent(many, kind)
    assert shapes == sent(few, kind)
    assert len(shapes) == (2 if kind == "data_parallel" else 3)  # ids, rows (which all have), gradients


def long(host, example=5):
    """The batch with two clicks more in an example than there may be."""
    lists = host.to_lists()
    lists["clicks"][example] = [1] * 8
    return KeyedJagged.from_lists(lists)


def test_a_list_that_is_too_long_is_refused_where_it_is_packed():
    each, host = on(TABLES, 1), long(batch())
    message = (
        r"feature 'clicks': example 5 has 8 ids; its max_length is 6 \(1 of 24 .*Raise Categorical.max_length to 8"
    )
    with pytest.raises(UserError, match=message):
        on_device(each, host)
    with pytest.raises(UserError, match=message):
        host.validate(SCHEMA)
    groups = (DedupGroup(features=("clicks", "views"), rows_per_example=1.0),)
    twice = KeyedJagged.concatenate([host.slice(0, 4)] * 2 + [host.slice(5, 21)])
    with pytest.raises(
        UserError, match=r"'clicks': example 8 has 8 ids"
    ):  # which is not the number of its distinct row
        layout = each.layout(SCHEMA, SIZE, groups)
        each.pack_deduplicated(deduplicate(twice, (groups[0].features,)), 1, layout, groups)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 1])
def test_what_reaches_the_devices_all_the_same_is_counted_and_no_row_sees_it(devices):
    each = on(TABLES, devices)
    short = tuple(dataclasses.replace(f, max_length=4) if f.name == "clicks" else f for f in each.layout(SCHEMA, SIZE))
    features = dataclasses.replace(on_device(each, batch()), layout=short)
    grads = {name: np.nan_to_num(g) for name, g in gradients(batch()).items()}
    grads["clicks"] = grads["clicks"][:, :4]
    step = step_of(each)
    embedded, lengths, state = step(fresh(each), features, grads)
    kept = np.minimum(batch().lengths[0], 4)
    over = int((batch().lengths[0] - kept).sum())
    assert over > 3
    counts = np.asarray(each.faults(state))
    assert counts.tolist() == [0, over]
    with pytest.raises(UserError, match=f"{over} ids for which an exchange, or a max_length, had no room"):
        each.check_faults(counts)
    np.testing.assert_array_equal(lengths["clicks"], kept)
    expected, _ = literally()
    np.testing.assert_array_equal(embedded["clicks"], expected["clicks"][:, :4])
    # The step is that of a batch in which the lists were cut.
    lists, weights = batch().to_lists(), {}
    for key in batch().keys:
        own = batch()[key]
        assert own.weights is not None
        weights[key] = [w.tolist() for w in np.split(own.weights, own.offsets(key)[1:-1])]
    for of in (lists, weights):
        of["clicks"] = [ids[:4] for ids in of["clicks"]]
    cut = on_device(each, KeyedJagged.from_lists(lists, weights))
    _, _, after = step(fresh(each), dataclasses.replace(cut, layout=short), grads)
    equal(rows_after(each, state), rows_after(each, after))


def test_ids_without_a_position_are_not_seen_by_an_id_map():
    table = dataclasses.replace(TABLES[0], rows=MAPPED.rows, features=("clicks",), id_map=MAPPED)
    each = on((table,), 1)
    schema = Schema(categorical=(Categorical(name="clicks", rows=None, length=None, max_length=3),))
    host = KeyedJagged.from_lists({"clicks": [[7, 8, 9], [1], [7, 5, 6], []]}, dtype=np.int64)
    layout = each.layout(schema, 4)
    packed = each.pack(host, 1, layout)
    high = jax.device_put(packed.high, meshes.everywhere(each.mesh))
    short = (dataclasses.replace(layout[0], max_length=2),)
    features = dataclasses.replace(placed(each, packed), layout=short, high=high)
    mapped, assignment = jax.jit(each.map_ids)(each.init(jax.random.key(0)), features)
    assert each.id_totals({"items": np.asarray(assignment.maps["items"]["counts"]).sum(axis=0)})["items"]["misses"] == 5
    assert np.asarray(jax.jit(each.exchange_ids)(mapped).faults).tolist() == [[0, 2]]


def test_jagged_lists_without_a_longest_one_are_refused_and_so_are_gradients_of_other_shapes():
    each = on(TABLES, 1)
    unlimited = Schema(
        categorical=(Categorical(name="clicks", rows=ROWS, length=None, capacity=4), *SCHEMA.categorical[1:])
    )
    with pytest.raises(UserError, match=r"'items' has pooling 'none', and feature 'clicks' .*max_length=\.\.\."):
        each.layout(unlimited, SIZE)
    state, features = each.abstract_state(), on_device(each, batch())
    embedded, routing = jax.eval_shape(each.lookup, state, features)
    with pytest.raises(ValueError, match=r"gradient of feature 'clicks' .* \(24, 6, 8\); got \(24, 3, 8\)"):
        each.update(state, routing, embedded | {"clicks": embedded["views"]})


def test_pooled_features_have_no_lengths_and_may_have_a_longest_list():
    pooled = dataclasses.replace(TABLES[0], pooling="sum")
    each = on((pooled, TABLES[1]), 1)
    features = on_device(each, batch())
    embedded, _ = jax.jit(each.lookup)(fresh(each), features)
    assert set(each.lengths(features)) == {"pair"}
    # Four float32 numbers of size 1, added in order.
    np.testing.assert_allclose(embedded["clicks"], literally()[0]["clicks"].sum(axis=1), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="'clicks': example 5 has 8 ids"):
        on_device(each, long(batch()))
