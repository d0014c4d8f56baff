"""Builds the compiled functions of a run without embedding tables.

The step, top to bottom: gradients of the global batch by the run's strategy (`parallel.fsdp`), their mean over what
counts, clipping by the global norm, optimizer, metric sums. One jitted function; its state is donated. What counts is
the sum of the weights over the whole global batch: the loss of a step does not depend on how its examples, or their
padding, are spread over devices or parts.

State may rest in host memory between steps (`parallel.offload`), and the loss may be scaled for float16
(`parallel.gradient_scaling`): a step whose gradients overflow then changes nothing but the factor.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.numerics import rules, weights
from scalejax.numerics.rules import QuantizationRule
from scalejax.parallel import context, ddp, fsdp, gradient_scaling, offload, pipeline, xla_flags
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.formatted import FormattedGather
from scalejax.parallel.rules import Placement
from scalejax.train import dense_metrics
from scalejax.train.experiment import DenseExperiment
from scalejax.train.precision import check_precision, init_model
from scalejax.train.protocols import DenseTask
from scalejax.train.state import ModelShape, Params, TrainState, optimizer_shardings, optimizer_step, with_sharding

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
    def formats(self) -> dict[str, QuantizationRule]:
        """The rule of each module whose products are in number formats, by path."""
        return rules.assign(self.experiment.quantization, weights.weights_of(self.model.logical_axes))

    @functools.cached_property
    def in_flight(self) -> int:
        """Steps that may be queued, see `mesh.steps_in_flight`."""
        return meshes.steps_in_flight(self.mesh)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return meshes.replicated(self.mesh)

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
    def compiler_options(self) -> dict[str, Any] | None:
        """Options of XLA that the run names, for the platform of its devices; None = none."""
        return xla_flags.compiler_options(self.experiment.xla_flags, self.mesh.devices.flat[0].platform) or None

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Sharding of every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        optimizer = jax.eval_shape(self.transformation.init, self.model.params)
        placed = optimizer_shardings(optimizer, self.model.params, self.shardings, self.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        sums, scale = jax.eval_shape(lambda: (dense_metrics.zeros(), self._first_scale()))
        params = {name: with_sharding(p, self.shardings[name]) for name, p in self.model.params.items()}
        optimizer = jax.tree.map(with_sharding, optimizer, placed)
        if self._offloads("parameters"):
            params = jax.tree.map(with_sharding, params, offload.on_host(params))
        if self._offloads("optimizer"):
            optimizer = jax.tree.map(with_sharding, optimizer, offload.on_host(optimizer))
        return TrainState(
            step=with_sharding(jax.ShapeDtypeStruct((), jnp.int32), self.replicated),
            params=params,
            optimizer=optimizer,
            tables={},
            metrics=jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), sums),
            key=with_sharding(key, self.replicated),
            loss_scale=jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), scale),
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
        """A fresh state, equal for equal seeds on every mesh; no device ever holds what it does not keep.

        Raises:
          UserError: jax is set up so that random numbers depend on the sharding.
        """
        fsdp.check_random()

        def create() -> TrainState:
            key = jax.random.key(self.experiment.seed)
            model = init_model(self.task, nnx.Rngs(jax.random.fold_in(key, 0)), self.experiment.precision, self.mesh)
            params = self.model.take_apart(model)
            if isinstance(self.experiment.strategy, Ddp) and jax.process_count() > 1:
                # Every process computed its own copy, perhaps on other hardware.
                params = ddp.broadcast(params, self.mesh)
            state = TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                optimizer=self.transformation.init(params),
                tables={},
                metrics=dense_metrics.zeros(),
                key=jax.random.fold_in(key, 1),
                loss_scale=self._first_scale(),
            )
            return self._moved(state, offload.stow)

        return jax.jit(create, out_shardings=self.state_shardings)()

    @functools.cached_property
    def train_step(self) -> Any:
        """jitted (state, batch) -> (state, mean loss of the batch); the state is donated."""
        return jax.jit(
            self._train_step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, self.replicated),
            compiler_options=self.compiler_options,
        )

    @functools.cached_property
    def eval_step(self) -> Any:
        """jitted (state, batch) -> (sum of losses, sum of weights) of a batch, on every device."""
        return jax.jit(self._eval_step, out_shardings=self.replicated, compiler_options=self.compiler_options)

    def take_metrics(self, state: TrainState) -> tuple[TrainState, dense_metrics.DenseSums]:
        """The state with zeroed sums, and the sums."""
        return dataclasses.replace(state, metrics=self._zero_metrics()), state.metrics

    @functools.cached_property
    def _zero_metrics(self) -> Any:
        return jax.jit(dense_metrics.zeros, out_shardings=self.state_shardings.metrics)

    def parts(self, rows: int) -> int:
        """Passes of a step over `rows` examples: the fewest that divide those of a device and are small enough."""
        local = rows // meshes.batch_shards(self.mesh)
        return meshes.fewest_parts(local, self.experiment.microbatch or local)

    def gradients(self, parts: int) -> Any:
        """Gradients of the sum of losses by the run's strategy, see `fsdp.gradients`.

        Raises:
          UserError: the strategy does not go with the mesh.
        """
        specs = {name: sharding.spec for name, sharding in self.shardings.items()}
        strategy = self.experiment.strategy
        return fsdp.gradients(self._loss, strategy, mesh=self.mesh, specs=specs, parts=parts, handled=self._handled)

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        gradients = self.gradients(self.parts(next(iter(batch.values())).shape[0]))
        key = jax.random.fold_in(state.key, state.step)
        state = self._moved(state, offload.fetch)
        held, counted, scale = state.loss_scale, 1, 1.0
        if held is not None:
            # Of the mean and not the sum over a batch: the factor need not follow its size.
            counted = next(iter(batch.values())).size
            scale = held.scale / counted
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            total, weight, _, grads = gradients(state.params, batch, key, scale)
        finite = None
        if held is not None:
            grads, finite = held.unscale(grads)
        grads = jax.tree.map(lambda g: g / (weight / counted).astype(g.dtype), grads)
        clip = self.experiment.clip
        if clip is None:
            norm = gradient_scaling.global_norm(grads)
        else:
            grads, norm = gradient_scaling.clip_by_global_norm(grads, clip)
        params, optimizer = optimizer_step(self.transformation, grads, state)
        skipped, scaling = None, self.experiment.loss_scaling
        if held is not None and finite is not None and scaling is not None:
            before = (state.params, state.optimizer)
            params, optimizer = gradient_scaling.take_step_if(finite, (params, optimizer), before)
            # An overflow at the least factor will come again: it counts as what it is and ends the run.
            skipped = ~finite & (held.scale > scaling.smallest)
            held = held.update(finite, scaling)
        state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            tables={},
            metrics=dense_metrics.update(state.metrics, total, weight, norm, clip, skipped),
            key=state.key,
            loss_scale=held,
        )
        return self._moved(state, offload.stow), total / weight

    def _first_scale(self) -> gradient_scaling.LossScale | None:
        scaling = self.experiment.loss_scaling
        return None if scaling is None else scaling.init()

    def _offloads(self, what: Literal["optimizer", "parameters"]) -> bool:
        return what in self.experiment.offload.split(" and ")

    def _moved(self, state: TrainState, move: Callable[[Any, Any], Any]) -> TrainState:
        """The state with what rests on the host brought to the devices or back: `move` is `offload.fetch` or `stow`."""
        if self._offloads("parameters"):
            state = dataclasses.replace(state, params=move(state.params, self.state_shardings.params))
        if self._offloads("optimizer"):
            state = dataclasses.replace(state, optimizer=move(state.optimizer, self.state_shardings.optimizer))
        return state

    def _eval_step(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if self._offloads("parameters"):
            state = dataclasses.replace(state, params=offload.fetch(state.params, self.state_shardings.params))
        # Models lay out their activations by the mesh that they find.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            total, weight, _ = self._task_loss(state.params, batch, None, whole)
        return total, weight

    @property
    def _handled(self) -> tuple[str, ...]:
        """Axes over which the loss has collectives of its own in the explicit form: the stages of a pipeline."""
        strategy = self.experiment.strategy
        explicit = isinstance(strategy, Ddp) or strategy.form == "explicit"
        return (pipeline.AXIS,) if explicit and self.mesh.shape[pipeline.AXIS] > 1 else ()

    def _loss(self, params: Params, batch: Batch, key: jax.Array, gather: Any) -> Any:
        found = self._task_loss(params, batch, key, gather)
        return pipeline.on_last_stage(found) if self._handled else found

    def _task_loss(self, params: Params, batch: Batch, key: jax.Array | None, gather: Any) -> Any:
        if self.formats:
            gather = FormattedGather(gather, self.formats)
        return self.task.loss(self.model.put_together(params), batch, key=key, gather=gather)


def whole(params: Params) -> Params:
    """The gather of parameters that are whole already."""
    return params


def build(experiment: DenseExperiment, schema: Any, mesh: Mesh) -> DenseProgram:
    """Binds an experiment to a schema and a mesh; allocates nothing.

    Raises:
      UserError: the batch does not divide over the mesh, a dtype would not do what it says, checkpoints are kept by a
        score that there is not, or model and data, model and mesh, or strategy and mesh do not fit.
    """
    for size in getattr(experiment.data, "batch_sizes", (experiment.data.batch_size,)):
        meshes.check_batch(size, mesh, over="batch axes")
    check_precision(experiment.precision)
    _check_dtypes(experiment)
    if experiment.checkpoints.best_metric != "loss":
        raise UserError(
            f"checkpoints.best_metric is {experiment.checkpoints.best_metric!r}, but a model without embedding tables "
            "is scored by its loss. Set --set checkpoints.best_metric=loss."
        )
    task = experiment.model.task(schema)
    abstract = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment.precision, mesh))
    program = DenseProgram(experiment=experiment, task=task, mesh=mesh, model=ModelShape.of(abstract))
    _check_divides(program)
    _ = program.formats  # which refuses rules without a module
    program.gradients(1)  # what it refuses is refused now
    return program


def _check_dtypes(experiment: DenseExperiment) -> None:
    """Refuses dtypes that would not do what they say, without a word.

    Raises:
      UserError: names the field.
    """
    strategy = experiment.strategy
    dtypes = {
        "precision.compute": experiment.precision.compute,
        "strategy.param_dtype": strategy.param_dtype,
        "strategy.reduce_dtype": strategy.reduce_dtype,
    }
    if strategy.output_dtype is not None:
        raise UserError(
            f"strategy.output_dtype is {strategy.output_dtype}, but a run uses nothing that a loss returns beside its "
            "sum and weight. Leave it None; `fsdp.gradients` takes it in programs of your own."
        )
    for field, dtype in dtypes.items():
        if dtype == "float64" and jnp.result_type(float) != jnp.float64:
            raise UserError(
                f"{field} is float64, but this jax has 64-bit types switched off and would use float32. Set "
                f"JAX_ENABLE_X64=1 in the environment, or choose another type with --set {field}=..."
            )
        if dtype == "float16" and experiment.loss_scaling is None:
            raise UserError(
                f"{field} is float16, in which small gradients underflow to zero unless the loss is scaled. Set "
                f"--set loss_scaling=LossScaling, or --set {field}=bfloat16, whose range is that of float32."
            )


_MAY_BE_WHOLE = ("vocabulary", "kv_heads")
"""Logical axes that every device may hold whole: used as they are, or repeated for each query head."""


def _check_divides(program: DenseProgram) -> None:
    """Refuses dimensions that do not divide over an axis that the rules give them, besides those of data.

    They would stay whole, and the devices of that axis would all compute the same.

    Raises:
      UserError: names the dimension, the axis, and sizes that would do.
    """
    rules, mesh = program.experiment.rules, program.mesh
    for path, p in program.model.params.items():
        for logical, size in zip(program.model.logical_axes[path], p.shape, strict=True):
            for axis in rules.mesh_axes(logical):
                count = mesh.shape[axis]
                if axis in meshes.BATCH_AXES or logical in _MAY_BE_WHOLE or size % count == 0:
                    continue
                fitting = [n for n in range(1, size + 1) if size % n == 0 and mesh.size % n == 0]
                below, above = size // count * count, -(-size // count) * count
                raise UserError(
                    f"The mesh has {axis}={count}, which does not divide {logical}={size} of {path!r}. Take "
                    f"{axis}={' or '.join(map(str, fitting))} (--set mesh.{axis}=N), or a model with {logical}="
                    f"{f'{below} or {above}' if below else above}."
                )
