"""Checkpoints of touched rows that two processes wrote, each its own rows, are the full ones to the bit."""

import jax
import numpy as np
import pytest
import small_run
from launch import run_workers

from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.checkpoints import chain
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints
from scalejax.train.runs.run import Run

pytestmark = pytest.mark.multiprocess


def test_a_chain_by_two_processes_is_their_full_checkpoint(tmp_path):
    recipe = small_run.write_recipe(tmp_path)
    command = ["-m", "scalejax", "train"]
    every = ("--set", "steps=6", "--set", "checkpoints.every=2", "--set")
    for name, full in (("deltas", 8), ("full", 2)):
        args = [recipe, "--workdir", str(tmp_path / name), *every, f"tables.full_every={full}"]
        run_workers(command, 2, 4, args, timeout_s=300)
    assert len(chain.chain_to(tmp_path / "deltas" / "checkpoints", 6)) == 3
    written = sorted(path.name for path in (tmp_path / "deltas" / "checkpoints" / "6" / "rows").glob("*.bin"))
    assert written == ["00000.bin", "00001.bin"]

    experiment = small_run.experiment(tmp_path / "rows.parquet", checkpoints=Checkpoints(every=2), tables__full_every=2)
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape(), jax.devices()[:1]))
    trees = []
    for name in ("deltas", "full"):
        folder = tmp_path / name / "checkpoints"
        with Checkpointer(folder, experiment.checkpoints, run.identity()) as checkpoints:
            tree, host = checkpoints.restore(6, run.abstract_stored())
        tree["key"] = jax.random.key_data(tree["key"])
        trees.append((jax.tree.map(np.asarray, tree), host))
    assert trees[0][1] == trees[1][1]
    jax.tree.map(np.testing.assert_array_equal, trees[0][0], trees[1][0])
    assert (trees[0][0]["tables"]["item"]["updated_body"] > 2).any()
    # And two processes go on from what two wrote.
    args = [recipe, "--workdir", str(tmp_path / "deltas"), *every, "tables.full_every=8", "--set", "steps=8"]
    run_workers(command, 2, 4, args, timeout_s=300)
    assert [path.name for path in (tmp_path / "deltas" / "checkpoints").iterdir() if path.name == "8"]
