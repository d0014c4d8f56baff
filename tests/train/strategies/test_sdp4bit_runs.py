"""Whole runs under SDP4Bit: killed and resumed, on other devices, scored as they were, beside plain ones."""

import dataclasses

import jax
import killed_run
import numpy as np
import pytest
import small_language_run
from changes import changed

from scalejax.configs import overrides
from scalejax.errors import UserError
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.train import loop, run_folder
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Precision
from scalejax.train.runs.run import Run

MESH = MeshShape(replica=2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small_language_run.write(tmp_path_factory.mktemp("texts") / "documents")


def experiment_of(texts, **changes):
    settings = {"strategy": Sdp4Bit(), "placement__mesh": MESH, "steps": 8, **changes}
    return small_language_run.experiment(texts, **settings)


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """(folder, what the run said) of one that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, loop.train(experiment_of(texts), workdir=folder)


def restored(experiment, folder, devices=8):
    """The whole stored state of the newest checkpoint, on so many devices."""
    mesh = make_mesh(experiment.placement.mesh, jax.devices()[:devices])
    run = Run.bind(experiment, experiment.data.build(), mesh)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        stored = run.to_stored(run.restore(checkpoints, None)[0])
    stored["key"] = jax.random.key_data(stored["key"])
    return jax.tree.map(np.asarray, stored)


def bound(experiment):
    return Run.bind(experiment, experiment.data.build(), make_mesh(experiment.placement.mesh))


def scored(experiment, folder, devices, spoil=False):
    mesh = make_mesh(experiment.placement.mesh, jax.devices()[:devices])
    run = Run.bind(experiment, experiment.data.build(), mesh)
    state, _ = run.open_to_score(folder, None)
    if spoil:
        state = dataclasses.replace(state, params={path: 0 * p for path, p in state.params.items()})
    return run.score(state, "validation")["val_loss"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(texts, trained, tmp_path):
    experiment = experiment_of(texts)
    killed_run.train(experiment, tmp_path, at=7)
    states = [restored(experiment, folder) for folder in (trained[0], tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    masters, copies = states[0]["params"], states[0]["exchange"]
    assert set(masters) == set(copies)
    for path, copy in copies.items():  # kept once, not for each device
        assert copy.value.shape == masters[path].shape
        assert copy.value.dtype == jax.numpy.bfloat16
    assert any((copy.value.astype(np.float32) != masters[path]).any() for path, copy in copies.items())


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices_with_its_copies(texts, trained):
    eight = restored(experiment_of(texts), trained[0])
    for mesh, devices in ((MeshShape(replica=2), 4), (MeshShape(), 1)):
        here = restored(experiment_of(texts, placement__mesh=mesh), trained[0], devices)
        jax.tree.map(np.testing.assert_array_equal, here["exchange"], eight["exchange"])
        jax.tree.map(np.testing.assert_array_equal, here["params"], eight["params"])


@pytest.mark.slow
def test_a_run_is_scored_with_the_copies_wherever_that_is(texts, trained):
    folder, said = trained
    assert scored(experiment_of(texts), folder, 8) == said["val_loss"]
    assert scored(experiment_of(texts), folder, 8, spoil=True) == said["val_loss"]  # masters are not read
    alone = experiment_of(texts, placement__mesh=MeshShape())
    assert scored(alone, folder, 1) == pytest.approx(said["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_losses_are_near_those_of_a_plain_run(texts, trained, tmp_path):
    plain = loop.train(
        changed(experiment_of(texts), strategy__weights="plain", strategy__gradients="plain"), workdir=tmp_path
    )
    assert trained[1]["val_loss"] == pytest.approx(plain["val_loss"], rel=0.05)
    assert trained[1]["val_loss"] != plain["val_loss"]


@pytest.mark.slow
def test_records_summary_and_report_say_what_is_left_out_and_remembered(trained):
    folder, said = trained
    windows = [r for r in run_folder.read_lines(folder / "metrics.jsonl") if r["kind"] == "window"]
    for window in windows:
        assert 0.01 < window["exchange_error"] < 0.4  # of 4 bits between two hosts, after 8 within
        assert 1e-4 < window["exchange_residual"] < 0.01  # as bfloat16 rounds, and a little more
    assert said["exchange_error"] == windows[-1]["exchange_error"]
    assert "Error of the exchange" in (folder / "report.html").read_text()


def test_what_does_not_go_is_refused_before_anything_is_allocated(texts, tmp_path):
    experiment = experiment_of(texts, placement__mesh=MeshShape())
    with pytest.raises(UserError, match=r"needs several indices of 'replica'.*strategy\.gradients=one_level"):
        loop.train(experiment, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    identities = {
        bound(experiment_of(texts, strategy=strategy)).identity()["exchange"]
        for strategy in (Sdp4Bit(), Sdp4Bit(weight_group=128), Sdp4Bit(weights="quantized"), Sdp4Bit(slow_group=256))
    }
    assert len(identities) == 3  # gradients leave nothing behind
    with jax.enable_x64(True):
        wide = experiment_of(texts, precision=Precision(params="float64"))
        with pytest.raises(UserError, match=r"Sdp4Bit quantizes float32, and .* is float64"):
            bound(wide).identity()


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_group_size(texts, trained):
    folder, _ = trained
    with pytest.raises(UserError, match="exchange"):
        loop.train(experiment_of(texts, strategy=Sdp4Bit(weight_group=128), steps=10), workdir=folder)


@pytest.mark.slow
def test_parameters_on_the_host_are_refused(texts):
    experiment = experiment_of(texts, placement__offload="optimizer and parameters")
    with pytest.raises(UserError, match=r"Sdp4Bit keeps a whole copy.*offload=optimizer"):
        Run.bind(experiment, experiment.data.build(), make_mesh(MESH))


@pytest.mark.slow
def test_full_shard_is_refused_with_the_memory_of_the_copies(texts):
    with pytest.raises(UserError, match=r"no field 'sharding' \(every device keeps a whole copy .* 2 bytes"):
        overrides.apply(experiment_of(texts), ["strategy.sharding=FULL_SHARD"])
