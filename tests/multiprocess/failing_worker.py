"""`scalejax ARGUMENTS`, whose disk is full for process 0 from step 4 on."""

from scalejax.cli import main
from scalejax.errors import UserError
from scalejax.train.reports import events

_window = events.EventWriter.window


def window(self, step, values):
    if self._files and step >= 4:
        raise UserError("cannot write metrics.jsonl: the disk is full.")
    _window(self, step, values)


events.EventWriter.window = window
main()
