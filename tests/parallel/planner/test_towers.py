"""Towers on hosts: every table on the host of its tower, hosts as even as can be, costs of exchanges in two levels."""

import dataclasses
import itertools

import numpy as np
import pytest
from embedding_cases import schema_of
from planner_cases import machine, table

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.plan.placement import PlanRefused, place
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.planner import AnalyticPlanner, TableConstraints, evaluate
from scalejax.parallel.planner.estimators import estimate, work
from scalejax.parallel.towers import Partition

BATCH = 256
TWO_LEVEL = Exchange(route="two_level")


def made(count, seed=0, **changes):
    """Tables t0, t1, ... of features t0_ids, t1_ids, ... with very unequal work, and their statistics."""
    rng = np.random.default_rng(seed)
    pairs = [
        table(f"t{i}", int(10 ** rng.uniform(1, 4)), 64, pooling=float(rng.lognormal(1, 1)), **changes)
        for i in range(count)
    ]
    return tuple(t for t, _ in pairs), tuple(s for _, s in pairs)


def in_turn(count, towers):
    return Partition(towers=tuple(tuple(f"t{i}_ids" for i in range(t, count, towers)) for t in range(towers)))


def planned(tables, statistics, topology, towers, constraints=(), exchange=TWO_LEVEL):
    return AnalyticPlanner(exchange=exchange).plan(tables, statistics, topology, BATCH, constraints, towers)


def host_of_tables(plan, tables, topology):
    """Hosts of each table."""
    placed = place(tables, plan, devices=topology.devices, devices_per_host=topology.group_size)
    return {
        name: {rank // topology.group_size for part in parts for rank in part.ranks or range(topology.devices)}
        for name, parts in placed.items()
    }


@pytest.mark.parametrize(
    ("hosts", "inside", "towers"), [(1, 8, 3), (2, 4, 2), (2, 4, 6), (4, 2, 4), (4, 2, 8), (8, 1, 8)]
)
@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_every_table_lies_on_the_host_of_its_tower(hosts, inside, towers, route):
    tables, statistics = made(20)
    topology = machine(8, inside)
    found = planned(tables, statistics, topology, in_turn(20, towers), exchange=Exchange(route=route))
    assert sorted(map(sorted, found.plan.towers)) == sorted(map(sorted, in_turn(20, towers).towers))
    at = host_of_tables(found.plan, tables, topology)
    for t, tower in enumerate(found.plan.towers):
        for feature in tower:
            assert at[feature.removesuffix("_ids")] == {t * hosts // towers}
    if hosts == towers:  # then nothing is gained by another order
        assert found.plan.towers == in_turn(20, towers).towers
    lines = found.report.hosts
    assert [t for line in lines for t in line.towers] == list(range(towers))
    assert max(line.max_s for line in lines) == found.report.max_s
    # What was searched is what is priced.
    assert found.report.max_s == pytest.approx(min(a.max_s for a in found.report.attempts if a.max_s is not None))


def test_rows_in_a_host_and_pieces_of_columns_are_both_taken():
    one_hot, _ = table("t0", 100, 128, pooling=1.0)
    many, _ = table("t1", 10_000, 64, pooling=64.0)
    tables = (one_hot, many)
    statistics = tuple(table(t.name, t.rows, t.dim, p)[1] for t, p in zip(tables, (1.0, 64.0), strict=True))
    found = planned(tables, statistics, machine(8, 4), in_turn(2, 2)).plan
    kinds = {entry.table: entry.kind for entry in found.tables}
    assert kinds["t1"] in ("table_row_wise", "table_column_wise")
    assert all(kind in ("table_wise", "table_row_wise", "table_column_wise") for kind in kinds.values())


@pytest.mark.parametrize(("hosts", "seed"), [(3, 0), (2, 0), (2, 4)])
def test_hosts_are_as_even_as_the_best_of_all_assignments(hosts, seed):
    """With several towers a host, against every assignment of six."""
    dims = 32 * np.random.default_rng(seed).integers(1, 20, 6)
    pairs = [table(f"t{i}", 1000, int(dim)) for i, dim in enumerate(dims)]
    tables, statistics = tuple(t for t, _ in pairs), tuple(s for _, s in pairs)
    topology, towers, each = machine(6, 6 // hosts), in_turn(6, 6), 6 // hosts

    def rows(t, **more):
        return TableConstraints(table=f"t{t}", kinds=("table_row_wise",), **more)

    found = planned(tables, statistics, topology, towers, tuple(map(rows, range(6))))
    busiest = max(line.mean_s for line in found.report.hosts)
    every = []
    for order in itertools.permutations(range(6)):
        parts = [order[i : i + each] for i in range(0, 6, each)]
        if parts == sorted(map(tuple, map(sorted, parts))):
            fixed = tuple(rows(t, host=h) for h, part in enumerate(parts) for t in part)
            lines = planned(tables, statistics, topology, None, fixed).report.hosts
            every.append(max(line.mean_s for line in lines))
    assert len(every) == {3: 15, 2: 10}[hosts]
    assert busiest <= min(every) * 1.001
    assert max(every) > min(every) * 1.1


def test_a_table_can_be_held_to_a_host_or_to_any_one():
    tables, statistics = made(8)
    topology = machine(8, 4)
    limits = tuple(TableConstraints(table=t.name, host=1 if i < 2 else "any") for i, t in enumerate(tables))
    found = planned(tables, statistics, topology, None, limits)
    at = host_of_tables(found.plan, tables, topology)
    assert at["t0"] == at["t1"] == {1}
    assert all(len(hosts) == 1 for hosts in at.values())
    assert {h for hosts in at.values() for h in hosts} == {0, 1}
    assert found.plan.towers == ()


def test_a_tower_goes_to_the_host_that_one_of_its_tables_names():
    tables, statistics = made(8)
    topology = machine(8, 2)
    limits = (TableConstraints(table="t0", host=3),)
    found = planned(tables, statistics, topology, in_turn(8, 4), limits)
    at = host_of_tables(found.plan, tables, topology)
    assert at["t0"] == at["t4"] == {3}
    assert found.plan.towers[3] == ("t0_ids", "t4_ids")


def test_equal_input_gives_equal_plans_of_towers_in_any_order():
    tables, statistics = made(12)
    topology = machine(8, 4)
    first = planned(tables, statistics, topology, in_turn(12, 4))
    again = planned(tables[::-1], statistics[::-1], topology, in_turn(12, 4))
    assert {e.table: e for e in first.plan.tables} == {e.table: e for e in again.plan.tables}
    assert first.plan.towers == again.plan.towers


def test_the_engine_looks_every_table_up_on_the_host_of_its_tower():
    """Its features go by way of the device of their host, and none by rows or from everywhere."""
    tables, statistics = made(8)
    found = planned(tables, statistics, machine(8, 4), in_turn(8, 4))
    on = EmbeddingCollection(
        tables=tables, mesh=meshes.make_mesh(MeshShape(replica=2, fsdp=4)), plan=found.plan, exchange=TWO_LEVEL
    )
    layout = on.layout(schema_of({f"t{i}_ids": 2 for i in range(8)}, rows=10), 16)
    channels = {look.channel for stack in on.stacks for look in lookups(stack, layout)}
    assert channels <= {"bags", "host"}


TOPOLOGY = machine(8, 4, devices_per_host=4)


@pytest.mark.parametrize(
    ("kind", "parts", "columns"), [("table_wise", 1, 1), ("table_row_wise", 4, 1), ("table_column_wise", 1, 2)]
)
def test_two_levels_are_priced_by_their_closed_forms(kind, parts, columns):
    config, found = table("t", 1000, 64, pooling=10.0)
    asked = work(config, found, BATCH)
    option = estimate(asked, TOPOLOGY, kind=kind, columns=columns, row_parts=parts, route="two_level")
    width, ids = 64 // columns, 10 * BATCH / parts
    within, between = 3 / 4 / 1e11, 1 / 2 / 1e10
    rows = kind == "table_row_wise"
    inside = 4 * width * (ids if rows else BATCH)
    across = 4 * width * BATCH / parts
    assert option.shard.forward_comm == pytest.approx((4 * ids + inside) * within)
    assert option.shard.backward_comm == pytest.approx(inside * within)
    assert option.forwarded.forward_comm == pytest.approx((4 * ids + across) / 4 * between)
    assert option.forwarded.backward_comm == pytest.approx(across / 4 * between)
    # Between hosts every device of the host sends its part of one vector a bag, whatever the kind.
    vectors = option.shards * option.forwarded.backward_comm
    assert vectors == pytest.approx(4 * 64 * BATCH / 4 * between)
    assert option.everywhere.total == 0
    assert (option.forwarded.forward_compute > 0) == rows


def test_with_one_host_there_are_no_two_levels():
    config, found = table("t", 1000, 64, pooling=10.0)
    asked = work(config, found, BATCH)
    one = machine(8, 4, devices_per_group=8)
    flat, two = (estimate(asked, one, kind="table_wise", route=route) for route in ("flat", "two_level"))
    assert flat == two


def test_rates_of_the_hops_follow_the_hosts_of_a_group():
    inside, across = 1 / 1e11, 1 / 1e10
    alike = machine(16, 4)
    assert alike.within_s_per_byte == pytest.approx(3 / 4 * inside)
    assert alike.between_s_per_byte == pytest.approx(3 / 4 * across)
    shared = machine(16, 4, devices_per_group=8)  # two hosts an index
    assert shared.within_s_per_byte == pytest.approx(3 / 8 * inside + 4 / 8 * across)
    assert shared.between_s_per_byte == pytest.approx(1 / 2 * across)
    parted = machine(16, 4, devices_per_group=2)  # two indices a host
    assert parted.within_s_per_byte == pytest.approx(1 / 2 * inside)
    assert parted.between_s_per_byte == pytest.approx(1 / 8 * inside + 6 / 8 * across)


def test_pooling_in_the_host_makes_rows_of_one_host_cheaper_than_rows_of_all():
    """Where an example has many ids, one vector crosses in place of all rows."""
    tables, statistics = made(1)
    statistics = (dataclasses.replace(statistics[0], pooling_factors=(64.0,)),)
    topology = machine(64, 8)
    plans = {kind: ShardingPlan(tables=(TablePlan(table="t0", kind=kind),)) for kind in ("row_wise", "table_row_wise")}
    comm = {}
    for kind, plan in plans.items():
        for route in ("flat", "two_level"):
            report = evaluate(plan, tables, statistics, topology, BATCH, exchange=Exchange(route=route))
            comm[kind, route] = sum(d.seconds.forward_comm + d.seconds.backward_comm for d in report.devices)
    assert comm["table_row_wise", "two_level"] < comm["row_wise", "two_level"] / 5
    assert comm["table_row_wise", "two_level"] < comm["table_row_wise", "flat"] / 5


FOUR = in_turn(8, 4)


@pytest.mark.parametrize(
    ("towers", "constraints", "topology", "said"),
    [
        (FOUR, (), machine(9, 3), r"got 4 towers and replica=3\. Take replica=1 or 2 or 4 "),
        (FOUR, (), machine(8, 1), "got 4 towers and replica=8"),
        (in_turn(6, 2), (), machine(), "t6_ids, t7_ids are in none. Give --towers a file that"),
        (in_turn(9, 2), (), machine(), "t8_ids are not in the data"),
        (
            FOUR,
            (TableConstraints(table="t0", host=0), TableConstraints(table="t4", host=1)),
            machine(),
            "tower 0 would be on two indices of the mesh axis replica, with table 't0' on 0 and 't4' on 1",
        ),
        (
            FOUR,
            tuple(TableConstraints(table=f"t{i}", host=1) for i in range(3)),
            machine(),
            "3 towers must be on index 1 of the mesh axis replica, and 2 have room",
        ),
        (
            FOUR,
            (TableConstraints(table="t0", host=2),),
            machine(),
            "host of table 't0' must be an index.*0 to 1.*got 2",
        ),
        (FOUR, (TableConstraints(table="t0", kinds=("row_wise",)),), machine(), "all of one host"),
        (FOUR, (), machine(memory=2**17), "tower . takes .* of index . of replica: give it fewer features, or a mesh"),
    ],
)
def test_towers_that_cannot_be_are_refused(towers, constraints, topology, said):
    tables, statistics = made(8)
    with pytest.raises(UserError, match=said):
        planned(tables, statistics, topology, towers, constraints)


def test_a_host_that_is_no_index_is_refused():
    with pytest.raises(UserError, match="host must be an index of the mesh axis replica, 'any' or None; got 'one'"):
        TableConstraints(table="t", host="one")


def test_a_table_of_two_towers_is_refused():
    tables, statistics = made(2)
    shared = dataclasses.replace(tables[0], features=("t0_ids", "other"))
    statistics = (dataclasses.replace(statistics[0], pooling_factors=(1.0, 1.0)), statistics[1])
    towers = Partition(towers=(("t0_ids", "t1_ids"), ("other",)))
    with pytest.raises(
        UserError, match="table 't0' lies on one host, but towers share it: t0_ids is in tower 0, other"
    ):
        planned((shared, tables[1]), statistics, machine(), towers)


WISE = [TablePlan(table=f"t{i}", kind="table_wise", ranks=(4 * (i % 2),)) for i in range(4)]


@pytest.mark.parametrize(
    ("entries", "towers", "per_host", "said"),
    [
        (
            (*WISE[:3], TablePlan(table="t3", kind="row_wise")),
            2,
            4,
            "tower 1 belongs on index 1 of the mesh axis replica, but its table 't3' is on 0, 1. Plan again",
        ),
        (WISE[:3], 2, 4, "but its table 't3' is on 0, 1"),  # what is not named is row-wise
        ((*WISE[:3], TablePlan(table="t3", kind="data_parallel")), 2, 4, "its table 't3' is on 0, 1"),
        ((*WISE[:3], dataclasses.replace(WISE[3], ranks=(3,))), 2, 4, "its table 't3' is on 0"),
        (WISE, 2, 2, "got 2 towers and replica=4"),
    ],
)
def test_a_plan_whose_towers_are_not_on_their_hosts_is_refused(entries, towers, per_host, said):
    tables, _ = made(4)
    plan = ShardingPlan(tables=tuple(entries), towers=in_turn(4, towers).towers)
    with pytest.raises(PlanRefused, match=said):
        place(tables, plan, devices=8, devices_per_host=per_host)


def test_a_plan_of_towers_is_built_where_they_are_on_their_hosts():
    tables, _ = made(4)
    plan = ShardingPlan(tables=tuple(WISE), towers=in_turn(4, 2).towers)
    for per_host in (4, 8):
        assert place(tables, plan, devices=8, devices_per_host=per_host)
    with pytest.raises(UserError, match=r"t4_ids are not in the data\. Set tables\.sharding"):
        place(tables, dataclasses.replace(plan, towers=in_turn(5, 2).towers), devices=8, devices_per_host=4)
