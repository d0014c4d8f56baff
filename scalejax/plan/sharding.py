"""The planner of `parallel.planner` on an experiment: where the tables of a recipe should live.

    found = shard(experiment, "h100:2x8", sample_batches=4)
    found.planned.report.render(console)
    found.planned.plan.save("plan.json")        # --set tables.sharding=plan.json, or ShardingPlan.load in a recipe
    shard(experiment, "h100:4x8", towers=Partition.load("towers.json"))         # the tables of a tower on one host

Ids per example come from the schema (`length`, or the room of a jagged feature), and how often they repeat from
Zipf's law; with sample batches both are counted in the first batches of the data. Nothing is compiled.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING

from scalejax import chips
from scalejax.data.examples.dedup import expand_batch
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.parallel import planner
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Route
from scalejax.parallel.embedding.tiers import cached
from scalejax.parallel.planner import Constants, Planned, Report, TableConstraints, TableStatistics, Zipf
from scalejax.parallel.towers import Partition
from scalejax.plan import planner_machines
from scalejax.units import duration, size

if TYPE_CHECKING:
    from rich.console import Console

    from scalejax.parallel.mesh import MeshShape
    from scalejax.train.experiment import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A plan for the tables of an experiment.

    Attributes:
      planned: The plan and what it costs.
      recipe: What the experiment's own plan costs by the same measure; None if it cannot be built or priced there.
      recipe_refused: Why it cannot; "" where it can.
      mesh: Devices per mesh axis that the plan is for, axes of size 1 left out.
      statistics: Where ids per example and repetitions come from, for people.
      route: Of the exchange that the plan was priced for.
      reordered: Whether the plan has other towers than the model, which must take those of the plan.
    """

    planned: Planned
    recipe: Report | None
    recipe_refused: str
    mesh: dict[str, int]
    statistics: str
    route: Route = "flat"
    reordered: bool = False

    def to_json(self) -> dict[str, object]:
        """The result as plain values, equal for equal input."""
        return {
            "mesh": self.mesh,
            "statistics": self.statistics,
            "route": self.route,
            "planned": self.planned.report.to_json(),
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "recipe_refused": self.recipe_refused,
        }

    def render(self, console: "Console") -> None:
        """Prints the report, and how the experiment's own plan compares."""
        from rich.markup import escape

        report = self.planned.report
        report.render(console)
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        console.print(f"mesh: {sizes}; route: {self.route}; statistics: {escape(self.statistics)}")
        if self.recipe is None:
            console.print(f"the recipe's own plan: {escape(self.recipe_refused)}")
        else:
            own = self.recipe
            console.print(
                f"the recipe's own plan: busiest device {duration(own.max_s)} a step, balance "
                f"{own.balance:.3f}, {size(own.memory_bytes)} a device"
                f"{'' if own.fits else ' (does not fit)'}"
            )


def shard(
    experiment: "Experiment",
    machine_name: str,
    *,
    mesh: str | None = None,
    sample_batches: int = 0,
    zipf: float = 1.05,
    table_memory: float = 0.8,
    constants: Constants | None = None,
    constraints: tuple[TableConstraints, ...] = (),
    towers: Partition | None = None,
) -> ShardResult:
    """Plans where the tables of an experiment live.

    Args:
      experiment: The run; its `tables.sharding` is only compared with.
      machine_name: A TPU topology as `scalejax plan` takes it, or GPU:HOSTSxGPUS; see `planner_machines`.
      mesh: Devices per axis, such as "replica=2,fsdp=8". None = a slice, or a host of GPUs, on `fsdp`, and slices or
        hosts on `replica`.
      sample_batches: Batches of the training data that ids are counted in; 0 = reads no data.
      zipf: Exponent of the law by which ids repeat where nothing is counted.
      table_memory: Share of a device's memory for tables, their states and exchanges; the dense part has the rest.
      constants: Measured rates in place of those of the data sheet.
      constraints: What is allowed for single tables.
      towers: Features whose tables stay together on a host, an index of the mesh axis `replica`; None = those of the
        model, if it has any. With several hosts such a plan is priced for the exchange in two levels, and where the
        model has towers for the one that stops between them, as if nothing became smaller there.

    Raises:
      UserError: the machine, the mesh or a number is wrong, the data cannot be read, the tables do not fit, or the
        towers are of other features or do not go evenly on the hosts.
    """
    if sample_batches < 0:
        raise UserError(f"--batches must be at least 0; got {sample_batches}. Give a few, or 0 to read no data.")
    if not 0 < table_memory <= 1:
        raise UserError(f"--table-memory must be a share above 0 and at most 1; got {table_memory}. Try 0.8.")
    topology = planner_machines.topology(machine_name)
    from scalejax.parallel import mesh as meshes
    from scalejax.train.runs import binding

    schema = experiment.data.schema()
    task = binding.bound_task(experiment, schema)
    whole = binding.tables_of(experiment, task)
    tables = cached(whole, experiment.tables.tiers)
    if not tables:
        raise UserError("This recipe has no embedding tables to place. `scalejax plan` says how its model fits.")
    shape = _default_mesh(machine_name, topology) if mesh is None else meshes.parse_mesh(mesh)
    sizes = dict(zip(meshes.AXES, shape.resolve(topology.devices), strict=True))
    topology = dataclasses.replace(
        topology,
        devices_per_group=topology.devices // sizes["replica"],
        memory_bytes=int(table_memory * topology.memory_bytes),
    )
    if constants is not None:
        topology = topology.with_constants(constants)
    statistics, source = _statistics(experiment, schema, whole, sample_batches, zipf)
    accumulate, batch_size = experiment.tables.accumulate, experiment.data.batch_size
    towers = towers or task.towers
    exchange = experiment.tables.exchange
    if towers is not None and topology.groups > 1 and exchange.route == "flat":
        modules = task.towers is not None and not experiment.tables.dedup
        exchange = dataclasses.replace(exchange, route="towers" if modules else "two_level")
    planned = planner.AnalyticPlanner(exchange=exchange, accumulate=accumulate).plan(
        tables, statistics, topology, batch_size, constraints, towers
    )
    own, refused = None, ""
    try:
        own = planner.evaluate(
            experiment.tables.sharding,
            tables,
            statistics,
            topology,
            batch_size,
            exchange=experiment.tables.exchange,
            accumulate=accumulate,
        )
    except UserError as error:
        refused = str(error)
    return ShardResult(
        planned=planned,
        recipe=own,
        recipe_refused=refused,
        mesh={axis: size for axis, size in sizes.items() if size > 1},
        statistics=source,
        route=exchange.route,
        reordered=task.towers is not None and task.towers != planned.plan.partition,
    )


def statistics_of_schema(
    schema: Schema, tables: tuple[TableConfig, ...], popularity: Zipf
) -> tuple[TableStatistics, ...]:
    """Ids per example as the schema has room for them, repeated by a law."""
    return tuple(
        TableStatistics(
            table=table.name,
            pooling_factors=tuple(schema[feature].room_per_example for feature in table.features),
            popularity=popularity,
            positions=_positions(schema, table),
        )
        for table in tables
    )


def _positions(schema: Schema, table: TableConfig) -> tuple[int, ...]:
    """Positions of an unpooled table with jagged features, as `TableStatistics` takes them."""
    if table.pooling != "none" or all(schema[name].max_length is None for name in table.features):
        return ()
    return tuple(schema[name].length or schema[name].max_length or 1 for name in table.features)


def _statistics(
    experiment: "Experiment", schema: Schema, tables: tuple[TableConfig, ...], sample_batches: int, zipf: float
) -> tuple[tuple[TableStatistics, ...], str]:
    if not sample_batches:
        assumed = statistics_of_schema(schema, tables, Zipf(exponent=zipf))
        return assumed, f"ids per example from the schema, repeated by Zipf's law of exponent {zipf:g} (assumed)"
    # All processes' slices together: one process would count fewer ids, and other distinct rows.
    batches = experiment.data.build().train_batches(start_example=0, process_index=0, process_count=1)
    sample = (expand_batch(batch).features for batch in itertools.islice(batches, sample_batches))
    counted = planner.from_batches(tables, sample)
    spread = {table.name: _positions(schema, table) for table in tables}
    counted = tuple(dataclasses.replace(found, positions=spread[found.table]) for found in counted)
    return counted, f"counted in the first {sample_batches} batches of the data"


def _default_mesh(machine_name: str, topology: planner.HostTopology) -> "MeshShape":
    from scalejax.parallel.mesh import MeshShape
    from scalejax.plan import topology as tpus

    if topology.name.partition(":")[0] in chips.GPUS:
        return MeshShape(replica=topology.hosts, fsdp=topology.devices_per_host)
    return tpus.default_mesh(tpus.parse(machine_name))
