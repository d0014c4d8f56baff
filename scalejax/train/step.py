"""Builds the compiled functions of a run: one program for every model.

The step, top to bottom: rows of embedding tables are fetched; gradients of the global batch are taken by the run's
strategy (`parallel.gradients`); they become those of the mean loss, are checked and clipped; optimizer; sparse update
of the rows; averages; metric sums. One jitted function; its state is donated. What counts is the sum of the weights
over the whole global batch: the loss of a step does not depend on how its examples, or their padding, are spread over
devices or parts.

A step whose gradients overflow under a scaled loss changes nothing but the factor: parameters, optimizer, variables,
averages and the state of the exchange go back to what they were, and tables write no row. What an exchange remembers of
gradients is in units of the scaled loss, and follows its factor.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.numerics.quantized import rules, weights
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel import context, ddp, fsdp, offload, pipeline, xla_flags
from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression.quantized_gather import QuantizedGather
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange.through_maps import Assignment
from scalejax.parallel.embedding.half_way import HalfWay
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, FeatureLayout
from scalejax.parallel.embedding.lookup import Routing
from scalejax.parallel.embedding.row_cache import Tiers
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.gradients import scaling as gradient_scaling
from scalejax.parallel.gradients.blocks import CompressedExchange, Gather, ShardWithState, States, StepContext
from scalejax.parallel.gradients.compute import GradientFunction, Keys, Loss, LossInputs, gradients
from scalejax.parallel.rules import ParameterPlacement
from scalejax.parallel.towers import HostTowers
from scalejax.train.experiment import Experiment
from scalejax.train.metrics import steps as step_sums
from scalejax.train.metrics.protocol import Metric
from scalejax.train.precision import init_model
from scalejax.train.state import ModelShape, Params, TrainState, optimizer_shardings, optimizer_step, with_sharding
from scalejax.train.task import Batch, Field, Placed, Task, host_fields, whole

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

_WHOLE_STEP = 0x57E9
"""Folded into the key of a step, for what is drawn once for all devices."""
_EXCHANGE = 0xE8C4
"""The same, for what the exchange of gradients and parameters draws."""


class Jitted(Protocol[Arguments, Result_co]):
    """A jitted function with its signature, which jax's own type forgets."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result_co: ...

    def eval_shape(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result_co: ...

    def trace(self, *args: object) -> jax.stages.Traced: ...


class _Read(TypedDict):
    """What scoring reads of a state."""

    params: Params
    variables: Params
    averages: dict[str, Params]
    tables: State
    exchange: States


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
    """What is known of a batch before its step.

    Attributes:
      routing: Where its ids went.
      assignment: What its ids do to the id maps; the state has it from the step on.
      embedded: Its rows, where they are fetched a step ahead ("stale"), else None.
    """

    routing: Routing
    assignment: Assignment
    embedded: dict[str, jax.Array] | HalfWay | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """What an evaluation finds out about one batch, on every device.

    Attributes:
      metrics: {name of a metric: its sums}.
      outputs: {name: [B, ...]}, what metrics collect of the loss.
      loss: float[], sum of losses.
      faults: int32[2] of `EmbeddingCollection.faults` of this lookup.
    """

    metrics: dict[str, Any]
    outputs: dict[str, jax.Array]
    loss: jax.Array
    faults: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """The functions of one run; nothing is allocated until `init` is called.

    Attributes:
      experiment: The run.
      task: Its model bound to the schema of its data.
      mesh: The devices.
      model: Structure of the model.
      collection: Its embedding tables on the mesh, or what the devices have of them; None where the model has none.
      tables: The whole tables.
      layout: Where each feature lies in the device form of a batch.
      plain_layout: The same without deduplication.
      constants: What the model reads in every step; shapes in a program that is only compiled.
      example: A host batch with the sizes of fields that the task does not state; None = it states them all.
      schedules_from: Step at which the schedules of the optimizers begin, see `phases`.
      towers: Where lookups stop between hosts, whose modules run there; None = they go all the way.
    """

    experiment: Experiment
    task: Task
    mesh: Mesh
    model: ModelShape
    collection: EmbeddingCollection | None
    tables: tuple[TableConfig, ...] = ()
    layout: tuple[FeatureLayout, ...] = ()
    plain_layout: tuple[FeatureLayout, ...] = ()
    constants: object = None
    example: object = None
    schedules_from: int = 0
    towers: HostTowers | None = None

    # What the run is made of.

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer."""
        return self.experiment.optimizer.build(self.experiment.steps)

    @functools.cached_property
    def row_schedule(self) -> optax.Schedule:
        """Factor on the learning rate of the tables, by step."""
        schedule = self.experiment.tables.schedule.build(self.experiment.steps)
        return lambda step: schedule(step - self.schedules_from)

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the task, by names that are unique."""
        return {f"{number}": metric for number, metric in enumerate(self.task.metrics())}

    @functools.cached_property
    def fields(self) -> Mapping[str, object]:
        """What a batch holds, see `task.Task.fields`."""
        return self.task.fields()

    @functools.cached_property
    def field_shardings(self) -> dict[str, object]:
        """How the arrays of a global batch lie on the devices, a tree like `fields`."""
        return jax.tree.map(lambda field: NamedSharding(self.mesh, field.spec), self.fields, is_leaf=is_field)

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """Paths of the parameters that are trained."""
        return self.model.trained(self.experiment.trainable)

    @functools.cached_property
    def formats(self) -> dict[str, QuantizationRule]:
        """The rule of each module whose products are in number formats, by path."""
        modules = weights.weights_of({path: self.model.logical_axes[path] for path in self.model.params})
        tables = () if self.collection is None else [f"tables/{table.name}" for table in self.collection.tables]
        found = rules.assign(self.experiment.quantization, modules, tables=tables)
        return {path: rule for path, rule in found.items() if path in modules}

    @functools.cached_property
    def in_flight(self) -> int:
        """Steps that may be queued, see `mesh.steps_in_flight`."""
        return meshes.steps_in_flight(self.mesh)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return meshes.replicated(self.mesh)

    @functools.cached_property
    def compiler_options(self) -> dict[str, xla_flags.Value] | None:
        """Options of XLA that the run names, as far as its devices know them; None = none."""
        devices = self.mesh.devices.flat
        return xla_flags.compiler_options(self.experiment.xla_flags, devices[0].platform, devices) or None

    @functools.cached_property
    def placements(self) -> tuple[ParameterPlacement, ...]:
        """Where each parameter lies between steps, and why not elsewhere."""
        described = {name: (self.model.logical_axes[name], p.shape) for name, p in self.model.params.items()}
        rules = self.experiment.placement.rules
        if self.towers is not None:
            rules = dataclasses.replace(rules, axes=(*rules.axes, ("towers", ("replica",))))
        frozen = self.model.params.keys() - self.trained
        placed = fsdp.place(described, self.experiment.strategy, mesh=self.mesh, rules=rules, frozen=frozen)
        apart = self.task.apart
        if apart and self.experiment.strategy.form == "implicit":
            raise UserError(
                f"{type(self.task).__name__} keeps {', '.join(apart)} apart, which needs strategy.form='explicit': in "
                "the implicit form a model sees the parameters of all devices. Set --set strategy.form=explicit."
            )
        return tuple(
            dataclasses.replace(p, spec=P(apart[p.name]), apart=apart[p.name]) if p.name in apart else p for p in placed
        )

    @functools.cached_property
    def specs(self) -> dict[str, P]:
        """Sharding per parameter, between steps."""
        return {placed.name: placed.spec for placed in self.placements}

    def gradients(self, parts: int) -> GradientFunction:
        """Gradients of the sum of losses by the run's strategy.

        Raises:
          UserError: the strategy does not go with the mesh or the task.
        """
        return gradients(
            self._loss,
            self.experiment.strategy,
            mesh=self.mesh,
            specs=self.specs,
            trained=self.trained,
            parts=parts,
            handled=self._handled,
            apart={placed.name: placed.apart for placed in self.placements if placed.apart},
            variable_specs=self.model.variable_specs,
        )

    @functools.cached_property
    def compressed(self) -> CompressedExchange | None:
        """The exchange, if it compresses once a step: what it leaves out is measured."""
        return self.gradients(1).compressed(self.model.params)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know before the first step."""
        if self.compressed is None:
            return ()
        return self.compressed.remarks(self.gradients(1).whole(self.model.params), self.mesh.shape)

    @functools.cached_property
    def residual(self) -> Callable[[TrainState, float], jax.Array]:
        """jitted (state, norm of the gradient) -> `CompressedExchange.residual`, float32[]."""
        exchange = self.compressed
        assert exchange is not None

        def found(params: Params, states: States, scale: gradient_scaling.LossScale | None, norm: float) -> jax.Array:
            factor = 1.0 if scale is None else scale.scale
            return exchange.residual(params, states, jnp.float32(norm) * factor)

        jitted = jax.jit(found, out_shardings=self.replicated)
        return lambda state, norm: jitted(state.params, state.exchange, state.loss_scale, norm)

    @property
    def _handled(self) -> tuple[str, ...]:
        """Axes over which the loss has collectives of its own in the explicit form: the stages of a pipeline."""
        explicit = self.experiment.strategy.form == "explicit"
        return (pipeline.AXIS,) if explicit and self.mesh.shape[pipeline.AXIS] > 1 else ()

    # State.

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        return self._abstract_state

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Sharding of every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self._abstract_state)

    @functools.cached_property
    def _abstract_state(self) -> TrainState:
        sharded = functools.partial(NamedSharding, self.mesh)
        shardings = {name: sharded(spec) for name, spec in self.specs.items()}
        trained = {name: p for name, p in self.model.params.items() if name in self.trained}
        optimizer = jax.eval_shape(self.transformation.init, trained)
        placed = optimizer_shardings(optimizer, trained, shardings, self.mesh)
        params = {name: with_sharding(p, shardings[name]) for name, p in self.model.params.items()}
        optimizer = jax.tree.map(with_sharding, optimizer, placed)
        averages = {a.name: {name: params[name] for name in trained} for a in self.experiment.averages}
        if self._offloads("parameters"):
            params = jax.tree.map(with_sharding, params, offload.on_host(params))
        if self._offloads("optimizer"):
            optimizer = jax.tree.map(with_sharding, optimizer, offload.on_host(optimizer))
        exchanged = self.gradients(1)
        variables = {
            name: with_sharding(v, sharded(self.model.variable_specs[name])) for name, v in self.model.variables.items()
        }

        def everywhere(tree: object) -> Any:
            return jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), tree)

        key = jax.eval_shape(lambda: jax.random.key(0))
        sums, scale = jax.eval_shape(lambda: (self._zeros(), self._first_scale()))
        exchange = jax.eval_shape(exchanged.init_exchange, self.model.params)
        lies = jax.tree.map(sharded, exchanged.exchange_specs(exchange), is_leaf=lambda x: isinstance(x, P))
        return TrainState(
            step=everywhere(jax.ShapeDtypeStruct((), jnp.int32)),
            params=params,
            variables=variables,
            optimizer=optimizer,
            averages=averages,
            tables={} if self.collection is None else self.collection.abstract_state(),
            exchange=jax.tree.map(with_sharding, exchange, lies),
            loss_scale=everywhere(scale),
            metrics=everywhere(sums),
            key=everywhere(key),
        )

    def init(self, tables: EmbeddingCollection | Tiers | None = None, redraw: int = 0) -> TrainState:
        """A fresh state, equal for equal seeds on every mesh; no device ever holds what it does not keep.

        Args:
          tables: What draws the embedding tables; None = the collection.
          redraw: Another number draws other parameters.

        Raises:
          UserError: jax is set up so that random numbers depend on the sharding, or tables do not fit.
        """
        state = self.init_dense(redraw)
        if self.collection is None:
            return state
        # 0 and 1 of the same seed are those of the model and of the steps (`create`), and 3 that of evaluations.
        key = jax.random.fold_in(jax.random.key(self.experiment.seed), 2)
        return dataclasses.replace(state, tables=(tables or self.collection).init(key))

    def init_dense(self, redraw: int = 0) -> TrainState:
        """As `init`, without embedding tables."""
        fsdp.check_random()
        key = jax.random.key(self.experiment.seed)
        return self._create(jax.random.fold_in(key, 4 + redraw) if redraw else key)

    @functools.cached_property
    def _create(self) -> Callable[[jax.Array], TrainState]:
        """jitted key -> a fresh state without tables."""
        exchanged = self.gradients(1)

        def create(key: jax.Array) -> TrainState:
            model = init_model(self.task, nnx.Rngs(jax.random.fold_in(key, 0)), self.experiment.precision, self.mesh)
            params, variables = self.model.split(model), self.model.variables_of(model)
            if isinstance(self.experiment.strategy, Ddp) and jax.process_count() > 1:
                # Every process computed its own copy, perhaps on other hardware.
                params = ddp.broadcast(params, self.mesh)
            trained = {name: p for name, p in params.items() if name in self.trained}
            state = TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                variables=variables,
                optimizer=self.transformation.init(trained),
                averages={a.name: trained for a in self.experiment.averages},
                tables={},
                exchange=exchanged.init_exchange(params),
                loss_scale=self._first_scale(),
                metrics=self._zeros(),
                key=jax.random.fold_in(key, 1),
            )
            return self._moved(state, offload.put_back)

        return jax.jit(create, out_shardings=dataclasses.replace(self.state_shardings, tables={}))

    def _zeros(self) -> dict[str, object]:
        measured = {} if self.compressed is None else {"exchange_error": jnp.full((), jnp.nan, jnp.float32)}
        sums = {name: metric.zeros() for name, metric in self.metrics.items()}
        return {"steps": step_sums.zeros(), **measured, **sums}

    def _first_scale(self) -> gradient_scaling.LossScale | None:
        scaling = self.experiment.gradients.loss_scaling
        return None if scaling is None else scaling.init()

    def take_metrics(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state with zeroed sums, and the sums."""
        # Zeros are made anew each time: the next step donates them.
        return dataclasses.replace(state, metrics=self._zero_metrics()), state.metrics

    @functools.cached_property
    def _zero_metrics(self) -> Callable[[], dict[str, object]]:
        return jax.jit(self._zeros, out_shardings=self.state_shardings.metrics)

    @functools.cached_property
    def on_all(self) -> Callable[[jax.Array], jax.Array]:
        """jitted array -> the same, whole on every device."""
        return jax.jit(lambda x: x, out_shardings=self.replicated)

    def _offloads(self, what: Literal["optimizer", "parameters"]) -> bool:
        return what in self.experiment.placement.offload.split(" and ")

    def _moved(self, state: TrainState, move: Callable[[Any, Any], Any]) -> TrainState:
        """The state with what rests on the host brought to the devices or put back: `move` is one of `offload`."""
        if self._offloads("parameters"):
            state = dataclasses.replace(state, params=move(state.params, self.state_shardings.params))
        if self._offloads("optimizer"):
            state = dataclasses.replace(state, optimizer=move(state.optimizer, self.state_shardings.optimizer))
        return state

    # Batches.

    def abstract_batch(self) -> Placed:
        """One global batch as shapes, dtypes and shardings."""
        rows, ranks = self.experiment.data.batch_size, self.mesh.shape["context"]

        def leaf(field: Field, host: np.ndarray | None = None) -> jax.ShapeDtypeStruct:
            own = field.shape
            if None in own and host is not None:
                have = np.shape(host) if field.scope == "step" else np.shape(host)[1:]
                own = tuple(known if size is None else size for size, known in zip(own, have, strict=True))
            sizes = tuple(size for size in own if size is not None)
            if len(sizes) < len(own):
                raise UserError(
                    f"A field of shape {own} of {type(self.task).__name__} has sizes that only the data know, so that "
                    "its step cannot be compiled without them. State them, or say planned_from = 'data' in the task."
                )
            if field.arrange == "zigzag":
                sizes = (context.padded_length(sizes[0], ranks), *sizes[1:])
            first = {"example": (rows,), "step": (), "device": (self.mesh.size,)}[field.scope]
            return jax.ShapeDtypeStruct((*first, *sizes), field.dtype, sharding=NamedSharding(self.mesh, field.spec))

        fields = self.fields
        if self.example is None:
            fields = jax.tree.map(leaf, fields, is_leaf=is_field)
        else:
            host = host_fields(self.task, self.example, 0, 0)
            fields = {
                name: None if host[name] is None else jax.tree.map(leaf, field, host[name], is_leaf=is_field)
                for name, field in fields.items()
            }
        features = None if self.collection is None else self._abstract_features()
        return Placed(fields, features, jax.tree.map(_as_shape, self.constants))

    def _abstract_features(self) -> DeviceJagged:
        size, groups = self.experiment.data.batch_size, self.experiment.tables.dedup
        slots = sum(feature.capacity for feature in self.layout)
        wide = sum(feature.capacity for feature in self.layout if feature.map is not None)
        each = NamedSharding(self.mesh, P(meshes.AXES))

        def leaf(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
            return jax.ShapeDtypeStruct((self.mesh.size, *shape), dtype, sharding=each)

        return DeviceJagged(
            values=leaf((slots,), jnp.int32),
            lengths=leaf((sum(f.bags for f in self.layout),), jnp.int32),
            weights=None,
            layout=self.layout,
            inverse=leaf((len(groups), size // self.mesh.size), jnp.int32) if groups else None,
            high=leaf((wide,), jnp.uint32) if wide else None,
        )

    def rows(self, placed: Placed) -> int:
        """Examples of a global batch: rows of its fields of scope "example", else of its first field."""
        fields = self.task.fields()
        own = {name: x for name, x in placed.fields.items() if scope_of(fields[name]) == "example"}
        return _rows(own or next(iter(placed.fields.values())))

    def parts(self, rows: int) -> int:
        """Passes of a step over `rows` examples: the fewest that divide those of a device and are small enough."""
        local = rows // meshes.batch_shards(self.mesh)
        most = self.experiment.gradients.microbatch
        if most == "cache":
            on_cpu = self.mesh.devices.flat[0].platform == "cpu" and self.collection is not None
            most = max(1, min(1024, 2**20 // self._embedded_width)) if on_cpu else None
        return meshes.fewest_parts(local, most or local)

    def _check_statistics(self, placed: Placed) -> None:
        if self.model.statistics and (rows := self.rows(placed)) == self.parts(rows):
            raise UserError(
                f"{', '.join(self.model.statistics[:3])}: a BatchNorm in training normalises over the examples of a "
                "batch, and batches or their parts have 1. Raise data.batch_size or gradients.microbatch, or choose a "
                "model without BatchNorm."
            )

    @functools.cached_property
    def _embedded_width(self) -> int:
        """Numbers that are looked up for one example."""
        assert self.collection is not None
        positions = {feature.name: feature.positions or 1 for feature in self.layout}
        return sum(
            table.dim * (positions[name] if table.pooling == "none" else 1)
            for table in self.collection.tables
            for name in table.features
        )

    # Functions.

    @functools.cached_property
    def train_step(self) -> Jitted[[TrainState, Placed], tuple[TrainState, jax.Array]]:
        """jitted (state, batch) -> (state, mean loss of the batch); the state is donated."""
        return self._jit(self._train_step, (self.state_shardings, self.replicated), donate_argnums=(0,))

    @functools.cached_property
    def look_ahead(self) -> Jitted[[TrainState, Placed], Ahead]:
        """jitted (state, batch) -> `Ahead` of a batch, for `pipelined_step`."""
        return self._jit(self._look_ahead, self._ahead_shardings)

    @functools.cached_property
    def pipelined_step(self) -> Jitted[[TrainState, Placed, Ahead, Placed], tuple[TrainState, jax.Array, Ahead]]:
        """jitted (state, batch, ahead, next batch) -> (state, mean loss, ahead of the next batch).

        The state is donated.

        The exchange of the next batch's ids reads nothing that the step computes, and nothing of the step waits for it.
        """
        # Not `ahead`: it may hold arrays of the batch itself.
        out_shardings = (self.state_shardings, self.replicated, self._ahead_shardings)
        return self._jit(self._pipelined_step, out_shardings, donate_argnums=(0,))

    def eval_step(self, state: TrainState, batch: Placed, numbers: jax.Array | None = None) -> Scored:
        """Scores a batch, on every device; `numbers` are those of its examples, uint32[B], for tasks that draw."""
        return self._compiled_eval_step(_read_of(state), batch, numbers)

    def statistics_step(self, state: TrainState, batch: Placed) -> Params:
        """The variables of the model, its running means being those of the batch."""
        return self._compiled_statistics_step(_read_of(state), batch)

    @functools.cached_property
    def _compiled_statistics_step(self) -> Jitted[[_Read, Placed], Params]:
        return self._jit(
            lambda read, batch: self._forward(read, batch, None, "statistics")[2], self.state_shardings.variables
        )

    @functools.cached_property
    def _compiled_eval_step(self) -> Jitted[[_Read, Placed, jax.Array | None], Scored]:
        return self._jit(self._eval_step, self.replicated)

    @functools.cached_property
    def faults(self) -> Jitted[[TrainState], jax.Array]:
        """jitted state -> int32[2] of `EmbeddingCollection.faults`."""
        collection = self.embeddings
        return self._jit(lambda state: collection.faults(state.tables), self.replicated)

    @functools.cached_property
    def id_counts(self) -> Jitted[[TrainState], dict[str, jax.Array]]:
        """jitted state -> `EmbeddingCollection.id_counts`."""
        collection = self.embeddings
        return self._jit(lambda state: collection.id_counts(state.tables), self.replicated)

    @functools.cached_property
    def is_pipelined(self) -> bool:
        """Whether a run calls `pipelined_step`, not `train_step`."""
        return self.collection is not None and self.experiment.tables.pipeline != "none"

    def repeated_step(self) -> tuple[Jitted[..., object], tuple[object, ...]]:
        """The jitted function that a run calls in every step, and its arguments as shapes: first the state, donated."""
        state, batch = self.abstract_state(), self.abstract_batch()
        if not self.is_pipelined:
            return self.train_step, (state, batch)
        return self.pipelined_step, (state, batch, self.look_ahead.eval_shape(state, batch), self.abstract_batch())

    @functools.cached_property
    def _ahead_shardings(self) -> Ahead:
        """An `Ahead` of shardings; stated, so that the first step of a run is compiled for what all others get."""
        each: Any = NamedSharding(self.mesh, P(meshes.AXES))
        rows: Any = meshes.batch_sharding(self.mesh) if self.experiment.tables.pipeline == "stale" else None
        return Ahead(each, each, rows)

    def _jit(
        self, function: Callable[Arguments, Result], out_shardings: object, donate_argnums: tuple[int, ...] = ()
    ) -> Jitted[Arguments, Result]:
        options = self.compiler_options
        jitted = jax.jit(function, out_shardings=out_shardings, donate_argnums=donate_argnums, compiler_options=options)
        return cast("Jitted[Arguments, Result]", jitted)

    @property
    def embeddings(self) -> EmbeddingCollection:
        """The tables of a model that has some."""
        assert self.collection is not None, "the model has no embedding tables"
        return self.collection

    def _fetch(self, tables: State, routing: Routing) -> dict[str, jax.Array] | HalfWay:
        if self.towers is None:
            embedded = self.embeddings.fetch(tables, routing)
        else:
            embedded = self.embeddings.fetch_half_way(tables, routing, self.towers)
        return jax.lax.with_sharding_constraint(embedded, meshes.batch_sharding(self.mesh))

    def _lengths(self, batch: Placed) -> dict[str, jax.Array]:
        if self.collection is None or batch.features is None:
            return {}
        lengths = self.collection.lengths(batch.features)
        return jax.lax.with_sharding_constraint(lengths, meshes.batch_sharding(self.mesh))

    def _look_ahead(self, state: TrainState, batch: Placed, steps_ahead: int = 0) -> Ahead:
        assert batch.features is not None
        features, assignment = self.embeddings.map_ids(state.tables, batch.features, steps_ahead=steps_ahead)
        routing = self.embeddings.exchange_ids(features)
        stale = self.experiment.tables.pipeline == "stale"
        return Ahead(routing, assignment, self._fetch(state.tables, routing) if stale else None)

    def _pipelined_step(
        self, state: TrainState, batch: Placed, ahead: Ahead, coming: Placed
    ) -> tuple[TrainState, jax.Array, Ahead]:
        # The maps as this step leaves them, although the state has them only from its end on: a checkpoint before the
        # next step must not know the ids of its batch.
        before = state
        if self.embeddings.mapped_tables:
            before = dataclasses.replace(state, tables={**state.tables, "maps": ahead.assignment.maps})
        following = self._look_ahead(before, coming, steps_ahead=1)
        return *self._step(state, batch, ahead), following

    def _train_step(self, state: TrainState, batch: Placed) -> tuple[TrainState, jax.Array]:
        if self.collection is None or batch.features is None:
            return self._step(state, batch, None)
        features, assignment = self.collection.map_ids(state.tables, batch.features)
        return self._step(state, batch, Ahead(self.collection.exchange_ids(features), assignment, None))

    def _step(self, state: TrainState, placed: Placed, ahead: Ahead | None) -> tuple[TrainState, jax.Array]:
        e = self.experiment
        self._check_statistics(placed)
        key = jax.random.fold_in(state.key, state.step)
        # Devices and parts fold small numbers into the key of the examples; `_WHOLE_STEP` is not to be one of them.
        keys = Keys(step=jax.random.fold_in(key, _WHOLE_STEP), examples=key)
        # Of the steps between two lines of metrics the first one, which every window has.
        measure = None if self.compressed is None else state.step % e.log_every == 0
        context = StepContext(state.step, jax.random.fold_in(key, _EXCHANGE), self._learning_rate(state), measure)
        state = self._moved(state, offload.fetch)
        tables, embedded = state.tables, {}
        if ahead is not None:
            tables = self.embeddings.admit(state.tables, ahead.assignment)
            embedded = self._fetch(tables, ahead.routing) if ahead.embedded is None else ahead.embedded
        progress = (state.step - self.schedules_from).astype(jnp.float32) / e.steps
        batch = Batch(placed.fields, embedded, self._lengths(placed), placed.constants, progress=progress)
        cut, shared = self._divided(batch)
        take = self.gradients(self.parts(_rows(cut)) if cut["fields"] else 1)
        # Gradients of the mean loss where that matters before the end: a factor need not follow the size of a batch,
        # nor do residuals of an exchange follow its weight, and sums of many examples leave the range of float16.
        # Elsewhere the sum over examples is divided by its weight.
        held, means = state.loss_scale, self.compressed is not None or bool(state.exchange)
        means = means or held is not None
        scale = 1.0
        if means:
            widest = jax.dtypes.canonicalize_dtype(jnp.float64)  # or losses in float64 had gradients of 24 bits
            scale = (1.0 if held is None else held.scale) / self.task.weight(batch).astype(widest)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            found = take(
                state.params,
                cut,
                inputs=embedded,
                variables=state.variables,
                exchange=state.exchange,
                constants=shared,
                keys=keys,
                context=context,
                scale=scale,
            )
        grads, rows, finite = found.params, found.inputs, None
        unit = jnp.float32(1)  # of the norms of what the exchange gave, in those of the mean loss
        if held is not None:
            (grads, rows), finite = held.unscale((grads, rows))
            unit = held.scale
        if not means:
            grads, rows = jax.tree.map(lambda g: g / found.weight.astype(g.dtype), (grads, rows))
            unit = found.weight
        clip = e.gradients.clip
        if clip is None:
            norm = gradient_scaling.global_norm(grads)
        else:
            grads, norm = gradient_scaling.clip_by_global_norm(grads, clip)
        params, optimizer = optimizer_step(self.transformation, grads, state, self.model.stacked)
        averages = {
            a.name: a.update(state.averages[a.name], {name: params[name] for name in self.trained}, state.step)
            for a in e.averages
        }
        exchange = take.after_update(params, found.exchange, context)
        new = (params, optimizer, averages, found.variables, exchange)
        skipped, scaling = None, e.gradients.loss_scaling
        if held is not None and finite is not None and scaling is not None:
            before = (state.params, state.optimizer, state.averages, state.variables, state.exchange)
            new = gradient_scaling.take_step_if(finite, new, before)
            # An overflow at the least factor will come again, and a batch in which nothing counts is none: they count
            # as what they are and end the run.
            skipped = ~finite & (held.scale > scaling.smallest) & (found.weight > 0)
            held = held.update(finite, scaling)
        params, optimizer, averages, variables, exchange = new
        if held is not None and state.loss_scale is not None:
            exchange = take.rescaled(params, exchange, held.scale / state.loss_scale.scale)
        if ahead is not None:
            tables = self.embeddings.update(tables, ahead.routing, rows, self.row_schedule(state.step), when=finite)
        loss = Loss(found.sum, found.weight, found.sums, found.outputs)
        state = TrainState(
            step=state.step + 1,
            params=params,
            variables=variables,
            optimizer=optimizer,
            averages=averages,
            tables=tables,
            exchange=exchange,
            loss_scale=held,
            metrics={
                "steps": step_sums.update(state.metrics["steps"], found.sum, found.weight, norm, clip, skipped),
                **_exchange_error(state.metrics, found.left_out, norm * unit, measure),
                **{name: metric.update(state.metrics[name], loss, batch) for name, metric in self.metrics.items()},
            },
            key=state.key,
        )
        return self._moved(state, offload.put_back), found.sum / found.weight.astype(found.sum.dtype)

    def _learning_rate(self, state: TrainState) -> jax.Array:
        """float32[]: that of the optimizer in this step, of its last rule where it has several."""
        # Schedules go by the steps that were taken.
        step = state.step - self.schedules_from - (0 if state.loss_scale is None else state.loss_scale.skipped)
        return jnp.asarray(self.experiment.optimizer.learning_rate.build(self.experiment.steps)(step), jnp.float32)

    def _divided(self, batch: Batch) -> tuple[dict[str, dict[str, jax.Array]], dict[str, object]]:
        """What of a batch has rows, and what all devices and parts share."""
        scopes = {name: scope_of(field) for name, field in self.fields.items()}
        own = {name: x for name, x in batch.fields.items() if scopes.get(name) == "example"}
        rest = {name: x for name, x in batch.fields.items() if name not in own}
        shared = {"fields": rest, "constants": batch.constants, "progress": batch.progress}
        return {"fields": own, "lengths": batch.lengths}, shared

    def _loss(self, given: LossInputs) -> tuple[Loss, Params]:
        own, shared = given.batch, given.constants
        fields = {**own["fields"], **shared["fields"]}
        batch = Batch(fields, given.inputs, own["lengths"], shared["constants"], progress=shared["progress"])
        found = self._task_loss(given.params, given.variables, batch, given.keys, given.gather)
        return (pipeline.on_last_stage(found[0]), found[1]) if self._handled else found

    def _task_loss(
        self,
        params: Mapping[str, jax.Array | ShardWithState],
        variables: Params,
        batch: Batch,
        keys: Keys | None,
        gather: Gather,
    ) -> tuple[Loss, Params]:
        """Loss and next variables of a batch, with parameters fetched by whom the task says."""
        if self.formats:
            gather = QuantizedGather(gather, self.formats)

        def by_blocks(
            params: Mapping[str, jax.Array | ShardWithState], variables: Params, batch: Batch
        ) -> tuple[Loss, Params]:
            model = self.model.merge(params, variables)
            return self.task.loss(model, batch, keys=keys, gather=gather), self.model.variables_of(model)

        def fetched(
            params: Mapping[str, jax.Array | ShardWithState], variables: Params, batch: Batch
        ) -> tuple[Loss, Params]:
            model = self.model.merge(gather(params), variables)
            return self.task.loss(model, batch, keys=keys, gather=whole), self.model.variables_of(model)

        if self.task.fetches == "blocks":
            return by_blocks(params, variables, batch)
        adapt = getattr(gather, "remat", None)
        policy = None if adapt is None else adapt(None)
        # Only what was gathered is dropped, and gathered again; unlike in a scan the second time must not be merged
        # with the first, which `prevent_cse` (the default) sees to.
        run = fetched if policy is None else jax.checkpoint(fetched, policy=policy)
        return run(params, variables, batch)

    def _eval_step(self, read: _Read, placed: Placed, numbers: jax.Array | None) -> Scored:
        keys = None
        if numbers is not None:
            key = jax.random.fold_in(jax.random.key(self.experiment.seed), 3)
            keys = Keys(jax.random.fold_in(key, _WHOLE_STEP), jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers))
        batch, loss, _, faults = self._forward(read, placed, keys, "evaluation")
        return Scored(
            metrics={name: metric.update(metric.zeros(), loss, batch) for name, metric in self.metrics.items()},
            outputs={name: x for name, x in loss.outputs.items() if name in self.collected},
            loss=loss.sum,
            faults=faults,
        )

    def _forward(
        self, read: _Read, placed: Placed, keys: Keys | None, purpose: Literal["evaluation", "statistics"]
    ) -> tuple[Batch, Loss, Params, jax.Array]:
        """Batch, loss, next variables and faults of a lookup of what is only computed forward."""
        params, tables = read["params"], read["tables"]
        if self._offloads("parameters"):
            params = offload.fetch(params, self.state_shardings.params)
        params = self.gradients(1).seen(params, read["exchange"])
        faults = jnp.zeros((2,), jnp.int32)
        embedded: dict[str, jax.Array] | HalfWay = {}
        if self.collection is not None and placed.features is not None:
            features, bad = self.collection.find_ids(tables, placed.features)
            routing = self.collection.exchange_ids(features)
            embedded = self._fetch(tables, routing)
            # Without a dtype the sum would be int64 where jax has 64-bit types switched on.
            faults = (bad + routing.faults).sum(axis=0, dtype=jnp.int32)
        batch = Batch(placed.fields, embedded, self._lengths(placed), placed.constants, purpose=purpose)
        if (average := self.experiment.evaluation.average) is not None:
            params = {**params, **read["averages"][average]}
        # Models lay out their activations by the mesh that they find.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            loss, variables = self._task_loss(params, read["variables"], batch, keys, whole)
        return batch, loss, variables, faults

    @functools.cached_property
    def collected(self) -> frozenset[str]:
        """Names of what metrics collect of every example, or of the first."""
        return frozenset(name for metric in self.metrics.values() for name in (*metric.collects, *metric.shows))

    @functools.cached_property
    def shown(self) -> frozenset[str]:
        """Names of what is collected of the first examples of a split alone."""
        return self.collected.difference(*(metric.collects for metric in self.metrics.values()))


def _exchange_error(
    before: Mapping[str, Any], left_out: jax.Array | None, norm: jax.Array, measure: jax.Array | None
) -> dict[str, jax.Array]:
    """The norm of what an exchange left out over that of what it gave: of this step if it measures, else as before."""
    if left_out is None or measure is None:
        return {}
    found = (jnp.sqrt(left_out) / norm).astype(jnp.float32)
    return {"exchange_error": jnp.where(measure, found, before["exchange_error"])}


def _read_of(state: TrainState) -> _Read:
    return {
        "params": state.params,
        "variables": state.variables,
        "averages": state.averages,
        "tables": state.tables,
        "exchange": state.exchange,
    }


def _rows(tree: object) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def _as_shape(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return x if isinstance(x, jax.ShapeDtypeStruct) else with_sharding(x, x.sharding)


def is_field(x: object) -> bool:
    """Whether this is a leaf of a tree of fields."""
    return isinstance(x, Field)


def scope_of(field: object) -> Literal["example", "step", "device"]:
    """The scope of a field, or of a tree of fields, which share one."""
    return jax.tree.leaves(field, is_leaf=is_field)[0].scope
