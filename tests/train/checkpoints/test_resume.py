"""A run that was killed goes on to the same bits."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_run

STEPS = 40
SETS = (f"steps={STEPS}", "log_every=5", "evaluation.every=20", "checkpoints.every=4", "data.batch_size=64")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return small_run.write_recipe(tmp_path_factory.mktemp("recipe"))


def _command(recipe: str, workdir: pathlib.Path) -> list[str]:
    sets = [part for item in SETS for part in ("--set", item)]
    return [
        sys.executable,
        "-m",
        "scalejax",
        "train",
        recipe,
        *sets,
        "--workdir",
        str(workdir),
        "--cpu-devices",
        "1",
    ]


def _environment() -> dict[str, str]:
    """In which the recipe finds its module."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _train(recipe: str, workdir: pathlib.Path) -> None:
    command = _command(recipe, workdir)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr


def _kill_after(recipe: str, workdir: pathlib.Path, seconds: float, *, steps_begun: int) -> None:
    """Starts the run and kills it some time after it has written its window of `steps_begun`."""
    process = subprocess.Popen(
        _command(recipe, workdir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
    )
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 300
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and any(
                json.loads(line)["step"] >= steps_begun
                for line in metrics.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ):
                break
            time.sleep(0.01)
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)


def _arrays(workdir: pathlib.Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """The final checkpoint, read by orbax alone."""
    path = workdir / "checkpoints" / str(step) / "arrays"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(path, ocp.args.PyTreeRestore(restore_args=as_numpy))


def _assert_equal_runs(left: pathlib.Path, right: pathlib.Path) -> None:
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    first, second = _arrays(left), _arrays(right)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (left, right)]
    assert [ends[0][k] for k in ("test_auc", "test_logloss")] == [ends[1][k] for k in ("test_auc", "test_logloss")]


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    _train(recipe, workdir)
    return workdir


def _killed_runs(recipe: str, workdir: pathlib.Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        _kill_after(recipe, workdir, rng.uniform(0, 0.3), steps_begun=rng.randrange(0, STEPS, 5))
    _train(recipe, workdir)


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_bits(recipe, uninterrupted, tmp_path):
    _killed_runs(recipe, tmp_path / "killed", kills=2, seed=0)
    _assert_equal_runs(uninterrupted, tmp_path / "killed")


@pytest.mark.slow
def test_run_killed_ten_times_goes_on_to_the_same_bits(recipe, uninterrupted, tmp_path):
    _killed_runs(recipe, tmp_path / "killed", kills=10, seed=1)
    _assert_equal_runs(uninterrupted, tmp_path / "killed")
