"""Joining a job: what is refused, and that a process alone stays alone."""

import os
import socket
import subprocess
import sys

import pytest

from scalejax.errors import TemporaryFailure, UserError
from scalejax.train import distributed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("10.0.0.1:99", None, None), "--processes, --process-id missing beside --coordinator 10.0.0.1:99"),
        ((None, 2, 0), "--coordinator missing beside --processes 2, --process-id 0"),
        (("10.0.0.1", 2, 0), "--coordinator must be HOST:PORT .* got '10.0.0.1'"),
        (("host:0", 2, 0), "port between 1 and 65535; got 'host:0'"),
        (("host:65536", 2, 0), "port between 1 and 65535"),
        ((":80", 2, 0), "HOST:PORT"),
        (("host:80", 0, 0), "--processes must be 1 or more; got 0"),
        (("host:80", 2, 2), "--process-id must be between 0 and 1 for --processes 2; got 2"),
        (("host:80", 2, -1), "--process-id must be between 0 and 1"),
    ],
)
def test_refuses_arguments_that_make_no_job(arguments, expected):
    with pytest.raises(UserError, match=expected):
        distributed.initialize(*arguments)


def test_a_taken_port_is_one_message_instead_of_an_abort():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}.*Choose another port"):
            distributed.initialize(f"127.0.0.1:{port}", 2, 0)


def test_a_silent_coordinator_is_one_message_instead_of_an_abort():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TemporaryFailure, match="process 1 found process 0 absent: nobody answered there within 1 s"):
        distributed.initialize(f"127.0.0.1:{port}", 2, 1, timeout_s=1)


@pytest.mark.slow
def test_a_process_without_a_cluster_stays_alone():
    script = (
        "from scalejax.train import distributed as d; d.initialize(None, None, None); import jax; "
        "print(jax.process_count(), d.is_primary(), d.broadcast([1]), d.gather('a'))"
    )
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    for extra in ({}, {**slurm, "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}):
        environment = {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert (done.stdout, done.stderr) == ("1 True [1] ['a']\n", "")


def test_a_pod_that_knows_of_no_other_is_refused(monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(UserError, match=r"pod 1 of a Job of Kubernetes .* --process-id \$\(JOB_COMPLETION_INDEX\)"):
        distributed.initialize(None, None, None)


def test_together_passes_results_and_errors_through_for_a_process_alone():
    assert distributed.together(lambda: 3) == 3
    assert distributed.on_primary(lambda: [3]) == [3]
    with pytest.raises(KeyError):
        distributed.together(lambda: {}["x"])
