"""Placement of the rows of each table: the devices of every slice, the stack that it lies in, and what is refused."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import (
    GRANULE_COLUMNS,
    RowOptimizer,
    RowwiseAdagrad,
    TableConfig,
    row_state_bytes,
)
from scalejax.parallel.embedding.plan.sharding_plan import KINDS, SLICED, Accumulate, ShardingPlan, TablePlan
from scalejax.parallel.towers import Partition

if TYPE_CHECKING:
    from scalejax.numerics.quantized.rules import QuantizationRule


@dataclasses.dataclass(frozen=True)
class Slice:
    """Columns [start, stop) of a table and the devices that its rows are striped over.

    Attributes:
      start, stop: Columns.
      ranks: Devices; row r is on ranks[(r + shift) % len(ranks)]; empty = on every device.
      update: As in `TablePlan`; read where ranks is empty.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    update: Literal["gather", "psum"] = "gather"


class PlanRefused(UserError):
    """A plan that cannot be built on this mesh; its tables are right."""


def place(
    tables: Sequence[TableConfig],
    plan: ShardingPlan,
    *,
    devices: int,
    devices_per_host: int,
    accumulate: Accumulate = "ordered",
    mesh_devices: int | None = None,
) -> dict[str, tuple[Slice, ...]]:
    """Slices and devices of every table.

    Entries without ranks go to the devices, or to the host, with the fewest bytes so far: the largest tables first.

    Args:
      tables: The tables.
      plan: How they are sharded.
      devices: Devices that hold one copy of the tables.
      devices_per_host: Of these, devices of one host; divides `devices`.
      accumulate: As in `EmbeddingCollection`.
      mesh_devices: As in `refusal`.

    Raises:
      PlanRefused: a plan for another number of devices, an entry that cannot be built here, or a tower that is not on
        its host: see the message.
      UserError: a table that does not exist or is named twice, or towers of other features.
    """
    entries = plan.by_table([table.name for table in tables])
    if plan.devices not in (None, devices):
        raise PlanRefused(
            f"ShardingPlan: was made for {plan.devices} devices, but {devices} hold one copy of the tables on this "
            "mesh. Plan again with `scalejax shard RECIPE --topology ...`, or use a mesh of that many devices."
        )
    for table in tables:
        why = refusal(
            table,
            entries[table.name],
            devices=devices,
            devices_per_host=devices_per_host,
            accumulate=accumulate,
            mesh_devices=mesh_devices,
        )
        if why is not None:
            raise PlanRefused(f"ShardingPlan: table {table.name!r} {why}")
    loads = [0.0] * devices
    placed: dict[str, tuple[Slice, ...]] = {}
    fixed = [t for t in tables if entries[t.name].ranks is not None or entries[t.name].kind in _EVERYWHERE]
    chosen = sorted((t for t in tables if t not in fixed), key=lambda t: -t.rows * row_bytes(t))
    for table in (*fixed, *chosen):
        entry = entries[table.name]
        columns = entry.columns if entry.kind in SLICED else 1
        groups = _groups(entry, devices, devices_per_host, loads)
        width = table.dim // columns
        slices = [Slice(i * width, (i + 1) * width, ranks, entry.update) for i, ranks in enumerate(groups)]
        if _is_joined(table, devices):
            slices = [Slice(0, table.dim, slices[0].ranks, entry.update)]
        placed[table.name] = tuple(slices)
        for ranks in groups:
            for rank in ranks or range(devices):
                loads[rank] += table.rows * row_bytes(table) / columns / max(1, len(ranks))
    if plan.partition is not None:
        _check_towers(tables, plan.partition, placed, devices, devices_per_host)
    return {table.name: placed[table.name] for table in tables}


def towers_of_tables(
    partition: Partition, tables: Sequence[TableConfig], field: str = "model.towers"
) -> dict[str, int]:
    """The tower of every table, by name; `field` as in `Partition.check`.

    Raises:
      UserError: the towers have other features, or two share a table.
    """
    partition.check([feature for table in tables for feature in table.features], field)
    numbers = {name: t for t, tower in enumerate(partition.towers) for name in tower}
    found: dict[str, int] = {}
    for table in tables:
        towers = {numbers[feature]: feature for feature in table.features}
        if len(towers) > 1:
            raise UserError(
                f"Partition: table {table.name!r} lies on one host, but towers share it: "
                f"{', '.join(f'{feature} is in tower {t}' for t, feature in sorted(towers.items()))}. Put "
                f"{', '.join(table.features)} into one tower, or give them tables of their own."
            )
        (found[table.name],) = towers
    return found


def _check_towers(
    tables: Sequence[TableConfig],
    partition: Partition,
    placed: dict[str, tuple[Slice, ...]],
    devices: int,
    per_host: int,
) -> None:
    """Refuses towers whose tables are not all on their host."""
    numbers = towers_of_tables(partition, tables, "tables.sharding")
    try:
        wanted = partition.on_hosts(devices // per_host).indices
    except UserError as error:
        raise PlanRefused(f"ShardingPlan: {str(error).removeprefix('Partition: ')}") from error
    for table in tables:
        ranks = {rank for part in placed[table.name] for rank in part.ranks or range(devices)}
        found, tower = sorted({rank // per_host for rank in ranks}), numbers[table.name]
        if found != [wanted[tower]]:
            raise PlanRefused(
                f"ShardingPlan: tower {tower} belongs on index {wanted[tower]} of the mesh axis replica, but its table "
                f"{table.name!r} is on {', '.join(map(str, found))}. Plan again with `scalejax shard RECIPE "
                "--topology ... --towers FILE.json`, or leave the towers out of the plan."
            )


class StackKey(NamedTuple):
    """Tables, or slices of them, that agree in all of this lie in one array, as long on every device as on the fullest.

    Attributes:
      width: Columns.
      dtype: Of the rows.
      rounding: As in `TableConfig`; "" where rows are not narrower than sums.
      optimizer: The row optimizer.
      track: As in `TableConfig`.
      reads: As in `TableConfig`.
      spread: "striped" over devices, or "copied": whole on every device.
      update: As in `TablePlan`.
    """

    width: int
    dtype: str
    rounding: str
    optimizer: RowOptimizer
    track: Literal["nothing", "updates"]
    reads: "QuantizationRule | None"
    spread: Literal["striped", "copied"]
    update: Literal["gather", "psum"]


def stack_key(
    table: TableConfig,
    width: int,
    *,
    spread: Literal["striped", "copied"],
    update: Literal["gather", "psum"] = "gather",
) -> StackKey:
    """The stack of a slice of `width` columns; the rest as in `StackKey`."""
    rounding = table.rounding if itemsize(table.dtype) < 4 else ""
    return StackKey(
        width, _dtype_name(table.dtype), rounding, table.optimizer, table.track, table.reads, spread, update
    )


def row_bytes(table: TableConfig, width: int | None = None) -> int:
    """Bytes of one row, or of `width` columns of it, with its optimizer state and what is tracked."""
    width, size = width or table.dim, itemsize(table.dtype)
    # States are float32, or wider where the rows are.
    states = row_state_bytes(table.optimizer, width) * max(4, size) // 4
    return width * size + states + (4 if table.track == "updates" else 0)


def itemsize(dtype: str) -> int:
    """Bytes of a number. NumPy alone knows neither bfloat16 nor the float8 family, and planning needs no jax."""
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _dtype_name(dtype: str) -> str:
    return dtype if dtype == "bfloat16" or dtype.startswith("float8") else str(np.dtype(dtype))


_EVERYWHERE = ("row_wise", "data_parallel")


def _is_joined(table: TableConfig, devices: int) -> bool:
    """Whether one device would hold all slices: the whole table is the same to the bit, and simpler."""
    return devices == 1 and not (isinstance(table.optimizer, RowwiseAdagrad) and table.optimizer.statistic == "slice")


def _groups(entry: TablePlan, devices: int, per_host: int, loads: Sequence[float]) -> list[tuple[int, ...]]:
    """Devices of each slice."""
    hosts = [tuple(range(h, h + per_host)) for h in range(0, devices, per_host)]
    by_load = sorted(range(devices), key=lambda d: (loads[d], d))
    host_loads = sorted(hosts, key=lambda h: (sum(loads[d] for d in h), h))
    ranks, columns = entry.ranks, entry.columns
    match entry.kind:
        case "data_parallel":
            return [()]
        case "row_wise":
            return [ranks or tuple(range(devices))]
        case "table_wise":
            return [ranks or (by_load[0],)]
        case "table_row_wise":
            return [ranks or host_loads[0]]
        case "column_wise":
            chosen = ranks or tuple(by_load[i % devices] for i in range(columns))
            return [(rank,) for rank in chosen]
        case "table_column_wise":
            inside = [d for d in by_load if d in host_loads[0]]
            chosen = ranks or tuple(inside[i % per_host] for i in range(columns))
            return [(rank,) for rank in chosen]
        case "grid":
            if ranks is None:
                return [host_loads[i % len(hosts)] for i in range(columns)]
            return [tuple(ranks[i : i + per_host]) for i in range(0, len(ranks), per_host)]
    raise AssertionError(entry.kind)


def refusal(
    table: TableConfig,
    entry: TablePlan,
    *,
    devices: int,
    devices_per_host: int,
    accumulate: Accumulate = "ordered",
    mesh_devices: int | None = None,
) -> str | None:
    """Why a table cannot be sharded so, as the end of a sentence about it; None if it can. Planners ask here too.

    Args:
      table: The table.
      entry: How it would be sharded.
      devices: Devices that hold one copy of the tables.
      devices_per_host: Of these, devices of one host.
      accumulate: As in `EmbeddingCollection`.
      mesh_devices: Devices of all copies, which share the buckets of an id map; None = there is one copy.
    """
    return (
        refused_map(table, mesh_devices or devices)
        or _refused_form(entry)
        or _refused_slices(table, entry, accumulate, devices)
        or (None if entry.ranks is None else _refused_ranks(entry, entry.ranks, devices, devices_per_host))
    )


def refused_map(table: TableConfig, devices: int) -> str | None:
    """As `refusal`, of what holds for every kind: whether the id map, if there is one, can be cut over the mesh."""
    why = None if table.id_map is None else table.id_map.refusal(devices)
    return None if why is None else f"has an id map that {why}"


def _refused_form(entry: TablePlan) -> str | None:
    if entry.kind not in KINDS:
        return f"has kind {entry.kind!r}; known kinds: {', '.join(KINDS)}."
    if entry.location != "device":
        return f"has location {entry.location!r}; known locations: device."
    if entry.update not in ("gather", "psum"):
        return f"has update {entry.update!r}; known updates: gather, psum."
    if entry.update == "psum" and entry.kind != "data_parallel":
        return f"has update 'psum', which only data_parallel tables have; its kind is {entry.kind}."
    if entry.columns < 1 or (entry.columns > 1 and entry.kind not in SLICED):
        return (
            f"has columns={entry.columns} and kind {entry.kind}; only {', '.join(SLICED)} cut columns, into at least 1 "
            "slice."
        )
    return None


def _refused_slices(table: TableConfig, entry: TablePlan, accumulate: Accumulate, devices: int) -> str | None:
    if entry.columns == 1:
        return None
    if table.dim % entry.columns:
        return f"is {table.dim} wide, which {entry.columns} equal column slices do not divide."
    width, optimizer = table.dim // entry.columns, table.optimizer
    if table.reads is not None and (table.reads.weight_block is None or width % table.reads.weight_block):
        shared = "whole rows" if table.reads.weight_block is None else f"blocks of {table.reads.weight_block}"
        return (
            f"has slices of {width} columns, but is read in {table.reads.weight_qtype}, where {shared} share a scale. "
            "Use slices that are multiples of that, or a kind that keeps rows whole: row_wise, table_wise, "
            "table_row_wise or data_parallel."
        )
    if optimizer.uses_row_norms:
        limit = "" if optimizer.max_norm is None else f" with max_norm={optimizer.max_norm}"
        return (
            f"is cut into columns, but {type(optimizer).__name__}{limit} needs norms of whole rows. Use a kind that "
            "keeps rows whole: row_wise, table_wise, table_row_wise or data_parallel."
        )
    if width % GRANULE_COLUMNS == 0:
        return None
    if isinstance(optimizer, RowwiseAdagrad) and optimizer.statistic == "row":
        return (
            f"has slices of {width} columns, but the mean square over a row, RowwiseAdagrad(statistic='row'), is "
            f"formed of blocks of {GRANULE_COLUMNS}. Use fewer slices, or statistic='slice' for one statistic a slice."
        )
    if accumulate == "exact" and not _is_joined(table, devices):
        return (
            f"has slices of {width} columns, but accumulate='exact' needs multiples of {GRANULE_COLUMNS}. Use fewer "
            "slices."
        )
    return None


def _refused_ranks(entry: TablePlan, ranks: tuple[int, ...], devices: int, per_host: int) -> str | None:
    if entry.kind == "data_parallel":
        return f"is data_parallel, on every device: leave ranks out; got {ranks}."
    if not ranks or min(ranks) < 0 or max(ranks) >= devices:
        return (
            f"has ranks {ranks}, but the mesh numbers its devices 0 to {devices - 1}. The plan was made for another "
            "mesh: make it again, or leave ranks out."
        )
    wanted = {
        "table_wise": 1,
        "column_wise": entry.columns,
        "table_column_wise": entry.columns,
        "table_row_wise": per_host,
        "grid": entry.columns * per_host,
    }.get(entry.kind, len(ranks))
    if len(ranks) != wanted:
        return (
            f"of kind {entry.kind} needs {wanted} ranks on this mesh ({devices} devices, {per_host} a host); got "
            f"{len(ranks)}."
        )
    groups = [ranks[i : i + per_host] for i in range(0, len(ranks), per_host)] if entry.kind == "grid" else [ranks]
    for group in groups:
        if entry.kind not in ("column_wise", "table_column_wise") and len(set(group)) != len(group):
            return f"names a device twice among the ranks {group}."
        if entry.kind in ("table_row_wise", "table_column_wise", "grid") and len({r // per_host for r in group}) != 1:
            return (
                f"of kind {entry.kind} must stay within one host, {per_host} devices that share an index of the mesh "
                f"axis replica; got ranks {group}."
            )
    return None
