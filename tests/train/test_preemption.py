"""The typed command, ended from outside at any moment, ends with a stated status and goes on to the same bits."""

import copy
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import typed_run
from covering import covering

from scalejax import configs
from scalejax.configs import serialization
from scalejax.errors import UserError
from scalejax.train import loop, peers, preemption
from scalejax.train.experiment import Checkpoints, Tables

SETS = {
    "click": ("steps=600", "log_every=20", "evaluation.every=300", "checkpoints.every=100"),
    "text": ("steps=120", "log_every=10", "evaluation.every=60", "checkpoints.every=30"),
    "graph": ("steps=600", "log_every=20", "evaluation.every=300", "checkpoints.every=100"),
}
EVALUATED = {"click": 300, "text": 60, "graph": 300}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    return typed_run.write(tmp_path_factory.mktemp("recipes"))


def arguments(recipes, kind, workdir, *more):
    sets = [part for item in (*SETS[kind], *more) for part in ("--set", item)]
    return [f"{recipes}:{kind}", *sets, "--workdir", str(workdir)]


@pytest.fixture(scope="module")
def whole(recipes, tmp_path_factory):
    """A function of a kind: the folder of that run, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")

    def run(kind):
        if not (folder / kind).exists():
            done = typed_run.start(arguments(recipes, kind, folder / kind), 1, folder / "said")
            assert done.wait() == [0], done.said()
        return folder / kind

    return run


def assert_left_in_order(run, workdir):
    """It said so, and recorded nothing that is not saved."""
    assert re.fullmatch(r"Asked to end.*saved.* Go on with: scalejax train .*--workdir=\S+", run.said().strip())
    recorded = [line["step"] for line in typed_run.lines(workdir)]
    assert max(recorded, default=0) <= max(typed_run.saved(workdir), default=0)


ENDED = covering(
    [
        (number, moment, kind)
        for number in (signal.SIGTERM, signal.SIGKILL)
        for moment in ("compile", "step", "save", "evaluation")
        for kind in SETS
    ],
    columns=[(0, 1)],
)


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_goes_on_to_the_same_bits(recipes, tmp_path):
    """One case of the product below, in which this process, on as many devices, is the one that goes on."""
    recipe, sets = f"{recipes}:click", ["steps=80", "log_every=5", "evaluation.every=40", "checkpoints.every=40"]
    experiment, workdir = configs.load(recipe, sets), tmp_path / "run"
    devices = {name: os.environ[name] for name in ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC")}
    typed = [word for text in sets for word in ("--set", text)]
    run = typed_run.start([recipe, *typed, "--workdir", str(workdir)], 1, tmp_path, **devices)
    typed_run.interrupt(run, signal.SIGTERM, typed_run.moments(workdir, 40)["step"], 0, [0])
    assert run.wait() == [75], run.said()
    assert_left_in_order(run, workdir)
    assert 10 <= typed_run.saved(workdir)[-1] < 80
    for folder in (workdir, tmp_path / "whole"):
        loop.train(experiment, workdir=folder, record=serialization.record(recipe, sets, experiment))
    typed_run.assert_equal(tmp_path / "whole", workdir)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment", "kind"), ENDED, ids=str)
def test_a_run_that_is_ended_at_any_moment_goes_on_to_the_same_bits(recipes, whole, tmp_path, number, moment, kind):
    workdir = tmp_path / "run"
    run = typed_run.start(arguments(recipes, kind, workdir), 1, tmp_path)
    typed_run.interrupt(run, number, typed_run.moments(workdir, EVALUATED[kind])[moment], 0, [0])
    status = run.wait()
    assert status == [-signal.SIGKILL if number == signal.SIGKILL else 75], run.said()
    if number != signal.SIGKILL:
        assert_left_in_order(run, workdir)
    again = typed_run.start(arguments(recipes, kind, workdir), 1, tmp_path)
    assert again.wait() == [0], again.said()
    typed_run.assert_equal(whole(kind), workdir)


@pytest.mark.slow
def test_a_run_shorter_than_its_interval_is_saved_by_the_clock(recipes, whole, tmp_path):
    by_clock = ("checkpoints.every=0", "checkpoints.every_seconds=0.5", "checkpoints.keep_last=1000")
    workdir = tmp_path / "run"
    run = typed_run.start(arguments(recipes, "click", workdir, *by_clock), 1, tmp_path)
    typed_run.interrupt(run, signal.SIGKILL, lambda: typed_run.saved(workdir), 0, [0])
    run.wait()
    before = typed_run.saved(workdir)
    assert before
    assert before[-1] < 600
    again = typed_run.start(arguments(recipes, "click", workdir, *by_clock), 1, tmp_path)
    assert again.wait() == [0], again.said()
    assert set(before) <= set(typed_run.saved(workdir))  # it went on
    typed_run.assert_equal(whole("click"), workdir)


ENDLESS = ("steps=1000000", "checkpoints.every=0", "checkpoints.every_seconds=0", "evaluation.every=0")


@pytest.mark.slow
def test_a_deadline_ends_a_run_in_time(recipes, tmp_path):
    command = [*arguments(recipes, "click", tmp_path / "run", *ENDLESS), "--grace", "30"]
    end = int(time.time()) + 60
    run = typed_run.start(command, 1, tmp_path, SLURM_JOB_END_TIME=str(end))
    assert run.wait() == [75], run.said()
    assert end - 30 <= time.time()  # status 75 says that it was saved before its end
    assert typed_run.saved(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "signals", "status", "said"),
    [
        ("0", [signal.SIGTERM], 143, r"Not saved within --grace 0 s: .*_steps \(loop.py:\d+\).*"),
        ("60", [signal.SIGTERM, signal.SIGINT], 130, r"Ended by a second SIGINT"),
    ],
    ids=["past its grace", "a second signal"],
)
def test_a_run_that_must_go_at_once_says_what_is_lost(recipes, tmp_path, grace, signals, status, said):
    workdir = tmp_path / "run"
    run = typed_run.start([*arguments(recipes, "click", workdir, *ENDLESS), "--grace", grace], 1, tmp_path)
    typed_run.until(run, typed_run.moments(workdir, 0)["step"])
    for number in signals:
        run.all[0].send_signal(number)
    assert run.wait() == [status], run.said()
    lost = "; what was trained since the newest checkpoint is lost. Go on with: scalejax train "
    assert re.match(said + lost, run.said()), run.said()
    assert typed_run.saved(workdir) == []


def test_time_and_a_pipeline_that_a_save_drains_are_refused_together(recipes):
    import small_run

    path = recipes.replace("recipes.py", "rows.parquet")
    with pytest.raises(UserError, match=r"checkpoints.every_seconds=5 .*tables.pipeline='stale'"):
        small_run.experiment(path, tables=Tables(pipeline="stale"), checkpoints=Checkpoints(every_seconds=5))
    stale = small_run.experiment(path, tables=Tables(pipeline="stale"))
    assert (stale.save_seconds, small_run.experiment(path).save_seconds) == (float("inf"), 300)
    never = small_run.experiment(path, checkpoints=Checkpoints(every_seconds=0))
    assert never.save_seconds == float("inf")


def test_deadlines_are_seconds_times_or_the_end_of_a_slurm_job(monkeypatch):
    monkeypatch.delenv(preemption.SLURM_VARIABLE, raising=False)
    assert preemption.deadline(None, 30) is None
    monkeypatch.setattr(preemption.time, "time", lambda: 1_790_000_000.0)
    assert preemption.deadline("90", 30) == 1_790_000_090
    assert preemption.deadline("2100-01-01T00:00+00:00", 30) == 4102444800
    for text in ("20", "-1", "soon", "2020-01-01T00:00"):
        with pytest.raises(UserError, match=f"--deadline must be seconds from now .*got '{re.escape(text)}'"):
            preemption.deadline(text, 30)
    monkeypatch.setenv(preemption.SLURM_VARIABLE, "1800000000")
    assert preemption.deadline(None, 30) == 1800000000


@pytest.mark.parametrize(("grace", "asked"), [(5001.0, True), (60.0, False)])
def test_a_run_is_asked_to_end_its_grace_before_the_deadline(monkeypatch, grace, asked):
    heard = threading.Event()
    monkeypatch.setattr(peers.job, "ask", lambda what: heard.set())
    with preemption.Preemption(deadline=time.time() + 5000, grace_s=grace) as one:
        one.leaving = True  # what it does then is tried elsewhere
        assert heard.wait(60 if asked else 0.2) == asked


# The main thread in native code for a quarter of an hour, as in a compilation.
IN_NATIVE_CODE = """
import hashlib, os, signal, sys, time
from scalejax.train import preemption
grace, trained, deadline = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def compile():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
with preemption.Preemption(deadline=deadline and time.time() + deadline, grace_s=grace, again="AGAIN") as heard:
    heard.watch(lambda: 4)
    heard.trained = trained
    print("here", flush=True)
    compile()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "trained", "deadline", "signals", "status", "said"),
    [
        ("60", 4, 0, [15], 75, "Asked to end; all that was trained is saved. Go on with: AGAIN"),
        ("60", 4, 0, [2], 75, "Asked to end; all that was trained is saved. Go on with: AGAIN"),
        ("0.3", 5, 0, [15], 143, r"Not saved within --grace 0.3 s: compile \(<string>:6\) < .*is lost. Go on .*"),
        ("0.3", 5, 0, [2], 130, r"Not saved within --grace 0.3 s: compile .*is lost. Go on .*"),
        ("60", 5, 0, [15, 2], 130, r"Ended by a second SIGINT; what was trained since .*is lost. Go on .*"),
        ("60", 5, 0, [2, 15], 143, r"Ended by a second SIGTERM; .*"),
        ("1", 4, 1.5, [], 75, "Asked to end; .*"),
        ("1", 5, 1.5, [], 143, r"Not saved within --grace 1 s: compile .*"),
    ],
)
def test_a_main_thread_in_native_code_is_ended_beside(grace, trained, deadline, signals, status, said):
    command = [sys.executable, "-c", IN_NATIVE_CODE, grace, str(trained), str(deadline)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        for number in signals:
            run.send_signal(number)
            while is_pending(run.pid, number):
                time.sleep(0.01)
        _, message = run.communicate(timeout=300)
    assert run.returncode == status, message
    assert re.fullmatch(said, message.strip())


def is_pending(pid, number):
    """Whether a signal has not yet reached a process; two that wait may arrive in any order."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", text, re.MULTILINE)]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_where_a_run_stands_is_said_by_its_own_functions_however_deep_it_is_in_those_of_others():
    stands = []

    class Here:
        def __deepcopy__(self, _):
            stands.extend(preemption._stack(sys._getframe()))

    run = {"__name__": "scalejax.made_up", "copy": copy, "lists": [[[[Here()]]]]}
    exec("def step():\n    copy.deepcopy(lists)\ndef steps():\n    step()", run)
    run["steps"]()
    assert re.fullmatch(r"__deepcopy__ \(test_preemption.py:\d+\)", stands[0])
    assert stands[1:3] == ["step (<string>:2)", "steps (<string>:4)"]


def test_handlers_of_the_program_come_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with preemption.Preemption():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1
