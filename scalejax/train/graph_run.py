"""A run over one graph: windows of its loss, and the splits by loss and accuracy, or AUC where labels are tasks."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalejax.data.graphs import NodeDataSet
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.train import console as consoles
from scalejax.train import dense_metrics, graph, summary
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.dense_metrics import HostState
from scalejax.train.experiment import GraphExperiment
from scalejax.train.graph import GraphProgram
from scalejax.train.prefetch import Prefetch
from scalejax.train.records import Records
from scalejax.train.state import TrainState, from_stored, to_stored
from scalejax.train.timing import peak_memory


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the highest accuracy, or AUC, on the split scored at intervals; the earliest of equals.

    Attributes:
      step: Where.
      value: On that split; -1 before the first evaluation.
      final: On the final split at that step.
    """

    step: int = 0
    value: float = -1.0
    final: float = -1.0


class GraphRun:
    """Implements `runs.Run`."""

    def __init__(self, program: GraphProgram, data: NodeDataSet) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self.best = Best()
        self._records: Records | None = None

    @classmethod
    def bind(cls, experiment: GraphExperiment, data: NodeDataSet) -> "GraphRun":
        """Binds an experiment to its graph.

        Raises:
          UserError: as `graph.build`.
        """
        return cls(graph.build(experiment, data), data)

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def in_flight(self) -> int:
        return meshes.steps_in_flight(self.mesh)

    @property
    def compiler_options(self) -> dict[str, Any]:
        return {}

    @property
    def records(self) -> Records:
        assert self._records is not None, "attach() comes first"
        return self._records

    def identity(self) -> dict[str, str]:
        return {
            "model": f"{type(self.experiment.model).__name__} {self.program.model.digest()}",
            "optimizer": type(self.experiment.optimizer).__name__,
            "data": self.data.fingerprint(),
        }

    def begin(self) -> tuple[TrainState, HostState]:
        return self.program.init(), HostState()

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
        abstract = self.program.abstract_state()
        stored, host = checkpoints.restore(step, to_stored(abstract))
        self.best = Best(**host["best"])
        return from_stored(stored, abstract, {}), HostState.from_dict(host)

    def attach(self, records: Records) -> None:
        self._records = records

    @contextlib.contextmanager
    def feed(self, host: HostState, steps: int) -> Iterator["_Feed"]:
        batches = self.data.train_batches(
            start_example=host.examples,
            parts=self.mesh.size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        with Prefetch(batches, self.program.place_batch) as prefetched:
            yield _Feed(self.program, prefetched)

    def before_step(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Nothing is due."""
        del state, step
        return host

    def log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, dict[str, str]]:
        """Writes the window that ends here."""
        dense_metrics.check_finite(state, step, self.experiment.optimizer.learning_rate, self.records.timer)
        state, window = dense_metrics.close_window(self.program, state, self.records.timer)
        host = host.with_window(window)
        values = window.values()
        rate = float(np.asarray(self.learning_rate(step)))
        self.records.events.window(step, {"examples_seen": host.examples, **values, "learning_rate": rate})
        timing = self.records.timer.window()
        self.records.events.timing(step, timing)
        shown = consoles.progress_fields(
            rate=f"{consoles.count(timing['samples_per_s'])} nodes/s", loss=values["loss"], lr=rate
        )
        return state, host, shown

    def evaluate(self, state: TrainState, step: int, split: str) -> dict[str, float]:
        values = self._scores(state, split, self.experiment.final_split)
        self.records.events.evaluation(step, split, values[split])
        self._compare(step, values)
        return values[split]

    def save(self, state: TrainState, host: HostState, step: int, scored: dict[str, float] | None) -> None:
        dense_metrics.check_finite(state, step, self.experiment.optimizer.learning_rate, self.records.timer)
        self.records.events.sync()
        metric = self.experiment.checkpoints.best_metric
        kept = None if scored is None else {metric: scored[metric]}
        known = host.to_dict() | {"best": dataclasses.asdict(self.best)}
        self.records.checkpoints.save(step, to_stored(state), known, kept)

    def close(self, state: TrainState, host: HostState) -> dict[str, Any]:
        experiment, timer = self.experiment, self.records.timer
        with timer.phase("evaluation"):
            values = self._scores(state, experiment.eval_split, experiment.final_split)
        with timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.records.checkpoints.wait()
        self._compare(experiment.steps, values)
        split = experiment.final_split
        if split != experiment.eval_split:
            self.records.events.evaluation(experiment.steps, split, values[split])
        closing: dict[str, Any] = {"steps": experiment.steps, "examples": host.examples}
        for name, scores in values.items():
            closing |= summary.of_evaluation(name, scores)
        closing |= {"best_step": self.best.step}
        metric = self.program.metric
        closing |= {f"best_{summary.prefix(experiment.eval_split)}_{metric}": self.best.value}
        closing |= {f"{summary.prefix(split)}_{metric}_at_best": self.best.final}
        return closing | timer.summary() | peak_memory(self.mesh.local_mesh.devices.flat)

    def describe(self) -> dict[str, Any]:
        schema = self.data.schema
        return {
            "dense_parameters": self.program.model.size,
            "nodes": schema.nodes,
            "edges": self.data.graph.adjacency.num_edges,
            "flops_per_step": self.program.task.flops_per_step(self.data.nodes_per_step),
        }

    def score(self, state: TrainState, split: str) -> dict[str, Any]:
        return summary.of_evaluation(split, self._scores(state, split)[split])

    def _compare(self, step: int, values: dict[str, dict[str, float]]) -> None:
        """Keeps what is better than the best so far."""
        metric = self.program.metric
        value = values[self.experiment.eval_split][metric]
        if value > self.best.value:
            self.best = Best(step, value, values[self.experiment.final_split][metric])

    def _scores(self, state: TrainState, *splits: str) -> dict[str, dict[str, float]]:
        """Loss and metric of splits, from one pass over the graph."""
        values = self.program.evaluate(state, self.data, splits)
        for split, found in values.items():
            if not math.isfinite(found["loss"]):
                raise UserError(
                    f"The loss of split {split!r} is not finite at step {int(state.step)}: these parameters are of no "
                    "use. Take an earlier checkpoint (--step), or train again with a lower learning rate."
                )
        return values


class _Feed:
    """Takes batches and dispatches steps on them."""

    def __init__(self, program: GraphProgram, batches: Iterator[Any]) -> None:
        self._program, self._batches = program, batches
        self._batch: Any = None
        self.amounts: dict[str, float] = {}

    def take(self) -> int:
        host, self._batch = next(self._batches)
        return len(host)

    def step(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        return self._program.train_step(state, self._program.placed, self._batch)

    def drain(self) -> None:
        """Nothing is computed ahead."""
