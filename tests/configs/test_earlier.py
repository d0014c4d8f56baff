"""Run folders of before there was one kind of experiment are read and not trained further.

`earlier/` holds experiment.json files that were written then; the plan of `click` came from a file that is gone.
"""

import dataclasses
import json
import pathlib
import shutil

import pytest

from scalejax import configs
from scalejax.configs import earlier, serialization
from scalejax.errors import UserError
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape
from scalejax.train import loop
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.experiment import Gradients
from scalejax.train.run_folder import RunFolder

RECORDS = pathlib.Path(__file__).with_name("earlier")


def recorded(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


def test_a_run_with_tables_is_what_it_was():
    found = serialization.reload(recorded("click"), where="here")
    plan = (TablePlan(table="carrier", kind="table_wise", ranks=(1,)),)
    tables = found.tables
    assert tables.sharding == ShardingPlan(tables=plan, devices=2, replicas="copy")
    assert (tables.optimizer.learning_rate, tables.dtype, tables.full_every) == (0.2, "bfloat16", 12)
    assert (tables.pipeline, tables.accumulate, tables.exchange.capacity_factor) == ("ids", "exact", 3.0)
    assert (found.strategy, found.gradients) == (Fsdp(sharding="NO_SHARD"), Gradients(microbatch="cache"))
    assert (found.placement.mesh, found.evaluation.every) == (MeshShape(fsdp=2), 4)
    assert found.checkpoints.best_metric is None


def test_a_language_model_is_what_it_was():
    found = serialization.reload(recorded("dense"), where="here")
    assert found.gradients == Gradients(microbatch=2, loss_scaling=LossScaling())
    assert (found.placement.mesh, found.placement.offload) == (MeshShape(tensor=2), "optimizer")
    assert (found.evaluation.split, found.evaluation.final_split) == ("train", "train")


def test_a_run_over_a_graph_is_what_it_was():
    found = serialization.reload(recorded("graph"), where="here")
    assert (found.placement.mesh, found.evaluation.every, found.evaluation.final) == (MeshShape(fsdp=2), 2, "best")
    assert found.checkpoints.best_metric == "accuracy"  # as it was set


@pytest.mark.parametrize("name", ["click", "dense", "graph"])
def test_another_recipe_is_noticed(name):
    data = recorded(name)
    data["experiment"]["fields"]["model"]["fields"]["dropout" if name == "graph" else "dim"] = 7
    with pytest.raises(UserError, match=r"no longer gives the experiment of the run here: model\.\w+: 7 -> "):
        serialization.reload(data, where="here")


def test_what_is_of_now_is_left_as_it_is():
    now = serialization.record("gcn-smoke", (), configs.load("gcn-smoke"))
    assert earlier.as_now(now) is now


def test_a_file_of_a_user_may_have_been_brought_to_the_fields_of_now(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from scalejax.configs.graph import gcn\nfrom scalejax.train.experiment import Experiment\n\n\n"
        "def mine() -> Experiment:\n    return gcn.smoke()\n"
    )
    recipe = f"{tmp_path / 'mine.py'}:mine"
    before = recorded("graph") | {"recipe": "mine.py:mine", "file_sha256": "0" * 64}
    assert serialization.reload(before, recipe=recipe).placement.mesh == MeshShape(fsdp=2)
    with pytest.raises(UserError, match="this file is not the one that the run"):
        serialization.reload({**earlier.as_now(before)}, recipe=recipe)


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_it_is_not_trained_further(tmp_path, resume):
    shutil.copy(RECORDS / "graph.json", tmp_path / "experiment.json")
    with (
        RunFolder(tmp_path) as folder,
        pytest.raises(UserError, match=r"not trained further\. Train in another"),
    ):
        folder.resume_step(resume, 12, steps=24)


@pytest.mark.parametrize(
    ("given", "now"),
    [
        ("mesh.fsdp=2", "placement.mesh.fsdp"),
        ("row_optimizer.learning_rate=0.1", "tables.optimizer.learning_rate"),
        ("precision.tables=bfloat16", "tables.dtype"),
        ("checkpoints.full_every=8", "tables.full_every"),
        ("eval_every=2", "evaluation.every"),
    ],
)
def test_a_path_of_before_is_answered_with_the_one_of_now(given, now):
    with pytest.raises(UserError, match=rf"has no field '\w+'\. It is {now} now\."):
        configs.load("wukong-smoke", [given])


@pytest.mark.slow
def test_a_checkpoint_of_then_is_scored_if_its_data_are_those_of_now(tmp_path):
    """What a model computes with is read by name; of the identity of then only the data counts."""
    experiment = configs.load("gcn-smoke")
    loop.train(experiment, workdir=tmp_path)
    scored = loop.evaluate(experiment, workdir=tmp_path)
    path = tmp_path / "checkpoints" / "12"
    manifest = manifests.read(path)
    before = manifest.identity | {"model": "GcnConfig c16bc0a5a19f8a07", "optimizer": "of then"}
    arrays = {name: d for name, d in manifest.arrays.items() if not name.startswith("metrics.")}
    manifests.write(path, dataclasses.replace(manifest, identity=before, arrays=arrays))
    assert loop.evaluate(experiment, workdir=tmp_path) == scored
    manifests.write(path, dataclasses.replace(manifest, identity=before | {"data": "others"}))
    with pytest.raises(UserError, match="data is 'others' in the checkpoint"):
        loop.evaluate(experiment, workdir=tmp_path)


def test_a_field_that_has_been_renamed_since_is_read_by_both_names():
    now = serialization.record(
        "wukong-smoke",
        ["tables.exchange.overflow=count"],
        configs.load("wukong-smoke", ["tables.exchange.overflow=count"]),
    )
    before = json.loads(json.dumps(now).replace("overflow", "spill"))
    assert before["sets"] == ["tables.exchange.spill=count"]
    assert serialization.reload(before).tables.exchange.overflow == "count"
    before["experiment"]["fields"]["tables"]["fields"]["exchange"]["fields"]["spill"] = "fail"
    with pytest.raises(UserError, match=r"tables\.exchange\.overflow: 'fail' -> 'count'"):
        serialization.reload(before)
    with pytest.raises(UserError, match=r"It is tables\.exchange\.overflow now\."):
        configs.load("wukong-smoke", ["tables.exchange.spill=count"])
