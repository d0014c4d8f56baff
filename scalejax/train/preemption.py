"""A run that is asked to end: by SIGTERM, SIGINT or a deadline it saves after the running step and goes.

Python calls a handler between two of its own instructions, and there are none while XLA compiles or a disk hangs. So a
thread reads, behind `signal.set_wakeup_fd`, what the kernel was told. It asks the loop to save and to end; where
nothing was trained that is not saved, or the loop does not come to it in time, it ends the process itself.
"""

import contextlib
import datetime
import os
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import NoReturn

from scalejax.errors import TemporaryFailure, UserError
from scalejax.train import peers

GRACE_S = 30.0
"""Seconds between being asked to end and ending without a save."""

SLURM_VARIABLE = "SLURM_JOB_END_TIME"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP, _ASKED = 0, 255
"""What is written to the thread besides numbers of signals: the block is left; another process was asked to end."""

_FRAMES = 6


class Preemption:
    """Hears, while the block is entered, that a run must end. Enter it in the main thread.

    Without being entered it hears nothing, and signals do what the program has set.

    Attributes:
      again: The command that goes on, for messages.
      trained: The last step that was begun; the loop says so.
      leaving: Whether the loop saves for the last time, so that all is left to it.
    """

    def __init__(self, *, deadline: float | None = None, grace_s: float = GRACE_S, again: str = "") -> None:
        """Describes when to end.

        Args:
          deadline: Seconds since the epoch by which the process must be gone: it is asked to end `grace_s` before.
          grace_s: How long it has to save when it is asked to end.
          again: The command that goes on; may change later.

        Raises:
          UserError: grace_s is negative or not finite.
        """
        _check_grace(grace_s)
        self.again, self.trained, self.leaving = again, 0, False
        self._saved: Callable[[], int] = lambda: 0
        self._grace_s = grace_s
        self._end_at = None if deadline is None else deadline - grace_s

    def __enter__(self) -> "Preemption":
        self._read, self._write = os.pipe()
        # `signal.set_wakeup_fd` refuses a descriptor that may block.
        os.set_blocking(self._write, False)
        self._main = threading.get_ident()
        # The handlers do nothing, and are there so that the kernel's call comes to Python, which writes to the pipe.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as nohup has it
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in heard}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        peers.job.asked = lambda: os.write(self._write, bytes([_ASKED]))
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # Whatever writes to the pipe is taken away before the pipe is closed.
        peers.job.asked = _nothing
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.write(self._write, bytes([_STOP]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def watch(self, saved: Callable[[], int]) -> None:
        """From here on there is something to lose.

        Args:
          saved: The newest step that a checkpoint of this run holds; 0 = none.
        """
        self.trained, self.leaving, self._saved = 0, False, saved
        peers.job.again = self.again
        peers.job.begin()

    def unsaved(self) -> bool:
        """Whether anything was trained that no checkpoint holds."""
        return self.trained > self._saved()

    def ended(self, step: int) -> TemporaryFailure:
        """What the loop raises when all is saved after a step."""
        return TemporaryFailure(f"Asked to end, and saved after step {step}. Go on with: {self.again}")

    def _listen(self) -> None:
        status = asked_at = None
        while True:
            # Before it is asked to end it looks at the deadline; after that at the last save, and at the grace.
            wait = 0.05 if asked_at is not None else 1.0
            numbers = os.read(self._read, 64) if select.select([self._read], [], [], wait)[0] else b""
            if self._end_at is not None and time.time() >= self._end_at and asked_at is None:
                numbers += bytes([_ASKED])
            for number in numbers:
                if number == _STOP:
                    return
                # The descriptor hears every signal for which the program has a Python handler.
                if number != _ASKED and number not in _SIGNALS:
                    continue
                if number != _ASKED and status is not None:
                    self._exit(128 + number, f"Ended by a second {signal.Signals(number).name}")
                status = status if number == _ASKED else 128 + number
                if asked_at is None:
                    asked_at = time.monotonic()
                    peers.job.ask(peers.END)
            if asked_at is None:
                continue
            if peers.job.is_primary and not self.leaving and not self.unsaved():
                self._exit(os.EX_TEMPFAIL, "Asked to end")
            if time.monotonic() - asked_at >= self._grace_s:
                stands = " < ".join(_stack(sys._current_frames().get(self._main)))  # pyright: ignore[reportPrivateUsage]
                self._exit(status or 128 + signal.SIGTERM, f"Not saved within --grace {self._grace_s:g} s: {stands}")

    def _exit(self, status: int, why: str) -> NoReturn:
        lost = (
            "what was trained since the newest checkpoint is lost"
            if self.unsaved()
            else "all that was trained is saved"
        )
        peers.job.end(status, f"{why}; {lost}. Go on with: {self.again}")


def deadline(text: str | None, grace_s: float) -> float | None:
    """Seconds since the epoch of `--deadline`, or of the end of a Slurm job; None where there is neither.

    Args:
      text: Seconds from now, or a time such as 2026-11-24T18:30, of this machine's zone where it names none.
      grace_s: How long before it the run is asked to end.

    Raises:
      UserError: it is neither, or nearer than `grace_s`; grace_s is negative or not finite.
    """
    _check_grace(grace_s)
    if text is None:
        slurm = os.environ.get(SLURM_VARIABLE, "")
        return float(slurm) if slurm.isdecimal() and int(slurm) else None
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > grace_s:
            return time.time() + seconds
    with contextlib.suppress(ValueError):
        if (when := datetime.datetime.fromisoformat(text).timestamp()) > time.time() + grace_s:
            return when
    raise UserError(
        "--deadline must be seconds from now or a time to come, such as 3600 or 2026-11-24T18:30, and farther away "
        f"than --grace, {grace_s:g} s, which is for the last save; got {text!r}."
    )


def _check_grace(grace_s: float) -> None:
    if not 0 <= grace_s < float("inf"):
        raise UserError(f"--grace must be 0 or more seconds, such as 30; got {grace_s:g}.")


def _nothing() -> None:
    pass


def _stack(frame: types.FrameType | None) -> list[str]:
    """Where a thread stands, innermost first, then calls of scalejax and of the script alone. Reads no file."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        if not found or frame.f_globals.get("__name__", "").partition(".")[0] in ("scalejax", "__main__"):
            code = frame.f_code
            found.append(f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        frame = frame.f_back
    return found
