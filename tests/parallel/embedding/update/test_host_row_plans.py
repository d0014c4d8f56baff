"""Plans of a batch from the host: as much room as a run needs, few shapes, and the same bits whatever the room."""

import dataclasses

import jax
import numpy as np
import pytest

from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adam, RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.update.host_row_plans import Room

SIZE, DIM = 512, 16
SCHEMA = Schema(
    categorical=(
        Categorical(name="a", rows=400),
        Categorical(name="b", rows=400),
        Categorical(name="bag", rows=5000, length=None, capacity=3.0),
    )
)
TABLES = (
    TableConfig(name="first", rows=400, dim=DIM, features=("a", "b"), optimizer=RowwiseAdagrad(learning_rate=0.1)),
    TableConfig(name="second", rows=5000, dim=DIM, features=("bag",), optimizer=RowwiseAdagrad(learning_rate=0.1)),
    TableConfig(name="third", rows=400, dim=DIM, features=("c",), optimizer=Adam()),
)
COLLECTION = EmbeddingCollection(tables=TABLES[:2], mesh=meshes.make_mesh(meshes.MeshShape(), jax.devices()[:1]))


def batch(seed, different):
    rng = np.random.default_rng(seed)
    lengths = np.ones((3, SIZE), np.int32)
    lengths[2] = rng.integers(0, 4, SIZE)
    total = int(lengths.sum())
    return HostKeyedJagged(SCHEMA.keys, rng.integers(0, different, total).astype(np.int32), lengths)


def planned(host, room):
    layout = COLLECTION.layout(SCHEMA, SIZE)
    return COLLECTION.with_plans(COLLECTION.pack(host, 1, layout), room)


def features(host, room):
    packed = planned(host, room)
    found = DeviceJagged(packed.values, packed.lengths, None, COLLECTION.layout(SCHEMA, SIZE), None, packed.plans)
    return jax.device_put(found, meshes.everywhere(COLLECTION.mesh))


def places(host, room):
    return [plan.rows.shape[1] for plans in planned(host, room).plans.values() for plan in plans]


@jax.jit
def step(state, features):
    embedded, routing = COLLECTION.lookup(state, features)
    return COLLECTION.update(state, routing, {name: 0.5 * vectors + 0.25 for name, vectors in embedded.items()})


def test_room_is_a_quarter_more_than_the_fullest_batch_and_never_shrinks():
    room = Room()
    assert room.of("stack", 0, 8192, 1800) == 2304  # 2250 rounded up to a multiple of 64
    assert [room.of("stack", 0, 8192, n) for n in (100, 2304, 2305, 0)] == [2304, 2304, 2944, 2944]
    assert room.of("stack", 1, 8192, 0) == 64
    assert room.of("other", 0, 8192, 7) == 64


def test_plans_hold_every_batch_and_batches_that_are_alike_share_their_shapes():
    room = Room()
    found = [places(batch(seed, 90), room) for seed in range(5)]
    assert found == [[128, 128]] * 5  # 90 rows and a quarter
    wider = places(batch(9, 400), room)
    assert all(many > few for many, few in zip(wider, found[0], strict=True))
    assert places(batch(1, 90), room) == wider
    for host in (batch(1, 90), batch(9, 400)):
        for plans in planned(host, room).plans.values():
            for plan in plans:
                assert plan.slots.max() <= plan.rows.shape[1]
    assert places(batch(0, 90), None) == [400, 1536]  # rows of the table, or slots


@pytest.mark.slow
def test_updates_are_the_same_to_the_bit_whatever_the_room():
    hosts = [batch(0, 300), batch(1, 40), batch(2, 390)]
    one = other = COLLECTION.init(jax.random.key(0))
    room = Room()
    for host in hosts:
        one, other = step(one, features(host, None)), step(other, features(host, room))
    jax.tree.map(np.testing.assert_array_equal, one["stacks"], other["stacks"])
    assert not np.array_equal(
        *(COLLECTION.to_logical(s)["first"]["rows"] for s in (one, COLLECTION.init(jax.random.key(0))))
    )


@pytest.mark.slow
def test_a_table_is_its_own_oracle_where_the_batch_has_fewer_rows_than_before():
    """Places that an earlier batch asked for hold no row: nothing beyond the rows of the batch changes."""
    room = Room()
    planned(batch(0, 390), room)
    before = COLLECTION.init(jax.random.key(1))
    kept = {name: np.array(leaves["rows"]) for name, leaves in COLLECTION.to_logical(before).items()}
    host = batch(3, 20)
    after = COLLECTION.to_logical(step(before, features(host, room)))
    for name, leaves in after.items():
        assert (np.asarray(leaves["rows"])[20:] == kept[name][20:]).all()
        assert (np.asarray(leaves["rows"])[:20] != kept[name][:20]).any(axis=1).all()


def test_tables_of_another_optimizer_have_room_of_their_own():
    schema = dataclasses.replace(SCHEMA, categorical=(*SCHEMA.categorical, Categorical(name="c", rows=400)))
    each = EmbeddingCollection(tables=TABLES, mesh=COLLECTION.mesh)
    base = batch(0, 90)
    host = HostKeyedJagged(
        schema.keys,
        np.concatenate([base.values, np.zeros(SIZE, np.int32)]),
        np.concatenate([base.lengths, np.ones((1, SIZE), np.int32)]),
    )
    packed = each.with_plans(each.pack(host, 1, each.layout(schema, SIZE)), Room())
    assert [plan.rows.shape[1] for plans in packed.plans.values() for plan in plans] == [128, 128, 64]
