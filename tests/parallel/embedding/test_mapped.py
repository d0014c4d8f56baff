"""Tables with id maps: a plain-Python model of the policy beside plain tables gives the same bits on every mesh."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest
from embedding_cases import placed
from id_map_model import Model

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adagrad, IdMapConfig, MappedFeatures, RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.embedding.stored import initial
from scalejax.parallel.embedding.stored.conversion import COUNTS, MAPS
from scalejax.parallel.mesh import MeshShape

SIZE, STEPS, DIM = 48, 6, 32
MASK = 2**64 - 1
ROOM = Exchange(capacity_factor=8.0)

SCHEMA = Schema(
    categorical=(
        Categorical(name="item", rows=None),
        Categorical(name="shop", rows=21),
        Categorical(name="bag", rows=None, length=None, capacity=4),
        Categorical(name="pair", rows=None, length=2),
        Categorical(name="tag", rows=None),
        Categorical(name="trail", rows=None, length=None, max_length=4, capacity=3),
    )
)
"""Three maps, one for each policy; none of them holds all the ids of a batch."""

LFU = IdMapConfig(rows=1 + 24 * 2, ways=2)
LRU = IdMapConfig(rows=1 + 24, ways=1, policy="lru", admit_after=2, candidate_ways=2)
TTL = IdMapConfig(rows=1 + 24 * 2, ways=2, policy="ttl", ttl_steps=1)
SGD_LIKE = RowwiseAdagrad(learning_rate=0.1, initial_accumulator=0.5)

TABLES = (
    TableConfig(name="items", rows=LFU.rows, dim=DIM, features=("item", "bag"), id_map=LFU, optimizer=SGD_LIKE),
    TableConfig(name="shops", rows=21, dim=DIM, features=("shop",), optimizer=SGD_LIKE),
    TableConfig(name="pairs", rows=LRU.rows, dim=DIM, features=("pair", "trail"), pooling="none", id_map=LRU),
    TableConfig(
        name="tags",
        rows=TTL.rows,
        dim=DIM,
        features=("tag",),
        id_map=TTL,
        optimizer=Adagrad(initial_accumulator=0.25),
        track="updates",
    ),
)
PLAIN = tuple(dataclasses.replace(table, id_map=None) for table in TABLES)
NUMBERED = Schema(categorical=tuple(dataclasses.replace(f, rows=21) for f in SCHEMA.categorical))
KINDS = ShardingPlan(
    tables=(
        TablePlan(table="items", kind="column_wise", columns=2),
        TablePlan(table="pairs", kind="data_parallel"),
        TablePlan(table="tags", kind="table_wise"),
    ),
    replicas="copy",
)
COPIED = ShardingPlan(tables=(TablePlan(table="pairs", kind="data_parallel"),))
ALL = ("items", "shops", "pairs", "tags")
CASES = {
    "3": (3, COPIED, ("pairs", "tags")),
    "1": (1, None, ALL),
    "8": (8, None, ALL),
    "8, kinds, all": (8, KINDS, ALL),
    "3, all": (3, None, ALL),
}
"""Devices, plan, tables."""


@pytest.fixture(autouse=True)
def several_rounds_of_resets(monkeypatch):
    monkeypatch.setattr(initial, "RESET_ROWS", 2)


def build(devices, plan, names, tables=TABLES):
    replica = 2 if plan is not None and plan.replicas == "copy" else 1
    mesh = meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:devices])
    own = tuple(table for table in tables if table.name in names)
    entries = tuple(entry for entry in plan.tables if entry.table in names) if plan else ()
    plan = ShardingPlan(tables=entries, replicas=plan.replicas if plan else "shard")
    return EmbeddingCollection(tables=own, mesh=mesh, plan=plan, exchange=ROOM)


@functools.cache
def on(name):
    return build(*CASES[name])


def hashed(numbers):
    """Small numbers as 64-bit ids of both signs."""
    return (np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


@functools.cache
def trace():
    """Host batches whose popular ids are on every device and whose others come and go."""
    rng, batches = np.random.default_rng(1), []
    for step in range(STEPS):
        lengths = np.ones((6, SIZE), np.int32)
        lengths[2], lengths[5] = rng.integers(0, 4, (2, SIZE))
        lengths[3] = 2
        ids = [hashed(20 * step + rng.zipf(1.4, n) % 90) for n in lengths.sum(axis=1)]
        ids[1] = rng.integers(0, 21, SIZE)
        batches.append(KeyedJagged(SCHEMA.keys, np.concatenate(ids), lengths))
    return tuple(batches)


def features_of(each, host, layout=None):
    layout = layout or each.layout(SCHEMA, SIZE)
    packed = each.pack(host, each.mesh.size, layout)
    return placed(each, packed)


@functools.cache
def step_of(each):
    @jax.jit
    def step(state, features, grads):
        features, assignment = each.map_ids(state, features)
        state = each.admit(state, assignment)
        embedded, routing = each.lookup(state, features)
        return embedded, each.update(state, routing, grads)

    return step


def grads_at(step, each):
    """Gradients of the features of a collection; those of a feature are the same whatever it has beside."""
    rng = np.random.default_rng(step)
    shape = {"pair": (SIZE, 2, DIM), "trail": (SIZE, 4, DIM)}
    grads = {
        name: rng.normal(size=shape.get(name, (SIZE, DIM))).astype(np.float32)
        for table in TABLES
        for name in table.features
    }
    return {name: grads[name] for table in each.tables for name in table.features}


def stored_of(each, state):
    return jax.tree.map(np.asarray, each.to_stored(state))


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def restored(each, tree):
    return each.from_stored(
        jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), tree, each.abstract_stored())
    )


@functools.cache
def expected():
    """(embedded at every step, final tables, the models): plain tables on one device, maps in Python."""
    each, models = build(1, None, ALL, PLAIN), {t.name: Model(t.id_map) for t in TABLES if t.id_map}
    fresh = jax.tree.map(np.asarray, each.to_logical(each.init(jax.random.key(3))))
    logical, seen = jax.tree.map(np.copy, fresh), []

    @jax.jit
    def plain_step(state, features, grads):
        embedded, routing = each.lookup(state, features)
        return embedded, each.update(state, routing, grads)

    for number, host in enumerate(trace()):
        bounds, values = host.feature_offsets(), host.values.copy()
        for table in TABLES:
            if table.id_map is None:
                continue
            spans = [slice(*bounds[host.keys.index(f) :][:2]) for f in table.features]
            ids = [int(i) & MASK for span in spans for i in host.values[span]]
            rows, gone = models[table.name].apply(ids, number)
            for span in spans:
                values[span] = [rows[int(i) & MASK] for i in host.values[span]]
            for row, _ in gone:
                for leaf, value in logical[table.name].items():
                    value[row] = fresh[table.name][leaf][row]
        state = each.from_logical(logical, updates=number)
        features = features_of(each, dataclasses.replace(host, values=values), each.layout(NUMBERED, SIZE))
        found, state = plain_step(state, features, grads_at(number, each))
        logical = jax.tree.map(np.array, each.to_logical(state))
        seen.append(jax.tree.map(np.asarray, found))
    return seen, logical, models


@functools.cache
def trained(name):
    """(embedded at every step, final state)."""
    each, seen = on(name), []
    state = each.init(jax.random.key(3))
    for number, host in enumerate(trace()):
        embedded, state = step_of(each)(state, features_of(each, host), grads_at(number, each))
        seen.append(jax.tree.map(np.asarray, embedded))
    return seen, state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3", "1", "8, kinds, all"])
def test_lookups_and_tables_equal_the_model_beside_plain_tables_to_the_bit(name):
    seen, logical, models = expected()
    found, state = trained(name)
    each = on(name)
    models = {table: model for table, model in models.items() if table in CASES[name][2]}
    for one, other in zip(found, seen, strict=True):
        equal(one, {feature: other[feature] for feature in one})
    equal(jax.tree.map(np.asarray, each.to_logical(state)), {t.name: logical[t.name] for t in each.tables})
    totals = each.id_totals(jax.device_get(each.id_counts(state)))
    assert totals == {table: model.counts for table, model in models.items()}
    assert all(found["evicted"] > 8 and found["unserved"] for found in totals.values()), totals
    tree = stored_of(each, state)
    for table, model in models.items():
        equal({leaf: x for leaf, x in tree[MAPS][table].items() if leaf != "counts"}, model.arrays())
    assert not np.asarray(each.faults(state)).any()


def hashed_batch(host, first):
    """The same batch with ids that nobody has seen."""
    values = hashed(first + np.arange(host.values.size))
    bounds = host.feature_offsets()
    values[bounds[1] : bounds[2]] = 0
    return dataclasses.replace(host, values=values)


@pytest.mark.slow
def test_expired_ids_leave_at_once_and_their_rows_are_fresh():
    each, (_, state) = on("3"), trained("3")
    model = copy.deepcopy(expected()[2]["tags"])
    gone = model.expire(STEPS)
    assert 0 < len(gone) < TTL.rows - 1
    after = jax.jit(each.expire)(state)
    before, tree = stored_of(each, state), stored_of(each, after)
    equal({leaf: x for leaf, x in tree[MAPS]["tags"].items() if leaf != "counts"}, model.arrays())
    assert each.id_totals(jax.device_get(each.id_counts(after)))["tags"] == model.counts
    was, fresh, tags = (
        jax.tree.map(np.array, each.to_logical(s)["tags"]) for s in (state, each.init(jax.random.key(3)), after)
    )
    assert (was["rows"][gone] != fresh["rows"][gone]).any(axis=1).all()
    fresh["updated"][gone] = STEPS + 1
    for leaf, value in was.items():
        value[gone] = fresh[leaf][gone]
    equal(tags, was)
    # Nothing else changes.
    equal(tree["pairs"], before["pairs"])
    equal(tree[MAPS]["pairs"], before[MAPS]["pairs"])
    equal(tree[COUNTS], before[COUNTS])
    with pytest.raises(ValueError, match="no table has an id map of policy 'ttl'"):
        build(1, None, ("items", "shops")).expire({})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3", "1"])
def test_evaluation_changes_nothing_and_gives_unknown_ids_row_zero(name):
    each, (_, state) = on(name), trained(name)
    _, _, models = expected()
    before = stored_of(each, state)
    strange = hashed_batch(trace()[-1], 20_000)
    known = trace()[-1]
    find = jax.jit(each.find_ids)
    for host in (strange, known):
        features, faults = find(state, features_of(each, host))
        assert not np.asarray(faults).any()
        rows = host_values(each, features)
        for table in each.mapped_tables:
            for feature in table.features:
                ids = host.values[slice(*host.feature_offsets()[host.keys.index(feature) :][:2])]
                model = models[table.name]
                where = {e.id: model.row(b, w) for b, ways in enumerate(model.ways) for w, e in enumerate(ways) if e}
                wanted = [where.get(int(i) & MASK, 0) for i in ids]
                assert rows[feature] == wanted
                assert any(wanted) == (host is known)
    equal(stored_of(each, state), before)


def host_values(each, features):
    """Ids of every feature in the order of the batch."""
    out, start, bag = {}, 0, 0
    for feature in features.layout:
        values = np.asarray(features.values)[:, start : start + feature.capacity]
        counts = np.asarray(features.lengths)[:, bag : bag + feature.bags].sum(axis=1)
        out[feature.name] = [int(v) for own, n in zip(values, counts, strict=True) for v in own[:n]]
        start, bag = start + feature.capacity, bag + feature.bags
    return out


@pytest.mark.slow
def test_a_state_moves_between_meshes_bit_for_bit():
    each, state = on("3"), trained("3")[1]
    tree = stored_of(each, state)
    for devices, plan in ((8, None), (1, None), (8, KINDS), (3, None)):
        other = build(devices, plan, CASES["3"][2])
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), other.abstract_stored())
        assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == shapes
        state = restored(other, tree)
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(other.abstract_state()), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        equal(stored_of(other, state), tree)
    assert tree[COUNTS]["updates"] == STEPS


@pytest.mark.slow
def test_a_state_goes_on_to_the_same_bits_on_every_mesh_and_plan():
    stop = 2
    for names in (("8", "3, all", "8, kinds, all"), ("1", "8", "3, all")):
        each = on(names[0])
        state = each.init(jax.random.key(3))
        for number, host in enumerate(trace()):
            if number and number % stop == 0:
                tree, each = stored_of(each, state), on(names[number // stop])
                state = restored(each, tree)
            _, state = step_of(each)(state, features_of(each, host), grads_at(number, each))
        equal(stored_of(each, state), stored_of(on("1"), trained("1")[1]))


@pytest.mark.slow
def test_deduplicated_features_give_the_same_rows_counts_and_vectors():
    groups = (
        DedupGroup(features=("item", "bag"), rows_per_example=1.0),
        DedupGroup(features=("tag",), rows_per_example=1.0),
    )
    host = trace()[0].take(np.repeat(np.arange(SIZE // 4), 4))
    each = on("1")
    layout = each.layout(SCHEMA, SIZE, groups)
    packed = each.pack_deduplicated(deduplicate(host, tuple(g.features for g in groups)), 1, layout, groups)
    assert packed is not None
    assert (packed.inverse[0] != np.arange(SIZE)).any(axis=1).all()
    features = placed(each, packed)
    _, state = step_of(each)(each.init(jax.random.key(3)), features_of(each, host), grads_at(0, each))
    start = each.init(jax.random.key(3))
    deduplicated, assignment = jax.jit(each.map_ids)(start, features)
    merged = {
        name: leaves | {"counts": id_map.merged_counts(leaves["counts"])} for name, leaves in assignment.maps.items()
    }
    equal(jax.tree.map(np.asarray, merged), stored_of(each, state)[MAPS])
    # What the distinct rows look up is what the examples look up.
    inverse = packed.inverse[0]
    ids, _ = jax.jit(each.find_ids)({**start, "maps": assignment.maps}, features_of(each, host))
    rows, distinct = host_values(each, ids), host_values(each, deduplicated)
    assert rows["tag"] == [distinct["tag"][u] for u in inverse[1]]
    assert rows["item"] == [distinct["item"][u] for u in inverse[0]]


@pytest.mark.slow
def test_a_batch_cut_between_devices_in_another_way_gives_the_same_maps():
    """Popular ids on all devices count as often as they occur, whoever sent them."""
    each, host = on("3"), trace()[1]
    moved = host.take(np.random.default_rng(0).permutation(SIZE))
    one, other = (
        step_of(each)(each.init(jax.random.key(3)), features_of(each, x), grads_at(0, each))[1] for x in (host, moved)
    )
    equal(stored_of(each, one)[MAPS], stored_of(each, other)[MAPS])


CROWDED = Exchange(capacity_factor=1.0)


def crowd():
    """Ids of one device that all belong to one bucket's device, more than evenly spread ones need."""
    ids = hashed(np.arange(4000))
    owner = np.asarray(id_map.owner_of(LFU, *id_map.split_ids(ids), 2))
    own = ids[owner == 1]
    bag = Schema(categorical=(Categorical(name="item", rows=None, length=20),))
    table = TableConfig(name="t", rows=LFU.rows, dim=DIM, features=("item",), id_map=LFU)
    return bag, table, KeyedJagged.from_dense({"item": own[:320].reshape(16, 20)})


@pytest.mark.default_cases("fail")
@pytest.mark.parametrize("overflow", ["fail", "count"])
def test_overflow_ids_on_their_way_to_the_map_are_refused_or_counted(overflow):
    schema, table, host = crowd()
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:2])
    exchange = dataclasses.replace(CROWDED, overflow=overflow)
    each = EmbeddingCollection(tables=(table,), mesh=mesh, exchange=exchange)
    layout = each.layout(schema, 16)
    if overflow == "fail":
        with pytest.raises(UserError, match=r"has 160 distinct ids of table 't' .* room for 88 .*capacity_factor=1.9"):
            each.pack(host, 2, layout)
        return

    @jax.jit
    def look(state, features):
        features, assignment = each.map_ids(state, features)
        state = each.admit(state, assignment)
        return state, *each.lookup(state, features), features.values

    state, embedded, routing, rows = look(each.init(jax.random.key(0)), features_of(each, host, layout))
    assert np.asarray(each.faults(state)).tolist() == [0, 2 * (160 - 88)]
    assert each.id_totals(jax.device_get(each.id_counts(state)))["t"]["misses"] == 2 * 88
    assert np.asarray(routing.faults).sum(axis=0)[0] == 0  # counted once, and not as bad
    rows, vectors = np.asarray(rows).reshape(16, 20), np.asarray(embedded["item"])
    table = np.asarray(each.to_logical(state)["t"]["rows"])
    lost = (rows < 0).sum(axis=1)
    assert lost.sum() == 2 * (160 - 88)
    expected = np.where((rows < 0)[..., None], 0, table[np.maximum(rows, 0)]).sum(axis=1)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)  # a lost id embeds as zeros
    with pytest.raises(UserError, match=r"144 ids for which.*table 't', which has an id map"):
        dataclasses.replace(each, exchange=CROWDED).check_faults(np.asarray(each.faults(state)))


def test_ids_of_other_tables_are_still_refused_and_floats_are():
    each, host = on("1"), trace()[0]
    values = host.values.copy()
    values[host.feature_offsets()[1]] = 21
    with pytest.raises(UserError, match=r"Feature 'shop': id 21 .* is outside \[0, 21\)"):
        each.pack(dataclasses.replace(host, values=values), 1, each.layout(SCHEMA, SIZE))
    with pytest.raises(UserError, match="values of a batch are float64; wanted integers"):
        each.pack(dataclasses.replace(host, values=host.values * 1.0), 1, each.layout(SCHEMA, SIZE))


def test_ids_that_are_not_rows_yet_are_not_looked_up():
    each = on("1")
    with pytest.raises(
        ValueError, match="item, bag, pair, tag, trail still hold 64-bit ids; call map_ids or find_ids first"
    ):
        each.exchange_ids(features_of(each, trace()[0]))


def test_maps_that_fit_neither_table_nor_mesh_are_refused():
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:8])
    with pytest.raises(UserError, match=r"'t': rows must be those of its id map, 49; got 50"):
        TableConfig(name="t", rows=50, dim=4, features=("a",), id_map=LFU)
    odd = IdMapConfig(rows=1 + 10 * 2, ways=2)
    with pytest.raises(UserError, match=r"table 't' has an id map that has 10 buckets of 2 ways, .* 8 dev.*rows=33"):
        EmbeddingCollection(tables=(TableConfig(name="t", rows=21, dim=4, features=("a",), id_map=odd),), mesh=mesh)
    with pytest.raises(
        UserError, match=r"'item' has ids of any 64 bits \(rows=None\), but table 'items' has no id map"
    ):
        build(1, None, ALL, PLAIN).layout(SCHEMA, SIZE)
    with pytest.raises(UserError, match="'items' has an id map, and rows alone do not say whose they are"):
        on("1").from_logical({})
    with pytest.raises(ValueError, match=r"key must be what jax.random.key makes"):
        on("1").init(jax.random.key(0, impl="rbg"))
    with pytest.raises(UserError, match="MappedFeatures: features must name at least one"):
        MappedFeatures(features=(), id_map=LFU)
