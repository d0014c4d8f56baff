"""LAMB and LANS in a run: norms of single layers on any devices, and a run that is killed."""

import dataclasses

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
import small_language_run as small
from flax import nnx

from scalejax import optim
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run
from scalejax.train.state import ModelShape

RATE = 0.05
LANS = optim.Lans(learning_rate=optim.Constant(value=RATE))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def stepped(texts, optimizer, devices, **changes):
    """Parameters before a step, the state after it, and the program."""
    experiment = small.experiment(texts, optimizer=optimizer, **changes)
    data = experiment.data.build()
    mesh = make_mesh(MeshShape(fsdp=devices), jax.devices()[:devices])
    program = binding.bind(experiment, data.schema, mesh)
    state = program.init()
    before = jax.tree.map(np.asarray, state.params)
    state, _ = program.train_step(state, convert.to_device(next(data.train_batches(start_example=0)), program))
    return before, state, program


@pytest.mark.slow
def test_a_step_of_lamb_moves_every_layer_by_the_same_share_of_its_norm(texts):
    before, state, program = stepped(texts, optim.Lamb(learning_rate=optim.Constant(value=RATE)), 8)
    assert program.model.stacked == {name: 1 for name in before if name.startswith("layers/")}
    for name, x in before.items():
        change = np.asarray(state.params[name], np.float64) - x
        for part, whole in zip(change, x, strict=True) if name in program.model.stacked else [(change, x)]:
            np.testing.assert_allclose(np.linalg.norm(part) / np.linalg.norm(whole), RATE, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_step_of_lans_on_eight_devices_is_that_on_one(texts, x64):
    wide = {"precision": Precision(params="float64")}
    (_, one, _), (_, eight, program) = (stepped(texts, LANS, devices, **wide) for devices in (1, 8))
    for name, want in one.params.items():
        np.testing.assert_allclose(eight.params[name], want, rtol=1e-9, atol=1e-12, err_msg=name)
    # The moments lie as the parameters do.
    moments = eight.optimizer[0]
    assert any(not p.sharding.is_fully_replicated for p in eight.params.values())
    for name, p in eight.params.items():
        assert moments.mu[name].sharding == moments.nu[name].sharding == p.sharding, name
    assert program.state_shardings.optimizer[0].count.is_fully_replicated


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(texts, tmp_path):
    experiment = small.experiment(texts, optimizer=dataclasses.replace(LANS, normalization="block"))
    whole = loop.train(experiment, workdir=tmp_path / "whole")
    resumed = killed_run.train(experiment, tmp_path / "killed", at=7)
    assert resumed["val_loss"] == whole["val_loss"]
    states = []
    for name in ("whole", "killed"):
        run = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape()))
        with Checkpointer(tmp_path / name / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            states.append(run.restore(checkpoints, 12)[0])
    for a, b in zip(*(jax.tree.leaves((state.params, state.optimizer)) for state in states), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_layers_and_towers_are_tensors_beside_each_other():
    class Model(nnx.Module):
        def __init__(self):
            self.each = nnx.Param(jnp.ones((2, 3, 4)), logical_axes=("towers", "layers", "norm"))
            self.experts = nnx.Param(jnp.ones((3, 4, 2, 2)), logical_axes=("layers", "experts", "input", "hidden"))
            self.turned = nnx.Param(jnp.ones((4, 3)), logical_axes=("input", "layers"))
            self.kernel = nnx.Param(jnp.ones((2, 2)), logical_axes=("input", "hidden"))

    assert ModelShape.of(Model()).stacked == {"each": 2, "experts": 1}
