"""The planner on experiments."""

import dataclasses
import io
import json
import pathlib

import numpy as np
import pytest
import small_run
from changes import changed
from rich.console import Console

from scalejax.configs.recsys import dcnv2
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.towers import TowersConfig
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.planner import Zipf
from scalejax.parallel.towers import Partition
from scalejax.plan.sharding import shard, statistics_of_schema
from scalejax.train.runs import binding

MACHINE = "h100:2x4"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An experiment on a file of 640 rows."""
    return small_run.experiment(small_run.write(tmp_path_factory.mktemp("data") / "rows.parquet"))


def test_a_plan_is_for_the_tables_and_the_mesh_of_the_experiment(small):
    found = shard(small, MACHINE)
    assert {entry.table for entry in found.planned.plan.tables} == {"shop", "hour", "item"}
    assert found.planned.plan.devices == 8
    assert found.mesh == {"replica": 2, "fsdp": 4}
    assert found.planned.report.topology.group_size == 4
    on = make_mesh(MeshShape(replica=2))
    built = binding.bind(changed(small, tables__sharding=found.planned.plan), small.data.schema(), on)
    assert built.collection.plan == found.planned.plan


def test_a_host_of_the_plan_is_what_the_mesh_makes_of_it(small):
    assert shard(small, MACHINE, mesh="fsdp=8").planned.report.topology.groups == 1
    assert shard(small, MACHINE, mesh="replica=4,fsdp=2").planned.report.topology.group_size == 2
    with pytest.raises(UserError, match="must multiply to the 8 devices"):
        shard(small, MACHINE, mesh="fsdp=3")


def test_equal_input_gives_equal_results(small):
    first, second = (shard(small, MACHINE, sample_batches=3) for _ in range(2))
    assert first.planned.plan == second.planned.plan
    assert first.to_json() == second.to_json()
    json.dumps(first.to_json())


def test_ids_are_counted_in_the_first_batches_of_the_data(small):
    # The shop is the same one in most examples: its rows repeat, and an update touches few of them.
    rng = np.random.default_rng(0)
    shops = np.where(rng.random(small_run.ROWS) < 0.97, 3, rng.integers(37, size=small_run.ROWS)).astype(np.int32)
    path = small_run.write(pathlib.Path(small.data.path).with_name("one_shop.parquet"), {"shop": shops})
    uneven = dataclasses.replace(small, data=dataclasses.replace(small.data, path=str(path)))
    seen = {}
    for name, experiment in (("even", small), ("uneven", uneven)):
        found = shard(experiment, MACHINE, sample_batches=4)
        assert "counted in the first 4 batches" in found.statistics
        seen[name] = found.planned.report.mean_s
    assert seen["uneven"] < seen["even"]
    assert "assumed" in shard(small, MACHINE).statistics


def test_ids_of_any_64_bits_are_counted(small):
    hashes = small_run.columns()["item"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    path = small_run.write(pathlib.Path(small.data.path).with_name("hashed.parquet"), {"item": hashes})
    features = (*small_run.FEATURES[:2], Categorical(name="item", rows=None))
    id_map = IdMapConfig(rows=1 + 64 * 2, ways=2)
    mapped = changed(
        small,
        data=small_run.data(path, categorical=features),
        tables__id_maps=(MappedFeatures(features=("item",), id_map=id_map),),
    )
    found = shard(mapped, MACHINE, sample_batches=3)
    assert "counted in the first 3 batches" in found.statistics
    assert {line.table for line in found.planned.report.tables} == {"shop", "hour", "item"}


def test_the_recipes_own_plan_is_priced_beside_it_or_its_fault_is_named(small):
    found = shard(small, MACHINE)
    assert found.recipe is not None
    assert found.planned.report.max_s <= found.recipe.max_s  # row-wise all over is among what the planner tries
    other = changed(
        small, tables__sharding=ShardingPlan(tables=(TablePlan(table="item", kind="table_wise", ranks=(9,)),))
    )
    found = shard(other, MACHINE)
    assert found.recipe is None
    assert "the mesh numbers its devices 0 to 7" in found.recipe_refused


def test_ids_per_example_are_those_of_the_schema():
    experiment = dcnv2.criteo()
    found = shard(experiment, "v5p:4x4x4")
    assert found.mesh == {"fsdp": 64}
    assert found.planned.report.topology.groups == 1  # one host, as the mesh sees it
    by_hand = {f.name: f.length for f in experiment.data.schema().categorical}
    assert sum(by_hand.values()) == 214
    # One hot table, C21 with 100 of 214 ids, is striped; whole slices of the others are less work than rows of all.
    kinds = {entry.table: entry.kind for entry in found.planned.plan.tables}
    assert kinds["C21"] == "row_wise"
    assert kinds["C23"] == "column_wise"
    assert found.recipe is not None
    assert found.planned.report.max_s < 0.9 * found.recipe.max_s


def test_lists_have_the_ids_that_there_is_room_for_and_the_positions_of_the_longest():
    schema = Schema(
        categorical=(
            Categorical(name="clicks", rows=9, length=None, max_length=50, capacity=7.5),
            Categorical(name="views", rows=9, length=None, max_length=4),
            Categorical(name="pair", rows=9, length=2),
        )
    )
    tables = (
        TableConfig(name="lists", rows=9, dim=4, features=("clicks", "pair"), pooling="none"),
        TableConfig(name="sums", rows=9, dim=4, features=("views",)),
    )
    lists, sums = statistics_of_schema(schema, tables, Zipf(exponent=1.0))
    assert (lists.pooling_factors, lists.positions) == ((7.5, 2.0), (50, 2))
    assert (sums.pooling_factors, sums.positions) == ((4.0,), ())


def test_tables_that_do_not_fit_are_named_with_what_lacks_and_what_helps():
    with pytest.raises(UserError) as refusal:
        shard(dcnv2.criteo(), "v5e:2x2")  # 98 GiB of tables and states on 4 x 16 GiB
    said = str(refusal.value)
    assert "the tables do not fit on 4 devices of 12.6 GiB" in said
    assert "more than is left there" in said
    assert "What helps: at least 8 devices are needed for the rows and states alone" in said


def test_wrong_numbers_are_refused(small):
    with pytest.raises(UserError, match="--batches must be at least 0; got -1"):
        shard(small, MACHINE, sample_batches=-1)
    with pytest.raises(UserError, match="--table-memory must be a share above 0"):
        shard(small, MACHINE, table_memory=0.0)
    with pytest.raises(UserError, match="exponent must lie in"):
        shard(small, MACHINE, zipf=99.0)


TOWERS = Partition(towers=(("hour", "item"), ("shop",)))


def test_towers_of_the_model_or_given_ones_are_kept_on_their_hosts(small):
    over = changed(small, model=TowersConfig(base=DlrmConfig(dim=8, bottom_hidden=(8,)), towers=TOWERS))
    for experiment, given, route in ((over, None, "towers"), (small, TOWERS, "two_level")):
        found = shard(experiment, MACHINE, towers=given)
        plan = found.planned.plan
        assert plan.towers == TOWERS.towers
        assert found.route == route
        at = {entry.table: {rank // 4 for rank in entry.ranks} for entry in plan.tables}
        assert at == {"hour": {0}, "item": {0}, "shop": {1}}
        assert [line.towers for line in found.planned.report.hosts] == [(0,), (1,)]
        text = printed(found)
        assert "hour, item" in text
        assert f"route: {route}" in text
        on = make_mesh(MeshShape(replica=2))
        run = changed(experiment, tables__sharding=plan, tables__exchange__route=route)
        built = binding.bind(run, small.data.schema(), on)
        assert built.collection.plan == plan
    alone = shard(over, "h100:1x8")  # in one host nothing is between hosts
    assert (alone.route, alone.planned.plan.towers) == ("flat", TOWERS.towers)
    with pytest.raises(UserError, match="got 2 towers and replica=4"):
        shard(over, "h100:4x2")
    assert shard(over, "h100:4x2", mesh="replica=2,fsdp=4").planned.report.topology.group_size == 4


def test_a_plan_made_for_other_towers_is_refused(small):
    base = DlrmConfig(dim=8, bottom_hidden=(8,))
    over = changed(small, model=TowersConfig(base=base, towers=TOWERS))
    plan, on = shard(over, MACHINE).planned.plan, make_mesh(MeshShape(replica=2))
    again = Partition(towers=(("item", "hour"), ("shop",)))  # the same, in another order within
    for towers in (TOWERS, again):
        run = changed(small, model=TowersConfig(base=base, towers=towers), tables__sharding=plan)
        assert binding.bind(run, small.data.schema(), on).collection.plan == plan
    for towers in ((("shop",), ("hour", "item")), (("hour",), ("shop", "item")), (("hour", "item", "shop"),)):
        run = changed(small, model=TowersConfig(base=base, towers=Partition(towers=towers)), tables__sharding=plan)
        with pytest.raises(UserError, match="plan keeps other towers together than the model has"):
            binding.bind(run, small.data.schema(), on)
    other = dataclasses.replace(plan, towers=(("hour", "item"), ("shop", "day")))
    with pytest.raises(UserError, match="day are not in the data"):
        binding.bind(changed(small, tables__sharding=other), small.data.schema(), on)


def test_two_levels_leave_most_tables_whole_and_the_busiest_device_less_busy():
    flat, hops = (
        shard(changed(dcnv2.criteo(), tables__exchange__route=route), "h100:8x8").planned
        for route in ("flat", "two_level")
    )
    assert [round(1e3 * found.report.max_s, 2) for found in (flat, hops)] == [1.51, 1.11]
    whole = [sum(entry.columns == 1 for entry in found.plan.tables) for found in (flat, hops)]
    assert whole == [0, 19]


def printed(found):
    console = Console(file=io.StringIO(), width=250)
    found.render(console)
    return console.file.getvalue()
