"""Compressed exchanges of 2 processes of 4 devices give what 1 process of 8 does, and the same bits on all devices."""

import json
import pathlib

import numpy as np
import pytest
from launch import run_workers

pytestmark = pytest.mark.multiprocess

WORKER = pathlib.Path(__file__).with_name("compressed_worker.py")


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory):
    """{processes: (arrays by name, {path: digests of the copies} of each process)}"""
    found = {}
    for processes in (1, 2):
        out = tmp_path_factory.mktemp("exchanges") / f"{processes}.npz"
        said = run_workers(WORKER, processes, 8 // processes, [str(out)], timeout_s=240)
        with np.load(out) as arrays:
            found[processes] = dict(arrays), [json.loads(one) for one in said]
    return found


def pairs(by_processes, *begin):
    """(name, array of one process, array of two) of names that begin so."""
    one, two = by_processes[1][0], by_processes[2][0]
    assert one.keys() == two.keys()
    chosen = [(name, one[name], two[name]) for name in one if name.startswith(begin)]
    assert chosen
    return chosen


def test_sums_without_rounding_are_those_of_one_process(by_processes):
    """Of whole numbers exact; `plain` is summed by Gloo in an order of its own, what arrives by all_to_all in ours."""
    for name, one, two in pairs(by_processes, "plain/", "one_level/", "two_level/", "identity"):
        kind, path = name.split("/")[1:]
        if kind == "whole":
            np.testing.assert_array_equal(two, one, err_msg=name)
            assert np.abs(one).max() > 20
        else:
            largest = np.abs(one).max()
            np.testing.assert_allclose(two, one, rtol=0, atol=1e-6 * largest, err_msg=name)
            if name.startswith(("one_level/", "two_level/")) and path != "whole":
                np.testing.assert_array_equal(two, one, err_msg=name)


def test_one_bit_with_feedback_goes_the_way_of_one_process(by_processes):
    for name, one, two in pairs(by_processes, "onebit"):
        np.testing.assert_allclose(two, one, rtol=1e-6, atol=1e-6, err_msg=name)
    steps = {name: one for name, one, _ in pairs(by_processes, "onebit 2/tails/")}
    assert len(np.unique(np.abs(steps["onebit 2/tails/0"]))) == 8  # of each owner's chunk a sign and a scale
    assert len({x.tobytes() for x in steps.values()}) == len(steps) == 4


def test_copies_of_rounded_steps_are_the_same_bits_on_all_devices_of_all_processes(by_processes):
    arrays, processes = by_processes[2]
    assert len(processes) == 2
    for path in processes[0]:
        digests = [digest for process in processes for digest in process[path]]
        assert len(digests) == 8
        assert len(set(digests)) == 1, path
        assert (arrays[f"copy/{path}"] != arrays[f"master/{path}"]).any()
    # Draws and the order of sums of what arrives do not know of processes.
    for name, one, two in pairs(by_processes, "copy/a", "copy/b", "master/a", "master/b"):
        np.testing.assert_array_equal(two, one, err_msg=name)
