"""A recipe as 2 processes of 4 devices equals 1 process of 8, in what it computes and in what it leaves behind."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import small_run
from launch import finish, run_workers, start_workers

from scalejax.train.checkpoints import trained
from scalejax.train.run_folder import read_lines

pytestmark = pytest.mark.multiprocess

TRAIN = ["-m", "scalejax", "train"]
WORKER = pathlib.Path(__file__).with_name("training_worker.py")
ALTERNATING = pathlib.Path(__file__).with_name("alternating_worker.py")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe on a small file of its own."""
    return small_run.write_recipe(tmp_path_factory.mktemp("recipe"))


def train(recipe, workdir, processes, devices, *more):
    return run_workers(TRAIN, processes, devices, [recipe, "--workdir", str(workdir), *more], timeout_s=300)


@pytest.fixture(scope="module")
def by_one(recipe, tmp_path_factory):
    """The run of one process with 8 devices."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(recipe, folder, 1, 8)
    return folder


@pytest.fixture(scope="module")
def by_two(recipe, tmp_path_factory):
    """The run of two processes with 4 devices each, and what they printed."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, train(recipe, folder, 2, 4)


def assert_close(left, right):
    """Equal records, numbers within float32 rounding: sums over 8 devices are taken in another order by the
    collectives of two processes, and 12 steps let that grow (the bound is that of losses, 1e-5; an AUC of 64 examples
    moves in steps of 1e-3 where two scores change places, hence it is looked at apart)."""
    one, two = read_lines(left / "metrics.jsonl"), read_lines(right / "metrics.jsonl")
    assert len(one) == len(two)
    for expected, got in zip(one, two, strict=True):
        assert list(expected) == list(got)
        for name, value in expected.items():
            if isinstance(value, float):
                assert got[name] == pytest.approx(value, rel=1e-5, abs=3e-3 if "auc" in name else 1e-6), name
            else:
                assert got[name] == value, name


def test_two_processes_record_what_one_does(by_one, by_two):
    assert_close(by_one, by_two[0])
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (by_one, by_two[0])]
    assert ends[0]["test_logloss"] == pytest.approx(ends[1]["test_logloss"], rel=1e-5)
    assert ends[0].keys() == ends[1].keys()


def test_only_process_0_prints_and_each_file_is_written_once(by_one, by_two):
    folder, (first, second) = by_two
    assert f"Run folder: {folder}" in first
    assert second == ""
    names = [sorted(p.name for p in path.iterdir()) for path in (by_one, folder)]
    assert names[0] == names[1]
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert [r["attempt"] for r in read_lines(folder / "timing.jsonl")] == [1, 1, 1]
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["processes"], environment["devices"]["count"]) == (2, 8)


def test_scores_are_those_of_one_process_where_devices_of_processes_take_turns_along_the_mesh(recipe, by_one, tmp_path):
    run_workers(ALTERNATING, 2, 4, ["train", recipe, "--workdir", str(tmp_path / "run")], timeout_s=300)
    assert_close(by_one, tmp_path / "run")
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (by_one, tmp_path / "run")]
    assert ends[0]["test_logloss"] == pytest.approx(ends[1]["test_logloss"], rel=1e-5)
    assert ends[0]["test_gauc"] == pytest.approx(ends[1]["test_gauc"], abs=3e-3)


@pytest.mark.parametrize(("before", "after"), [("by_two", (1, 1)), ("by_one", (2, 4))])
def test_a_run_goes_on_at_another_number_of_processes(recipe, by_one, by_two, tmp_path, before, after):
    run = tmp_path / "run"
    shutil.copytree({"by_one": by_one, "by_two": by_two[0]}[before], run)
    shutil.rmtree(run / "checkpoints" / "12")
    train(recipe, run, *after, "--resume", "must")
    assert_close(by_one, run)
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (by_one, run)]
    assert ends[0]["test_logloss"] == pytest.approx(ends[1]["test_logloss"], rel=1e-5)


def test_phases_and_frozen_parameters_of_two_processes_are_those_of_one(recipe, tmp_path):
    parted = recipe.replace(":small", ":parted")
    train(parted, tmp_path / "one", 1, 8)
    train(parted, tmp_path / "two", 2, 4)
    assert_close(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        assert [path.name for path in (tmp_path / name / "checkpoints").glob("frozen-*")] == ["frozen-12"]
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "12")  # it begins the phase once more, with another process
    train(parted, tmp_path / "two", 1, 8, "--resume", "must")
    assert_close(tmp_path / "one", tmp_path / "two")
    one, two = (trained.open_run(tmp_path / name).params for name in ("one", "two"))
    for path, value in one.items():
        np.testing.assert_allclose(two[path][...], value[...], rtol=1e-4, atol=1e-5, err_msg=path)


TOWERS = """
import pathlib
import small_run
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.parallel.towers import Partition
from scalejax.train.experiment import Experiment

def towers() -> Experiment:
    base, partition = DlrmConfig(dim=8, bottom_hidden=(8,), top_hidden=(8,)), (("item",), ("shop", "hour"))
    model = TowersConfig(base=base, towers=Partition(towers=partition), modules=(DlrmTower(dim=4, mixed=1),))
    return small_run.experiment(pathlib.Path(__file__).with_name("rows.parquet"), model=model)
"""


def test_towers_of_which_each_process_has_one_train_as_all_on_one_device(tmp_path):
    small_run.write(tmp_path / "rows.parquet")
    (tmp_path / "recipe.py").write_text(TOWERS)
    recipe = f"{tmp_path / 'recipe.py'}:towers"
    train(recipe, tmp_path / "one", 1, 1)
    hosts = ("--set", "tables.exchange.route=towers", "--set", "placement.mesh.replica=2")
    train(recipe, tmp_path / "two", 2, 4, *hosts)
    assert_close(tmp_path / "one", tmp_path / "two")
    one, two = (trained.open_run(tmp_path / name).params for name in ("one", "two"))
    for path, value in one.items():
        np.testing.assert_allclose(two[path][...], value[...], rtol=1e-4, atol=1e-5, err_msg=path)


def test_a_mistake_is_one_message_of_each_process(recipe, by_two):
    arguments = [recipe, "--workdir", str(by_two[0]), "--resume", "never"]
    finished = finish(start_workers(TRAIN, 2, 4, arguments), 300)
    for one in finished:
        assert one.returncode == 2, one.stderr
        assert "--resume never" in one.stderr
        assert "Traceback" not in one.stderr


def test_an_error_of_process_0_alone_ends_the_whole_job_soon(recipe, tmp_path):
    worker = pathlib.Path(__file__).with_name("failing_worker.py")
    workers = start_workers(worker, 2, 1, ["train", recipe, "--workdir", str(tmp_path / "run")])
    first, other = finish(workers, timeout_s=120, patience_s=60)
    assert first.returncode == 2, first.stderr
    assert "Error: cannot write" in first.stderr
    assert other.returncode not in (0, -9), other.stderr


def test_losses_and_parameters_agree_in_float64(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    rows = pathlib.Path(recipe.partition(":")[0]).with_name("rows.parquet")
    results = {}
    for processes, devices in ((1, 1), (1, 8), (2, 4)):
        out = tmp_path / f"{processes}x{devices}.npz"
        run_workers(WORKER, processes, devices, [str(rows), str(out)], timeout_s=300)
        with np.load(out) as arrays:
            results[processes, devices] = dict(arrays)
    expected = results.pop((1, 1))
    assert expected["losses"].size == 50
    assert len(expected) > 10
    for got in results.values():
        assert got.keys() == expected.keys()
        # Sums over examples are split over devices: float64 rounding, 1e-16 a sum, grown over 50 steps.
        np.testing.assert_allclose(got.pop("losses"), expected["losses"], rtol=1e-12)
        for name, array in got.items():
            if "(counts)" in name:
                assert array.dtype == np.int32, name
                np.testing.assert_array_equal(array, expected[name])
                continue
            assert array.dtype == np.float64, name
            np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
