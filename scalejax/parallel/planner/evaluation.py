"""What a plan costs, whoever made it: memory and seconds of every device, from the plan alone.

Works on any `ShardingPlan`, so that a plan written by hand, by another planner or by a search is judged by one measure.
"""

from collections.abc import Sequence

import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.planner import estimators
from scalejax.parallel.planner.estimators import Option, Seconds, StackKey
from scalejax.parallel.planner.report import DeviceReport, Report, TableReport
from scalejax.parallel.planner.statistics import TableStatistics
from scalejax.parallel.planner.topology import Topology


def evaluate(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    statistics: Sequence[TableStatistics],
    topology: Topology,
    batch_size: int,
    *,
    exchange: Exchange | None = None,
) -> Report:
    """Prices a plan. Tables that it does not name are row-wise over all devices, as in `ShardingPlan`.

    Args:
      plan: The plan; it need not fit.
      tables: The tables.
      statistics: One entry for each table, in any order.
      topology: The machine.
      batch_size: Examples of the global batch.
      exchange: Room of the exchanges; None = the default of `EmbeddingCollection`.
    Raises:
      UserError: a plan that cannot be built on this machine, or statistics that do not match the tables.
    """
    check_plan(plan, tables, topology)
    capacity_factor = (exchange or Exchange()).capacity_factor
    works = works_of(tables, statistics, batch_size)
    entries = {entry.table: entry for entry in plan.tables}
    n = topology.devices
    sums = {name: np.zeros(n) for name in ("forward_compute", "forward_comm", "backward_compute", "backward_comm")}
    rows: dict[StackKey, np.ndarray] = {}
    row_bytes: dict[StackKey, int] = {}
    buffers, fixed = np.zeros(n), 0
    own, replicated = np.zeros(n), 0
    lines = []
    for table in tables:
        entry = entries.get(table.name, TablePlan(table=table.name))
        devices = devices_of(entry, n)
        option = estimators.estimate(
            works[table.name],
            topology,
            kind=entry.kind,
            columns=entry.columns,
            row_parts=max(1, len(devices) // entry.columns),
            capacity_factor=capacity_factor,
        )
        index = list(devices)
        for name, total in sums.items():
            total += getattr(option.everywhere, name)
            np.add.at(total, index, getattr(option.shard, name))
        fixed += option.everywhere_buffers
        if entry.kind == "data_parallel":
            replicated += option.rows * option.row_bytes
        else:
            stack = rows.setdefault(option.stack, np.zeros(n))
            np.add.at(stack, index, option.rows)
            row_bytes[option.stack] = option.row_bytes
            np.add.at(buffers, index, option.shard_buffers)
            np.add.at(own, index, option.rows * option.row_bytes)
        lines.append(_table_line(entry, option, n))
    padded = sum(row_bytes[stack] * int(held.max()) for stack, held in rows.items())
    exchanged = fixed + int(buffers.max(initial=0))
    return Report(
        topology=topology,
        batch_size=batch_size,
        tables=tuple(lines),
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
) -> dict[str, estimators.Work]:
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


def devices_of(entry: TablePlan, devices: int) -> tuple[int, ...]:
    """Owners of the pieces, slice after slice; () for a data-parallel table."""
    if entry.kind == "data_parallel":
        return ()
    return tuple(range(devices)) if entry.ranks is None else entry.ranks


def check_plan(plan: ShardingPlan, tables: Sequence[TableConfig], topology: Topology) -> None:
    """Refuses a plan that cannot be built on a machine.

    Raises:
      UserError: a table that does not exist or is named twice, devices that do not exist or do not suit the kind, or
        slices that do not divide the width.
    """
    by_name = {table.name: table for table in tables}
    seen: set[str] = set()
    for entry in plan.tables:
        if entry.table not in by_name:
            raise UserError(f"ShardingPlan: there is no table {entry.table!r}. Correct the name.")
        if entry.table in seen:
            raise UserError(f"ShardingPlan: table {entry.table!r} is named twice; give it one entry.")
        seen.add(entry.table)
        wrong = _wrong(entry, by_name[entry.table], topology)
        if wrong is not None:
            raise UserError(
                f"ShardingPlan: table {entry.table!r} is {entry.kind} with ranks {entry.ranks} and {entry.columns} "
                f"columns on {topology.hosts} hosts of {topology.devices_per_host} devices, but {wrong}."
            )


def _wrong(entry: TablePlan, table: TableConfig, topology: Topology) -> str | None:
    in_host = topology.devices_per_host
    if entry.columns < 1 or table.dim % entry.columns:
        return f"the slices must divide the width of {table.dim}"
    if entry.columns > 1 and entry.kind not in ("column_wise", "table_column_wise", "grid"):
        return "this kind has no column slices"
    if entry.kind == "data_parallel":
        return None if entry.ranks is None else "this kind is on every device and takes no ranks"
    if entry.ranks is None:
        return None if entry.kind == "row_wise" else "this kind needs ranks"
    if not entry.ranks or len(set(entry.ranks)) < len(entry.ranks):
        return "the ranks must be at least one device, each named once"
    if not 0 <= min(entry.ranks) <= max(entry.ranks) < topology.devices:
        return f"the devices are 0 to {topology.devices - 1}"
    wanted = {
        "row_wise": len(entry.ranks),
        "table_wise": 1,
        "column_wise": entry.columns,
        "table_row_wise": in_host,
        "table_column_wise": entry.columns,
        "grid": entry.columns * in_host,
    }[entry.kind]
    if len(entry.ranks) != wanted:
        return f"this kind needs {wanted} ranks"
    hosts = [rank // in_host for rank in entry.ranks]
    if entry.kind in ("table_row_wise", "table_column_wise") and len(set(hosts)) > 1:
        return "the ranks must be of one host"
    if entry.kind == "grid" and any(len(set(hosts[i : i + in_host])) > 1 for i in range(0, len(hosts), in_host)):
        return "the ranks of each slice must be of one host"
    return None


def _table_line(entry: TablePlan, option: Option, devices: int) -> TableReport:
    shards = devices if entry.kind == "data_parallel" else option.shards
    return TableReport(
        table=entry.table,
        kind=entry.kind,
        columns=entry.columns,
        ranks=entry.ranks,
        bytes=shards * option.rows * option.row_bytes,
        piece_bytes=option.rows * option.row_bytes,
        piece_s=option.shard.total + option.everywhere.total,
        work_s=option.work_s(devices),
        why="",
    )
