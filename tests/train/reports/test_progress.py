"""What a run says while it trains, in a terminal, in a pipe and to a program."""

import io
import json
import os
import pathlib
import subprocess
import sys

import pytest
import rich.console
import small_run

from scalejax.train.reports import progress

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def clock(monkeypatch):
    """Seconds, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def a_run(shown, clock):
    """Steps 1 to 40, of which 10 take 2 s, and 5 s of compilation."""
    with shown.begin(40, 0):
        with shown.compiling("step"):
            clock[0] += 5
        clock[0] += 2
        window = progress.Window(
            metrics={"ne": 0.91, "auc": float("nan")},
            learning_rate=1e-3,
            examples_per_s=512.0,
            rate=8192.0,
            unit="tokens",
        )
        shown.window(10, "", 0.6931, window)
        shown.evaluation(10, "validation", {"ne": 0.95, "examples": 64}, {"ne": 0.95})
    shown.done({"test_ne": 0.97, "run_folder": "runs/a", "val_gate_cv": [[0.5, float("nan")], [float("inf"), 0.25]]})


def test_a_pipe_gets_plain_lines(clock):
    stream = io.StringIO()
    shown = progress.shown_on(rich.console.Console(file=stream))
    a_run(shown, clock)
    assert stream.getvalue().splitlines() == [
        "compiling the step ...",
        "compiled the step in 5 s",
        "train step 10/40  loss 0.6931  ne 0.9100  auc nan  8.19k tokens/s  ETA 6 s",
        "validation at step 10  ne 0.9500",
    ]


def test_a_program_gets_one_json_object_a_line(clock):
    stream = io.StringIO()
    a_run(progress.JsonLines(stream), clock)
    start, compiling, compiled, window, evaluation, done = [
        json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()
    ]
    assert start == {"event": "start", "step": 0, "steps": 40}
    assert (compiling["event"], compiled["event"], compiled["seconds"]) == ("compiling", "compiled", 5.0)
    assert window["event"] == "window"
    assert (window["step"], window["steps"], window["loss"], window["ne"]) == (10, 40, 0.6931, 0.91)
    assert (window["examples_per_s"], window["eta_s"], window["auc"]) == (512.0, 6.0, None)
    assert evaluation == {"event": "evaluation", "step": 10, "split": "validation", "ne": 0.95, "examples": 64}
    nested = [[0.5, None], [None, 0.25]]
    assert done == {"event": "done", "test_ne": 0.97, "run_folder": "runs/a", "val_gate_cv": nested}


def test_a_resumed_run_reckons_from_its_own_start(clock):
    stream = io.StringIO()
    shown = progress.JsonLines(stream)
    with shown.begin(100, 50):
        clock[0] += 10
        window = progress.Window(metrics={}, learning_rate=0.0, examples_per_s=1.0, rate=1.0, unit="examples")
        shown.window(60, "", 0.5, window)
    assert json.loads(stream.getvalue().splitlines()[-1])["eta_s"] == 40.0


def test_a_terminal_keeps_its_bar_and_no_console_shows_nothing(clock):
    stream = io.StringIO()
    shown = progress.shown_on(rich.console.Console(file=stream, force_terminal=True, width=120))
    a_run(shown, clock)
    text = stream.getvalue()
    assert "10/40" in text
    assert "8.19k tokens/s" in text
    assert "compiling" not in text
    a_run(progress.shown_on(None), clock)


WATCHED = """
import io, sys, threading
import rich.console, rich.live
from etils import epy

lazy_imports, found = epy.lazy_imports, []

def watched(*arguments, **named):
    drawing = any(isinstance(thread, rich.live._RefreshThread) for thread in threading.enumerate())
    found.append("imports replaced beside a bar" if drawing else "imports replaced alone")
    return lazy_imports(*arguments, **named)

epy.lazy_imports = watched
from scalejax.data import Categorical, ParquetData
from scalejax.train import loop

terminal = rich.console.Console(file=io.StringIO(), force_terminal=True)
with loop.progresses.shown_on(terminal).begin(10, 0):
    data = ParquetData(path=sys.argv[1], categorical=(Categorical(name="shop", rows=37),), batch_size=64)
    next(data.build().train_batches(start_example=0))
print(*found, sep="\\n")
"""


@pytest.mark.slow
def test_nothing_replaces_the_import_function_while_a_bar_is_drawn(tmp_path):
    """etils' `lazy_imports` does for a moment, for all threads: a relative import of rich's thread fails in it."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(small_run.write(tmp_path / "rows.parquet"))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    imports = done.stdout.splitlines()
    assert imports
    assert set(imports) == {"imports replaced alone"}
