"""Models of many kinds, each one file of a user and one recipe: they train, go on after a kill, and know no mesh."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changes import changed
from flax import nnx

from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import binding, convert, loop, scoring
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.pipeline import Pipeline
from scalejax.train.run import Run
from scalejax.train.run_folder import read_lines
from scalejax.train.task import Batch, whole

FOLDER = pathlib.Path(__file__).parent.parent / "outside"

LEARNS = {
    # file: (value of the summary, how it is to be, what was learnt; what a trivial model has)
    "segmenter": ("test_dice", "above", 0.75),  # all pixels marked: 0.46
    "detector": ("test_found", "above", 0.6),  # three cells at random: 0.05
    "diffusion": ("test_loss", "below", 0.5),  # no noise predicted: 1
    "pair": ("test_retrieved", "above", 0.5),  # at random: 0.06
    "soft_targets": ("test_accuracy", "above", 0.7),  # the same class always: 0.33
    "inversion": ("test_loss", "below", 0.3),  # the token as it begins: 0.65
    "supernet": ("test_accuracy", "above", 0.8),  # the same class always: 0.5
    "pruner": ("test_loss", "below", 0.25),  # the mean of the values: 0.6
    "preferences": ("test_agreement", "above", 0.7),  # the reference: 0.5
}
TRAINED_BESIDE_MATRICES = {"inversion": {"token"}, "preferences": {"policy/embedding", "policy/head"}}
STRATEGIES = {"implicit": Fsdp(), "explicit": Fsdp(form="explicit"), "ddp": Ddp()}
CHEAP = ("segmenter", "detector", "pair", "soft_targets", "supernet")


def recipe(name):
    """The recipe of a user's file: its only function of that name."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_a_user", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


def bound(experiment, devices, **changes):
    """A run on so many devices."""
    experiment = changed(experiment, **changes)
    return Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def steps(run, state, count, examples=0):
    """(State, losses) after some steps."""
    losses, batches = [], run.program.task.train_batches(run.data, run.mesh, examples)
    for _ in range(count):
        state, loss = run.program.train_step(state, convert.to_device(next(batches), run.program))
        losses.append(float(loss))
    return state, losses


def stored(experiment, folder, step=None):
    run = bound(experiment, None)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        tree, known = checkpoints.restore(step, run.abstract_stored())
    tree["key"] = jax.random.key_data(tree["key"])
    return host(tree), known


@pytest.fixture(scope="module", params=LEARNS)
def trained(request, tmp_path_factory):
    """(Name, experiment, run folder, summary) of each model."""
    experiment, folder = recipe(request.param), tmp_path_factory.mktemp(request.param)
    return request.param, experiment, folder, loop.train(experiment, workdir=folder)


def test_it_learns_more_than_what_is_trivial(trained):
    name, _, folder, summary = trained
    value, how, limit = LEARNS[name]
    assert summary[value] > limit if how == "above" else summary[value] < limit
    assert (folder / "report.html").exists()


def test_a_run_in_two_halves_has_the_same_bits(trained, tmp_path):
    _, experiment, folder, summary = trained
    half = experiment.steps // 2
    loop.train(changed(experiment, steps=half), workdir=tmp_path)
    before = stored(experiment, folder, half)[0]
    jax.tree.map(np.testing.assert_array_equal, before, stored(experiment, tmp_path)[0])
    again = loop.train(experiment, workdir=tmp_path, resume="must")
    one, two = stored(experiment, folder), stored(experiment, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, one[0], two[0])
    assert one[1] == two[1]
    assert not all(np.array_equal(one[0]["params"][path], x) for path, x in before["params"].items())
    value = LEARNS[trained[0]][0]
    assert again[value] == summary[value]


def of_devices(name, strategy, devices):
    """Losses, and parameters, variables and averages, after four steps in float64."""
    run = bound(recipe(name), devices, precision=Precision(params="float64"), strategy=strategy)
    state, losses = steps(run, run.program.init(), 4)
    return losses, host({**state.params, **state.variables, "averages": state.averages}), run, state


@pytest.fixture(scope="module")
def of_one_device():
    """What one device finds, by the name of the model."""
    found = {}

    def find(name):
        if name not in found:
            with jax.enable_x64(True):
                found[name] = of_devices(name, Fsdp(), 1)
        return found[name]

    return find


def assert_close(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), found[1], wanted[1])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in LEARNS])
def test_eight_devices_are_one(of_one_device, name, form):
    assert_close(of_devices(name, STRATEGIES[form], 8), of_one_device(name))
