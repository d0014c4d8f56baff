"""Weights & Biases."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Literal

from scalejax.errors import UserError
from scalejax.train.trackers import protocol
from scalejax.train.trackers.protocol import TrackedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb:
    """A run of Weights & Biases, named as the run folder.

    Attributes:
      project: Its project.
      entity: User or team; None = that of the login.
      mode: "offline" asks for no login and no network: `wandb sync --append RUN_FOLDER/wandb/offline-*` uploads it.
    """

    project: str = "scalejax"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"

    def build(self) -> "_Run":
        protocol.require("wandb", "Wandb")
        return _Run(self)


class _Run:
    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")  # optional, and slow to import

        c = self._config
        try:
            self._run = wandb.init(
                project=c.project,
                entity=c.entity,
                mode=c.mode,
                id=run.id,
                name=run.folder.name,
                dir=str(run.folder),
                config=dict(run.record),
                # Offline there is nobody to ask; the id alone says what the run goes on with.
                resume="allow" if c.mode == "online" else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"trackers: Wandb cannot begin ({error}). Run `wandb login`, or set mode='offline'."
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, svg: str) -> None:
        wandb = importlib.import_module("wandb")

        self._run.log({name: wandb.Html(svg, inject=False)}, step=step)

    def finish(self) -> None:
        self._run.finish()
