"""Costs of a whole plan, whoever made it: memory and seconds of every device.

Works on any `ShardingPlan` that the engine builds, so that a plan written by hand, by another planner or by a search is
judged by one measure. Where the rows lie is asked of the engine (`embedding.plan.place`), tables without ranks
included.
"""

from collections.abc import Sequence

import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import StackKey, place
from scalejax.parallel.embedding.plan.sharding_plan import Accumulate, Exchange, ShardingPlan
from scalejax.parallel.planner import estimators
from scalejax.parallel.planner.estimators import Option, Seconds
from scalejax.parallel.planner.report import DeviceReport, Report, TableReport
from scalejax.parallel.planner.statistics import TableStatistics
from scalejax.parallel.planner.topology import HostTopology


def evaluate(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    statistics: Sequence[TableStatistics],
    topology: HostTopology,
    batch_size: int,
    *,
    exchange: Exchange | None = None,
    accumulate: Accumulate = "ordered",
) -> Report:
    """Prices a plan. Tables that it does not name are row-wise over all devices, as in `ShardingPlan`.

    `update="psum"` is priced as "gather".

    Args:
      plan: The plan; it need not fit.
      tables: The tables.
      statistics: One entry for each table, in any order.
      topology: The machine.
      batch_size: Examples of the global batch.
      exchange: Room and route of the exchanges; None = the default of `EmbeddingCollection`.
      accumulate: As in `EmbeddingCollection`.
    Raises:
      UserError: a plan that cannot be built on this machine, one of several copies, or statistics that do not match the
        tables.
    """
    if plan.replicas != "shard":
        raise UserError(
            f"evaluate: replicas must be 'shard'; got {plan.replicas!r}: what copies send each other is not priced. "
            "Give the topology of one copy and the same tables with replicas='shard'."
        )
    exchange = exchange or Exchange()
    works = works_of(tables, statistics, batch_size)
    entries = plan.by_table([table.name for table in tables])
    n = topology.devices
    placed = place(tables, plan, devices=n, devices_per_host=topology.group_size, accumulate=accumulate)
    sums = {name: np.zeros(n) for name in ("forward_compute", "forward_comm", "backward_compute", "backward_comm")}
    rows: dict[StackKey, np.ndarray] = {}
    row_bytes: dict[StackKey, int] = {}
    buffers, fixed = np.zeros(n), 0
    own, replicated = np.zeros(n), 0
    hosts = np.arange(n) // topology.group_size
    lines = []
    for table in tables:
        entry, slices = entries[table.name], placed[table.name]
        index = np.array([rank for part in slices for rank in part.ranks], np.int64)
        option = estimators.estimate(
            works[table.name],
            topology,
            kind=entry.kind,
            columns=len(slices),
            row_parts=max(1, len(slices[0].ranks)),
            capacity_factor=exchange.capacity_factor,
            route=exchange.route,
        )
        pieces = np.bincount(hosts[index], minlength=topology.groups)[hosts]
        for name, total in sums.items():
            total += getattr(option.everywhere, name) + pieces * getattr(option.forwarded, name)
            np.add.at(total, index, getattr(option.shard, name))
        fixed += option.everywhere_buffers
        replicated += option.map_bytes
        if entry.kind == "data_parallel":
            replicated += option.rows * option.row_bytes
        else:
            stack = rows.setdefault(option.stack, np.zeros(n))
            np.add.at(stack, index, option.rows)
            row_bytes[option.stack] = option.row_bytes
            np.add.at(buffers, index, option.shard_buffers)
            np.add.at(own, index, option.rows * option.row_bytes)
        lines.append(_table_line(option, None if _on_all(option, n) else tuple(index.tolist()), n))
    padded = sum(row_bytes[stack] * int(held.max()) for stack, held in rows.items())
    exchanged = fixed + int(buffers.max(initial=0))
    return Report(
        topology=topology,
        batch_size=batch_size,
        tables=tuple(lines),
        towers=plan.towers,
        devices=tuple(
            DeviceReport(
                device=d,
                seconds=Seconds(**{name: float(total[d]) for name, total in sums.items()}),
                table_bytes=int(own[d]) + replicated,
                padding_bytes=padded - int(own[d]),
                buffer_bytes=exchanged,
            )
            for d in range(n)
        ),
    )


def works_of(
    tables: Sequence[TableConfig], statistics: Sequence[TableStatistics], batch_size: int
) -> dict[str, estimators.TableWork]:
    """The work of every table, by name.

    Raises:
      UserError: names that are not unique, or statistics that are missing, for no table, or given twice.
    """
    names = [table.name for table in tables]
    given = [entry.table for entry in statistics]
    if len(set(names)) < len(names):
        again = next(name for name in names if names.count(name) > 1)
        raise UserError(f"tables: {again!r} is there twice; give every table a name of its own.")
    missing, beyond = sorted(set(names) - set(given)), sorted(set(given) - set(names))
    if missing or beyond or len(given) != len(set(given)):
        twice = sorted({name for name in given if given.count(name) > 1})
        raise UserError(
            "statistics: must have one entry for each table; "
            f"missing: {', '.join(missing[:5]) or 'none'}; for no table: {', '.join(beyond[:5]) or 'none'}; twice: "
            f"{', '.join(twice[:5]) or 'none'}. Where nothing was measured, statistics.assumed(tables) makes them up."
        )
    by_name = {entry.table: entry for entry in statistics}
    return {table.name: estimators.work(table, by_name[table.name], batch_size) for table in tables}


def _on_all(option: Option, devices: int) -> bool:
    return option.kind == "data_parallel" or (option.kind == "row_wise" and option.row_parts == devices)


def _table_line(option: Option, ranks: tuple[int, ...] | None, devices: int) -> TableReport:
    shards = devices if option.kind == "data_parallel" else option.shards
    return TableReport(
        table=option.table,
        kind=option.kind,
        columns=option.columns,
        ranks=ranks,
        bytes=shards * option.rows * option.row_bytes + devices * option.map_bytes,
        piece_bytes=option.rows * option.row_bytes,
        piece_s=option.shard.total + option.everywhere.total,
        work_s=option.work_s(devices),
        why="",
    )
