"""The places where a run writes, saves, books its time and shows how far it is."""

import dataclasses

from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.reports.events import EventWriter
from scalejax.train.reports.progress import Progress
from scalejax.train.reports.timing import StepTimer


@dataclasses.dataclass(frozen=True)
class Records:
    """Of one run folder.

    Attributes:
      checkpoints: Its checkpoints.
      events: Its records by line.
      timer: Where its time goes.
      progress: How far it is, for whoever waits.
    """

    checkpoints: Checkpointer
    events: EventWriter
    timer: StepTimer
    progress: Progress
