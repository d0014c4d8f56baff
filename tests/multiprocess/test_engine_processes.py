"""An engine of two processes has the tokens of one, and ends when one of them does."""

import dataclasses
import json
import os
import pathlib
import signal
import time
import urllib.request

import chat_cases
import launch
import pytest
from llama_cases import GQA, write_checkpoint

WORKER = pathlib.Path(__file__).with_name("engine_worker.py")

pytestmark = pytest.mark.multiprocess


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


def test_served_by_two_processes(tmp_path):
    """Both end with 0 after a SIGTERM to each."""
    pytest.importorskip("tokenizers", reason="needs the extra llm")
    folder = chat_cases.write_model(tmp_path / "theirs", max_positions=256)
    port = launch.free_port()
    command = ["-m", "scalejax", "serve", str(folder)]
    options = ["--mesh", "fsdp=1,context=8", "--slots", "8", "--kv-tokens", "256", "--page", "16", "--port", str(port)]
    workers = launch.start_workers(command, 2, 4, options)
    try:
        deadline = time.monotonic() + 300
        while "Serving" not in workers[0].stdout():
            assert time.monotonic() < deadline
            assert all(worker.process.poll() is None for worker in workers), workers[0].stderr_path.read_text()
            time.sleep(0.2)
        body = json.dumps({"model": "theirs", "prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 9
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert 'compilations_total{model_name="theirs"} 0.0' in answer.read().decode()
        for worker in workers:
            os.kill(worker.process.pid, signal.SIGTERM)
        assert [worker.process.wait(timeout=40) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
