"""The device, threads, date and commit that a measurement is reported with."""

import contextlib
import datetime
import os
import pathlib
import subprocess
from collections.abc import Iterator


def device_name(device: object) -> str:
    """Human name of a jax device: "NVIDIA H200", or "cpu (AMD EPYC, 2 threads)" for a CPU."""
    platform, kind = getattr(device, "platform", "cpu"), getattr(device, "device_kind", "cpu")
    if platform != "cpu":
        return str(kind)
    return f"cpu ({_processor()}, {len(usable_cpus())} threads)"


def on_cpu() -> bool:
    """Whether jax's first device is a CPU."""
    import jax

    return jax.devices()[0].platform == "cpu"


def usable_cpus() -> list[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[int]:
    """Holds every thread of this process, and those it starts, to `count` CPUs; yields how many there really are.

    XLA sizes its thread pool from the CPUs that the process may use and has no call to change it, hence affinity and
    not a setting. Where the system has no affinity (macOS, Windows) nothing changes and all CPUs are reported.
    """
    before = usable_cpus()
    if not hasattr(os, "sched_setaffinity") or len(before) <= count:
        yield len(before)
        return
    _pin(before[:count])
    try:
        yield count
    finally:
        _pin(before)


def commit() -> str:
    """Commit of the checkout that this package runs from, "+changes" where it differs from it; else "unknown"."""
    here = pathlib.Path(__file__).resolve().parent
    head = _git(here, "rev-parse", "--short=12", "HEAD")
    if not head or _git(here, "ls-files", "--error-unmatch", __file__) is None:
        return "unknown"
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    return f"{head}+changes" if changed else head


def today() -> str:
    """The date, as YYYY-MM-DD in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


def _pin(cpus: list[int]) -> None:
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end between the listing and the call
            os.sched_setaffinity(int(task.name), cpus)
