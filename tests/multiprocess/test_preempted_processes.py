"""Processes of one run: one that is killed, stopped, absent or asked to end, and what becomes of the others."""

import re
import signal
import time

import pytest
import typed_run

pytestmark = pytest.mark.multiprocess

SETS = {
    "click": ("steps=100", "log_every=5", "evaluation.every=50", "checkpoints.every=25"),
    "text": ("steps=40", "log_every=5", "evaluation.every=20", "checkpoints.every=10"),
    "graph": ("steps=100", "log_every=5", "evaluation.every=50", "checkpoints.every=25"),
}
EVALUATED = {"click": 50, "text": 20, "graph": 50}
TIMEOUT_S = 4
"""Of the process that is stopped. The others have the default: a machine that is busy keeps a thread waiting."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    return typed_run.write(tmp_path_factory.mktemp("recipes"))


def arguments(recipes, kind, workdir, *more):
    sets = [part for item in (*SETS[kind], *more) for part in ("--set", item)]
    return [f"{recipes}:{kind}", *sets, "--workdir", str(workdir)]


@pytest.fixture(scope="module")
def whole(recipes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")

    def run(kind):
        if not (folder / kind).exists():
            done = typed_run.start(arguments(recipes, kind, folder / kind), 2, folder / "said")
            assert done.wait() == [0, 0], done.said()
        return folder / kind

    return run


ENDED = {"both asked": (15, (0, 1)), "one asked": (15, (1,)), "one killed": (9, (1,)), "0 killed": (9, (0,))}
CASES = [
    ("both asked", "compile", "click"),
    ("one asked", "step", "click"),
    ("one killed", "step", "click"),
    ("0 killed", "save", "click"),
    ("both asked", "evaluation", "graph"),
    ("one asked", "save", "text"),
]
"""Each moment, each way and each kind: a case is three runs of two processes. `train/test_preemption.py` has more."""


@pytest.mark.parametrize(("ended", "moment", "kind"), CASES)
def test_processes_that_are_ended_go_on_to_the_same_bits(recipes, whole, tmp_path, ended, moment, kind):
    (value, who), workdir = ENDED[ended], tmp_path / "run"
    number = signal.Signals(value)
    run = typed_run.start(arguments(recipes, kind, workdir), 2, tmp_path)
    typed_run.interrupt(run, number, typed_run.moments(workdir, EVALUATED[kind])[moment], 0, who)
    statuses = run.wait()  # of one that is asked, status 75 says that it was within --grace
    said = [run.said(0), run.said(1)]
    for index, status in enumerate(statuses):
        killed = number == signal.SIGKILL and index in who
        assert status == (-signal.SIGKILL if killed else 75), said
        assert "Traceback" not in said[index]
        if not killed and number == signal.SIGKILL:
            assert re.search(
                rf"Error: process {who[0]} is gone since 20\S+: .* Go on with: scalejax train ", said[index]
            )
    if number == signal.SIGTERM:
        recorded = [line["step"] for line in typed_run.lines(workdir)]
        assert max(recorded, default=0) <= max(typed_run.saved(workdir), default=0)
    again = typed_run.start(arguments(recipes, kind, workdir), 2, tmp_path)
    assert again.wait() == [0, 0], [again.said(0), again.said(1)]
    typed_run.assert_equal(whole(kind), workdir)


def test_a_process_that_is_stopped_ends_the_other_in_time(recipes, tmp_path):
    workdir = tmp_path / "run"
    command = [*arguments(recipes, "click", workdir, "steps=1000000"), "--peer-timeout", str(TIMEOUT_S)]
    run = typed_run.start(command, 2, tmp_path)
    sent = typed_run.interrupt(run, signal.SIGSTOP, typed_run.moments(workdir, 0)["step"], 0, [1])
    run.all[0].wait(300)
    took = time.monotonic() - sent
    run.kill()
    assert run.all[0].returncode == 75, run.said()
    assert took > TIMEOUT_S - 1
    assert re.search(r"Error: process 1 is silent since 20\S+, for more than 4 s: .* Go on with: scalejax", run.said())


def test_processes_save_by_the_clock_at_the_same_step(recipes, whole, tmp_path):
    by_clock = ("checkpoints.every=0", "checkpoints.every_seconds=0.3", "checkpoints.keep_last=1000")
    run = typed_run.start(arguments(recipes, "click", tmp_path / "run", *by_clock), 2, tmp_path)
    assert run.wait() == [0, 0], [run.said(0), run.said(1)]
    assert len(typed_run.saved(tmp_path / "run")) > 1
    typed_run.assert_equal(whole("click"), tmp_path / "run")
