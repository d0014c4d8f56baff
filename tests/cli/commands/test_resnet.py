"""Runs of ResNets as folders of Hugging Face, and runs that begin with such folders."""

import pathlib

import jax
import numpy as np
import pytest
from changes import changed

from scalejax import configs
from scalejax.configs import serialization
from scalejax.errors import UserError
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.surgery.heads import NewHead
from scalejax.train import loop
from scalejax.train.checkpoints import trained
from scalejax.train.experiment import Init
from scalejax.train.runs.run import Run

RECIPE = str(pathlib.Path(__file__).parents[2] / "outside" / "pictures.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    folder, experiment = tmp_path_factory.mktemp("run"), configs.load(RECIPE, ["steps=2"])
    record = serialization.record(RECIPE, ["steps=2"], experiment)
    loop.train(experiment, workdir=folder, recipe=RECIPE, record=record, console=None)
    return folder


@pytest.mark.slow
def test_a_run_becomes_a_folder_and_another_begins_with_it(invoke, run, tmp_path):
    experiment = configs.load(RECIPE, ["steps=2"])
    done = invoke("convert", str(run), str(tmp_path / "theirs"), "--recipe", RECIPE)
    assert done.exit_code == 0, done.stderr
    assert "step 2" in done.stdout
    known = trained.open_run(run)
    state = begun(changed(experiment, init=str(tmp_path / "theirs")))
    for path, array in {**known.params, **known.variables}.items():
        np.testing.assert_array_equal({**state.params, **state.variables}[path], array[...])

    other = changed(experiment, data__classes=3)
    with pytest.raises(UserError, match=r"data.classes is 'row, column, down, up"):
        begun(changed(other, init=str(tmp_path / "theirs")))
    state = begun(changed(other, init=Init(path=str(tmp_path / "theirs"), surgery=NewHead())))
    assert state.params["head/kernel"].shape == (16, 3)
    for path, array in {**known.params, **known.variables}.items():
        if not path.startswith("head/"):
            np.testing.assert_array_equal({**state.params, **state.variables}[path], array[...])


def begun(experiment):
    """The state with which a run begins."""
    return Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:1])).begin()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--experts", "fused"), "--experts fused: {run} is no run of a language model"),
        (("--dtype", "float16"), "--dtype float16: {run} is no run of a language model"),
        (("--shard-size", "1"), "--shard-size 1.0: {run} is no run of a language model"),
        (("--step", "1"), "--step 1: "),
    ],
)
def test_mistakes_are_one_message(invoke, run, tmp_path, arguments, words):
    result = invoke("convert", str(run), str(tmp_path / "x"), "--recipe", RECIPE, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert words.format(run=run) in line
    assert not (tmp_path / "x").exists()
