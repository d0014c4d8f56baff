"""The line-by-line records of a run: `metrics.jsonl`, `timing.jsonl`, and what its trackers get; process 0 writes them.

`metrics.jsonl` holds only values that follow from the experiment, so that two runs of one experiment, or an interrupted
and an uninterrupted one, have equal files. One JSON object a line, keys in this order:

    {"kind": "window", "step": 200, "split": "train", "examples": 12800, "logloss": ..., "ne": ..., "calibration": ...,
     "base_rate": ..., "auc_hist": ..., "auc_error_bound": ..., "nonfinite": 0, "learning_rate": ..., ...}
    {"kind": "evaluation", "step": 200, "split": "validation", "examples": 2048, "logloss": ..., "auc": ..., ...}

Runs whose exchange compresses have "exchange_error" and "exchange_residual" too (`reports.exchange`).

A window covers the steps since the previous window, each example scored before it is trained on. With several tasks a
metric is called "logloss/task". An undefined or non-finite value is null.

`timing.jsonl` holds what depends on the machine (see `timing.StepTimer.window`), one object a window:

    {"attempt": 1, "step": 200, "wall_s": ..., "samples_per_s": ..., "step_p50_s": ..., "data_wait_share": ..., ...}

where `attempt` counts the processes that worked in this folder. Trackers get the numbers under names such as
`train/logloss`, `validation/auc` and `timing/samples_per_s`.
"""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from scalejax.train import disk, run_folder
from scalejax.train.trackers.protocol import TrackedRun, Tracker

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"

Value = float | int | str | None


class EventWriter:
    """Writes the records of one run folder and starts its trackers; on every process but 0 all methods do nothing.

    Opening cuts the files back to `step`, the restored step (0 = nothing was restored, so nothing stays). A
    record that is already there is not written a second time: a run that was stopped between its last checkpoint and
    its end repeats the final evaluation. Each line is handed to the operating system at once; write the window of a
    step *before* saving its checkpoint.

    Raises:
      UserError: a file holds a line that is not a record, or the disk refuses.
    """

    def __init__(
        self, folder: Path, *, process_index: int = 0, step: int = 0, trackers: Sequence[Tracker] = ()
    ) -> None:
        self._files: dict[str, io.FileIO] = {}
        self._present: set[tuple[object, ...]] = set()
        self._trackers: list[Tracker] = []
        if process_index != 0:
            return
        for name in (METRICS_FILE, TIMING_FILE):
            run_folder.cut_back(folder / name, step if step > 0 else -1)
        self._present = {_identity(record) for record in run_folder.read_lines(folder / METRICS_FILE)}
        earlier = run_folder.read_lines(folder / TIMING_FILE)
        self._attempt = 1 + max((record["attempt"] for record in earlier), default=0)
        self._folder = folder
        with disk.explained(f"cannot write to run folder {folder}"):
            for name in (METRICS_FILE, TIMING_FILE):
                self._files[name] = open(folder / name, "ab", buffering=0)  # noqa: SIM115
        try:
            for tracker in trackers:
                tracker.start(TrackedRun.of(folder, step))
                self._trackers.append(tracker)
        except BaseException:
            self.close()
            raise

    def window(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds the training metrics of the window that ends with `step`."""
        self._metrics("window", step, "train", values)

    def evaluation(self, step: int, split: str, values: Mapping[str, Value]) -> None:
        """Adds the metrics of a pass over `split` with the parameters after `step`."""
        self._metrics("evaluation", step, split, values)

    def timing(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds what the machine did in the window that ends with `step`."""
        if not self._files:
            return
        self._line(TIMING_FILE, {"attempt": self._attempt, "step": step, **values})
        self._scalars("timing", step, values)

    def picture(self, step: int, name: str, svg: str) -> None:
        """Gives a picture to the trackers; the folder has its own."""
        for tracker in self._trackers:
            tracker.picture(step, name, svg)

    def sync(self) -> None:
        """Makes all lines durable; call it before a checkpoint that comes after them is committed."""
        for name, file in self._files.items():
            with disk.explained(f"cannot write {self._folder / name}"):
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes all files and trackers."""
        for file in self._files.values():
            file.close()
        trackers, self._files, self._trackers = self._trackers, {}, []
        for tracker in trackers:
            tracker.finish()

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _metrics(
        self, kind: Literal["window", "evaluation"], step: int, split: str, values: Mapping[str, Value]
    ) -> None:
        record = {"kind": kind, "step": step, "split": split, **values}
        if not self._files or _identity(record) in self._present:
            return
        self._present.add(_identity(record))
        self._line(METRICS_FILE, record)
        self._scalars(split, step, values)

    def _line(self, name: str, record: Mapping[str, Value]) -> None:
        disk.append(self._files[name], to_line(record).encode(), self._folder / name)

    def _scalars(self, group: str, step: int, values: Mapping[str, Value]) -> None:
        plain_values = {f"{group}/{name}": plain(value) for name, value in values.items()}
        numbers = {name: value for name, value in plain_values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(step, numbers)


def to_line(record: Mapping[str, Value]) -> str:
    """One line of strict JSON; floats in their shortest exact form, NaN and infinities as null."""
    return json.dumps({name: plain(value) for name, value in record.items()}, allow_nan=False) + "\n"


def plain(value: Value | np.generic | np.ndarray) -> Value:
    """A value that strict JSON can hold: NumPy scalars become Python's, non-finite floats None."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return plain(value.item())


def _identity(record: Mapping[str, object]) -> tuple[object, ...]:
    return record["kind"], record["step"], record["split"]
