"""A run folder: one writer at a time, lines that end where the checkpoint ends, one message for each refusal."""

import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from scalejax.errors import UserError
from scalejax.train import run_folder
from scalejax.train.run_folder import RunFolder, choose, cut_back, differences, environment_record, read_lines

EXPERIMENT = {"type": "Experiment", "steps": 100, "optimizer": {"type": "Adam", "learning_rate": 0.1}}

HOLDER = """
import pathlib, sys
from scalejax.train.reports.events import EventWriter
from scalejax.train.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])) as folder, EventWriter(folder.path) as events:
    for step in range(10**9):
        events.window(step, {"loss": 1.0 / (step + 1)})
        if step == 100:
            print("holding", flush=True)
"""


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(run_folder, "_LOCK_PATIENCE_S", 0.1)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_NUM_CPU_DEVICES": "1"}


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_writer_is_refused_naming_the_first(tmp_path):
    with RunFolder(tmp_path), pytest.raises(UserError) as error:
        RunFolder(tmp_path)
    message = str(error.value)
    assert f"{tmp_path} is being written by process {os.getpid()} on " in message
    assert "choose another --workdir" in message
    with RunFolder(tmp_path):  # closed, so free
        pass


@pytest.mark.slow
def test_a_killed_writer_frees_the_folder_and_leaves_whole_lines(tmp_path, monkeypatch):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        with pytest.raises(UserError, match=f"is being written by process {process.pid} on "):
            RunFolder(tmp_path)
        process.send_signal(signal.SIGKILL)
    monkeypatch.setattr(run_folder, "_LOCK_PATIENCE_S", 5.0)
    with RunFolder(tmp_path) as folder:
        folder.begin(EXPERIMENT, {}, 50)
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(51))


def test_lines_after_the_restored_step_and_a_cut_line_are_removed(tmp_path):
    lines = [b'{"step": 10, "loss": 0.5}\n', b'{"step": 20, "loss": 0.25}\n', b'{"step": 30, "loss": 0.125}\n']
    for ending in (b"", b'{"step": 40, "lo', b'{"step": 20, "loss": 0.2'):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b"".join(lines) + ending)
        assert [record["step"] for record in read_lines(path)] == [10, 20, 30]
        cut_back(path, 20)
        assert path.read_bytes() == lines[0] + lines[1]
        cut_back(path, -1)
        assert path.read_bytes() == b""


def test_a_damaged_line_before_the_last_is_an_error_naming_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    for read in (read_lines, lambda path: cut_back(path, 1)):
        with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is damaged"):
            read(path)


@pytest.mark.parametrize(
    ("resume", "latest", "holds_run", "expected"),
    [
        ("auto", None, False, None),
        ("auto", None, True, None),
        ("auto", 30, True, 30),
        ("never", None, False, None),
        ("never", None, True, "already holds a run (no checkpoint yet)"),
        ("never", 30, True, "already holds a run (its newest checkpoint is step 30)"),
        ("must", 30, True, 30),
        ("must", None, True, "holds no checkpoint to go on from"),
        ("must", None, False, "holds no checkpoint to go on from"),
    ],
)
def test_where_a_run_goes_on(tmp_path, resume, latest, holds_run, expected):
    with RunFolder(tmp_path) as folder:
        if holds_run:
            folder.begin(EXPERIMENT, {}, None)
        if isinstance(expected, str):
            with pytest.raises(UserError) as error:
                folder.resume_step(resume, latest, steps=100)
            assert f"--resume {resume}: {tmp_path} {expected}" in str(error.value)
        else:
            assert folder.resume_step(resume, latest, steps=100) == expected


def test_a_changed_experiment_is_reported_and_the_old_record_kept(tmp_path):
    changed = {**EXPERIMENT, "steps": 200, "optimizer": {"type": "Adam", "learning_rate": 0.2}}
    with RunFolder(tmp_path) as folder:
        folder.begin(EXPERIMENT, {}, None)
        folder.write_summary({"steps": 100})
        assert folder.begin(changed, {}, 100) == ["steps: 100 -> 200", "optimizer.learning_rate: 0.1 -> 0.2"]
    assert json.loads((tmp_path / "experiment.json").read_text()) == changed
    assert json.loads((tmp_path / "experiment-until-100.json").read_text()) == EXPERIMENT
    assert not (tmp_path / "summary.json").exists()


def test_another_experiment_without_a_checkpoint_is_not_overwritten(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.begin(EXPERIMENT, {}, None)
        (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n')
        with pytest.raises(UserError, match=r"another experiment that has saved no checkpoint yet \(steps: 100 -> 5\)"):
            folder.begin({**EXPERIMENT, "steps": 5}, {}, None)
        assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [10]


def test_differences_name_paths_and_ignore_what_json_does_not_keep():
    assert differences({"a": (1, 2), "b": {"c": None}}, {"a": [1, 2], "b": {"c": None}}) == []
    assert differences({"a": 1, "b": {"c": 1}}, {"b": {"c": "x"}, "d": []}) == [
        "a: 1 -> absent",
        'b.c: 1 -> "x"',
        "d: absent -> []",
    ]


def test_a_class_that_moved_within_the_package_is_no_difference():
    before = {"exchange": {"type": "scalejax.parallel.embedding.plan.placement.Exchange"}}
    after = {"exchange": {"type": "scalejax.parallel.embedding.plan.sharding_plan.Exchange"}}
    assert differences(before, after) == []
    assert len(differences(before, {"exchange": {"type": "scalejax.parallel.embedding.plan.sharding_plan.Plan"}})) == 1
    assert len(differences({"type": "mine.Exchange"}, {"type": "theirs.Exchange"})) == 1


def test_numbers_that_are_not_finite_are_null_in_the_summary(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.write_summary({"auc": -math.inf, "ne": 0.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"auc": None, "ne": 0.5}


def test_every_start_without_a_workdir_gets_a_new_folder(tmp_path):
    root = tmp_path / "runs"
    assert choose(None, "wukong", "auto", root) == root / "wukong-001"
    assert choose(None, "wukong", "never", root) == root / "wukong-002"
    (root / "wukong-041").mkdir()
    (root / "wukong-flights-099").mkdir()
    assert choose(None, "wukong", "auto", root) == root / "wukong-042"
    assert choose(None, "my/path.py:big run", "auto", root) == root / "my-path-big-run-001"
    assert choose(tmp_path / "x", "wukong", "must", root) == tmp_path / "x"
    with pytest.raises(UserError, match=r"--resume must: give the folder .*--workdir .*wukong-042"):
        choose(None, "wukong", "must", root)


def test_a_file_in_the_place_of_the_folder_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserError, match=f"cannot write to run folder {path}: .*file.*move that file away"):
            RunFolder(path)
    with pytest.raises(UserError, match="cannot make a run folder"):
        choose(None, "wukong", "auto", tmp_path / "file")


DISK = """
import pathlib, sys
from scalejax.errors import UserError
from scalejax.train.reports.events import EventWriter
from scalejax.train.run_folder import RunFolder
step = 0
try:
    with RunFolder(pathlib.Path(sys.argv[1]) / "run") as folder:
        folder.begin({"steps": 1}, {}, None)
        with EventWriter(folder.path) as events:
            while True:
                step += 1
                events.window(step, {"text": "x" * 1000})
except UserError as error:
    print(step, error)
    sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "expected"), [("true", "the disk is full"), ("mount -o remount,ro", "the file system is read-only")]
)
def test_a_disk_that_refuses_is_one_message(tmp_path, then, expected):
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    isolate = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=100k none {tmp_path}"
    if subprocess.run([*isolate, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this system does not let tests mount a file system of their own")
    script = f'{mount} && {then} {tmp_path} && exec "$@"'
    command = [*isolate, "sh", "-c", script, "sh", sys.executable, "-c", DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (2, "")
    assert expected in done.stdout
    assert "--workdir" in done.stdout


def test_the_environment_names_versions_devices_and_flags_but_no_host(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    record = environment_record({"fsdp": 8})
    assert record["mesh"] == {"fsdp": 8}
    assert record["devices"]["count"] == 8
    assert {"jax", "flax", "orbax-checkpoint", "numpy"} <= set(record["packages"])
    assert "XLA_FLAGS" in record["flags"]
    assert record["commit"] is None or len(record["commit"].rstrip("+")) >= 7
    assert os.uname().nodename not in json.dumps(record["devices"]) + record["python"]
    json.dumps(record, allow_nan=False)
