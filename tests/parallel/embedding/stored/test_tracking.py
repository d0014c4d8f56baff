"""Rows that updates touched: exactly those, from every plan, and back into a copy of the state to the bit."""

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
    numpy_update,
    plan_of,
    random_logical,
    wide_tables,
)

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.embedding.stored import tracking
from scalejax.parallel.mesh import MeshShape


def tracked(optimizer):
    return tuple(dataclasses.replace(table, track="updates") for table in wide_tables(optimizer))


def planned(tables, devices, plan, replica=1):
    mesh = meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan)


def summed(tables):
    entries = tuple(TablePlan(table=t.name, kind="data_parallel", update="psum") for t in tables)
    return ShardingPlan(tables=entries)


def stepped(collection, state, seed):
    host = batch(24, seed=seed)
    features = device_features(collection, host, 24)
    grads = given_grads(collection.tables, host, seed)
    placed = jax.device_put(grads, meshes.everywhere(collection.mesh))

    def one(state, features, grads):
        return collection.update(state, collection.lookup(state, features)[1], grads)

    return jax.jit(one)(state, features, placed), host, grads


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def moved(tree, abstract):
    return jax.tree.map(lambda x, leaf: jax.device_put(np.array(x), leaf.sharding), tree, abstract)


CASES = {
    "row-wise": ("rowwise", "row_wise", 8, 1),
    "column slices": ("adam", "column_wise", 8, 1),
    "column slices with a statistic each": (RowwiseAdagrad(statistic="slice"), "column_wise", 8, 1),
    "table-wise on 3": ("partial adam", "table_wise", 3, 1),
    "copies": ("sgd decoupled", "data_parallel", 8, 1),
    "copies, summed": ("lars", "summed", 4, 1),
    "groups of devices": ("adagrad", "grid", 8, 2),
    "one device": ("lamb", "row_wise", 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_touched_rows_bring_an_old_copy_to_the_new_state(case):
    optimizer, kind, devices, replica = CASES[case]
    tables = tracked(OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer)
    replicas = "copy" if kind == "grid" else "shard"
    plan = summed(tables) if kind == "summed" else plan_of(kind, tables, replicas)
    each = planned(tables, devices, plan, replica)
    logical = random_logical(each)
    for leaves in logical.values():
        leaves["updated"][:] = 0
    state, first, grads = stepped(each, each.from_logical(logical), 1)
    old = as_numpy(each.to_stored(state))
    state, second, _ = stepped(each, state, 2)
    state, third, _ = stepped(each, state, 3)
    wanted = as_numpy(each.to_stored(state))

    # Which update touched a row last, from the ids alone.
    expected = {table.name: np.zeros(table.rows, np.int32) for table in tables}
    for number, host in enumerate((first, second, third), start=1):
        for name, rows in numpy_update(tables, logical, host, grads)[1].items():
            expected[name][sorted(rows)] = number
    for name, numbers in expected.items():
        np.testing.assert_array_equal(np.asarray(each.to_logical(state)[name]["updated"]), numbers)

    blocks = list(tracking.touched_rows(each.stacks, state, since=1))
    for table in tables:
        own = [rows for rows in blocks if rows.table == table.name and "updated" in rows.leaves]
        found = np.concatenate([rows.numbers for rows in own])
        assert sorted(found.tolist()) == np.flatnonzero(expected[table.name] > 1).tolist()

    # Into the stored form of another mesh.
    if kind == "column_wise" and isinstance(optimizer, RowwiseAdagrad):
        other = planned(tables, 4, plan)
    else:
        other = planned(tables, 4 if devices == 1 else 1, None)
    tree = moved(old, other.abstract_stored())
    for rows in blocks:
        tree[rows.table] = tracking.write_stored(tree[rows.table], rows)
    for table in tables:
        for name, array in wanted[table.name].items():
            got = tree[table.name][name]
            assert got.sharding.is_equivalent_to(other.abstract_stored()[table.name][name].sharding, got.ndim)
            np.testing.assert_array_equal(np.asarray(got), array, err_msg=f"{table.name} {name}")
    assert any((old[t.name]["rows_tail"] != wanted[t.name]["rows_tail"]).any() for t in tables)


@pytest.mark.slow
def test_untouched_since_the_last_update_is_nothing():
    each = planned(tracked(OPTIMIZERS["rowwise"]), 8, None)
    state, _, _ = stepped(each, each.init(jax.random.key(0)), 1)
    assert list(tracking.touched_rows(each.stacks, state, since=1)) == []


@pytest.mark.slow
def test_blocks_are_bounded_and_lose_nothing(monkeypatch):
    each = planned(tracked(OPTIMIZERS["rowwise"]), 2, None)
    state, _, _ = stepped(each, each.init(jax.random.key(0)), 1)
    whole = {name: np.zeros(0, np.int64) for name in ("shared", "big", "means", "tiny")}
    for rows in tracking.touched_rows(each.stacks, state, since=0):
        whole[rows.table] = np.append(whole[rows.table], rows.numbers)
    monkeypatch.setattr(tracking, "_BLOCK_BYTES", 3 * (32 * 4 + 8))
    monkeypatch.setattr(tracking, "_MARKS", 100)
    parts = {name: np.zeros(0, np.int64) for name in whole}
    for rows in tracking.touched_rows(each.stacks, state, since=0):
        assert len(rows.numbers) <= 3
        parts[rows.table] = np.append(parts[rows.table], rows.numbers)
    for name, numbers in whole.items():
        assert sorted(parts[name].tolist()) == sorted(numbers.tolist())


@pytest.mark.parametrize("count", [1, 5, 64, 100])
def test_rows_are_gathered_on_a_device_as_on_the_host(count):
    rng = np.random.default_rng(0)
    for shape in ((300, 3), (300,)):
        array = rng.normal(size=shape).astype(np.float32)
        places = rng.choice(300, count, replace=False)
        got = tracking.gather_rows(jnp.asarray(array), places, room=100)
        np.testing.assert_array_equal(got, array[places])


def test_tables_that_are_not_tracked_carry_no_numbers():
    each = planned(wide_tables(OPTIMIZERS["rowwise"]), 8, None)
    assert all("updated" not in leaves for leaves in each.abstract_logical().values())
    assert all("updated" not in leaves for leaves in each.abstract_state()["stacks"].values())


def test_only_names_of_choices_are_taken():
    with pytest.raises(ValueError, match="track must be one of nothing, updates; got 'yes'"):
        dataclasses.replace(wide_tables(RowwiseAdagrad())[0], track="yes")


def test_rows_from_elsewhere_enter_tracked_tables_untouched():
    table = dataclasses.replace(wide_tables(OPTIMIZERS["rowwise"])[0], track="updates")
    each = planned((table,), 2, None)
    leaves = random_logical(each)[table.name]
    del leaves["updated"]
    state = each.from_logical({table.name: leaves})
    back = as_numpy(each.to_logical(state)[table.name])
    assert (back["updated"] == 0).all()
    np.testing.assert_array_equal(back["rows"], leaves["rows"])
    assert list(tracking.touched_rows(each.stacks, state, since=0)) == []
    with pytest.raises(UserError, match="missing: \\['accumulator'\\]"):
        each.from_logical({table.name: {"rows": leaves["rows"]}})
