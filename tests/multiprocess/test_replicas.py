"""Processes that begin with different parameters are found out, and made equal to process 0."""

import json
import pathlib

import numpy as np
import pytest
from launch import run_workers

pytestmark = pytest.mark.multiprocess

WORKER = pathlib.Path(__file__).with_name("replica_worker.py")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_broadcast_gives_all_processes_what_process_0_holds(processes):
    found = [json.loads(printed) for printed in run_workers(WORKER, processes, 2)]
    expected = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32).tolist()
    for process in found:
        assert process["before"] == {"same": False, "drawn apart": True}
        assert process["after"] == {"same": False, "drawn apart": False}
        assert process["values"]["drawn apart"] == [expected] * 2
        assert process["values"]["buffer"] == [[True, False]] * 2
