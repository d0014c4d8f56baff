"""Runs a reader on bytes in a forked child with limits of time and memory, and says how that ended.

The process that forks has never imported jax's backends, so a fork is safe. Allowed ends are `read` and `refused`.
"""

import contextlib
import importlib
import json
import os
import pathlib
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scalejax.errors import UserError

SECONDS = 10.0
IMPORT_SECONDS = 120.0
BYTES = 2**32
"""Of addresses beyond those in use when a child begins; each thread of Arrow reserves many that it never uses."""


@dataclass(frozen=True)
class End:
    """How a child ended.

    Attributes:
      kind: "read", "refused" (one UserError), "traceback", "signal" or "hang".
      text: Digest of what was read, message, traceback or name of the signal.
      lines: Hashes of the lines of scalejax that ran, where that was asked for.
    """

    kind: str
    text: str
    lines: tuple[int, ...] = ()


def run(read: Callable[[], str], *, trace: bool = False, seconds: float | None = None) -> End:
    """Calls `read` in a child."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        try:
            end = json.dumps(_inside(read, trace)).encode()
            while end:
                end = end[os.write(sink, end) :]
        finally:
            os._exit(0)
    os.close(sink)
    seconds = SECONDS if seconds is None else seconds
    data, until = b"", time.monotonic() + seconds
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 16)):
                break
            data += part
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return End("hang", f"no end within {seconds} s")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return End("signal", signal.Signals(os.WTERMSIG(status)).name)
    if not data:
        return End("signal", f"left with status {os.waitstatus_to_exitcode(status)} and no word")
    kind, text, lines = json.loads(data)
    return End(kind, text, tuple(lines))


def _inside(read: Callable[[], str], trace: bool) -> tuple[str, str, list[int]]:
    in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines: set[int] = set()

    def in_line(frame: Any, event: str, argument: Any) -> Any:
        lines.add(hash((frame.f_code.co_filename, frame.f_lineno)))
        return in_line

    def in_call(frame: Any, event: str, argument: Any) -> Any:
        return in_line if "/scalejax/" in frame.f_code.co_filename else None

    if trace:
        sys.settrace(in_call)
    try:
        with warnings.catch_warnings(action="error"):
            warnings.simplefilter("default", ResourceWarning)
            kind, text = "read", read()
    except UserError as error:
        kind, text = "refused", str(error)
    except BaseException:
        kind, text = "traceback", traceback.format_exc(limit=-12)
    sys.settrace(None)
    return kind, text, sorted(lines)


def intact(reader: Any, files: dict[str, bytes]) -> str:
    """The digest of an intact sample; what reading it imported is imported here, so that no other child has to."""

    def read_and_name() -> str:
        return json.dumps([reader.read(folder), sorted(sys.modules)])

    with _written(files) as folder:
        end = run(read_and_name, seconds=IMPORT_SECONDS)
    assert end.kind == "read", end
    digest, modules = json.loads(end.text)
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    return digest


def run_on(reader: Any, files: dict[str, bytes], *, trace: bool = False) -> End:
    """Writes files into a folder of their own and has a reader (`readers.Reader`) read it in a child."""
    with _written(files) as folder:
        return run(lambda: reader.read(folder), trace=trace)


@contextlib.contextmanager
def _written(files: dict[str, bytes]) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = pathlib.Path(name)
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        yield folder
