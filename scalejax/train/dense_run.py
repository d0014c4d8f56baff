"""A run of a model without embedding tables: windows and evaluations of its mean loss."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalejax import chips
from scalejax.errors import UserError
from scalejax.parallel import offload
from scalejax.train import console as consoles
from scalejax.train import dense, dense_metrics, summary
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.dense import DenseProgram
from scalejax.train.dense_metrics import HostState
from scalejax.train.experiment import DenseExperiment
from scalejax.train.prefetch import Prefetch
from scalejax.train.protocols import DataSet
from scalejax.train.records import Records
from scalejax.train.state import TrainState, from_stored, to_stored
from scalejax.train.timing import peak_memory


class DenseRun:
    """Implements `runs.Run`."""

    def __init__(self, program: DenseProgram, data: DataSet) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self._records: Records | None = None

    @classmethod
    def bind(cls, experiment: DenseExperiment, data: DataSet, mesh: Mesh) -> "DenseRun":
        """Binds an experiment to its data and a mesh.

        Raises:
          UserError: as `dense.build`, or state must not rest in the host memory of these devices.
        """
        if experiment.offload != "none":
            offload.check(mesh.devices)
        return cls(dense.build(experiment, data.schema, mesh), data)

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def in_flight(self) -> int:
        return self.program.in_flight

    @property
    def compiler_options(self) -> dict[str, Any]:
        return self.program.compiler_options or {}

    @property
    def records(self) -> Records:
        assert self._records is not None, "attach() comes first"
        return self._records

    def identity(self) -> dict[str, str]:
        """Model, optimizer and data; how the backward pass recomputes and what computes attention may differ."""
        experiment = self.experiment
        return {
            "model": f"{type(experiment.model).__name__} {self.program.model.digest()}",
            "optimizer": type(experiment.optimizer).__name__ + (" of a scaled loss" if experiment.loss_scaling else ""),
            "data": self.data.fingerprint(),
        }

    def begin(self) -> tuple[TrainState, HostState]:
        return self.program.init(), HostState()

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
        abstract = self.program.abstract_state()
        stored, host = checkpoints.restore(step, to_stored(abstract))
        return from_stored(stored, abstract, {}), HostState.from_dict(host)

    def attach(self, records: Records) -> None:
        self._records = records

    @contextlib.contextmanager
    def feed(self, host: HostState, steps: int) -> Iterator["_Feed"]:
        batches = self.data.train_batches(
            start_example=host.examples, process_index=jax.process_index(), process_count=jax.process_count()
        )
        with Prefetch(batches, self._place) as prefetched:
            yield _Feed(self.program, prefetched, jax.process_count())

    def before_step(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Nothing is due."""
        del state, step
        return host

    def log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, dict[str, str]]:
        """Writes the window that ends here; here and before a save training waits for the device."""
        dense_metrics.check_finite(state, step, self.experiment.optimizer.learning_rate, self.records.timer)
        state, window = dense_metrics.close_window(self.program, state, self.records.timer)
        host = host.with_window(window)
        values = window.values()
        taken = step
        if state.loss_scale is not None:
            taken -= int(state.loss_scale.skipped)  # schedules go by the steps that were taken
            values |= {"skipped": window.skipped, "loss_scale": float(state.loss_scale.scale)}
        rate = float(np.asarray(self.learning_rate(taken)))
        seen = {"examples_seen": host.examples, "weight_seen": host.weight, "learning_rate": rate}
        self.records.events.window(step, seen | values)
        timing = self._speed(self.records.timer.window())
        self.records.events.timing(step, timing)
        shown = consoles.progress_fields(
            rate=f"{consoles.count(timing['tokens_per_s'])} tokens/s", loss=values["loss"], lr=rate
        )
        return state, host, shown

    def evaluate(self, state: TrainState, step: int, split: str) -> dict[str, float]:
        values = self._loss(state, split)
        self.records.events.evaluation(step, split, values)
        return values

    def save(self, state: TrainState, host: HostState, step: int, scored: dict[str, float] | None) -> None:
        dense_metrics.check_finite(state, step, self.experiment.optimizer.learning_rate, self.records.timer)
        self.records.events.sync()
        best = self.experiment.checkpoints.best_metric
        kept = None if scored is None else {best: scored[best]}
        self.records.checkpoints.save(step, to_stored(state), host.to_dict(), kept)

    def close(self, state: TrainState, host: HostState) -> dict[str, Any]:
        experiment, split, timer = self.experiment, self.experiment.final_split, self.records.timer
        with timer.phase("evaluation"):
            values = self._loss(state, split)
        with timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.records.checkpoints.wait()
        self.records.events.evaluation(experiment.steps, split, values)
        closing = {"steps": experiment.steps, "examples": host.examples, "weight": host.weight}
        closing |= summary.of_evaluation(split, values)
        return closing | self._speed(timer.summary()) | peak_memory(self.mesh.local_mesh.devices.flat)

    def describe(self) -> dict[str, Any]:
        return {
            "dense_parameters": self.program.model.size,
            "flops_per_example": self.program.task.flops_per_example(),
            "tokens_per_example": self.program.task.tokens_per_example(),
        }

    def score(self, state: TrainState, split: str) -> dict[str, Any]:
        return summary.of_evaluation(split, self._loss(state, split))

    def _loss(self, state: TrainState, split: str) -> dict[str, float]:
        """Mean loss of one pass over a split; sums of batches are added in float64, in file order."""
        batches = self.data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count())
        found: list[tuple[jax.Array, jax.Array]] = []
        with Prefetch(batches, self._place) as prefetched:
            for _, batch in prefetched:
                found.append(self.program.eval_step(state, batch))
                # Without a bound a long split would queue on the device; virtual devices must not queue at all.
                if len(found) >= self.program.in_flight:
                    found[-self.program.in_flight][0].block_until_ready()
        sums = np.array([[float(x) for x in pair] for pair in jax.device_get(found)])
        total, weight = sums.sum(0)
        if not np.isfinite(total):
            raise UserError(
                f"The loss of split {split!r} is not finite at step {int(state.step)}: these parameters are of no use. "
                "Take an earlier checkpoint (--step), or train again with a lower learning rate."
            )
        mean = total / weight
        return {"loss": mean, "perplexity": float(np.exp(mean)), "weight": weight}

    def _place(self, batch: Any) -> dict[str, jax.Array]:
        """This process's slice of a global batch on its devices."""
        sharding = self.program.batch_sharding()
        size = len(batch) * jax.process_count()
        fields = {field.name: self.program.arrange(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
        return {
            name: jax.make_array_from_process_local_data(sharding, field, (size, *field.shape[1:]))
            for name, field in fields.items()
        }

    def _speed(self, timing: dict[str, float]) -> dict[str, float]:
        """With tokens and FLOPs of the model a second and device.

        The FLOPs are those that the model defines, 6 a multiply-accumulate of its matrices and half of those of full
        attention, nothing recomputed, each row by its own length. MFU is their share of the bfloat16 peak of the chip,
        where that is known.
        """
        devices, none = self.mesh.size, float("nan")  # before the first step
        flops = timing.get("flops_per_s", none)
        timing = {"tokens_per_s": none} | {name: value for name, value in timing.items() if name != "flops_per_s"}
        speed = {
            "tokens_per_s_per_device": timing["tokens_per_s"] / devices,
            "tflops_per_s_per_device": flops / devices / 1e12,
        }
        chip = chips.for_device_kind(self.mesh.devices.flat[0].device_kind)
        if chip is not None:
            peak = chip.bf16_flops_per_s / chip.devices_per_chip / 1e12
            speed |= {"peak_tflops_per_s": peak, "mfu": speed["tflops_per_s_per_device"] / peak}
        return timing | speed


class _Feed:
    """Takes batches and dispatches steps on them."""

    def __init__(self, program: DenseProgram, batches: Iterator[Any], processes: int) -> None:
        self._program, self._batches, self._processes = program, batches, processes
        self._batch: Any = None
        self.amounts: dict[str, float] = {}

    def take(self) -> int:
        host, self._batch = next(self._batches)
        rows, tokens = len(host) * self._processes, host.tokens.shape[1]
        self.amounts = {"tokens": rows * tokens, "flops": rows * self._program.task.flops_per_example(tokens)}
        return rows

    def step(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        return self._program.train_step(state, self._batch)

    def drain(self) -> None:
        """Nothing is computed ahead."""
