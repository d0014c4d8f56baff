"""The places where a run writes, saves and books its time."""

import dataclasses

from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.reports.events import EventWriter
from scalejax.train.reports.timing import StepTimer


@dataclasses.dataclass(frozen=True)
class Records:
    """Of one run folder.

    Attributes:
      checkpoints: Its checkpoints.
      events: Its records by line.
      timer: Where its time goes.
    """

    checkpoints: Checkpointer
    events: EventWriter
    timer: StepTimer
