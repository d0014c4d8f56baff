"""The features of each tower, and the order of towers, are part of what a run is: its parameters lie tower by tower."""

import dataclasses
import json
import shutil

import pytest
import small_run

from scalejax.errors import UserError
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.parallel.towers import Partition
from scalejax.train import loop
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.experiment import Phase

BASE = DlrmConfig(dim=4, bottom_hidden=(4,), top_hidden=(4,))


def over(*towers):
    return TowersConfig(base=BASE, towers=Partition(towers=towers), modules=(DlrmTower(dim=2),))


FIRST = over(("item",), ("shop", "hour"))
OTHERS = {
    "other towers": over(("shop",), ("item", "hour")),
    "another order of towers": over(("shop", "hour"), ("item",)),
    "another order in a tower": over(("item",), ("hour", "shop")),
}
SAID = r"model.towers is '\[\[\"item\"\], \[\"shop\", \"hour\"\]\]' in the checkpoint and '\[\[.*' here"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    rows = small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")
    return small_run.experiment(rows, model=FIRST, steps=2, log_every=1, evaluation__every=0)


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    loop.train(experiment, workdir=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_towers_neither_go_on_nor_begin_with_a_run_nor_score_it(experiment, run, tmp_path, model):
    other = dataclasses.replace(experiment, model=model)
    with pytest.raises(UserError, match=SAID):
        loop.train(dataclasses.replace(other, steps=4), workdir=run, resume="must")
    with pytest.raises(UserError, match=SAID):
        loop.train(dataclasses.replace(other, init=str(run)), workdir=tmp_path)
    with pytest.raises(UserError, match=SAID):
        loop.evaluate(other, workdir=run, split="validation")


def test_a_phase_with_other_towers_wants_a_surgery(experiment, tmp_path):
    phase = Phase(name="other", steps=1, changes={"model": OTHERS["other towers"]})
    with pytest.raises(UserError, match=r"'other' has no surgery.*model.towers is"):
        loop.train(dataclasses.replace(experiment, phases=(phase,)), workdir=tmp_path)


@pytest.mark.slow
def test_a_checkpoint_from_before_towers_were_named_goes_on(experiment, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "2"
    manifest = manifests.read(folder)
    named = json.loads(manifest.identity["model.towers"])
    assert named == [["item"], ["shop", "hour"]]
    identity = {name: text for name, text in manifest.identity.items() if name != "model.towers"}
    manifests.write(folder, dataclasses.replace(manifest, identity=identity))
    assert loop.train(dataclasses.replace(experiment, steps=3), workdir=tmp_path / "run", resume="must")["steps"] == 3


def test_models_without_towers_name_none(experiment):
    assert BASE.task(experiment.data.schema()).identity() == {}
