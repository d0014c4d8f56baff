"""Checkpoints across process counts: saved by two, restored by one, and the other way round, to the bit."""

import pathlib

import pytest
from launch import finish, run_workers, start_workers

pytestmark = pytest.mark.multiprocess

WORKER = pathlib.Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory) -> pathlib.Path:
    """Three steps saved by 2 processes of 4 devices, of which the last two are kept."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    printed = run_workers(WORKER, 2, 4, ["save", str(folder), "4x2"])
    assert printed == ["[2, 3]\n"] * 2
    return folder


@pytest.mark.parametrize(("devices", "mesh"), [(1, "1x1"), (8, "2x4")])
def test_what_two_processes_saved_one_restores(saved_by_two, devices, mesh):
    printed = run_workers(WORKER, 1, devices, ["restore", str(saved_by_two), mesh])
    assert printed[0].startswith("3 ")


def test_what_two_processes_saved_two_restore_on_another_mesh(saved_by_two):
    printed = run_workers(WORKER, 2, 2, ["restore", str(saved_by_two), "1x4"])
    assert printed[0].startswith("3 ")
    assert printed[0] == printed[1]


@pytest.mark.parametrize(("devices", "mesh"), [(1, "1x1"), (8, "8x1")])
def test_what_one_process_saved_two_restore(tmp_path, devices, mesh):
    assert run_workers(WORKER, 1, devices, ["save", str(tmp_path / "c"), mesh]) == ["[2, 3]\n"]
    printed = run_workers(WORKER, 2, 4, ["restore", str(tmp_path / "c"), "2x4"])
    assert printed[0].startswith("3 ")


def test_every_process_hears_of_the_damage_that_one_found(tmp_path):
    run_workers(WORKER, 1, 1, ["save", str(tmp_path / "c"), "1x1"])
    for path in sorted(file for file in (tmp_path / "c" / "3").rglob("*") if file.is_file())[1:2]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    finished = finish(start_workers(WORKER, 2, 4, ["restore", str(tmp_path / "c"), "2x4"]), 120)
    assert [one.returncode for one in finished] == [2, 2]
    for one in finished:
        assert "is damaged" in one.stdout
        assert "newest intact checkpoint before it is step 2" in one.stdout


def test_process_0_alone_locks_and_a_second_job_is_refused_as_a_whole(tmp_path):
    from scalejax.train.run_folder import RunFolder

    assert run_workers(WORKER, 2, 1, ["lock", str(tmp_path), "2x1"]) == ["locked\n"] * 2
    with RunFolder(tmp_path):
        finished = finish(start_workers(WORKER, 2, 1, ["lock", str(tmp_path), "2x1"]), 120)
    assert [one.returncode for one in finished] == [2, 2]
    assert all("is being written by process" in one.stdout for one in finished)
