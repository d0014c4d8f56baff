"""Binds an experiment to its data and its devices: every mistake that can be found before anything is allocated."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.numerics.quantized import rules
from scalejax.optim import ByPath
from scalejax.parallel import mesh as meshes
from scalejax.parallel import pipeline
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange import to_towers
from scalejax.parallel.embedding.tiers import cached, cached_schema
from scalejax.parallel.gradients.blocks import axes_of
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.parallel.towers import HostTowers
from scalejax.train.experiment import Experiment, Tables
from scalejax.train.metrics.protocol import Metric, Value, names_of
from scalejax.train.precision import check_precision, init_model
from scalejax.train.state import ModelShape
from scalejax.train.step import Program
from scalejax.train.task import Task


def bind(experiment: Experiment, schema: object, mesh: Mesh, data: object = None, *, abstract: bool = False) -> Program:
    """Binds an experiment to a schema and a mesh; allocates nothing but the constants of the task.

    Args:
      experiment: The run.
      schema: Of its data.
      mesh: The devices.
      data: The data, where the task has constants; None = they are not needed, as for a plan from the schema.
      abstract: The program is only compiled, perhaps for devices that are not here: constants are shapes.

    Raises:
      UserError: names the fields that do not fit: batch and mesh, model and data, strategy and mesh, dtypes, rules,
        scores; or a field that means nothing for this model.
    """
    check_precision(experiment)
    _check_dtypes(experiment)
    task = bound_task(experiment, schema)
    tables = tables_of(experiment, task)
    if not tables:
        _check_without_tables(experiment, task)
    best_value(experiment, task.metrics())
    _check_validation(experiment, task)
    task.check(experiment, mesh, data)
    collection, looked_up, towers = None, task.schema, _towers_on_hosts(experiment, task, mesh)
    if tables:
        _check_planned_towers(experiment, task)
        on_devices = cached(tables, experiment.tables.tiers)
        looked_up = cached_schema(task.schema, on_devices)
        plan = experiment.tables.sharding
        if towers is not None:
            features = {table.name: table.features for table in on_devices}
            plan = to_towers.in_hosts(plan, features, towers, mesh.size // towers.hosts)
        collection = EmbeddingCollection(
            tables=on_devices,
            mesh=mesh,
            plan=plan,
            exchange=experiment.tables.exchange,
            accumulate=experiment.tables.accumulate,
            implementation=experiment.tables.implementation,
        )
        if towers is not None:
            to_towers.check(collection.stacks, towers)
    model = nnx.eval_shape(lambda: init_model(task, nnx.Rngs(0), experiment.precision, mesh))
    size, dedup = experiment.data.batch_size, experiment.tables.dedup
    constants, example = None, None
    if data is not None:
        constants = (task.abstract_constants if abstract else task.constants)(data, mesh)
        example = next(task.train_batches(data, mesh, 0)) if abstract else None
    program = Program(
        experiment=experiment,
        task=task,
        mesh=mesh,
        model=ModelShape.of(model),
        collection=collection,
        tables=tables,
        layout=() if collection is None else collection.layout(looked_up, size, dedup),
        plain_layout=() if collection is None else collection.layout(looked_up, size),
        constants=constants,
        example=example,
        towers=towers,
    )
    _check_divides(program)
    _check_stages(program)
    _check_strategy(experiment)
    _check_evaluation(experiment, program.model.statistics)
    if program.model.statistics and experiment.gradients.microbatch is not None:
        warnings.warn(
            f"{', '.join(program.model.statistics[:3])}: with gradients.microbatch the means of a BatchNorm are those "
            "of a part and not of the global batch.",
            stacklevel=2,
        )
    _ = program.formats  # which refuses rules without a module
    # What a step of so many parts refuses is refused now.
    taken = program.gradients(1 if experiment.gradients.microbatch is None else program.parts(size))
    if experiment.gradients.loss_scaling is not None:
        remembered = program.abstract_state().exchange
        factor = jax.ShapeDtypeStruct((), jnp.float32)
        # Traced for its refusal alone: an exchange without a rule is to be found out before the first step.
        jax.eval_shape(functools.partial(taken.rescaled, program.model.params), remembered, factor)
    return program


def bound_task(experiment: Experiment, schema: object) -> Task:
    """The model of a run, bound to the schema of its data.

    Raises:
      UserError: model and data do not fit, or a feature needs an id map, has two, or does not exist.
    """
    if isinstance(schema, Schema):
        schema = with_rows(schema, experiment)
    return experiment.model.task(schema)


def tables_of(experiment: Experiment, task: Task) -> tuple[TableConfig, ...]:
    """The embedding tables of a run: with their optimizer, id maps, dtypes and formats, and tracked if need be."""
    settings = experiment.tables
    tables = _with_maps(task.tables(), experiment)
    found = []
    for table in tables:
        rule = rules.find(experiment.quantization, f"tables/{table.name}")
        reads = rule if rule is not None and rule.weight_qtype is not None else table.reads
        found.append(
            dataclasses.replace(
                table,
                optimizer=settings.optimizer,
                dtype=settings.dtype or table.dtype,
                reads=reads,
                track="updates" if settings.full_every is not None else table.track,
            )
        )
    return tuple(found)


def with_rows(schema: Schema, experiment: Experiment) -> Schema:
    """The schema that the model sees: features with an id map have as many rows as that.

    Raises:
      UserError: a feature of any 64-bit ids has no map, or a map names a feature that does not exist or has one.
    """
    rows: dict[str, int] = {}
    for entry in experiment.tables.id_maps:
        for name in entry.features:
            if name not in schema.keys:
                raise UserError(f"tables.id_maps: there is no feature {name!r}; the data has {', '.join(schema.keys)}.")
            if name in rows:
                raise UserError(f"tables.id_maps: feature {name!r} is named twice; give it one map.")
            rows[name] = entry.id_map.rows
    for feature in schema.categorical:
        if feature.rows is None and feature.name not in rows:
            raise UserError(
                f"Feature {feature.name!r} has ids of any 64 bits (rows=None) and no id map. Give the experiment one, "
                f"tables=Tables(id_maps=(MappedFeatures(features=({feature.name!r},), "
                "id_map=IdMapConfig(rows=...)),)), or the feature a number of rows."
            )
    features = [
        dataclasses.replace(feature, rows=rows.get(feature.name, feature.rows)) for feature in schema.categorical
    ]
    return dataclasses.replace(schema, categorical=tuple(features))


def best_value(experiment: Experiment, metrics: tuple[Metric, ...]) -> Value:
    """The value by which checkpoints are kept.

    Raises:
      UserError: there is none of that name; lists those that there are.
    """
    names, wanted = names_of(metrics), experiment.checkpoints.best_metric
    if wanted is None:
        return next(iter(names.values()))
    for name, value in names.items():
        if name == wanted or name.startswith(f"{wanted}/"):  # of the first of several tasks
            return value
    raise UserError(
        f"checkpoints.best_metric is {wanted!r}, but this model is scored by {', '.join(names)}. Set "
        f"--set checkpoints.best_metric={next(iter(names))}."
    )


def _with_maps(tables: tuple[TableConfig, ...], experiment: Experiment) -> tuple[TableConfig, ...]:
    entries = {name: entry for entry in experiment.tables.id_maps for name in entry.features}
    new = []
    for table in tables:
        found = [entries.get(name) for name in table.features]
        if any(entry is not found[0] for entry in found):
            raise UserError(
                f"tables.id_maps: the features {', '.join(table.features)} share table {table.name!r}, and so one map: "
                "name all of them in one entry."
            )
        new.append(table if found[0] is None else dataclasses.replace(table, id_map=found[0].id_map))
    return tuple(new)


def _towers_on_hosts(experiment: Experiment, task: Task, mesh: Mesh) -> HostTowers | None:
    """The towers whose modules run between the hops of the exchange; None where it has none.

    Raises:
      UserError: the model has no towers, or they do not go with the mesh or with deduplication.
    """
    hosts = mesh.shape["replica"]
    if experiment.tables.exchange.route != "towers":
        return None
    if task.towers is None:
        raise UserError(
            "tables.exchange.route is 'towers', which runs the modules of towers between the hops, but "
            f"{type(experiment.model).__name__} has none. Set --set tables.exchange.route=two_level, or take a model "
            "over towers (models.recsys.towers.TowersConfig)."
        )
    if experiment.tables.dedup:
        raise UserError(
            "tables.exchange.route is 'towers', with which a host has the examples of others but not which of them "
            "share a row; got tables.dedup. Leave that out, or set --set tables.exchange.route=two_level."
        )
    return task.towers.on_hosts(hosts) if hosts > 1 else None


def _check_planned_towers(experiment: Experiment, task: Task) -> None:
    """Refuses a sharding plan that keeps other towers together than the model has."""
    planned, own = experiment.tables.sharding.partition, task.towers
    if planned is None or own is None:
        return
    if tuple(map(set, planned.towers)) != tuple(map(set, own.towers)):
        shown = ["; ".join(", ".join(tower) for tower in towers.towers) for towers in (planned, own)]
        raise UserError(
            f"tables.sharding: the plan keeps other towers together than the model has, or in another order: {shown[0]}"
            f" in the plan, {shown[1]} in the model. Plan again with `scalejax shard RECIPE --topology ...`, or give "
            "the model the towers of the plan: --set model.towers=PLAN.json."
        )


def _check_without_tables(experiment: Experiment, task: Task) -> None:
    """Refuses what means nothing for a model without embedding tables."""
    for field in dataclasses.fields(Tables):
        value = getattr(experiment.tables, field.name)
        if value != field.default:
            raise UserError(
                f"tables.{field.name} is {value!r}, but {type(experiment.model).__name__} has no embedding tables. "
                "Leave it out."
            )
    if experiment.gradients.microbatch == "cache":
        raise UserError(
            f"gradients.microbatch is 'cache', but {type(experiment.model).__name__} has no embedding tables. Give a "
            "number of examples, or None."
        )


def _check_validation(experiment: Experiment, task: Task) -> None:
    if experiment.evaluation.validation == "progressive" and not any(metric.lifetime for metric in task.metrics()):
        raise UserError(
            "evaluation.validation is 'progressive', but no metric of "
            f"{type(experiment.model).__name__} adds up over days. Set --set evaluation.validation=split."
        )


def _check_evaluation(experiment: Experiment, statistics: tuple[str, ...]) -> None:
    if experiment.evaluation.statistics and not statistics:
        raise UserError(
            f"evaluation.statistics is {experiment.evaluation.statistics}, but {type(experiment.model).__name__} keeps "
            "no running means. Set --set evaluation.statistics=0."
        )
    names = [average.name for average in experiment.averages]
    if len(set(names)) != len(names):
        raise UserError(f"averages: names must differ; got {', '.join(names)}.")
    scored = experiment.evaluation.average
    if scored is not None and scored not in names:
        known = ", ".join(names) or "none"
        raise UserError(
            f"evaluation.average is {scored!r}, but the averages of the run are: {known}. Name one of them, add "
            f"averages=(Average(name={scored!r}),), or leave it None."
        )


def _check_dtypes(experiment: Experiment) -> None:
    """Refuses dtypes that would not do what they say, without a word."""
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
        if dtype == "float16" and experiment.gradients.loss_scaling is None:
            raise UserError(
                f"{field} is float16, in which small gradients underflow to zero unless the loss is scaled. Set "
                f"--set gradients.loss_scaling=LossScaling, or --set {field}=bfloat16, whose range is that of float32."
            )


_MAY_BE_WHOLE = ("vocabulary", "kv_heads")
"""Logical axes that every device may hold whole: used as they are, or repeated for each query head."""


def _check_divides(program: Program) -> None:
    """Refuses dimensions that do not divide over an axis that the rules give them, besides those of data.

    They would stay whole, and the devices of that axis would all compute the same.
    """
    table, mesh = program.experiment.placement.rules, program.mesh
    for path, p in program.model.params.items():
        for logical, size in zip(program.model.logical_axes[path], p.shape, strict=True):
            for axis in table.mesh_axes(logical):
                count = mesh.shape[axis]
                gathered = axis in meshes.BATCH_AXES and logical != "experts"
                if gathered or logical in _MAY_BE_WHOLE or size == 1 or size % count == 0:
                    continue
                fitting = [n for n in range(1, size + 1) if size % n == 0 and mesh.size % n == 0]
                below, above = size // count * count, -(-size // count) * count
                raise UserError(
                    f"The mesh has {axis}={count}, which does not divide {logical}={size} of {path!r}. Take "
                    f"{axis}={' or '.join(map(str, fitting))} (--set placement.mesh.{axis}=N), or a model with "
                    f"{logical}={f'{below} or {above}' if below else above}."
                )


def _check_strategy(experiment: Experiment) -> None:
    """Refuses masters on the host beside whole copies on every device, and momentum twice."""
    compression: Compression | None = getattr(experiment.strategy, "compression", None)
    rules = experiment.optimizer.rules if isinstance(experiment.optimizer, ByPath) else ()
    optimizers = [rule.optimizer for rule in rules] or [experiment.optimizer]
    if compression is not None and compression.momentum and compression.double_momentum == "refuse":
        for optimizer in optimizers:
            if inside := getattr(optimizer, "momentum", 0) or getattr(optimizer, "b1", 0):
                raise UserError(
                    f"strategy.compression.momentum={compression.momentum} beside a {type(optimizer).__name__} with "
                    f"momentum {inside}: gradients would have momentum twice, which diverges. Set one of them to 0, "
                    "or --set strategy.compression.double_momentum=allow."
                )
    schedules = {optimizer.learning_rate for optimizer in optimizers}
    if compression is not None and compression.error_feedback == "corrected" and len(schedules) > 1:
        raise UserError(
            f"strategy.compression.error_feedback='corrected' goes by the learning rate, and the rules of optimizer "
            f"have {len(schedules)} schedules. Give them one, or --set strategy.compression.error_feedback=vanilla."
        )
    if isinstance(experiment.strategy, Sdp4Bit) and "parameters" in experiment.placement.offload:
        raise UserError(
            f"strategy=Sdp4Bit keeps a whole copy of the parameters on every device, and placement.offload="
            f"{experiment.placement.offload!r} would bring the shards of the master parameters to the host beside it. "
            "Set --set placement.offload=optimizer, or none, or --set strategy=Fsdp."
        )


def _check_stages(program: Program) -> None:
    """Refuses stages without layers that are cut over them, where a loss is taken for a pipeline.

    Every stage would run all layers, and all but the last for nothing.
    """
    e, stages = program.experiment, program.mesh.shape[pipeline.AXIS]
    over = {axis for spec in program.specs.values() for entry in spec for axis in axes_of(entry)}
    if e.strategy.form == "explicit" and stages > 1 and pipeline.AXIS not in over:
        raise UserError(
            f"strategy={type(e.strategy).__name__} in its explicit form runs placement.mesh.stage={stages} as a "
            f"pipeline, but placement.rules cut no parameter of {type(e.model).__name__} over stage. Set --set "
            "placement.mesh.stage=1, take strategy=Fsdp(form='implicit'), or give rules that cut layers over stage."
        )
