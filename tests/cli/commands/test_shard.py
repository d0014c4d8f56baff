"""`scalejax shard`: the report, the plan as a file, and that file in training."""

import json
import shlex

import jax
import pytest
import small_run

from scalejax import configs
from scalejax.configs import serialization
from scalejax.errors import UserError
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.planner import Constants
from scalejax.parallel.towers import Partition
from scalejax.train.runs import binding


def test_a_saved_plan_is_read_again_for_the_mesh_that_it_was_made_for(invoke, tmp_path):
    recipe = small_run.write_recipe(tmp_path)
    plan, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    asked = ("--topology", "h100:1x8", "--batches", "2", "--save", str(plan), "--json", str(figures))
    planning = invoke("shard", recipe, *asked)
    assert planning.exit_code == 0, planning.stderr
    for words in (
        "Tables",
        "item",
        "the recipe's own plan: busiest device",
        f"--set=tables.sharding={plan}",
        "placement.mesh.fsdp=8",
    ):
        assert words in planning.stdout
    assert json.loads(figures.read_text())["planned"]["fits"]
    kept = plan.read_bytes()
    invoke("shard", recipe, *asked)
    assert plan.read_bytes() == kept
    experiment = configs.load(recipe, [f"tables.sharding={plan}"])
    built = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))
    assert built.collection.plan == ShardingPlan.load(plan)
    # On another number of devices the plan is refused, not bent.
    with pytest.raises(UserError, match="was made for 8 devices, but 1 hold one copy"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape(), jax.devices()[:1]))


@pytest.mark.parametrize(
    ("sets", "mesh", "sizes"),
    [
        (("placement.mesh.replica=2",), "fsdp=8", (1, 8, 1, 1, 1, 1)),
        (
            ("placement.mesh.replica=4", "placement.mesh.fsdp=1", "placement.mesh.tensor=2"),
            "replica=2,fsdp=4",
            (2, 4, 1, 1, 1, 1),
        ),
        ((), "tensor=8", (1, 1, 1, 1, 8, 1)),
        (("placement.mesh=none",), "replica=2,fsdp=4", (2, 4, 1, 1, 1, 1)),
    ],
)
def test_the_next_command_trains_on_the_mesh_that_was_planned_for(invoke, tmp_path, sets, mesh, sizes):
    recipe = small_run.write_recipe(tmp_path)
    given = [word for text in sets for word in ("--set", text)]
    plan = tmp_path / "plan.json"
    planning = invoke("shard", recipe, "--topology", "h100:1x8", "--mesh", mesh, *given, "--save", str(plan))
    assert planning.exit_code == 0, planning.stderr
    command = shlex.split(planning.stdout.partition("Next, on 8 devices:")[2].removesuffix("  train by it\n"))
    assert command[:3] == ["scalejax", "train", recipe]
    again = [word.removeprefix("--set=") for word in command[3:]]
    assert configs.load(recipe, again).placement.mesh.resolve(8) == sizes


def test_a_plan_of_towers_gives_a_model_its_towers_in_the_order_of_their_hosts(invoke, tmp_path):
    plan, towers = tmp_path / "plan.json", tmp_path / "towers.json"
    # Four towers of unequal work: the planner assigns them to the two hosts.
    names = ("carrier", "tailnum", "plane_model", "flight", "origin", "dest", "month", "weekday", "hour")
    Partition(towers=(names[:4], names[4:6], names[6:8], names[8:])).save(towers)
    asked = ("--topology", "h100:2x4", "--save", str(plan))
    planning = invoke("shard", "dlrm-smoke_towers", *asked, "--set", f"model.towers={towers}")
    assert planning.exit_code == 0, planning.stderr
    assert "Hosts (indices of replica)" in planning.stdout
    command = shlex.split(planning.stdout.partition("Next, on 8 devices:")[2].removesuffix("  train by it\n"))
    again = [word.removeprefix("--set=") for word in command[3:]]
    assert f"model.towers={plan}" in again
    experiment = configs.load("dlrm-smoke_towers", again)
    assert experiment.tables.exchange.route == "towers"
    assert experiment.model.towers.towers == experiment.tables.sharding.towers != Partition.load(towers).towers
    built = binding.bind(experiment, experiment.data.schema(), make_mesh(experiment.placement.mesh))
    assert built.collection.plan == ShardingPlan.load(plan)
    recorded = json.loads(json.dumps(serialization.record("dlrm-smoke_towers", again, experiment)))
    plan.unlink()  # the record holds plan and towers
    assert serialization.reload(recorded) == experiment
    # A flat model has no towers of its own, and its tables go by those of the file.
    planning = invoke("shard", "dlrm-smoke", *asked, "--towers", str(towers))
    assert planning.exit_code == 0, planning.stderr
    assert "model.towers" not in planning.stdout
    assert ShardingPlan.load(plan).towers == experiment.model.towers.towers
    refused = invoke("shard", "dlrm-smoke", "--topology", "h100:3x4", "--towers", str(towers))
    assert refused.exit_code == 2
    assert "got 4 towers and replica=3" in refused.stderr


@pytest.mark.slow
def test_training_goes_by_a_saved_plan_and_records_it(invoke, tmp_path):
    recipe = small_run.write_recipe(tmp_path)
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    invoke("shard", recipe, "--topology", "h100:1x8", "--save", str(plan))
    done = invoke("train", recipe, "--set", f"tables.sharding={plan}", "--set", "steps=2", "--workdir", str(run))
    assert done.exit_code == 0, done.stderr
    recorded = json.loads((run / "experiment.json").read_text())["experiment"]["fields"]["tables"]
    recorded = recorded["fields"]["sharding"]["fields"]
    names = [entry.table for entry in ShardingPlan.load(plan).tables]
    assert [entry["fields"]["table"] for entry in recorded["tables"]] == names
    plan.unlink()  # the record holds it
    for mesh in ((), ("--mesh", "replica=2,fsdp=4")):
        scored = invoke("eval", str(run), "--recipe", recipe, *mesh)
        assert scored.exit_code == 0, scored.stderr


def test_measured_constants_replace_rates(invoke, tmp_path):
    recipe = small_run.write_recipe(tmp_path)
    Constants(device="H200", date="2026-11-21", memory_bandwidth=4e12).save(tmp_path / "constants.json")
    shown = invoke("shard", recipe, "--topology", "h200:1x8", "--constants", str(tmp_path / "constants.json"))
    assert "measured on H200, 2026-11-21" in shown.stdout
    assert shown.stdout.rstrip().endswith("--save plan.json  keep the plan")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--topology", "v5p:4x4x4", "--save", "plan.txt"), "--save plan.txt: must end in .json"),
        (("--topology", "v5e:2x2"), "the tables do not fit on 4 devices"),
        (("--topology", "h100"), "must look like"),
        (("--topology", "v5p:4x4x4", "--table-memory", "2"), "--table-memory must be a share"),
        (("--topology", "v5p:4x4x4", "--constants", "none.json"), "cannot read none.json"),
    ],
)
def test_mistakes_are_one_message(invoke, arguments, words):
    refused = invoke("shard", "dcnv2-criteo", *arguments)
    assert refused.exit_code == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line
