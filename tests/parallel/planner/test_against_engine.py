"""What is planned, the engine builds; what is estimated, it allocates."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from planner_cases import machine

from scalejax.errors import UserError
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import (
    MOST_ROWS,
    Adagrad,
    Adam,
    IdMapConfig,
    Lamb,
    LarsSgd,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    Sgd,
    TableConfig,
)
from scalejax.parallel.embedding.plan.placement import place
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.mesh import AXES
from scalejax.parallel.planner import AnalyticPlanner, Reuse, TableConstraints, TableStatistics, evaluate
from scalejax.parallel.planner.options import KINDS

OPTIMIZERS = (
    Sgd(),
    Sgd(max_norm=1.0),
    Adagrad(),
    RowwiseAdagrad(),
    RowwiseAdagrad(statistic="slice"),
    RowwiseAdagrad(max_norm=2.0),
    Adam(),
    PartialRowwiseAdam(),
    Lamb(),
    PartialRowwiseLamb(),
    LarsSgd(),
)
SHAPES = ((1, 1), (2, 2), (3, 1), (4, 2), (8, 4), (8, 8), (6, 3))
BATCH = 480
COUNTERS = 4 + 2 * 4
"""Bytes of a device that are no table: the number of updates and two counts of faults."""


def mapped(table, rng):
    """The table with an id map, whose buckets divide over every number of `SHAPES`."""
    ways = int(rng.choice([1, 2, 8]))
    id_map = IdMapConfig(
        rows=1 + 24 * int(rng.integers(1, 50)) * ways,
        ways=ways,
        admit_after=int(rng.integers(1, 3)),
        candidate_ways=int(rng.choice([1, 3, 8])),
    )
    return dataclasses.replace(table, rows=id_map.rows, id_map=id_map)


def random_case(seed):
    """Tables, their statistics, a machine, constraints, and how gradients add up."""
    rng = np.random.default_rng(seed)
    tables, statistics, constraints = [], [], []
    for number in range(rng.integers(1, 7)):
        features = tuple(f"f{number}_{i}" for i in range(rng.integers(1, 3)))
        dtype = ("float32", "bfloat16", "float16", "float64")[rng.choice(4, p=(0.5, 0.2, 0.2, 0.1))]
        table = TableConfig(
            name=f"t{number}",
            rows=int(10 ** rng.uniform(0, 5)),
            dim=int(rng.choice([1, 3, 8, 16, 24, 40, 48, 64, 96, 128])),
            features=features,
            pooling=("sum", "mean", "none")[rng.integers(3)],
            dtype=dtype,
            optimizer=OPTIMIZERS[rng.integers(len(OPTIMIZERS))],
            rounding=("stochastic", "nearest")[rng.integers(2)],
            track=("nothing", "updates")[rng.integers(2)],
        )
        if rng.random() < 0.25:
            table = mapped(table, rng)
        tables.append(table)
        pooling = tuple(float(rng.uniform(0, 20)) for _ in features)
        reuse = Reuse(factor=float(rng.uniform(1, 9)))
        statistics.append(TableStatistics(table=table.name, pooling_factors=pooling, popularity=reuse))
        if rng.random() < 0.7:
            kinds = tuple(k for k in KINDS if rng.random() < 0.5) or None
            width, most = int(rng.choice([1, 2, 4, 8, 16, 32])), int(rng.choice([1, 2, 8]))
            constraints.append(TableConstraints(table=table.name, kinds=kinds, min_slice_width=width, max_devices=most))
    devices, in_group = SHAPES[rng.integers(len(SHAPES))]
    topology = dataclasses.replace(machine(devices, 1), devices_per_group=in_group)
    return tables, statistics, topology, constraints, ("ordered", "exact")[rng.integers(2)]


def planned(seed):
    """A plan for a random case, constraints that leave nothing being taken off, and the case."""
    tables, statistics, topology, constraints, accumulate = random_case(seed)
    if any(table.dtype == "float64" for table in tables):
        accumulate = "ordered"  # sums in fixed point are of float32
    planner = AnalyticPlanner(accumulate=accumulate)
    while True:
        try:
            return planner.plan(tables, statistics, topology, BATCH, constraints), tables, topology, accumulate
        except UserError as error:
            assert "cannot be sharded as they ask" in str(error)
            name = str(error).split("'")[1]
            constraints = [c for c in constraints if c.table != name]


def mesh_of(topology):
    devices = np.array(jax.devices()[: topology.devices])
    return Mesh(devices.reshape(topology.groups, topology.group_size, 1, 1, 1, 1), AXES)


def allocated(tables, topology, plan, **options):
    """Bytes of every device of the state that the engine would allocate, without its counters and its key."""
    state = EmbeddingCollection(tables=tuple(tables), mesh=mesh_of(topology), plan=plan, **options).abstract_state()
    state.pop("key", None)
    for leaves in state.get("maps", {}).values():
        del leaves["counts"]
    total = 0
    for leaf in jax.tree.leaves(state):
        total += int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    return total - COUNTERS


@pytest.mark.slow
def test_the_engine_builds_every_plan_and_allocates_what_was_estimated():
    kinds, of_maps, sliced = Counter(), Counter(), 0
    for seed in range(300):
        found, tables, topology, accumulate = planned(seed)
        with jax.enable_x64(True):  # float64 tables
            held = allocated(tables, topology, found.plan, accumulate=accumulate)
        estimated = {device.table_bytes + device.padding_bytes for device in found.report.devices}
        assert estimated == {held}, seed
        kinds.update(entry.kind for entry in found.plan.tables)
        of_maps.update(e.kind for e, table in zip(found.plan.tables, tables, strict=True) if table.id_map)
        sliced += any(entry.columns > 1 for entry in found.plan.tables)
    assert set(kinds) == set(KINDS)  # every kind was put to the test
    assert set(of_maps) == set(KINDS)
    assert sliced > 30


def uneven_plans(tables):
    """Hand-made: everything on one device, uneven slices, groups, copies, and places that are left to the engine."""
    first, second, third = (table.name for table in tables)
    yield tuple(TablePlan(table=name, kind="table_wise", ranks=(0,)) for name in (first, second, third))
    yield (
        TablePlan(table=first, kind="column_wise", columns=4, ranks=(0, 1, 1, 2)),
        TablePlan(table=second, kind="row_wise", ranks=(5, 6, 7)),
        TablePlan(table=third, kind="data_parallel"),
    )
    yield (
        TablePlan(table=first, kind="grid", columns=2, ranks=(0, 1, 2, 3, 0, 1, 2, 3)),
        TablePlan(table=second, kind="table_row_wise"),
        TablePlan(table=third, kind="table_column_wise", columns=2),
    )
    yield ()


@pytest.mark.parametrize("number", range(4))
def test_plans_made_by_hand_are_estimated_as_they_are_allocated(number):
    tables = tuple(
        TableConfig(name=f"t{i}", rows=rows, dim=64, features=(f"f{i}",)) for i, rows in enumerate((1001, 77, 3))
    )
    statistics = [TableStatistics(table=t.name, pooling_factors=(2.0,), popularity=Reuse(factor=2.0)) for t in tables]
    topology = machine(8, 4)
    plan = ShardingPlan(tables=list(uneven_plans(tables))[number])
    report = evaluate(plan, tables, statistics, topology, BATCH)
    held = allocated(tables, topology, plan)
    assert {device.table_bytes + device.padding_bytes for device in report.devices} == {held}
    if number == 0:  # all the rows on every device: seven of eight hold padding alone
        assert held == (1001 + 77 + 3) * (4 * 64 + 4)
        assert [device.table_bytes for device in report.devices] == [held] + [0] * 7


def test_the_planner_and_the_engine_count_the_rows_of_a_device_alike():
    rows = MOST_ROWS // 2 + 1
    tables = [TableConfig(name=f"t{i}", rows=rows, dim=1, features=(f"f{i}",), optimizer=Sgd()) for i in range(2)]
    statistics = [TableStatistics(table=t.name, pooling_factors=(1.0,), popularity=Reuse(factor=1.0)) for t in tables]
    topology = machine(2, 2, memory=2**50)
    copies = [TableConstraints(table=t.name, kinds=("data_parallel",)) for t in tables]
    with pytest.raises(UserError, match="do not fit"):
        AnalyticPlanner().plan(tables, statistics, topology, BATCH, copies)
    both = ShardingPlan(tables=tuple(TablePlan(table=t.name, kind="data_parallel") for t in tables))
    with pytest.raises(UserError, match="rows on one device"):
        allocated(tables, topology, both)
    found = AnalyticPlanner().plan(tables, statistics, topology, BATCH)
    assert allocated(tables, topology, found.plan) > 0


@pytest.mark.parametrize("devices", [4, 5, 8])
def test_an_id_map_that_the_engine_refuses_is_not_planned_for(devices):
    id_map = IdMapConfig(rows=1 + 50 * 2, ways=2)
    table = TableConfig(name="t", rows=id_map.rows, dim=8, features=("f",), id_map=id_map)
    statistics = [TableStatistics(table="t", pooling_factors=(1.0,), popularity=Reuse(factor=1.0))]
    topology = machine(devices, devices)
    if devices == 5:
        found = AnalyticPlanner().plan([table], statistics, topology, BATCH)
        assert allocated([table], topology, found.plan) > 0
        return
    asked = (
        lambda: AnalyticPlanner().plan([table], statistics, topology, BATCH),
        lambda: evaluate(ShardingPlan(), [table], statistics, topology, BATCH),
        lambda: allocated([table], topology, ShardingPlan()),
    )
    for ask in asked:
        with pytest.raises(UserError, match=f"table 't' has an id map .* 50 buckets .* over {devices} devices"):
            ask()


def test_an_id_map_takes_room_from_the_rows():
    id_map = IdMapConfig(rows=1 + 8 * 1000, ways=8, admit_after=2)
    table = TableConfig(name="t", rows=id_map.rows, dim=1, features=("f",), id_map=id_map, optimizer=Sgd())
    statistics = [TableStatistics(table="t", pooling_factors=(0.001,), popularity=Reuse(factor=1.0))]
    rows, ways = 4 * id_map.rows, 16 * 1000 * (8 + 8)
    with pytest.raises(UserError, match="do not fit"):
        AnalyticPlanner().plan([table], statistics, machine(1, 1, memory=rows + ways - 1), BATCH)
    (line,) = AnalyticPlanner().plan([table], statistics, machine(1, 1, memory=rows + ways + 8000), BATCH).report.tables
    assert line.bytes == rows + ways


def test_a_plan_says_how_many_devices_it_was_made_for():
    found, tables, topology, _ = planned(4)
    assert found.plan.devices == topology.devices
    other = 2 * topology.devices
    with pytest.raises(UserError, match=f"was made for {topology.devices} devices, but {other} hold one copy"):
        place(tables, found.plan, devices=other, devices_per_host=topology.group_size)
