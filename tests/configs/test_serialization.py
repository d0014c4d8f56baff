"""Experiments become JSON data exactly, differences are named, and code runs only because the user names it."""

import dataclasses
import json
import math
import pathlib
import shutil

import hypothesis
import hypothesis.strategies as st
import pytest

from scalejax import configs
from scalejax.configs import as_data, serialization
from scalejax.errors import UserError
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.towers import Partition

EXAMPLES = pathlib.Path(__file__).parent / "example_recipes.py"
RECIPE = f"{EXAMPLES}:first"


@dataclasses.dataclass(frozen=True)
class Held:
    value: object


def _through_json(data):
    return json.loads(json.dumps(data))


def test_data_names_types_and_fields():
    data = as_data.to_data(configs.load(RECIPE))
    assert data["type"] == "scalejax.train.experiment.Experiment"
    assert data["fields"]["model"]["fields"]["mlp"]["fields"] == {"hidden": [64, 32], "dropout": 0.0}
    assert data["fields"]["optimizer"]["type"] == "scalejax.optim.optimizers.Adam"


@hypothesis.given(st.floats())
def test_floats_survive_json_to_the_bit(value):
    data = _through_json(as_data.to_data(Held(value)))
    back = data["fields"]["value"]
    back = float(back["fields"]["value"]) if isinstance(back, dict) else back
    assert type(back) is float
    assert (math.isnan(value) and math.isnan(back)) or (value.hex() == back.hex())


def test_equal_after_json():
    experiment = configs.load(RECIPE, ["optimizer=AdamW", "model.mlp.dropout=0.1"])
    assert as_data.same(experiment, _through_json(as_data.to_data(experiment)))


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["steps=11"], ["steps: 10 -> 11"]),
        (["model.mlp.hidden=64,33"], ["model.mlp.hidden.1: 32 -> 33"]),
        (["model.mlp.hidden=64"], ["model.mlp.hidden: (64, 32) -> (64,)"]),
        (["optimizer=AdamW"], ["optimizer: Adam -> AdamW"]),
        (["data.path=x", "seed=1"], ["data.path: None -> 'x'", "seed: 0 -> 1"]),
    ],
)
def test_diff_names_the_paths(sets, expected):
    assert as_data.diff(configs.load(RECIPE), configs.load(RECIPE, sets)) == expected


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (0.0, -0.0), (1, True), (None, 0), ("1", 1), ((), None)])
def test_types_and_signs_count(a, b):
    assert not as_data.same(Held(a), Held(b))


@pytest.mark.parametrize("value", [[1], {1: 2}, {"a": len}, object(), len, b"x"])
def test_refuses_live_objects(value):
    with pytest.raises(ValueError, match=r"experiment\.value(\.a)? must be a plain value"):
        as_data.to_data(Held(value))


def _recorded(recipe, *sets):
    return _through_json(serialization.record(recipe, sets, configs.load(recipe, sets)))


def test_a_user_file_is_run_again_only_when_it_is_named():
    recorded = _recorded(RECIPE, "steps=7")
    with pytest.raises(UserError, match=r"is no recipe of scalejax.* name it: --recipe .*example_recipes\.py:first"):
        serialization.reload(recorded)
    assert serialization.reload(recorded, recipe=RECIPE).steps == 7


def test_a_moved_copy_of_the_file_will_do(tmp_path):
    copy = tmp_path / "example_recipes.py"
    shutil.copy(EXAMPLES, copy)
    assert serialization.reload(_recorded(RECIPE, "steps=7"), recipe=f"{copy}:first").steps == 7


def test_a_changed_file_is_refused(tmp_path):
    changed = tmp_path / "example_recipes.py"
    changed.write_text(EXAMPLES.read_text() + "\n")
    with pytest.raises(UserError, match="not the one that the run"):
        serialization.reload(_recorded(RECIPE), recipe=f"{changed}:first")


def test_another_function_of_the_file_is_refused():
    with pytest.raises(UserError, match="came from function 'first'"):
        serialization.reload(_recorded(RECIPE), recipe=f"{EXAMPLES}:second")


def test_a_recipe_that_has_changed_since_is_refused():
    recorded = _recorded(RECIPE)
    recorded["experiment"]["fields"]["steps"] = 5
    with pytest.raises(UserError, match=r"no longer gives the experiment .*steps: 5 -> 10"):
        serialization.reload(recorded, recipe=RECIPE)


def test_a_recipe_may_learn_options_of_the_compiler_that_its_runs_did_not_have():
    recorded = _recorded("wukong-smoke")
    assert recorded["experiment"]["fields"]["xla_flags"] == ["tpu-async-all-to-all"]
    recorded["experiment"]["fields"]["xla_flags"] = []
    assert serialization.reload(recorded) == configs.load("wukong-smoke")
    recorded = _recorded("wukong-smoke", "xla_flags=gpu-deterministic")
    assert serialization.reload(recorded).xla_flags == ("gpu-deterministic",)


def test_a_field_that_the_record_lacks_counts_as_its_default():
    recorded = _recorded("llama-smoke")
    for name in ("mlp", "norm", "self_attention", "unroll"):
        del recorded["experiment"]["fields"]["model"]["fields"][name]
    assert serialization.reload(recorded) == configs.load("llama-smoke")
    recorded = _recorded("llama")
    del recorded["experiment"]["fields"]["model"]["fields"]["unroll"]
    with pytest.raises(UserError, match=r"no longer gives the experiment .*model\.unroll: 1 -> 4"):
        serialization.reload(recorded)


def test_a_module_of_the_user_is_run_again_only_when_it_is_named(tmp_path, monkeypatch):
    shutil.copy(EXAMPLES, tmp_path / "recipes_of_a_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    named = "recipes_of_a_module:second"
    recorded = _recorded(named)
    assert recorded["file_sha256"] is None
    assert serialization.reload(recorded, recipe=named).steps == 3
    with pytest.raises(UserError, match=f"name it: --recipe {named}"):
        serialization.reload(recorded)
    for other in (RECIPE, "recipes_of_a_module:first"):
        with pytest.raises(UserError, match=f"came from '{named}'. Give that one"):
            serialization.reload(recorded, recipe=other)


def test_a_file_without_its_digest_is_refused():
    recorded = _recorded(RECIPE) | {"file_sha256": None}
    with pytest.raises(UserError, match="has no SHA-256"):
        serialization.reload(recorded, recipe=RECIPE)


@pytest.mark.parametrize("named", ["wukong-smoke", "scalejax.configs.recsys.wukong:smoke"])
def test_a_recipe_of_the_package_is_run_again_by_itself(named):
    recorded = _recorded(named)
    assert serialization.reload(recorded) == configs.load(named)
    with pytest.raises(UserError, match="Leave --recipe out"):
        serialization.reload(recorded, recipe=RECIPE)


def test_a_plan_of_a_file_is_taken_from_the_record(tmp_path):
    plan = ShardingPlan(
        tables=(TablePlan(table="a", kind="table_wise", ranks=(1,)), TablePlan(table="b", kind="data_parallel")),
        devices=2,
    )
    plan.save(tmp_path / "plan.json")
    sets = ("steps=7", f"tables.sharding={tmp_path / 'plan.json'}", "tables.sharding.replicas=copy", "seed=3")
    recorded = _recorded(RECIPE, *sets)
    (tmp_path / "plan.json").unlink()
    found = serialization.reload(recorded, recipe=RECIPE)
    assert found.tables.sharding == dataclasses.replace(plan, replicas="copy")
    assert (found.steps, found.seed) == (7, 3)
    recorded["experiment"]["fields"]["tables"]["fields"]["sharding"]["fields"]["tables"] = "b"
    with pytest.raises(
        UserError, match=r"tables in tables\.sharding in experiment\.json of the run here must be a list"
    ):
        serialization.reload(recorded, recipe=RECIPE, where="here")


def test_towers_of_a_file_are_taken_from_the_record_and_those_of_the_command_line_read_again(tmp_path):
    towers = Partition(
        towers=(("carrier", "tailnum", "hour", "flight"), ("plane_model", "origin", "dest"), ("month", "weekday"))
    )
    towers.save(tmp_path / "towers.json")
    recorded = json.loads(json.dumps(_recorded("dlrm-smoke_towers", f"model.towers={tmp_path / 'towers.json'}")))
    (tmp_path / "towers.json").unlink()
    assert serialization.reload(recorded).model.towers == towers
    as_text = str([list(tower) for tower in towers.towers]).replace(" ", "")
    recorded = json.loads(json.dumps(_recorded("dlrm-smoke_towers", f"model.towers={as_text}")))
    assert serialization.reload(recorded).model.towers == towers


def test_a_phase_that_changes_a_part_of_the_model_is_recorded_and_found_again():
    """Its changes are whole paths."""
    experiment = configs.load("moma-smoke")
    recorded = json.loads(json.dumps(serialization.record("moma-smoke", [], experiment)))
    assert serialization.reload(recorded) == experiment
