"""From tables, statistics and a machine to a plan: what is proposed, placed, judged and explained.

    planned = plan(tables, statistics, topology, batch_size=65_536)
    planned.report.render(rich.console.Console())
    EmbeddingCollection(tables=tables, mesh=mesh, plan=planned.plan)

The objective is the busiest device: the seconds of a step there, by the formulas of `estimators`. Nothing is trained.
Equal input gives equal plans, in whatever order tables, statistics and constraints come.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import towers_of_tables
from scalejax.parallel.embedding.plan.sharding_plan import Accumulate, Exchange, ShardingPlan, TablePlan
from scalejax.parallel.planner import evaluation, options, partition, proposals
from scalejax.parallel.planner import towers as on_hosts
from scalejax.parallel.planner.estimators import Option
from scalejax.parallel.planner.options import TableConstraints
from scalejax.parallel.planner.partition import DoesNotFit, Partitioner, ShardPlacement
from scalejax.parallel.planner.proposals import Choices, Proposal
from scalejax.parallel.planner.report import Attempt, Report
from scalejax.parallel.planner.statistics import TableStatistics
from scalejax.parallel.planner.topology import HostTopology
from scalejax.parallel.towers import Partition
from scalejax.units import duration, size


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan and what it costs."""

    plan: ShardingPlan
    report: Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalyticPlanner:
    """Plans by explicit formulas.

    Attributes:
      exchange: Room and route of the exchanges, as the `EmbeddingCollection` will have it.
      accumulate: How it adds gradients up, which decides the slices that it takes.
      greedy_steps: Times that the busiest device's largest piece is cut finer without finding a better plan before the
        search ends.
      polished: How many of the best proposals are improved by moving and swapping pieces.
    """

    exchange: Exchange = Exchange()
    accumulate: Accumulate = "ordered"
    greedy_steps: int = 8
    polished: int = 3

    def plan(
        self,
        tables: Sequence[TableConfig],
        statistics: Sequence[TableStatistics],
        topology: HostTopology,
        batch_size: int,
        constraints: Sequence[TableConstraints] = (),
        towers: Partition | None = None,
    ) -> Planned:
        """Plans.

        Args:
          tables: The tables, with unique names.
          statistics: One entry for each.
          topology: The machine.
          batch_size: Examples of the global batch.
          constraints: At most one entry for each table.
          towers: Features whose tables stay together on one host, an index of the mesh axis `replica`, which has as
            many towers as each other. The plan has them in the order of their hosts.

        Raises:
          UserError: something contradicts itself, towers do not fit the tables or the hosts, or no plan was found that
            fits; the message names the table, how much lacks and what to change.
        """
        began = time.perf_counter()
        if not tables:
            raise UserError("plan: tables must name at least one table; got none.")
        if batch_size < 1:
            raise UserError(f"plan: batch_size must be at least 1, the examples of the global batch; got {batch_size}.")
        works = evaluation.works_of(tables, statistics, batch_size)
        options.check_constraints(tables, constraints)
        if towers is not None:
            constraints = on_hosts.on_one_host(towers, tables, constraints)
        limits = {entry.table: entry for entry in constraints}
        names = sorted(works)  # whatever order the tables come in
        choices = [
            options.options(
                works[name],
                topology,
                limits.get(name),
                capacity_factor=self.exchange.capacity_factor,
                accumulate=self.accumulate,
                route=self.exchange.route,
            )
            for name in names
        ]
        if towers is not None:
            towers = on_hosts.in_order_of_hosts(towers, tables, dict(zip(names, choices, strict=True)), topology)
            numbers, hosts = towers_of_tables(towers, tables), towers.on_hosts(topology.groups).indices
            choices = [
                tuple(dataclasses.replace(option, host=hosts[numbers[name]]) for option in found)
                for name, found in zip(names, choices, strict=True)
            ]
        search = _Search(choices, topology)
        search.run(self.greedy_steps, self.polished)
        if search.best is None:
            raise UserError(_does_not_fit(search, {table.name: table for table in tables}, towers))
        placement = search.best
        by_name = {
            option.table: _entry(option, ranks)
            for option, ranks in zip(placement.options, placement.ranks, strict=True)
        }
        found = ShardingPlan(
            tables=tuple(by_name[table.name] for table in tables),
            devices=topology.devices,
            towers=() if towers is None else towers.towers,
        )
        report = evaluation.evaluate(
            found, tables, statistics, topology, batch_size, exchange=self.exchange, accumulate=self.accumulate
        )
        reasons = {name: _why(choices[i], placement.options[i], report, topology) for i, name in enumerate(names)}
        return Planned(
            found,
            dataclasses.replace(
                report,
                tables=tuple(dataclasses.replace(line, why=reasons[line.table]) for line in report.tables),
                attempts=tuple(search.attempts),
                lower_bound_s=proposals.lower_bound(choices, topology.devices),
                planner_s=time.perf_counter() - began,
            ),
        )


def plan(
    tables: Sequence[TableConfig],
    statistics: Sequence[TableStatistics],
    topology: HostTopology,
    batch_size: int,
    constraints: Sequence[TableConstraints] = (),
    towers: Partition | None = None,
) -> Planned:
    """`AnalyticPlanner().plan`: a plan whose busiest device is as little busy as could be found."""
    return AnalyticPlanner().plan(tables, statistics, topology, batch_size, constraints, towers)


class _Search:
    """Tries proposals and remembers the best."""

    def __init__(self, choices: Choices, topology: HostTopology) -> None:
        self.choices, self.topology = choices, topology
        self.attempts: list[Attempt] = []
        self.failures: list[DoesNotFit] = []
        self.tried: dict[Proposal, str] = {}
        self.found: dict[Proposal, ShardPlacement] = {}
        self.best: ShardPlacement | None = None

    def run(self, greedy_steps: int, polished: int) -> None:
        quick = (partition.greedy, partition.mixed)
        devices = self.topology.devices
        for name, proposal in proposals.combinations(self.choices):
            self.attempt(name, proposal, quick)
        for name, ever_smaller in proposals.limited(self.choices, self.topology):
            for proposal in ever_smaller:
                if self.attempt(name, proposal, quick) is not None:
                    break
        for name, proposal in proposals.uniform(self.choices, devices):
            self.attempt(name, proposal, quick)
        for name, proposal in proposals.least_memory(self.choices, devices):
            self.attempt(name, proposal, quick)
        self._cut_finer(greedy_steps, quick)
        # This partitioner places everything several times, and so comes last: where no other has found room.
        if self.best is None:
            for proposal, name in list(self.tried.items()):
                self.attempt(name, proposal, (partition.memory_balanced,))
        for proposal in sorted(self.found, key=lambda proposal: _merit(self.found[proposal]))[:polished]:
            placement = partition.improve(self.found[proposal], self.topology)
            seconds = float(placement.seconds.max())
            self.attempts.append(Attempt(proposal=self.tried[proposal], partitioner="moves and swaps", max_s=seconds))
            self._keep(placement)

    def attempt(self, name: str, proposal: Proposal, partitioners: Sequence[Partitioner]) -> ShardPlacement | None:
        """The placement of the first partitioner that finds room."""
        if proposal in self.found:
            return self.found[proposal]
        self.tried[proposal] = name
        chosen = [found[i] for found, i in zip(self.choices, proposal, strict=True)]
        for partitioner in partitioners:
            label = partitioner.__name__
            try:
                placement = partitioner(chosen, self.topology)
            except DoesNotFit as failure:
                self.failures.append(failure)
                lacks = f"{size(failure.missing_bytes)} short for {failure.option.table}"
                self.attempts.append(Attempt(proposal=name, partitioner=label, max_s=None, reason=lacks))
            else:
                seconds = float(placement.seconds.max())
                self.attempts.append(Attempt(proposal=name, partitioner=label, max_s=seconds))
                self.found[proposal] = placement
                self._keep(placement)
                return placement
        return None

    def _keep(self, placement: ShardPlacement) -> None:
        if self.best is None or _merit(placement) < _merit(self.best):
            self.best = placement

    def _cut_finer(self, patience: int, partitioners: Sequence[Partitioner]) -> None:
        at = min(self.found, key=lambda proposal: _merit(self.found[proposal]), default=None)
        left = patience
        while at is not None and left > 0 and at in self.found:
            at = proposals.finer(self.choices, at, self.found[at], self.topology.devices)
            if at is None or at in self.tried:
                return
            before = self.best
            self.attempt("greedy", at, partitioners)
            left = patience if self.best is not before else left - 1


def _merit(placement: ShardPlacement) -> tuple[float, int, float]:
    return float(placement.seconds.max()), placement.memory_bytes, float(placement.seconds.sum())


def _entry(option: Option, ranks: tuple[int, ...]) -> TablePlan:
    return TablePlan(table=option.table, kind=option.kind, ranks=ranks or None, columns=option.columns)


def _spreads_rows(option: Option) -> bool:
    return option.row_parts > 1


def _why(found: Sequence[Option], chosen: Option, report: Report, topology: HostTopology) -> str:
    """One clause: what speaks for the chosen option against the one with least work."""
    n = topology.devices
    if len(found) == 1:
        return "the only one allowed"
    least = min(found, key=lambda option: option.work_s(n))
    if chosen.work_s(n) <= least.work_s(n):
        return f"least work of {len(found)} options"
    if least.rows * least.row_bytes > topology.memory_bytes:
        return f"{least.label} would put {size(least.rows * least.row_bytes)} on one device"
    more = f"{chosen.work_s(n) / least.work_s(n):.2f}x the work of {least.label}"
    if chosen.shard.total < least.shard.total:
        pieces = f"{duration(chosen.shard.total)} a piece and not {duration(least.shard.total)}"
        return f"{more}, but {pieces} (mean of a device {duration(report.mean_s)})"
    return f"{more}, but fits better beside the others"


def _bytes_of_all(option: Option, devices: int) -> int:
    copies = devices if option.kind == "data_parallel" else option.shards
    return copies * option.rows * option.row_bytes + devices * option.map_bytes


def _does_not_fit(search: _Search, tables: dict[str, TableConfig], towers: Partition | None) -> str:
    """Which, by how much, and what to change."""
    topology = search.topology
    n, room = topology.devices, topology.memory_bytes
    least = {found[0].table: min(_bytes_of_all(option, n) for option in found) for found in search.choices}
    total = sum(least.values())
    closest = min(search.failures, key=lambda failure: (failure.missing_bytes, failure.option.table))
    option, table = closest.option, tables[closest.option.table]
    held = option.rows * option.row_bytes + option.map_bytes
    each = held + option.shard_buffers + option.everywhere_buffers
    largest = sorted(least, key=lambda name: (-least[name], name))[:3]
    advice = []
    if total > n * room:
        advice.append(f"at least {math.ceil(total / room)} devices are needed for the rows and states alone")
    if towers is not None and option.host is not None:
        numbers = towers_of_tables(towers, list(tables.values()))
        tower = numbers[option.table]
        own = sum(least[name] for name in least if numbers[name] == tower)
        advice.append(
            f"tower {tower} takes {size(own)} of the {size(topology.group_size * room)} of index {option.host} of "
            "replica: give it fewer features, or a mesh whose replica has fewer indices, of several hosts each"
        )
    elif not any(found[0].table == option.table and any(map(_spreads_rows, found)) for found in search.choices):
        advice.append(f"allow row_wise for {option.table!r} in its constraints")
    advice.append("give more devices or memory_bytes, a narrower dtype, or an optimizer with less state per row")
    advice.append("a smaller batch or capacity_factor shrinks the exchanges")
    return (
        f"plan: the tables do not fit on {n} devices of {size(room)}. Closest was table {option.table!r} "
        f"({table.rows:,} rows x {table.dim}, {table.dtype}, {type(table.optimizer).__name__}) as {option.label}: "
        f"{size(each)} a device, of which {size(held)} rows and state{' and id map' if option.map_bytes else ''}, "
        f"{size(closest.missing_bytes)} more than is left there. All tables take {size(total)} of {size(n * room)}; "
        f"the largest: {', '.join(f'{name} {size(least[name])}' for name in largest)}. What helps: {'; '.join(advice)}."
    )
