"""A graph over 2 processes of 2 devices is trained as by 1 process of 1 device; without a mesh it is refused.

The devices of the processes take turns along the mesh: 0 1 1 0.
"""

import json
import pathlib
import shutil

import pytest
from launch import finish, run_workers, start_workers

from scalejax.train.run_folder import read_lines

pytestmark = pytest.mark.multiprocess

TRAIN = ["-m", "scalejax", "train"]
ALTERNATING = pathlib.Path(__file__).with_name("alternating_worker.py")
RUNS = {
    "gcn-smoke": [],
    # Each device draws the dropout of its mini-batches in its own way.
    "graphsage-smoke": ["--set", "model.dropout=0.0"],
    "gat-smoke": ["--set", "model.dropout=0.0"],
}


@pytest.mark.parametrize("recipe", ["graphsage-smoke", "gat-smoke"])
def test_two_processes_record_what_one_does(recipe, tmp_path):
    steps = ["--set", "steps=8", "--set", "checkpoints.every=4", *RUNS[recipe]]
    one, two = tmp_path / "one", tmp_path / "two"
    run_workers(TRAIN, 1, 1, [recipe, "--workdir", str(one), *steps], timeout_s=300)
    over_all = ["--workdir", str(two), "--set", "placement.mesh=MeshShape", *steps]
    said = run_workers(ALTERNATING, 2, 2, ["train", recipe, *over_all], timeout_s=300)
    assert f"Run folder: {two}" in said[0]
    assert said[1] == ""
    records = [read_lines(folder / "metrics.jsonl") for folder in (one, two)]
    assert len(records[0]) == len(records[1])
    for expected, got in zip(*records, strict=True):
        assert list(expected) == list(got)
        for name, value in expected.items():
            # Sums over nodes are split over devices: float32 rounding, grown over 8 steps.
            close = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
            assert got[name] == close, (expected["kind"], expected["step"], name)
    # A run of two processes goes on by one.
    shutil.rmtree(two / "checkpoints" / "8")
    run_workers(TRAIN, 1, 1, [recipe, "--workdir", str(two), "--resume", "must", *steps], timeout_s=300)
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert ends[1]["test_loss"] == pytest.approx(ends[0]["test_loss"], rel=1e-4)


def test_processes_without_a_mesh_are_refused_by_each(tmp_path):
    finished = finish(start_workers(TRAIN, 2, 1, ["gcn-smoke", "--workdir", str(tmp_path / "run")]), 300)
    for one in finished:
        assert one.returncode == 2, one.stderr
        assert "2 processes train over all of their devices, and placement.mesh is none" in one.stderr
        assert "Traceback" not in one.stderr
