"""Takes batches and runs steps on them, the exchange of ids a step ahead where the experiment wants it.

pipeline     while step i runs                                      rows of step i
none         batch i + 1 and i + 2 are copied                       after update i - 1
ids          and the ids of batch i + 1 are exchanged               after update i - 1
stale        and its rows fetched                                   after update i - 2
"""

from collections.abc import Iterator
from typing import Any

import jax

from scalejax.parallel.embedding.jagged import DeviceBatch
from scalejax.train.program import Ahead, Program
from scalejax.train.state import TrainState


class Pipeline:
    """The steps of one run, in order."""

    def __init__(self, program: Program, batches: Iterator[tuple[Any, DeviceBatch]], steps: int) -> None:
        self._program, self._batches, self._left = program, batches, steps
        self._ahead: Ahead | None = None
        self._batch: DeviceBatch | None = None
        self._coming: DeviceBatch | None = None

    def take(self) -> int:
        """Waits for the batches of the next step; returns the examples of one."""
        self._left -= 1
        self._take()
        return self._program.experiment.data.batch_size

    @property
    def amounts(self) -> dict[str, float]:
        """Nothing but examples."""
        return {}

    def _take(self) -> None:
        if self._program.experiment.pipeline == "none":
            _, self._batch = next(self._batches)
            return
        if self._coming is None:
            _, self._coming = next(self._batches)
        self._batch = self._coming
        # After the last step no batch comes: the same one again keeps the program the same.
        self._coming = next(self._batches)[1] if self._left > 0 else self._batch

    def step(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Dispatches the step on what `take` took; the state is donated."""
        assert self._batch is not None
        if self._program.experiment.pipeline == "none":
            return self._program.train_step(state, self._batch)
        ahead = self._ahead or self._program.look_ahead(state, self._batch)
        state, loss, self._ahead = self._program.pipelined_step(state, self._batch, ahead, self._coming)
        return state, loss

    def drain(self) -> None:
        """Forgets what was fetched ahead: the next step goes on as a run would that begins here."""
        if self._program.experiment.pipeline == "stale":
            self._ahead = None
