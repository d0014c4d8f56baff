"""Tables that do not fit: which, by how much, and what helps, before anything is allocated."""

import jax
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adam, IdMapConfig, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan import memory
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.units import size

TABLES = (
    TableConfig(name="wide", rows=1000, dim=64, features=("a",), optimizer=RowwiseAdagrad()),
    TableConfig(name="narrow", rows=90, dim=16, features=("b",), optimizer=Adam(), dtype="bfloat16", track="updates"),
    TableConfig(name="copied", rows=10, dim=8, features=("c",)),
)
PLANS = {
    "rows": ShardingPlan(tables=(TablePlan(table="copied", kind="data_parallel"),)),
    "slices": ShardingPlan(
        tables=(TablePlan(table="wide", kind="column_wise", columns=4), TablePlan(table="narrow", kind="table_wise"))
    ),
}


def collection(tables=TABLES, plan=None, devices=8):
    mesh = meshes.make_mesh(meshes.MeshShape(), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan or ShardingPlan())


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_counted_bytes_are_those_that_are_allocated(plan):
    each = collection(plan=plan)
    state = each.init(jax.random.key(0))
    allocated = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state["stacks"]))
    assert memory.device_bytes(each.stacks, each.mesh.size) == allocated


def test_id_maps_count_on_every_device_of_the_mesh():
    waiting = IdMapConfig(rows=1 + 24 * 2, ways=2, admit_after=2, candidate_ways=3)
    at_once = IdMapConfig(rows=1 + 16, ways=1)
    tables = (
        *TABLES[:1],
        TableConfig(name="waiting", rows=49, dim=32, features=("w",), id_map=waiting),
        TableConfig(name="at_once", rows=17, dim=8, features=("o",), id_map=at_once),
    )
    plan = ShardingPlan(
        tables=(
            TablePlan(table="waiting", kind="column_wise", columns=2),
            TablePlan(table="at_once", kind="data_parallel"),
        ),
        replicas="copy",
    )
    mesh = meshes.make_mesh(meshes.MeshShape(replica=2), jax.devices()[:8])
    each = EmbeddingCollection(tables=tables, mesh=mesh, plan=plan)
    state = each.abstract_state()
    # Eight devices share the buckets, four a copy of the rows. Counters are not counted.
    maps = [leaf for leaves in state["maps"].values() for name, leaf in leaves.items() if name != "counts"]
    leaves = [*maps, *jax.tree.leaves(state["stacks"])]
    allocated = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
    assert memory.device_bytes(each.stacks, 8) == allocated
    assert sum(x.size * x.dtype.itemsize for x in maps) == 24 * (2 + 3) * 16 + 16 * 16
    assert memory.largest_tables(each.stacks, 8)["waiting"] == 49 * (16 + 1) * 4 + 3 * (2 + 3) * 16
    with pytest.raises(UserError, match=r"take .* too much"):
        memory.check_fits(each.stacks, allocated - 1, 8)
    memory.check_fits(each.stacks, allocated, 8)


def test_each_table_counts_where_most_of_it_lies():
    each = collection(plan=PLANS["slices"], devices=2)
    # Four slices of 16 columns over two devices: two on each, every one with its own mean of squares.
    assert memory.largest_tables(each.stacks, 2) == {
        "wide": 1000 * 2 * (16 + 1) * 4,
        "narrow": 90 * (16 * (2 + 4 + 4) + 4),
        "copied": 5 * (8 + 1) * 4,
    }


def test_tables_beyond_the_memory_of_the_machine_are_refused_before_they_are_made():
    huge = TableConfig(name="everyone", rows=2**30, dim=1 << 14, features=("a",))  # 64 TiB
    each = collection((huge, *TABLES[1:]))
    room = meshes.device_memory_bytes(each.mesh)
    assert room == meshes.host_memory_bytes() // 8
    with pytest.raises(UserError, match=r"tables take 8 TiB on each of 8 device\(s\), which has [\d.]+ GiB") as refusal:
        each.init(jax.random.key(0))
    said = str(refusal.value)
    assert f"{size(memory.device_bytes(each.stacks, each.mesh.size) - room)} too much" in said
    assert "The largest tables, on the device that has most of each: everyone 8 TiB, narrow" in said
    assert "tables.dtype=bfloat16" in said


def test_the_number_of_devices_that_it_names_is_enough_and_one_less_is_not():
    room = 100_000
    with pytest.raises(UserError, match=r"at least (\d+) such devices") as refusal:
        memory.check_fits(collection(TABLES[:1], devices=1).stacks, room, 1)
    wanted = int(str(refusal.value).partition("at least ")[2].split()[0])
    share = TABLES[0].rows * (64 + 1) * 4
    assert np.ceil(share / wanted) <= room < share / (wanted - 1)
    memory.check_fits(collection(TABLES[:1], devices=wanted).stacks, room, wanted)


ONE_BIG = (TableConfig(name="big", rows=1000, dim=63, features=("a",), optimizer=Sgd()),)


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_a_plan_that_wastes_room_is_told_what_striped_rows_take(kind):
    wasteful = collection(ONE_BIG, ShardingPlan(tables=(TablePlan(table="big", kind=kind),)))
    room = memory.device_bytes(wasteful.stacks, 8) // 2
    with pytest.raises(UserError, match="too much") as refusal:
        memory.check_fits(wasteful.stacks, room, 8)
    striped = collection(ONE_BIG)
    memory.check_fits(striped.stacks, room, 8)
    each = size(memory.device_bytes(striped.stacks, 8))
    assert f"striped over 8 devices take {each} on each: set kind='row_wise'" in str(refusal.value)
    assert "such devices" not in str(refusal.value)


def test_copies_of_tables_are_told_what_one_copy_takes(monkeypatch):
    mesh = meshes.make_mesh(meshes.MeshShape(replica=2), jax.devices()[:8])
    entries = (TablePlan(table="big", kind="table_wise"),)
    takes = {over: 1000 // over * 63 * 4 for over in (4, 8)}
    for room, advice in (
        (takes[4], "over 4 devices take [^ ]+ KiB on each: set kind='row_wise'"),
        (takes[4] - 1, "over 8 devices take [^ ]+ KiB on each: set replicas='shard' and kind='row_wise'"),
        (takes[8], "over 8 devices"),
        (takes[8] - 1, "at least 9 such devices and replicas='shard'"),
    ):
        each = EmbeddingCollection(tables=ONE_BIG, mesh=mesh, plan=ShardingPlan(tables=entries, replicas="copy"))
        monkeypatch.setattr("scalejax.parallel.embedding.collection.device_memory_bytes", lambda mesh, room=room: room)
        with pytest.raises(UserError, match=advice):
            each.check_fits()


def test_the_number_of_devices_counts_what_does_not_get_smaller():
    # Small tables, of which every device has a row, and a map.
    id_map = IdMapConfig(rows=1 + 64 * 8, ways=8)
    tables = (
        *(TableConfig(name=f"t{i}", rows=3, dim=25, features=(f"f{i}",), optimizer=Sgd()) for i in range(10)),
        TableConfig(name="big", rows=id_map.rows, dim=25, features=("a",), optimizer=Sgd(), id_map=id_map),
    )

    def takes(devices):
        return 10 * -(-3 // devices) * 100 + -(-513 // devices) * 100 + -(-64 // devices) * 8 * 16

    for room in (60_000, 8_000, 2_000, 1_328):
        by_trial = next(n for n in range(1, 1000) if takes(n) <= room)
        with pytest.raises(UserError, match=f"at least {by_trial} such devices"):
            memory.check_fits(collection(tables, devices=1).stacks, room, 1)
    with pytest.raises(UserError, match="Not even a row of each has room"):
        memory.check_fits(collection(tables, devices=1).stacks, 1_227, 1)


def test_on_gpus_the_room_is_a_pool_of_which_the_message_names_the_size():
    stacks = collection(ONE_BIG).stacks
    for platform, named in (("gpu", True), ("cpu", False), ("tpu", False)):
        with pytest.raises(UserError, match="too much") as refusal:
            memory.check_fits(stacks, 100, 8, platform=platform)
        assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in str(refusal.value)) is named
