"""The line-by-line records of a run: `metrics.jsonl`, `timing.jsonl` and TensorBoard events; process 0 writes them.

`metrics.jsonl` holds only values that follow from the experiment, so that two runs of one experiment, or an interrupted
and an uninterrupted one, have equal files. One JSON object a line, keys in this order:

    {"kind": "window", "step": 200, "split": "train", "examples": 12800, "logloss": ..., "ne": ..., "calibration": ...,
     "base_rate": ..., "auc_hist": ..., "auc_error_bound": ..., "nonfinite": 0, "learning_rate": ..., ...}
    {"kind": "evaluation", "step": 200, "split": "validation", "examples": 2048, "logloss": ..., "auc": ..., ...}

A window covers the steps since the previous window, each example scored before it is trained on. With several tasks a
metric is called "logloss/task". An undefined or non-finite value is null.

`timing.jsonl` holds what depends on the machine (see `timing.StepTimer.window`), one object a window:

    {"attempt": 1, "step": 200, "wall_s": ..., "samples_per_s": ..., "step_p50_s": ..., "data_wait_share": ..., ...}

where `attempt` counts the processes that worked in this folder; lines of earlier attempts stay. TensorBoard events lie
in `tensorboard/` with tags such as `train/logloss`, `validation/auc` and `timing/samples_per_s`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalejax.errors import UserError

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Value = float | int | str | None


class EventWriter:
    """Writes the records of one run folder; on every process but 0 all methods do nothing.

    Opening cuts `metrics.jsonl` back to `step`, the restored step (0 = nothing was restored, so nothing stays). A
    record that is already there is not written a second time: a run that was stopped between its last checkpoint and
    its end repeats the final evaluation. Each line is handed to the operating system at once; write the window and the
    evaluation of a step *before* saving its checkpoint.

    Raises:
      UserError: `metrics.jsonl` holds a line that is not a record.
    """

    def __init__(self, folder: Path, *, process_index: int = 0, step: int = 0) -> None:
        self._files: dict[str, Any] = {}
        self._present: set[tuple[Any, ...]] = set()
        self._board = None
        if process_index != 0:
            return
        from tensorboardX import SummaryWriter  # slow to import, and needed by one process only

        kept = cut_back(folder / METRICS_FILE, step)
        self._present = {_identity(record) for record in kept}
        earlier = read(folder / TIMING_FILE)
        self._attempt = 1 + max((record["attempt"] for record in earlier), default=0)
        _drop_torn_line(folder / TIMING_FILE)
        self._files = {name: open(folder / name, "a", encoding="utf-8") for name in (METRICS_FILE, TIMING_FILE)}  # noqa: SIM115
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def window(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds the training metrics of the window that ends with `step`."""
        self._metrics({"kind": "window", "step": step, "split": "train", **values})

    def evaluation(self, step: int, split: str, values: Mapping[str, Value]) -> None:
        """Adds the metrics of a pass over `split` with the parameters after `step`."""
        self._metrics({"kind": "evaluation", "step": step, "split": split, **values})

    def timing(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds what the machine did in the window that ends with `step`."""
        if self._board is None:
            return
        self._line(TIMING_FILE, {"attempt": self._attempt, "step": step, **values})
        self._scalars("timing", step, values)

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _metrics(self, record: dict[str, Any]) -> None:
        if self._board is None or _identity(record) in self._present:
            return
        self._present.add(_identity(record))
        self._line(METRICS_FILE, record)
        kind = "train" if record["kind"] == "window" else record["split"]
        self._scalars(kind, record["step"], {k: v for k, v in record.items() if k not in ("kind", "step", "split")})

    def _line(self, name: str, record: Mapping[str, Value]) -> None:
        self._files[name].write(to_line(record))
        self._files[name].flush()

    def _scalars(self, group: str, step: int, values: Mapping[str, Value]) -> None:
        assert self._board is not None
        for name, value in values.items():
            number = plain(value)
            if isinstance(number, (int, float)):
                self._board.add_scalar(f"{group}/{name}", number, step)


def to_line(record: Mapping[str, Value]) -> str:
    """One line of strict JSON; floats in their shortest exact form, NaN and infinities as null."""
    return json.dumps({name: plain(value) for name, value in record.items()}, allow_nan=False) + "\n"


def plain(value: Any) -> Value:
    """A value that strict JSON can hold: NumPy scalars become Python's, non-finite floats None."""
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return float(value) if math.isfinite(value) else None


def read(path: Path) -> list[dict[str, Any]]:
    """All complete records of a `.jsonl` file, in order; a missing file has none, a torn last line is left out.

    Raises:
      UserError: a line that is not a JSON object.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was torn
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(
                f"{path}: line {number} is not a JSON object but {line[:80]!r}. The file is damaged: remove that line, "
                "or start in another folder with --workdir."
            )
        records.append(record)
    return records


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Removes the records after `step` (all of them if `step` is 0), atomically; returns those that stay."""
    if not path.exists():
        return []
    records = read(path)
    if not all(isinstance(record.get("step"), int) for record in records):
        raise UserError(f"{path}: a record has no step. Start in another folder with --workdir.")
    stays = [step > 0 and record["step"] <= step for record in records]
    content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    left = b"".join(line + b"\n" for line, stay in zip(lines, stays, strict=True) if stay)
    if left != content:
        part = path.with_suffix(".part")
        part.write_bytes(left)
        os.replace(part, path)
    return [record for record, stay in zip(records, stays, strict=True) if stay]


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))


def _identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record["step"], record["split"]
