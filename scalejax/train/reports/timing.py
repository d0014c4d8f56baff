"""Timing of a run, measured without waiting for the device after every step.

A step is dispatched long before it is done. The timer is handed one small output of each step (not donated, such as the
mean loss) and waits for the output of the step `in_flight` steps back: the device always has work queued, yet the
moments at which waits end are the moments at which steps complete. Step times are differences of those moments. Steps
that are found complete at once, as in a short run, have a mean and no times of their own: where they are most, there
is no median. A run in several pieces has sums and means of all, and the median of the last.

Time is booked by phase:

    data_wait     the loop asked for a batch that was not there yet
    dispatch      inside the call of the jitted step
    blocked       waiting for the device (steps to complete, metrics to arrive)
    checkpoint    the part of saving that holds the loop up
    compile       first calls; counted apart, in no rate and no step time
    handover      a state made of a checkpoint, where a run goes on or a phase begins, surgery included; counted apart
    evaluation    counted apart likewise

`samples_per_s` counts training examples over the wall time after the warm-up steps, what counts apart taken out and
everything else (data, checkpoints, logging) left in. Other amounts of a step (tokens, FLOPs) are counted likewise,
as `<name>_per_s`: rows of different lengths are different work.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

Phase = Literal["data_wait", "dispatch", "blocked", "checkpoint", "compile", "handover", "evaluation"]

_APART = ("compile", "handover", "evaluation")
_WAITS = ("blocked", "checkpoint", "evaluation")
"""Phases in which the loop waits for the device anyway: steps in flight are waited for and timed first."""

_AT_ONCE = 20
"""A median so many times below the mean is that of steps which were complete before anybody waited for them."""


class Output(Protocol):
    """An array that a step returned."""

    def block_until_ready(self) -> object: ...


class Device(Protocol):
    """A device of jax."""

    def memory_stats(self) -> dict[str, int] | None: ...


class StepTimer:
    """Times the steps of one process.

        timer = StepTimer(warmup_steps=20)
        with timer.phase("compile"): ...
        for step in range(...):
            with timer.phase("data_wait"): batch = next(batches)
            with timer.phase("dispatch"): state, loss = train_step(state, batch)
            timer.step_done(examples=batch_size, output=loss)
            if at the end of a window:
                writer.timing(step, timer.window())
        summary |= timer.summary()

    Args:
      warmup_steps: First steps left out of `samples_per_s` and of the step times of `summary` (caches, first touches).
        A run no longer than that is measured whole; `measured_steps` tells.
      in_flight: Steps that may be queued on the device.
      clock: Seconds, increasing; replaced in tests.
    """

    def __init__(
        self, *, warmup_steps: int = 20, in_flight: int = 2, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._warmup = warmup_steps
        self._in_flight = in_flight
        self._start = self._window_start = self._last = clock()
        self._pending: deque[tuple[dict[str, float], Output | None]] = deque()
        self._window_phases = dict.fromkeys(get_args(Phase), 0.0)
        self._phases = dict.fromkeys(get_args(Phase), 0.0)
        self._apart_since_last = 0.0
        self._durations: list[float] = []
        self._earlier: list[Mapping[str, float]] = []
        self._amounts: list[dict[str, float]] = []
        self._window_first = 0

    def goes_on_from(self, windows: Iterable[Mapping[str, float]]) -> None:
        """Adds the windows of earlier pieces of the run, as `timing.jsonl` has them, to what `summary` gives."""
        self._earlier = list(windows)

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Books the time inside the block; blocks must not nest."""
        if name in _WAITS:
            self._drain()
        start = self._clock()
        try:
            yield
        finally:
            self._book(name, self._clock() - start)

    def step_done(
        self, *, examples: int, output: Output | None = None, amounts: Mapping[str, float] | None = None
    ) -> None:
        """Call once after each step was dispatched.

        Args:
          examples: Training examples in the step's global batch.
          output: A small output of the step; None = a step is taken for complete when its dispatch returned.
          amounts: What else is in the batch, by name; the same names in every step.
        """
        self._pending.append(({"samples": examples, **(amounts or {})}, output))
        while len(self._pending) > (0 if output is None else self._in_flight):
            self._complete()

    def window(self) -> dict[str, float]:
        """Waits for the steps in flight, returns what happened since the last call, and starts anew.

        Returns:
          steps, examples, wall_s (what counts apart taken out), samples_per_s and that of other amounts,
          step_mean_s, step_p50_s, step_p95_s, data_wait_share (of wall_s), and `<phase>_s` for each phase.
        """
        self._drain()
        now = self._clock()
        durations = self._durations[self._window_first :]
        amounts = self._amounts[self._window_first :]
        phases = self._window_phases
        wall = now - self._window_start - sum(phases[name] for name in _APART)
        result = {
            "steps": len(durations),
            "examples": int(sum(found["samples"] for found in amounts)),
            "wall_s": wall,
            **_rates(amounts, wall),
            **_quantiles(durations),
            "data_wait_share": phases["data_wait"] / wall if wall > 0 else float("nan"),
            **{f"{name}_s": seconds for name, seconds in phases.items()},
        }
        self._window_start, self._window_first = now, len(self._durations)
        self._window_phases = dict.fromkeys(self._window_phases, 0.0)
        return result

    def summary(self) -> dict[str, float]:
        """The whole run so far: the timing fields of `summary.json`.

        Returns:
          samples_per_s and that of other amounts, step_mean_s, step_p50_s, step_p95_s and measured_steps (all without
          warm-up), data_wait_share, compile_s, handover_s, evaluation_s, checkpoint_s, and wall_s, which leaves nothing
          out.
        """
        self._drain()
        first = self._warmup if len(self._durations) > self._warmup else 0
        durations, amounts = self._durations[first:], self._amounts[first:]
        before = {
            name: sum(_number(window, f"{name}_s") for window in self._earlier) for name in ("wall", *self._phases)
        }
        phases = {name: seconds + before[name] for name, seconds in self._phases.items()}
        wall = self._clock() - self._start + before["wall"] + sum(before[name] for name in _APART)
        training = wall - sum(phases[name] for name in _APART)
        seconds, steps = sum(durations) + before["wall"], len(durations)
        quantiles = _quantiles(durations)
        if self._earlier:
            rates = dict.fromkeys(key for window in self._earlier for key in window if key.endswith("_per_s"))
            amounts = [*amounts, *(_amounts(window, rates) for window in self._earlier)]
            taken = [(_number(window, "step_mean_s"), _number(window, "steps")) for window in self._earlier]
            steps += int(sum(count for _, count in taken))
            total = sum(durations) + sum(mean * count for mean, count in taken)
            quantiles["step_mean_s"] = total / steps if steps else float("nan")
        return {
            **_rates(amounts, seconds),
            **quantiles,
            "measured_steps": steps,
            "data_wait_share": phases["data_wait"] / training if training > 0 else float("nan"),
            "compile_s": phases["compile"],
            "handover_s": phases["handover"],
            "evaluation_s": phases["evaluation"],
            "checkpoint_s": phases["checkpoint"],
            "wall_s": wall,
        }

    def _book(self, name: Phase, seconds: float) -> None:
        self._phases[name] += seconds
        self._window_phases[name] += seconds
        if name in _APART:
            self._apart_since_last += seconds

    def _complete(self) -> None:
        amounts, output = self._pending.popleft()
        if output is not None:
            start = self._clock()
            output.block_until_ready()
            self._book("blocked", self._clock() - start)
        now = self._clock()
        self._durations.append(now - self._last - self._apart_since_last)
        self._amounts.append(amounts)
        self._last, self._apart_since_last = now, 0.0

    def _drain(self) -> None:
        while self._pending:
            self._complete()


def _number(window: Mapping[str, float], key: str) -> float:
    """A number of a line of `timing.jsonl`; 0 where it is undefined."""
    return window.get(key) or 0.0


def _amounts(window: Mapping[str, float], rates: Iterable[str]) -> dict[str, float]:
    """What a window had in its batches, by its rates and its time."""
    return {name.removesuffix("_per_s"): _number(window, name) * _number(window, "wall_s") for name in rates}


def _rates(amounts: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """`<name>_per_s` of all steps together; NaN where no time has passed."""
    names = amounts[0] if amounts else ("samples",)
    total = {name: sum(found.get(name, 0) for found in amounts) for name in names}
    return {f"{name}_per_s": count / seconds if seconds > 0 else float("nan") for name, count in total.items()}


def _quantiles(durations: list[float]) -> dict[str, float]:
    """The mean, and median and 95th percentile where the clock carries them; else NaN."""
    found: dict[str, float] = dict.fromkeys(("step_mean_s", "step_p50_s", "step_p95_s"), float("nan"))
    if durations:
        mean, (p50, p95) = float(np.mean(durations)), np.percentile(durations, (50, 95))
        found["step_mean_s"] = mean
        if p50 * _AT_ONCE >= mean:
            found |= {"step_p50_s": float(p50), "step_p95_s": float(p95)}
    return found


def peak_memory(devices: Iterable[Device] = ()) -> dict[str, int]:
    """The most memory that this process ever held, by what it is.

    Args:
      devices: jax devices of this process.
    Returns:
      "peak_rss_bytes": resident memory of the process on the host (on CPU that is everything there is), and, where the
      devices count their own memory, "peak_device_bytes": the largest peak of one device.
    """
    result = {"peak_rss_bytes": _peak_rss_bytes()}
    stats = [device.memory_stats() for device in devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        result["peak_device_bytes"] = int(max(peaks))
    return result


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the process that started this one: Linux hands its peak on
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
