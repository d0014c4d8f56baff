"""How far a run is while it trains: a bar in a terminal, plain lines in a pipe, or one JSON object a line.

    {"event": "compiling", "what": "state"}
    {"event": "compiled", "what": "state", "seconds": 1.3}
    {"event": "start", "step": 0, "steps": 400}
    {"event": "compiling", "what": "step"}
    {"event": "compiled", "what": "step", "seconds": 4.2}
    {"event": "window", "step": 25, "steps": 400, "phase": "", "loss": 0.46, "examples_per_s": 8100.0, "eta_s": 12.5,
     "learning_rate": 1e-3, "rate": 8100.0, "unit": "examples", "logloss": 0.47, ...}
    {"event": "evaluation", "step": 100, "split": "validation", "logloss": 0.45, ...}
    {"event": "warning", "step": 100, "text": "The residual of the exchange has grown ..."}
    {"event": "done", "run_folder": "runs/wukong-001", "test_auc": 0.71, ...}

A resumed run starts at its step. `loss` is that of the step, metrics are those of the window; `rate` counts what the
task counts (tokens, examples) a second. "done" has the closing summary. What is undefined or not finite is null.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import IO, Any

import rich.progress
from rich.console import Console

from scalejax.train import disk
from scalejax.train.reports import console as consoles
from scalejax.train.reports import summary as summaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """What is shown of the steps since the window before.

    Attributes:
      metrics: The first metrics by name.
      learning_rate: Of the step that ends it.
      examples_per_s: Training examples a second.
      rate: The same in units of the task.
      unit: What those are, "tokens".
    """

    metrics: Mapping[str, float]
    learning_rate: float
    examples_per_s: float
    rate: float
    unit: str

    @property
    def speed(self) -> str:
        """For people: "8.1k tokens/s"."""
        return f"{consoles.count(self.rate)} {self.unit}/s"


class Progress:
    """Shows nothing: the progress of every process but the first, and of a call from Python without a console."""

    def begin(self, steps: int, start: int) -> AbstractContextManager[None]:
        """For the time of training, from after step `start` to step `steps`."""
        del steps, start
        return contextlib.nullcontext()

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """For the time in which the program of "state" or "step" is compiled and runs for the first time."""
        del what
        return contextlib.nullcontext()

    def window(self, step: int, phase: str, loss: float, window: Window) -> None:
        """A window of the phase ends with `step`, whose own mean loss is `loss`."""

    def evaluation(self, step: int, split: str, values: Mapping[str, float], shown: Mapping[str, float]) -> None:
        """A split was scored with the parameters after `step`: all values, and the few to show to people."""

    def warning(self, step: int, text: str) -> None:
        """What a user should look at, found at the end of `step`."""

    def done(self, summary: Mapping[str, object]) -> None:
        """The run has ended."""


class Bar(Progress):
    """A line of a terminal that is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def begin(self, steps: int, start: int) -> Iterator[None]:
        with rich.progress.Progress(*consoles.progress_columns(), console=self._console) as self._bar:
            fields: dict[str, Any] = consoles.progress_fields()
            self._task = self._bar.add_task("train", total=steps, completed=start, **fields)
            yield

    def window(self, step: int, phase: str, loss: float, window: Window) -> None:
        fields: dict[str, Any] = consoles.progress_fields(rate=window.speed, **window.metrics, lr=window.learning_rate)
        self._bar.update(self._task, completed=step, description=phase or "train", **fields)

    def warning(self, step: int, text: str) -> None:
        del step
        self._console.print(f"Warning: {text}", markup=False, highlight=False, soft_wrap=True)


class TextLines(Progress):
    """A plain line for each thing that happens, at once."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._steps, self._start = 0, 0
        self._began = time.perf_counter()  # moved on by what compiling takes: the time that is left has none

    def _say(self, event: Mapping[str, object], text: str) -> None:
        del event
        if text:
            print(text, file=self._stream, flush=True)

    def begin(self, steps: int, start: int) -> AbstractContextManager[None]:
        self._steps, self._start, self._began = steps, start, time.perf_counter()
        self._say({"event": "start", "step": start, "steps": steps}, "")
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        self._say({"event": "compiling", "what": what}, f"compiling the {what} ...")
        yield
        seconds = time.perf_counter() - start
        self._began += seconds
        event = {"event": "compiled", "what": what, "seconds": seconds}
        self._say(event, f"compiled the {what} in {summaries.duration(seconds)}")

    def window(self, step: int, phase: str, loss: float, window: Window) -> None:
        eta = (time.perf_counter() - self._began) / (step - self._start) * (self._steps - step)
        event = {"event": "window", "step": step, "steps": self._steps, "phase": phase, "loss": loss}
        event |= {"examples_per_s": window.examples_per_s, "eta_s": eta, "learning_rate": window.learning_rate}
        event |= {"rate": window.rate, "unit": window.unit, **window.metrics}
        shown = _texts({"loss": loss, **window.metrics})
        left = f"ETA {summaries.duration(eta)}" if step < self._steps else ""
        self._say(event, f"{phase or 'train'} step {step}/{self._steps}  {shown}  {window.speed}  {left}".rstrip())

    def evaluation(self, step: int, split: str, values: Mapping[str, float], shown: Mapping[str, float]) -> None:
        event = {"event": "evaluation", "step": step, "split": split, **values}
        self._say(event, f"{split} at step {step}  {_texts(shown)}")

    def warning(self, step: int, text: str) -> None:
        self._say({"event": "warning", "step": step, "text": text}, f"Warning: {text}")

    def done(self, summary: Mapping[str, object]) -> None:
        self._say({"event": "done", **summary}, "")


class JsonLines(TextLines):
    """The same events as JSON objects, one a line."""

    def _say(self, event: Mapping[str, object], text: str) -> None:
        super()._say(event, json.dumps(disk.finite(event), allow_nan=False))


def shown_on(console: Console | None) -> Progress:
    """What suits a console: a bar where it can be drawn anew, else lines; nothing without one."""
    if console is None:
        return Progress()
    return Bar(console) if console.is_terminal or console.is_jupyter else TextLines(console.file)


def _texts(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())
