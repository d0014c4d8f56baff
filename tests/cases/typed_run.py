"""`python -m scalejax train` as it is typed, in one process or several, and signals from outside.

They come at times that the files of the run tell: nothing in it knows of the test.
"""

import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import orbax.checkpoint as ocp
import small_graph_run
import small_language_run
import small_run

RECIPES = """
import dataclasses
import pathlib
import small_graph_run
import small_language_run
import small_run
from scalejax.parallel.mesh import MeshShape
from scalejax.train.experiment import Evaluation, Experiment, Placement

HERE = pathlib.Path(__file__).parent

def click() -> Experiment:
    return small_run.experiment(HERE / "rows.parquet")

def text() -> Experiment:
    return small_language_run.experiment(HERE / "texts", evaluation=Evaluation(final_split="validation", every=6))

def graph() -> Experiment:
    return small_graph_run.gcn(str(HERE / "graph.npz"), placement=Placement(mesh=MeshShape()), evaluation=Evaluation())
"""
PROGRAM = ["-m", "scalejax", "train"]


def write(folder: pathlib.Path) -> str:
    """Writes data and recipes; returns the file, of which FILE:click, FILE:text and FILE:graph are recipes."""
    small_run.write(folder / "rows.parquet")
    small_language_run.write(folder / "texts")
    small_graph_run.write_graph(folder / "graph.npz")
    (folder / "recipes.py").write_text(RECIPES)
    return str(folder / "recipes.py")


@dataclasses.dataclass
class Processes:
    """What was started; output goes to files, so that no full pipe stops it."""

    all: list[subprocess.Popen]
    errors: list[pathlib.Path]

    def wait(self, timeout_s: float = 300) -> list[int]:
        """Their statuses; negative for a signal. Kills what is left."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.all:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        return [process.returncode for process in self.all]

    def kill(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()

    def said(self, number: int = 0) -> str:
        """On standard error, without what Gloo and jax remark."""
        lines = self.errors[number].read_text().splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo]") and "proxy variable" not in line)


def start(arguments: Sequence[str], processes: int, folder: pathlib.Path, **variables: str) -> Processes:
    """Starts the command with one CPU device a process; `folder` gets what they print."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "8", **variables}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    started, errors = [], []
    for number in range(processes):
        job = ["--coordinator", address, "--processes", str(processes), "--process-id", str(number)]
        command = [sys.executable, *PROGRAM, *arguments, *(job if processes > 1 else [])]
        errors.append(folder / f"{number}-{time.monotonic_ns()}.err")
        with open(errors[-1], "wb") as error, open(folder / f"{number}.out", "wb") as out:
            started.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=error, env=environment)
            )
    return Processes(started, errors)


def until(run: Processes, seen: Callable[[], bool], timeout_s: float = 300) -> None:
    """Returns when something is seen, or a process has ended."""
    deadline = time.monotonic() + timeout_s
    while not seen():
        if any(process.poll() is not None for process in run.all):
            return
        assert time.monotonic() < deadline, [run.said(number) for number in range(len(run.all))]
        time.sleep(0.002)


def lines(workdir: pathlib.Path) -> list[dict]:
    """Of metrics.jsonl, those that are whole."""
    try:
        text = (workdir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def saved(workdir: pathlib.Path) -> list[int]:
    """Steps of complete checkpoints."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal())


def moments(workdir: pathlib.Path, evaluated: int) -> dict[str, Callable[[], bool]]:
    """By name: whether a run has come to its compilation, to a step, to a save, to an evaluation."""
    return {
        "compile": lambda: (workdir / "environment.json").exists(),
        "step": lambda: len(lines(workdir)) >= 2,
        "save": lambda: any((workdir / "checkpoints").glob("saving-*")),
        "evaluation": lambda: evaluated in saved(workdir),
    }


def interrupt(run: Processes, number: signal.Signals, seen: Callable[[], bool], seed: int, who: Sequence[int]) -> float:
    """Sends a signal to some of the processes soon after something is seen; returns when, by the monotonic clock."""
    until(run, seen)
    time.sleep(random.Random(seed).uniform(0, 0.05))
    for index in who:
        if run.all[index].poll() is None:
            run.all[index].send_signal(number)
    return time.monotonic()


def arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Of the newest checkpoint, read by orbax alone."""
    path = workdir / "checkpoints" / str(saved(workdir)[-1]) / "arrays"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(path).item_metadata.tree
        restored = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(path, ocp.args.PyTreeRestore(restore_args=restored))


def assert_equal(left: pathlib.Path, right: pathlib.Path) -> None:
    """Two runs recorded the same bytes and ended with the same bits."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    one, two = arrays(left), arrays(right)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)
