"""Several processes: how they find each other, wait for each other and agree."""

import atexit
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from scalejax import compat
from scalejax.errors import UserError
from scalejax.train import peers

T = TypeVar("T")

INITIALIZATION_TIMEOUT_S = 120
"""How long a process waits for the others at the start."""

HEARTBEAT_TIMEOUT_S = 60
"""After how long without a sign of life jax aborts the others; `peers.TIMEOUT_S` ends them earlier, and says why."""

_LOOPBACK = ("127.0.0.1", "localhost")
_POD = "JOB_COMPLETION_INDEX"
"""Variable of the environment in pods of an Indexed Job."""


def initialize(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    *,
    timeout_s: int = INITIALIZATION_TIMEOUT_S,
    peer_timeout_s: float = peers.TIMEOUT_S,
) -> None:
    """Joins the processes of a job, which watch each other from then on. Call it before anything asks jax for devices.

    A process that is gone ends the others with a line each and status 75, see `peers`. jax's own handler of SIGTERM is
    left out: it would keep the signal from those of Python.

    Without arguments a cluster that jax knows (Slurm, Open MPI, TPU pods, Kubernetes) is joined, and a process that
    is alone stays alone.

    Args:
      coordinator: "host:port" of process 0, where it will listen.
      processes: Number of processes, 1 or more.
      process_id: This process, 0 <= process_id < processes.
      timeout_s: Seconds to wait for the others.
      peer_timeout_s: Seconds of silence after which a process counts as gone.
    Raises:
      UserError: Only some of the three are given, one is out of range, processes disagree, the port is taken, or a pod
        of a Job of Kubernetes is not told of the others.
      TemporaryFailure: Some processes did not come in time; it names them.
    """
    if not 0 < peer_timeout_s < HEARTBEAT_TIMEOUT_S:
        raise UserError(
            f"--peer-timeout must be above 0 and below {HEARTBEAT_TIMEOUT_S} s, after which jax aborts; got "
            f"{peer_timeout_s:g}."
        )
    given = {"--coordinator": coordinator, "--processes": processes, "--process-id": process_id}
    if all(value is None for value in given.values()):
        detected = compat.detected_processes()
        if not detected:
            _check_alone()
        if detected <= 1:
            return
        coordinator, processes, process_id = compat.detected_job(timeout_s)
    if coordinator is None or processes is None or process_id is None:
        missing = [name for name, value in given.items() if value is None]
        present = [f"{name} {value}" for name, value in given.items() if value is not None]
        raise UserError(
            f"distributed: {', '.join(missing)} missing beside {', '.join(present)}. Give all three, or none of them "
            "on a cluster that jax detects or for a single process."
        )
    host, port = _address(coordinator)
    if processes < 1:
        raise UserError(f"--processes must be 1 or more; got {processes}. Give the number of processes of the job.")
    if not 0 <= process_id < processes:
        raise UserError(
            f"--process-id must be between 0 and {processes - 1} for --processes {processes}; got {process_id}. "
            "Number the processes from 0."
        )
    # A job on one machine has no reason to listen to others; jax would listen on every interface.
    bind_address = coordinator if host in _LOOPBACK else None
    # jax aborts the whole process when it cannot connect or listen, so look before it leaps.
    if process_id == 0:
        _check_port_is_free(host if host in _LOOPBACK else "", port, coordinator)
    connections = peers.join(host, port, processes, process_id, timeout_s)
    peers.job.watch(connections, process_id, processes, peer_timeout_s)
    if process_id:
        _wait_for_listener(host, port, timeout_s)
    jax.config.update("jax_enable_preemption_service", False)
    compat.abort_late()
    jax.distributed.initialize(
        coordinator,
        processes,
        process_id,
        coordinator_bind_address=bind_address,
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
    peers.job.present(broadcast(peers.job.token))
    atexit.register(_leave)


def _check_alone() -> None:
    """Refuses a pod of an Indexed Job that nobody tells of the others: each would be a run of its own."""
    index = os.environ.get(_POD)
    if index is not None:
        raise UserError(
            f"distributed: this is pod {index} of a Job of Kubernetes (${_POD}), and nothing says how many there are: "
            f"each would train alone, in the same folder. Give --coordinator JOB-0.SERVICE:8476 --processes N "
            f"--process-id $({_POD}), as the Job in docs/training.md does. For a run of each pod give "
            "--coordinator localhost:8476 --processes 1 --process-id 0."
        )


def _leave() -> None:
    """Before jax's own handler, in which processes wait for each other."""
    peers.job.leave(1 if hasattr(sys, "last_value") else 0)  # an error that nobody caught


def is_primary() -> bool:
    """Whether this process owns the run folder: its lock, its records, its console."""
    return jax.process_index() == 0


def broadcast(value: object) -> Any:
    """The value of process 0 on every process. `value`: anything that JSON holds; ignored on the other processes."""
    if jax.process_count() == 1:
        return value
    return gather(value if is_primary() else None)[0]


def gather(value: T) -> list[T]:
    """The values of all processes, by process, on every process. `value`: anything that JSON holds."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).reshape(-1)
    # A power of two, so that few shapes are ever compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def together(part: Callable[[], T]) -> T:
    """Does a part on every process and raises on every process when it fails on any, so that none waits in vain.

    Args:
      part: What this process does; may fail on some processes only.
    Returns:
      This process's result.
    Raises:
      Exception: What `part` raised, where it did. Elsewhere a `UserError` or, if no process failed with one, a
        `RuntimeError` that names the process and carries its message.
    """
    failure: Exception | None = None
    result = None
    try:
        result = part()
    except Exception as error:
        failure = error
    raise_together(failure)
    return result  # pyright: ignore[reportReturnType]


def on_primary(part: Callable[[], T]) -> T:
    """Does a part on process 0 alone; every process gets its result or its error, as in `together`.

    Args:
      part: Returns something that JSON holds.
    """
    return broadcast(together(lambda: part() if is_primary() else None))


def raise_together(error: BaseException | None) -> None:
    """As `together`, for an error that was kept from earlier. Every process calls this at the same point."""
    if jax.process_count() == 1:
        reports = []
    else:
        reports = gather(None if error is None else [isinstance(error, UserError), f"{error}"])
    if error is not None:
        raise error
    failures = [(process, *report) for process, report in enumerate(reports) if report is not None]
    for process, is_user_error, message in sorted(failures, key=lambda failure: not failure[1]):
        kind = UserError if is_user_error else RuntimeError
        raise kind(f"process {process}: {message}")


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(
            f"--coordinator must be HOST:PORT with a port between 1 and 65535; got {coordinator!r}. Give the address "
            "of the machine of process 0 and a port that is free there, for instance 10.0.0.1:8476."
        )
    return host.strip("[]"), int(port)


def _check_port_is_free(host: str, port: int, coordinator: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(
                f"--coordinator {coordinator}: process 0 cannot listen on port {port} ({error.strerror}). Choose "
                "another port, or end the program that uses it."
            ) from error


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Until jax listens on process 0, which does so at once; if that is gone, `peers` ends this process."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1.0).close()
            return
        time.sleep(0.05)
