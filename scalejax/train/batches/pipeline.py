"""Takes batches and runs steps on them, the exchange of ids a step ahead where the experiment wants it.

pipeline     while step i runs                                      rows of step i
none         batch i + 1 and i + 2 are copied                       after update i - 1
ids          and the ids of batch i + 1 are exchanged               after update i - 1
stale        and its rows fetched                                   after update i - 2
"""

import dataclasses
from collections.abc import Iterator

import jax

from scalejax.parallel.embedding.row_cache import RowCache
from scalejax.train.state import TrainState
from scalejax.train.step import Ahead, Program
from scalejax.train.task import Placed


class Pipeline:
    """The steps of one run, in order.

    Args:
      program: The run.
      batches: Host batches and their device forms.
      steps: That will be taken.
      cache: By which the batches were prepared, where tables have tiers.

    Attributes:
      amounts: What is counted of the batch that was taken last besides its examples, by name: see
        `timing.StepTimer.step_done`.
    """

    def __init__(
        self,
        program: Program,
        batches: Iterator[tuple[object, Placed]],
        steps: int,
        cache: RowCache | None = None,
    ) -> None:
        self._program, self._batches, self._left, self._cache = program, batches, steps, cache
        self._ahead: Ahead | None = None
        self._batch: Placed | None = None
        self._coming: Placed | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self.amounts: dict[str, float] = {}

    def take(self) -> int:
        """Waits for the batches of the next step; returns the examples of one."""
        self._left -= 1
        self._take()
        assert self._batch is not None
        shapes = {name: x.shape for name, x in self._batch.fields.items() if isinstance(x, jax.Array)}
        if shapes != self._shapes:  # of a whole model `work` may take longer than a step
            work, unit = self._program.task.work(shapes), self._program.task.unit
            amounts = {} if unit == "examples" else {unit: work.count}
            self.amounts = amounts | ({"flops": work.flops} if work.flops else {})
            self._shapes = shapes
        return self._program.rows(self._batch)

    def _take(self) -> None:
        if not self._program.is_pipelined:
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
        if self._cache is not None:
            state = dataclasses.replace(state, tables=self._cache.advance(state.tables))
        if not self._program.is_pipelined:
            return self._program.train_step(state, self._batch)
        assert self._coming is not None
        ahead = self._ahead or self._program.look_ahead(state, self._batch)
        state, loss, self._ahead = self._program.pipelined_step(state, self._batch, ahead, self._coming)
        return state, loss

    def drain(self) -> None:
        """Forgets what was fetched ahead: the next step goes on as a run would that begins here."""
        if self._program.experiment.tables.pipeline == "stale":
            self._ahead = None
