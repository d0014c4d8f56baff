"""Builds the compiled functions of a run from an experiment, a schema and a mesh.

The step, top to bottom: look the rows up (exchange over all devices), dense forward and backward (the compiler places
its collectives), dense optimizer, sparse update of the rows that were looked up, metric sums. One jitted function; its
state is donated.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.data.schema import Schema
from scalejax.errors import UserError
from scalejax.numerics import rules, weights
from scalejax.numerics.rules import QuantizationRule
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection, Routing
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.jagged import DeviceBatch, FeatureLayout, KeyedJagged
from scalejax.parallel.embedding.mapped import Assignment
from scalejax.train import metrics
from scalejax.train.experiment import Experiment
from scalejax.train.precision import check_precision, init_model
from scalejax.train.protocols import Task
from scalejax.train.state import ModelShape, Params, TrainState, optimizer_shardings, optimizer_step, with_sharding


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
    embedded: dict[str, jax.Array] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The functions of one run; nothing is allocated until `init` is called.

    Attributes:
      experiment: The run.
      task: Its model bound to the schema of its data.
      collection: Its embedding tables on the mesh.
      mesh: The devices.
      model: Structure of the dense part.
      layout: Where each feature lies in the device form of a batch.
      plain_layout: The same without deduplication.
    """

    experiment: Experiment
    task: Task
    collection: EmbeddingCollection
    mesh: Mesh
    model: ModelShape
    layout: tuple[FeatureLayout, ...]
    plain_layout: tuple[FeatureLayout, ...]

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The dense optimizer."""
        return self.experiment.optimizer.build(self.experiment.steps)

    @functools.cached_property
    def row_schedule(self) -> optax.Schedule:
        """Factor on the learning rate of the tables, by step."""
        return self.experiment.row_schedule.build(self.experiment.steps)

    @functools.cached_property
    def formats(self) -> dict[str, QuantizationRule]:
        """The rule of each module of the dense part whose products are in number formats, by path."""
        modules = weights.weights_of(self.model.logical_axes)
        found = rules.assign(self.experiment.quantization, modules, tables=map(_path, self.collection.tables))
        return {path: rule for path, rule in found.items() if path in modules}

    @functools.cached_property
    def in_flight(self) -> int:
        """Steps that may be queued, see `mesh.steps_in_flight`."""
        return meshes.steps_in_flight(self.mesh)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return meshes.replicated(self.mesh)

    def batch_sharding(self) -> NamedSharding:
        """Examples over the batch axes."""
        return meshes.batch_sharding(self.mesh)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Sharding of every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        shardings = self.model.shardings(self.mesh, self.experiment.rules)
        optimizer = jax.eval_shape(self.transformation.init, self.model.params)
        sums = jax.eval_shape(functools.partial(metrics.zeros, len(self.task.schema.labels)))
        key = jax.eval_shape(lambda: jax.random.key(0))
        return TrainState(
            step=with_sharding(jax.ShapeDtypeStruct((), jnp.int32), self.replicated),
            params={name: with_sharding(p, shardings[name]) for name, p in self.model.params.items()},
            optimizer=jax.tree.map(
                with_sharding,
                optimizer,
                optimizer_shardings(optimizer, self.model.params, shardings, self.mesh),
            ),
            tables=self.collection.abstract_state(),
            metrics=jax.tree.map(lambda leaf: with_sharding(leaf, self.replicated), sums),
            key=with_sharding(key, self.replicated),
        )

    def abstract_batch(self) -> DeviceBatch:
        """One global batch as shapes, dtypes and shardings."""
        size, schema = self.experiment.data.batch_size, self.task.schema
        slots = sum(feature.capacity for feature in self.layout)
        groups = self.experiment.dedup
        wide = sum(feature.capacity for feature in self.layout if feature.map is not None)
        rows = P(meshes.BATCH_AXES)

        def leaf(shape: tuple[int, ...], dtype: Any, spec: P) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

        return DeviceBatch(
            features=KeyedJagged(
                values=leaf((self.mesh.size, slots), jnp.int32, P(meshes.AXES)),
                lengths=leaf((self.mesh.size, sum(f.bags for f in self.layout)), jnp.int32, P(meshes.AXES)),
                weights=None,
                layout=self.layout,
                inverse=leaf((self.mesh.size, len(groups), size // self.mesh.size), jnp.int32, P(meshes.AXES))
                if groups
                else None,
                high=leaf((self.mesh.size, wide), jnp.uint32, P(meshes.AXES)) if wide else None,
            ),
            dense=leaf((size, len(schema.dense)), jnp.float32, rows),
            labels=leaf((size, len(schema.labels)), jnp.float32, rows),
            weights=leaf((size,), jnp.float32, rows),
        )

    def init(self) -> TrainState:
        """A fresh state, equal for equal seeds on every mesh."""

        def create() -> tuple[dict[str, jax.Array], Any, Any, Any]:
            key = jax.random.key(self.experiment.seed)
            model = init_model(self.task, nnx.Rngs(jax.random.fold_in(key, 0)), self.experiment.precision, self.mesh)
            params = self.model.take_apart(model)
            sums = metrics.zeros(len(self.task.schema.labels))
            return params, self.transformation.init(params), sums, jax.random.fold_in(key, 1)

        shardings = self.state_shardings
        params, optimizer, sums, key = jax.jit(
            create, out_shardings=(shardings.params, shardings.optimizer, shardings.metrics, shardings.key)
        )()
        tables = self.collection.init(jax.random.fold_in(jax.random.key(self.experiment.seed), 2))
        step = jax.device_put(jnp.zeros((), jnp.int32), self.replicated)
        return TrainState(step=step, params=params, optimizer=optimizer, tables=tables, metrics=sums, key=key)

    @functools.cached_property
    def train_step(self) -> Any:
        """jitted (state, batch) -> (state, mean loss of the batch); the state is donated."""
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=(self.state_shardings, self.replicated))

    @functools.cached_property
    def look_ahead(self) -> Any:
        """jitted (state, batch) -> `Ahead` of a batch, for `pipelined_step`."""
        return jax.jit(self._look_ahead)

    @functools.cached_property
    def pipelined_step(self) -> Any:
        """jitted (state, batch, ahead, next batch) -> (state, mean loss, ahead of the next batch).

        The state is donated.

        The exchange of the next batch's ids reads nothing that the step computes, so that both can run at once.
        """
        outs = (self.state_shardings, self.replicated, None)
        # Not `ahead`: it may hold arrays of the batch itself.
        return jax.jit(self._pipelined_step, donate_argnums=0, out_shardings=outs)

    @functools.cached_property
    def eval_step(self) -> Any:
        """jitted (state, batch) -> (logits float32[B, T], int32[2] as `faults` of this lookup), on every device."""
        return jax.jit(self._eval_step, out_shardings=self.replicated)

    @functools.cached_property
    def take_metrics(self) -> Any:
        """jitted state -> (state with zeroed sums, sums); the state is donated."""

        def take(state: TrainState) -> tuple[TrainState, metrics.MetricSums]:
            zero = metrics.zeros(len(self.task.schema.labels))
            return dataclasses.replace(state, metrics=zero), state.metrics

        return jax.jit(take, donate_argnums=0, out_shardings=(self.state_shardings, self.state_shardings.metrics))

    @functools.cached_property
    def faults(self) -> Any:
        """jitted state -> int32[2] of `EmbeddingCollection.faults`."""
        return jax.jit(lambda state: self.collection.faults(state.tables), out_shardings=self.replicated)

    @functools.cached_property
    def id_counts(self) -> Any:
        """jitted state -> `EmbeddingCollection.id_counts`."""
        return jax.jit(lambda state: self.collection.id_counts(state.tables), out_shardings=self.replicated)

    def _fetch(self, tables: Any, routing: Routing) -> dict[str, jax.Array]:
        embedded = self.collection.fetch(tables, routing)
        return jax.lax.with_sharding_constraint(embedded, self.batch_sharding())

    def _with_lengths(self, batch: DeviceBatch) -> DeviceBatch:
        lengths = self.collection.lengths(batch.features)
        return dataclasses.replace(batch, lengths=jax.lax.with_sharding_constraint(lengths, self.batch_sharding()))

    def _look_ahead(self, state: TrainState, batch: DeviceBatch, steps_ahead: int = 0) -> Ahead:
        features, assignment = self.collection.map_ids(state.tables, batch.features, steps_ahead=steps_ahead)
        routing = self.collection.exchange_ids(features)
        stale = self.experiment.pipeline == "stale"
        return Ahead(routing, assignment, self._fetch(state.tables, routing) if stale else None)

    def _pipelined_step(
        self, state: TrainState, batch: DeviceBatch, ahead: Ahead, coming: DeviceBatch
    ) -> tuple[TrainState, jax.Array, Ahead]:
        # The maps as this step leaves them, although the state has them only from its end on: a checkpoint before the
        # next step must not know the ids of its batch.
        before = state
        if self.collection.mapped_tables:
            before = dataclasses.replace(state, tables={**state.tables, "maps": ahead.assignment.maps})
        following = self._look_ahead(before, coming, steps_ahead=1)
        return *self._step(state, batch, ahead), following

    def _train_step(self, state: TrainState, batch: DeviceBatch) -> tuple[TrainState, jax.Array]:
        features, assignment = self.collection.map_ids(state.tables, batch.features)
        return self._step(state, batch, Ahead(self.collection.exchange_ids(features), assignment, None))

    def _step(self, state: TrainState, batch: DeviceBatch, ahead: Ahead) -> tuple[TrainState, jax.Array]:
        routing, tables = ahead.routing, self.collection.admit(state.tables, ahead.assignment)
        embedded = self._fetch(tables, routing) if ahead.embedded is None else ahead.embedded
        key = jax.random.fold_in(state.key, state.step)
        batch = self._with_lengths(batch)
        loss, logits, dense_grads, row_grads = self._gradients(state.params, embedded, batch, key)
        params, optimizer = optimizer_step(self.transformation, dense_grads, state)
        tables = self.collection.update(tables, routing, row_grads, self.row_schedule(state.step))
        state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            tables=tables,
            metrics=metrics.update(state.metrics, logits, batch.labels, batch.weights),
            key=state.key,
        )
        return state, loss

    def _gradients(
        self, params: Params, embedded: dict[str, jax.Array], batch: DeviceBatch, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Params, dict[str, jax.Array]]:
        """Mean loss of the global batch, logits, and gradients of that loss, in `parts` passes."""

        def total(params: Params, embedded: dict[str, jax.Array], batch: DeviceBatch, key: jax.Array) -> Any:
            total, weight, aux = self.task.loss(self._put_together(params), embedded, batch, key=key)
            return total, (weight, aux["logits"])

        grad = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        # A task's loss does not read the ids, which have no axis of examples to cut.
        examples = (embedded, batch.dense, batch.labels, batch.weights, batch.lengths)

        def one(examples: Any, key: jax.Array) -> Any:
            embedded, dense, labels, weights, lengths = examples
            part = DeviceBatch(batch.features, dense, labels, weights, lengths)
            return grad(params, embedded, part, key)

        if self.parts == 1:
            (loss, (weight, logits)), (dense_grads, row_grads) = one(examples, key)
        else:

            def body(carry: Any, part: Any) -> Any:
                (loss, (weight, logits)), (dense_grads, row_grads) = one(part[0], part[1])
                return jax.tree.map(jnp.add, carry, (loss, weight, dense_grads)), (logits, row_grads)

            parts = jax.tree.map(lambda x: meshes.cut(x, self.mesh, self.parts), examples)
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.parts))
            shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts), key)
            zero = (shapes[0][0], shapes[0][1][0], shapes[1][0])
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zero)
            (loss, weight, dense_grads), (logits, row_grads) = jax.lax.scan(body, zero, (parts, keys))
            logits, row_grads = jax.tree.map(lambda x: meshes.join(x, self.mesh), (logits, row_grads))

        def mean(x: jax.Array) -> jax.Array:
            return x / weight.astype(x.dtype)

        return mean(loss), logits, jax.tree.map(mean, dense_grads), jax.tree.map(mean, row_grads)

    def _put_together(self, params: Params) -> nnx.Module:
        return self.model.put_together(weights.formatted(params, self.formats) if self.formats else params)

    @functools.cached_property
    def parts(self) -> int:
        """Passes of the dense part in a step: the fewest that divide a device's examples and are small enough."""
        local = self.experiment.data.batch_size // meshes.batch_shards(self.mesh)
        most = self.experiment.microbatch
        if most is None:
            positions = {feature.name: feature.positions or 1 for feature in self.layout}
            width = sum(
                table.dim * (positions[name] if table.pooling == "none" else 1)
                for table in self.collection.tables
                for name in table.features
            )
            most = max(1, min(1024, 2**20 // width)) if self.mesh.devices.flat[0].platform == "cpu" else local
        return meshes.fewest_parts(local, most)

    def _eval_step(self, state: TrainState, batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        features, faults = self.collection.find_ids(state.tables, batch.features)
        routing = self.collection.exchange_ids(features)
        embedded = self._fetch(state.tables, routing)
        model = self._put_together(state.params)
        _, _, aux = self.task.loss(model, embedded, self._with_lengths(batch), key=None)
        return aux["logits"], (faults + routing.faults).sum(axis=0, dtype=jnp.int32)


def build(experiment: Experiment, schema: Schema, mesh: Mesh) -> Program:
    """Binds an experiment to a schema and a mesh; allocates nothing.

    Raises:
      UserError: the batch does not divide over the mesh, float64 is asked of a jax that has it switched off, the
        checkpoints are kept by a score that there is not, or the model, the schema and the id maps do not fit.
    """
    meshes.check_batch(experiment.data.batch_size, mesh)
    check_precision(experiment.precision)
    if (best := experiment.checkpoints.best_metric) in ("loss", "accuracy"):
        raise UserError(
            f"checkpoints.best_metric is {best!r}, but a model with embedding tables is scored by logloss, ne and auc. "
            "Set --set checkpoints.best_metric=logloss."
        )
    task = bound_task(experiment, schema)
    collection = EmbeddingCollection(
        tables=tables_of(experiment, task),
        mesh=mesh,
        plan=experiment.sharding,
        exchange=experiment.exchange,
        accumulate=experiment.accumulate,
    )
    abstract = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment.precision, mesh))
    program = Program(
        experiment=experiment,
        task=task,
        collection=collection,
        mesh=mesh,
        model=ModelShape.of(abstract),
        layout=collection.layout(schema, experiment.data.batch_size, experiment.dedup),
        plain_layout=collection.layout(schema, experiment.data.batch_size),
    )
    _ = program.formats  # which refuses rules without a module
    return program


def with_rows(schema: Schema, experiment: Experiment) -> Schema:
    """The schema that the model sees: features with an id map have as many rows as that.

    Raises:
      UserError: a feature of any 64-bit ids has no map, or a map names a feature that does not exist or has one.
    """
    rows: dict[str, int] = {}
    for entry in experiment.id_maps:
        for name in entry.features:
            if name not in schema.keys:
                raise UserError(f"id_maps: there is no feature {name!r}; the data has {', '.join(schema.keys)}.")
            if name in rows:
                raise UserError(f"id_maps: feature {name!r} is named twice; give it one map.")
            rows[name] = entry.id_map.rows
    for feature in schema.categorical:
        if feature.rows is None and feature.name not in rows:
            raise UserError(
                f"Feature {feature.name!r} has ids of any 64 bits (rows=None) and no id map. Give the experiment one, "
                f"id_maps=(MappedFeatures(features=({feature.name!r},), id_map=IdMapConfig(rows=...)),), or the "
                "feature a number of rows."
            )
    features = [
        dataclasses.replace(feature, rows=rows.get(feature.name, feature.rows)) for feature in schema.categorical
    ]
    return dataclasses.replace(schema, categorical=tuple(features))


def bound_task(experiment: Experiment, schema: Schema) -> Task:
    """The model of a run, bound to the schema of its data.

    Raises:
      UserError: as `with_rows`.
    """
    return experiment.model.task(with_rows(schema, experiment), experiment.row_optimizer)


def _with_maps(tables: tuple[TableConfig, ...], experiment: Experiment) -> tuple[TableConfig, ...]:
    entries = {name: entry for entry in experiment.id_maps for name in entry.features}
    new = []
    for table in tables:
        found = [entries.get(name) for name in table.features]
        if any(entry is not found[0] for entry in found):
            raise UserError(
                f"id_maps: the features {', '.join(table.features)} share table {table.name!r}, and so one map: name "
                "all of them in one entry."
            )
        new.append(table if found[0] is None else dataclasses.replace(table, id_map=found[0].id_map))
    return tuple(new)


def tables_of(experiment: Experiment, task: Task) -> tuple[TableConfig, ...]:
    """The embedding tables of a run, with their id maps, dtypes and formats, and tracked if need be."""
    tables, dtype = _with_maps(task.tables(), experiment), experiment.precision.tables
    if dtype is not None:
        tables = tuple(dataclasses.replace(table, dtype=dtype) for table in tables)
    reads = {table.name: rules.find(experiment.quantization, _path(table)) for table in tables}
    tables = tuple(
        dataclasses.replace(table, reads=rule)
        if (rule := reads[table.name]) is not None and rule.weight_qtype is not None
        else table
        for table in tables
    )
    if experiment.checkpoints.full_every is not None:
        tables = tuple(dataclasses.replace(table, track="updates") for table in tables)
    return tables


def _path(table: TableConfig) -> str:
    """By which rules know a table."""
    return f"tables/{table.name}"
