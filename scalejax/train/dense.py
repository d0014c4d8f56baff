"""Builds the compiled functions of a run without embedding tables.

The step, top to bottom: gradients of the global batch by the run's strategy (`parallel.fsdp`), their mean over what
counts, clipping by the global norm, optimizer, metric sums. One jitted function; its state is donated. What counts is
the sum of the weights over the whole global batch: the loss of a step does not depend on how its examples, or their
padding, are spread over devices or parts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import context, fsdp, gradient_scaling, pipeline
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.rules import Placement
from scalejax.train import dense_metrics
from scalejax.train.experiment import DenseExperiment
from scalejax.train.precision import check_precision, compute_dtype
from scalejax.train.protocols import DenseTask
from scalejax.train.state import ModelShape, Params, TrainState, optimizer_shardings, with_sharding

Batch = dict[str, jax.Array]
"""The fields of a host batch, [B, S] each, positions in the order of `DenseProgram.arrange`."""


@dataclasses.dataclass(frozen=True, eq=False)
class DenseProgram:
    """The functions of one run; nothing is allocated until `init` is called.

    Attributes:
      experiment: The run.
      task: Its model bound to the schema of its data.
      mesh: The devices.
      model: Structure of the model.
    """

    experiment: DenseExperiment
    task: DenseTask
    mesh: Mesh
    model: ModelShape

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer."""
        return self.experiment.optimizer.build(self.experiment.steps)

    @functools.cached_property
    def in_flight(self) -> int:
        """Steps that may be queued: on virtual CPU devices one, as their collectives could wait for each other."""
        local = self.mesh.local_mesh.devices
        return 1 if local.size > 1 and local.flat[0].platform == "cpu" else 3

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, P())

    def batch_sharding(self) -> NamedSharding:
        """Of a field [B, S]: examples over the batch axes, positions over `context`."""
        return NamedSharding(self.mesh, P(meshes.BATCH_AXES, "context"))

    def arrange(self, field: np.ndarray) -> np.ndarray:
        """A field [B, S] of a host batch with its positions in the order in which `context` cuts them.

        All fields are arranged alike, so that each token keeps its target, weight, segment and position, and a loss
        that is a sum over tokens stays what it was. What fills rows up to a length that divides is padding as the data
        has it: zeros, of weight 0 and in a segment of its own.
        """
        return context.zigzag(field, self.mesh.shape["context"])

    @functools.cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """Sharding per parameter, between steps."""
        return {placed.name: NamedSharding(self.mesh, placed.spec) for placed in self.placements}

    @functools.cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Where each parameter lies between steps, and why not elsewhere."""
        described = {name: (self.model.logical_axes[name], p.shape) for name, p in self.model.params.items()}
        return fsdp.place(described, self.experiment.strategy, mesh=self.mesh, rules=self.experiment.rules)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Sharding of every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        optimizer = jax.eval_shape(self.transformation.init, self.model.params)
        placed = optimizer_shardings(optimizer, self.model.params, self.shardings, self.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        sums = jax.eval_shape(dense_metrics.zeros)
        return TrainState(
            step=with_sharding(jax.ShapeDtypeStruct((), jnp.int32), self.replicated),
            params={name: with_sharding(p, self.shardings[name]) for name, p in self.model.params.items()},
            optimizer=jax.tree.map(with_sharding, optimizer, placed),
            tables={},
            metrics=jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), sums),
            key=with_sharding(key, self.replicated),
        )

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One global batch as shapes, dtypes and shardings."""
        length = context.padded_length(self.task.schema.length, self.mesh.shape["context"])
        shape = (self.experiment.data.batch_size, length)
        dtypes = {
            "tokens": jnp.int32,
            "targets": jnp.int32,
            "weights": jnp.float32,
            "segment_ids": jnp.int32,
            "positions": jnp.int32,
        }
        sharding = self.batch_sharding()
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}

    def init(self) -> TrainState:
        """A fresh state, equal for equal seeds on every mesh; no device ever holds what it does not keep."""

        def create() -> tuple[Params, Any, Any, Any]:
            key = jax.random.key(self.experiment.seed)
            model = init_model(self.task, nnx.Rngs(jax.random.fold_in(key, 0)), self.experiment, self.mesh)
            params = self.model.take_apart(model)
            return params, self.transformation.init(params), dense_metrics.zeros(), jax.random.fold_in(key, 1)

        s = self.state_shardings
        make = jax.jit(create, out_shardings=(s.params, s.optimizer, s.metrics, s.key))
        params, optimizer, sums, key = make()
        step = jax.device_put(jnp.zeros((), jnp.int32), self.replicated)
        return TrainState(step=step, params=params, optimizer=optimizer, tables={}, metrics=sums, key=key)

    @functools.cached_property
    def train_step(self) -> Any:
        """jitted (state, batch) -> (state, mean loss of the batch); the state is donated."""
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=(self.state_shardings, self.replicated))

    @functools.cached_property
    def eval_step(self) -> Any:
        """jitted (state, batch) -> (sum of losses, sum of weights) of a batch, on every device."""
        return jax.jit(self._eval_step, out_shardings=self.replicated)

    @functools.cached_property
    def take_metrics(self) -> Any:
        """jitted state -> (state with zeroed sums, sums); the state is donated."""

        def take(state: TrainState) -> tuple[TrainState, dense_metrics.DenseSums]:
            return dataclasses.replace(state, metrics=dense_metrics.zeros()), state.metrics

        return jax.jit(take, donate_argnums=0, out_shardings=(self.state_shardings, self.state_shardings.metrics))

    def parts(self, rows: int) -> int:
        """Passes of a step over `rows` examples: the fewest that divide those of a device and are small enough."""
        local = rows // meshes.batch_shards(self.mesh)
        most = self.experiment.microbatch or local
        return next(parts for parts in range(1, local + 1) if local % parts == 0 and local // parts <= most)

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        specs = {name: sharding.spec for name, sharding in self.shardings.items()}
        gradients = fsdp.gradients(
            self._loss,
            self.experiment.strategy,
            mesh=self.mesh,
            specs=specs,
            parts=self.parts(next(iter(batch.values())).shape[0]),
            handled=self._handled,
        )
        key = jax.random.fold_in(state.key, state.step)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            total, weight, _, grads = gradients(state.params, batch, key)
        grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
        clip = self.experiment.clip
        if clip is None:
            norm = gradient_scaling.global_norm(grads)
        else:
            grads, norm = gradient_scaling.clip_by_global_norm(grads, clip)
        updates, optimizer = self.transformation.update(grads, state.optimizer, state.params)
        state = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),  # pyright: ignore[reportArgumentType]
            optimizer=optimizer,
            tables={},
            metrics=dense_metrics.update(state.metrics, total, weight, norm, clip),
            key=state.key,
        )
        return state, total / weight

    def _eval_step(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Models lay out their activations by the mesh that they find.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            total, weight, _ = self.task.loss(self.model.put_together(state.params), batch, key=None)
        return total, weight

    @property
    def _handled(self) -> tuple[str, ...]:
        """Axes over which the loss has collectives of its own in the explicit form: the stages of a pipeline."""
        strategy = self.experiment.strategy
        explicit = isinstance(strategy, Ddp) or strategy.form == "explicit"
        return (pipeline.AXIS,) if explicit and self.mesh.shape[pipeline.AXIS] > 1 else ()

    def _loss(self, params: Params, batch: Batch, key: jax.Array, gather: Any) -> Any:
        found = self.task.loss(self.model.put_together(params), batch, key=key, gather=gather)
        return pipeline.on_last_stage(found) if self._handled else found


def build(experiment: DenseExperiment, schema: Any, mesh: Mesh) -> DenseProgram:
    """Binds an experiment to a schema and a mesh; allocates nothing.

    Raises:
      UserError: the batch does not divide over the mesh, float64 is asked of a jax that has it switched off, or the
        model and the data do not fit.
    """
    for size in getattr(experiment.data, "batch_sizes", (experiment.data.batch_size,)):
        meshes.check_batch(size, mesh, over="batch axes")
    check_precision(experiment.precision)
    task = experiment.model.task(schema)
    abstract = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment, mesh))
    return DenseProgram(experiment=experiment, task=task, mesh=mesh, model=ModelShape.of(abstract))


def init_model(task: DenseTask, rngs: nnx.Rngs, experiment: DenseExperiment, mesh: Mesh) -> nnx.Module:
    """The model of a run in its dtypes."""
    precision = experiment.precision
    return task.init(rngs, param_dtype=jnp.dtype(precision.params), compute_dtype=compute_dtype(precision, mesh))
