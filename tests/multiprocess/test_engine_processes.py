"""An engine of two processes has the tokens of one, and ends when one of them does."""

import dataclasses
import json
import os
import pathlib
import signal
import time

import launch
import pytest
from llama_cases import GQA, write_checkpoint

WORKER = pathlib.Path(__file__).with_name("engine_worker.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "theirs"
    write_checkpoint(folder, dataclasses.replace(GQA, max_positions=512))
    return folder


def told(output):
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.parametrize("mesh", ["context=8", "context=4,tensor=2"])
def test_two_processes_give_the_tokens_of_one(folder, mesh):
    (alone,) = launch.run_workers(WORKER, 1, 1, [folder, "fsdp=1", "no"])
    first, second = launch.run_workers(WORKER, 2, 4, [folder, mesh, "no"], timeout_s=240)
    want, got = told(alone), told(first)
    for key in want:
        assert got[key] == (pytest.approx(want[key], abs=2e-3) if "likelihoods" in key else want[key])
    assert second == ""


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_dies_ends_the_other_within_ten_seconds(folder, gone):
    workers = launch.start_workers(WORKER, 2, 4, [folder, "context=8", "yes"])
    try:
        deadline = time.monotonic() + 240
        while not workers[0].stdout().strip():
            assert time.monotonic() < deadline
            assert all(worker.process.poll() is None for worker in workers), workers[0].stderr_path.read_text()
            time.sleep(0.1)
        os.kill(workers[gone].process.pid, signal.SIGKILL)
        assert workers[1 - gone].process.wait(timeout=10) == os.EX_TEMPFAIL
        said = workers[1 - gone].stderr_path.read_text().strip().splitlines()
        assert f"process {gone} is gone since" in said[-1]
        assert "trained" not in said[-1]
    finally:
        for worker in workers:
            worker.kill()
