"""Processes that find each other, agree on values, and fail together."""

import pathlib

import pytest
from launch import finish, run_workers, start_workers

pytestmark = pytest.mark.multiprocess

WORKER = pathlib.Path(__file__).with_name("agree_worker.py")


def test_an_error_on_one_process_is_raised_on_all():
    assert run_workers(WORKER, 2, 1, ["1"]) == ["process 1: no such thing\n", "no such thing\n"]


def test_a_worker_that_fails_does_not_leave_the_others_running(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys, time\nif sys.argv[-1] == '1': sys.exit(3)\ntime.sleep(1000)\n")
    finished = finish(start_workers(script, 2, 1), timeout_s=900, patience_s=0.5)  # a test may take 600 s
    assert [one.returncode for one in finished] == [-9, 3]
    with pytest.raises(AssertionError, match="process 1: exit 3"):
        run_workers(script, 2, 1, timeout_s=1)
