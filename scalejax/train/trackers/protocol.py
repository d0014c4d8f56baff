"""`Tracker`: where the numbers of a run go besides its folder, and what it is told of the run."""

import dataclasses
import importlib.util
import pathlib
import uuid
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from scalejax.errors import UserError
from scalejax.train import disk

FILE = "tracker.json"
"""In a run folder: the id under which trackers know the run, whatever attempt it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it.

    Attributes:
      folder: The run folder.
      id: The same in every attempt of the run, and no other run's: 16 hexadecimal digits.
      step: From which it goes on; 0 = it begins. Later steps may have been logged before: they come again.
      record: The content of `experiment.json`.
    """

    folder: pathlib.Path
    id: str
    step: int
    record: Mapping[str, object]

    @classmethod
    def of(cls, folder: pathlib.Path, step: int) -> "TrackedRun":
        """The run of a folder, which keeps its id.

        Raises:
          UserError: the disk refuses, or the file is damaged.
        """
        path = folder / FILE
        if not path.exists():
            disk.write_json(path, {"id": uuid.uuid4().hex[:16]})
        found = disk.read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get("id"), str):
            raise UserError(f"{path} is damaged: it has no id. Remove it; trackers then take this for a new run.")
        record = folder / "experiment.json"
        return cls(folder=folder, id=found["id"], step=step, record=disk.read_json(record) if record.exists() else {})


class Tracker(Protocol):
    """Called by process 0 alone, by one thread, in this order: `start`, the rest in any order, `finish`."""

    def start(self, run: TrackedRun) -> None:
        """Opens the run; where it was opened before under this id, goes on with it."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers, by names such as "train/logloss", "validation/auc", "timing/samples_per_s"."""
        ...

    def picture(self, step: int, name: str, svg: str) -> None:
        """Adds a picture, the text of an SVG file."""
        ...

    def finish(self) -> None:
        """Writes what is left. The run may be over, or go on in another process."""
        ...


@runtime_checkable
class TrackerConfig(Protocol):
    """A frozen dataclass of plain values; constructing one imports nothing."""

    def build(self) -> Tracker:
        """The tracker, not yet started.

        Raises:
          UserError: what it needs is not installed.
        """
        ...


def require(package: str, tracker: str) -> None:
    """Refuses a tracker whose package is not installed, before anything is trained.

    Raises:
      UserError: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(f"trackers: {tracker} needs the package {package}. pip install {package}, or leave it out.")
