"""trackio: runs in a database on this machine, shown by `trackio show`."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from scalejax.train.trackers import protocol
from scalejax.train.trackers.protocol import TrackedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackio:
    """A run of trackio in `$TRACKIO_DIR`, named as the run folder and by its id.

    Attributes:
      project: Its project.
    """

    project: str = "scalejax"

    def build(self) -> "_Run":
        protocol.require("trackio", "Trackio")
        return _Run(self)


class _Run:
    def __init__(self, config: Trackio) -> None:
        self._config = config
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        trackio = importlib.import_module("trackio")  # optional, and slow to import

        self._run = trackio.init(
            project=self._config.project,
            name=f"{run.folder.name}-{run.id}",
            resume="allow",
            config=dict(run.record),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, svg: str) -> None:
        trackio = importlib.import_module("trackio")

        self._run.log({name: trackio.Html(svg)}, step=step)

    def finish(self) -> None:
        self._run.finish()
