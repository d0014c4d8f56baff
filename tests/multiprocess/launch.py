"""Runs a script as several processes on the loopback interface, and ends every one of them."""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_START = pathlib.Path(__file__).with_name("worker_start.py")


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a worker ended. `returncode` is negative for a signal, as in subprocess."""

    returncode: int
    stdout: str
    stderr: str


@dataclasses.dataclass
class Worker:
    """A running process; its output goes to files, so that no full pipe can stop it."""

    process: subprocess.Popen
    stdout_path: pathlib.Path
    stderr_path: pathlib.Path

    def stdout(self) -> str:
        """What Python has printed on it so far."""
        return self.stdout_path.read_text(encoding="utf-8")

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_workers(
    script: pathlib.Path | Sequence[str], processes: int, devices_per_process: int, args: Sequence[str] = ()
) -> list[Worker]:
    """Starts `python SCRIPT ARGS --coordinator HOST:PORT --processes N --process-id I` N times.

    Args:
      script: A file, or what follows `python`, for instance ["-m", "scalejax", "train", "wukong"].
      processes: 1 starts one process without the three options.
      devices_per_process: CPU devices of each.
      args: Arguments after the script.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_CHECK_PROXY_ENVS": "0",
    }
    coordinator = f"127.0.0.1:{free_port()}"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="workers-"))
    workers = []
    for index in range(processes):
        program = [str(script)] if isinstance(script, pathlib.Path) else script
        command = [sys.executable, str(_START), *program, *map(str, args)]
        if processes > 1:
            command += ["--coordinator", coordinator, "--processes", str(processes), "--process-id", str(index)]
        out, err = folder / f"{index}.out", folder / f"{index}.err"
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
            )
        workers.append(Worker(process, out, err))
    return workers


def finish(workers: list[Worker], timeout_s: float, patience_s: float = 10.0) -> list[Finished]:
    """Waits for the workers and kills those that are left when the time is over or another one has failed.

    Args:
      workers: From `start_workers`.
      timeout_s: Seconds for all of them.
      patience_s: Seconds that the others get to end after one has failed.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while any(worker.process.poll() is None for worker in workers) and time.monotonic() < deadline:
            if any(worker.process.poll() for worker in workers):
                deadline = min(deadline, time.monotonic() + patience_s)
                patience_s = float("inf")
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.kill()
    return [Finished(w.process.returncode, w.stdout(), w.stderr_path.read_text()) for w in workers]


def run_workers(
    script: pathlib.Path | Sequence[str],
    processes: int,
    devices_per_process: int,
    args: Sequence[str] = (),
    timeout_s: float = 120.0,
) -> list[str]:
    """Runs workers to their end; returns what each printed on stdout.

    Raises:
      AssertionError: One failed or was still running; shows what all of them said.
    """
    finished = finish(start_workers(script, processes, devices_per_process, args), timeout_s)
    if any(one.returncode != 0 for one in finished):
        said = "\n".join(
            f"--- process {i}: exit {one.returncode}\n{one.stdout[-4000:]}{one.stderr[-8000:]}"
            for i, one in enumerate(finished)
        )
        raise AssertionError(f"{script}: a process failed or ran longer than {timeout_s:g} s\n{said}")
    return [one.stdout for one in finished]
