"""The recipe of deduplicated training: what it trains is what training without deduplication trains, to the bit."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest
from changes import changed

from scalejax import configs
from scalejax.data.examples.dedup import DedupBatch
from scalejax.parallel.mesh import make_mesh
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment
from scalejax.train.runs import binding, scoring
from scalejax.train.state import TrainState


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    experiment = configs.load("recd-smoke")
    return dataclasses.replace(
        experiment, data=dataclasses.replace(experiment.data, folder=str(tmp_path_factory.mktemp("logs")))
    )


def trained(experiment: Experiment, steps: int, devices: int = 1) -> tuple[TrainState, list[bool]]:
    """The state after some steps, and which of the batches went deduplicated."""
    data = experiment.data.build()
    program = binding.bind(experiment, data.schema, make_mesh(experiment.placement.mesh, jax.devices()[:devices]))
    state, went = program.init(), []
    for host in itertools.islice(data.train_batches(start_example=0), steps):
        batch = convert.to_device(host, program)
        went.append(batch.features.inverse is not None)
        state, _ = program.train_step(state, batch)
    program.embeddings.check_faults(np.asarray(program.faults(state)))
    return state, went


def equal(one: TrainState, other: TrainState) -> None:
    for name in ("params", "optimizer", "tables"):
        jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(other, name))


def plainly(experiment: Experiment) -> Experiment:
    return changed(experiment, data=dataclasses.replace(experiment.data, lists="plain"), tables__dedup=())


@pytest.mark.slow
def test_training_equals_training_without_deduplication_to_the_bit(smoke: Experiment) -> None:
    assert smoke.tables.accumulate == "exact"
    dedup, went = trained(smoke, steps=6)
    plain, _ = trained(plainly(smoke), steps=6)
    assert all(went)
    equal(dedup, plain)
    before = binding.bind(smoke, smoke.data.schema(), make_mesh(smoke.placement.mesh, jax.devices()[:1])).init()
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), dedup.params, before.params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_batches_without_room_go_the_plain_way_and_nothing_changes(smoke: Experiment) -> None:
    tight = tuple(dataclasses.replace(group, rows_per_example=0.01) for group in smoke.tables.dedup)
    dedup, went = trained(changed(smoke, tables__dedup=tight), steps=3)
    plain, _ = trained(plainly(smoke), steps=3)
    assert not any(went)
    equal(dedup, plain)


def test_the_log_is_made_once_and_deduplicated_as_the_dials_say(smoke: Experiment) -> None:
    data = smoke.data.build()
    folder = pathlib.Path(smoke.data.folder)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    assert kept
    again = smoke.data.build()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == kept
    assert [path.name for path in folder.iterdir()] == [next(iter(kept)).parent.name]
    assert again.fingerprint() == data.fingerprint()
    batch = next(data.train_batches(start_example=0))
    assert isinstance(batch, DedupBatch)
    assert batch.features.groups == tuple(group.features for group in smoke.tables.dedup)
    assert min(batch.features.factors) > 4


@pytest.mark.slow
def test_shuffled_sessions_train_as_well_as_shuffled_rows(tmp_path: pathlib.Path) -> None:
    recipe = configs.load("recd-sessions_time")
    found = {}
    for shuffle in ("sessions", "rows"):
        data = dataclasses.replace(recipe.data, shuffle=shuffle, seed=0, folder=str(tmp_path / "logs"))
        experiment = dataclasses.replace(recipe, data=data, seed=0)
        state, _ = trained(experiment, steps=recipe.steps)
        program = binding.bind(experiment, data.schema(), make_mesh(recipe.placement.mesh, jax.devices()[:1]))
        scores = scoring.score(program, state, data.build().eval_batches("test"))
        found[shuffle] = scores.measure()["auc"]
    # Over seeds each has a standard deviation of 0.004 (benchmarks/results/recd.md).
    assert found["sessions"] == pytest.approx(found["rows"], abs=0.01)
    assert found["sessions"] > 0.75
