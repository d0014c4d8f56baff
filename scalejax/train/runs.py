"""What the train loop knows of a run, whatever its model: this protocol and nothing else."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from scalejax.train.checkpoint import Checkpointer


class HostState(Protocol):
    """What a run knows on the host between two steps."""

    @property
    def examples(self) -> int:
        """Global example counter: the position in the training stream."""
        ...

    def after(self, examples: int) -> Any:
        """One step later."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, exactly."""
        ...


class Feed(Protocol):
    """Takes batches and dispatches steps on them."""

    def take(self) -> int:
        """Waits for the next batch; returns its examples, over all processes."""
        ...

    @property
    def amounts(self) -> dict[str, float]:
        """What is counted of that batch besides its examples, by name: see `timing.StepTimer.step_done`."""
        ...

    def step(self, state: Any) -> tuple[Any, jax.Array]:
        """Dispatches the step on what `take` took; the state is donated. Returns the state and the mean loss."""
        ...

    def drain(self) -> None:
        """Forgets what was computed ahead: the next step goes on as a run would that begins here."""
        ...


class Run(Protocol):
    """A run bound to its data and its devices.

    `log`, `evaluate`, `before_step` and `close` write their records where `attach` said, and book the time there.
    """

    @property
    def mesh(self) -> Mesh: ...

    @property
    def in_flight(self) -> int:
        """Steps that may be queued."""
        ...

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of XLA that the run sets itself."""
        ...

    def identity(self) -> dict[str, str]:
        """What a checkpoint must share with the run that restores it; meshes, rules and batch sizes may differ."""
        ...

    def begin(self) -> tuple[Any, Any]:
        """A fresh state, and what the host knows."""
        ...

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[Any, Any]:
        """Both of a checkpoint, the newest for None."""
        ...

    def attach(self, records: Any) -> None:
        """Says where to write and to save, see `loop.Records`."""
        ...

    def feed(self, host: Any, steps: int) -> AbstractContextManager[Feed]:
        """The batches of the next `steps` steps."""
        ...

    def before_step(self, state: Any, host: Any, step: int) -> Any:
        """What must happen before a step is dispatched; returns what the host then knows."""
        ...

    def log(self, state: Any, host: Any, step: int) -> tuple[Any, Any, dict[str, str]]:
        """Writes the window that ends here; returns also what the progress line shows."""
        ...

    def evaluate(self, state: Any, step: int, split: str) -> dict[str, float]:
        """Scores a split."""
        ...

    def save(self, state: Any, host: Any, step: int, scored: dict[str, float] | None) -> None:
        """Begins to save a checkpoint."""
        ...

    def close(self, state: Any, host: Any) -> dict[str, Any]:
        """Scores the final split; returns what the summary says of the run."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the summary says of the model."""
        ...

    def score(self, state: Any, split: str) -> dict[str, Any]:
        """Scores a split once more; writes nothing."""
        ...
