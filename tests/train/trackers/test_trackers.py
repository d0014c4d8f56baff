"""Trackers get what the run folder gets, and a run that goes on stays one run for them."""

import json
import math
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import small_run

from scalejax import configs
from scalejax.configs import serialization
from scalejax.errors import UserError
from scalejax.train import loop
from scalejax.train.reports.events import EventWriter
from scalejax.train.run_folder import read_lines
from scalejax.train.trackers import protocol
from scalejax.train.trackers.tensorboard import TensorBoard
from scalejax.train.trackers.trackio import Trackio
from scalejax.train.trackers.wandb import Wandb

MINE = """
import dataclasses, json, pathlib
import small_run
from scalejax.train.experiment import Checkpoints, Experiment

@dataclasses.dataclass(frozen=True)
class Mine:
    name: str = "mine.jsonl"

    def build(self):
        return Recorder(self.name)

class Recorder:
    def __init__(self, name):
        self.name = name

    def start(self, run):
        self.file = open(run.folder / self.name, "a")
        self.write("start", id=run.id, step=run.step, recipe=run.record["recipe"])

    def log(self, step, values):
        self.write("log", step=step, values=values)

    def picture(self, step, name, svg):
        self.write("picture", step=step, name=name, svg=svg)

    def finish(self):
        self.write("finish")
        self.file.close()

    def write(self, what, **rest):
        self.file.write(json.dumps({"what": what, **rest}) + "\\n")

def recipe() -> Experiment:
    rows = pathlib.Path(__file__).with_name("rows.parquet")
    return small_run.experiment(rows, trackers=(Mine(),), checkpoints=Checkpoints(every=3))
"""


@pytest.mark.slow
def test_a_tracker_of_a_users_file_follows_a_run_over_its_attempts(tmp_path):
    small_run.write(tmp_path / "rows.parquet")
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(MINE)
    recipe = f"{file}:recipe"
    for sets in (["steps=6"], []):
        experiment = configs.load(recipe, sets)
        loop.train(experiment, workdir=folder, record=serialization.record(recipe, sets, experiment))
    calls = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    starts = [call for call in calls if call["what"] == "start"]
    assert [call["step"] for call in starts] == [0, 6]
    assert len({call["id"] for call in starts}) == 1
    assert {call["recipe"] for call in starts} == {recipe}
    assert [call["what"] for call in calls].count("finish") == 2
    assert calls[-1]["what"] == "finish"
    # The numbers of metrics.jsonl, those of the final scores of six steps apart, which the longer run has not.
    logged = {
        (call["step"], name): value for call in calls if call["what"] == "log" for name, value in call["values"].items()
    }
    for record in read_lines(folder / "metrics.jsonl"):
        group = "train" if record["kind"] == "window" else record["split"]
        for name, value in record.items():
            if isinstance(value, float | int) and name != "step":
                assert logged[record["step"], f"{group}/{name}"] == value
    pictures = [call for call in calls if call["what"] == "picture"]
    assert {call["name"] for call in pictures} >= {"reliability diagram, test", "score histogram, test"}
    assert all(call["svg"].startswith("<svg") for call in pictures)
    # An id is no other run's.
    ids = {protocol.TrackedRun.of(at, 0).id for at in (folder, tmp_path)}
    assert len(ids) == 2


def test_a_tracker_whose_package_is_missing_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol.importlib.util, "find_spec", lambda name: None)
    experiment = small_run.experiment(tmp_path / "never-read", trackers=(Wandb(project="clicks"),))
    with pytest.raises(UserError, match=r"Wandb needs the package wandb\. pip install wandb"):
        loop.train(experiment, workdir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_only_process_0_tracks(tmp_path):
    class Refuses:
        def start(self, run):
            raise AssertionError

    with EventWriter(tmp_path, process_index=1, trackers=(Refuses(),)) as events:
        events.window(1, {"loss": 1.0})
        events.picture(1, "x", "<svg/>")
    assert list(tmp_path.iterdir()) == []


def test_trackers_are_chosen_on_the_command_line():
    experiment = configs.load(
        "wukong-smoke", ["trackers=TensorBoard,Wandb,Trackio", "trackers.1.project=clicks", "trackers.1.mode=online"]
    )
    assert experiment.trackers == (TensorBoard(), Wandb(project="clicks", mode="online"), Trackio())
    assert configs.load("wukong-smoke", ["trackers=[]"]).trackers == ()


def test_a_damaged_id_is_named(tmp_path):
    (tmp_path / protocol.FILE).write_text("{}")
    with pytest.raises(UserError, match=r"tracker.json is damaged: it has no id"):
        protocol.TrackedRun.of(tmp_path, 0)


def attempts(folder, config):
    """A run in two attempts, the second from step 2 on, and pictures at its end."""
    folder.mkdir()
    (folder / "experiment.json").write_text('{"recipe": "x", "experiment": {"fields": {"steps": 4}}}')
    for first, last in ((1, 3), (3, 4)):
        with EventWriter(folder, step=first - 1, trackers=(config.build(),)) as events:
            for step in range(first, last + 1):
                events.window(step, {"logloss": 1 / step, "auc": math.nan})
            events.picture(last, "scores", "<svg xmlns='http://www.w3.org/2000/svg'/>")


@pytest.mark.slow
def test_wandb_without_a_network_keeps_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    _in_a_process_of_its_own(tmp_path, "wandb", "Wandb")
    found = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(found) == 2
    run = json.loads((tmp_path / "run" / protocol.FILE).read_text())["id"]
    for attempt in found:
        assert run in attempt.name.split("-")  # W&B numbers folders of one second: two attempts may begin in it
        written = (attempt / f"run-{run}.wandb").read_bytes()
        assert b"train/logloss" in written
        assert b"train/auc" not in written  # undefined
        assert list((attempt / "files" / "media" / "html").glob("scores*"))


@pytest.mark.slow
def test_wandb_says_that_there_is_no_login(tmp_path):
    pytest.importorskip("wandb")
    code = """
        import pathlib, sys
        from scalejax.train.trackers.protocol import TrackedRun
        from scalejax.train.trackers.wandb import Wandb
        Wandb(mode="online").build().start(TrackedRun.of(pathlib.Path(sys.argv[1]), 0))
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith("scalejax.errors.UserError: trackers: Wandb cannot begin (")
    assert last.endswith("). Run `wandb login`, or set mode='offline'.")


@pytest.mark.slow
def test_trackio_keeps_one_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    _in_a_process_of_its_own(tmp_path, "trackio", "Trackio")
    code = """
        import json, sys
        from trackio.sqlite_storage import SQLiteStorage
        print(json.dumps({run: SQLiteStorage.get_logs("clicks", run) for run in SQLiteStorage.get_runs("clicks")}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    run = json.loads((tmp_path / "run" / protocol.FILE).read_text())["id"]
    assert list(runs) == [f"run-{run}"]
    logged = {record["step"]: record["train/logloss"] for record in runs[f"run-{run}"] if "train/logloss" in record}
    assert logged == {step: 1 / step for step in range(1, 5)}
    assert any("scores" in record for record in runs[f"run-{run}"])


def _in_a_process_of_its_own(folder, module, name):
    """Both packages keep threads, and read their environment when they are imported."""
    code = f"""
        import pathlib, sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import test_trackers
        from scalejax.train.trackers.{module} import {name}
        test_trackers.attempts(pathlib.Path({str(folder)!r}) / "run", {name}(project="clicks"))
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment, timeout=120)
