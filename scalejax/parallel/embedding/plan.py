"""Where the rows of each table live, and how ids, rows and gradients travel.

    kind                 rows of a table                            columns                         ranks name
    row_wise             dealt out one by one over the ranks        whole                           the devices (all)
    table_wise           on one device                              whole                           that device
    column_wise          whole on each of its devices               one slice a device              one per slice
    table_row_wise       dealt out over the devices of one host     whole                           those devices
    table_column_wise    whole on each of its devices               one slice a device of a host    one per slice
    grid                 dealt out over the devices of one host,    one slice a host                slice after slice
                         for each slice another host or the same
    data_parallel        whole on every device                      whole                           (nothing)

Devices are numbered along the flattened mesh; a host is what shares an index of the mesh axis `replica`. With
`replicas="copy"` ("2-D" sharding) each index of `replica` holds all tables, sharded over its own devices only, which
are then numbered from 0; updates are gathered over the copies, which stay equal to the bit.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import GRANULE_COLUMNS, RowwiseAdagrad, TableConfig, row_state_bytes

Kind = Literal[
    "row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"
]
KINDS: tuple[str, ...] = get_args(Kind)
SLICED = ("column_wise", "table_column_wise", "grid")
Wire = Literal["full", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Room in the routed all_to_all, and what travels.

    Attributes:
      capacity_factor: Slots per destination, as a multiple of what evenly spread ids would need.
      roomy_below_bytes: While the rows of one exchange take at most this many bytes on a device even with room for the
        worst case (all ids go to one device), they get that room, and no batch can be too uneven. Larger exchanges go
        by `capacity_factor`, so that memory per device falls as devices are added.
      forward: What rows and pooled vectors travel as. "full" keeps the dtype of the computation; float16 is clamped to
        its range; float8 and int8 carry one float32 scale a vector.
      backward: What gradients travel as.
      loss_scale: Gradients are multiplied by it before they travel and divided after; for float16 and float8.
      spill: Ids that find no room embed as zeros and update nothing. "fail": training stops; "count": it goes on, and
        their number is a metric.
    """

    capacity_factor: float = 2.0
    roomy_below_bytes: int = 0
    forward: Wire = "full"
    backward: Wire = "full"
    loss_scale: float = 1.0
    spill: Literal["fail", "count"] = "fail"

    def __post_init__(self) -> None:
        if not self.capacity_factor >= 1.0:
            raise UserError(
                f"Exchange: capacity_factor must be at least 1, what evenly spread ids need; got "
                f"{self.capacity_factor}. Set it with --set exchange.capacity_factor=2."
            )
        for name in ("forward", "backward"):
            if getattr(self, name) not in get_args(Wire):
                raise UserError(
                    f"Exchange: {name} must be one of {', '.join(get_args(Wire))}; got {getattr(self, name)!r}."
                )
        if not (self.loss_scale > 0 and math.isfinite(self.loss_scale)):
            raise UserError(f"Exchange: loss_scale must be a positive number; got {self.loss_scale}.")
        if self.spill not in ("fail", "count"):
            raise UserError(f"Exchange: spill must be 'fail' or 'count'; got {self.spill!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """How one table is sharded.

    Attributes:
      table: Name of the table.
      kind: See the table above.
      ranks: Devices, by number; None = chosen by load (row_wise: all of them).
      columns: Equal column slices of the sliced kinds.
      location: Where rows rest; "device" is its memory.
      update: For data_parallel: "gather" sends every device the ids and gradients of all, exact and deterministic;
        "psum" sums dense gradients of the whole table, cheaper for small tables and equal to rounding only.
    """

    table: str
    kind: Kind = "row_wise"
    ranks: tuple[int, ...] | None = None
    columns: int = 1
    location: Literal["device"] = "device"
    update: Literal["gather", "psum"] = "gather"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How every table is sharded; tables that are not named are row-wise.

    Attributes:
      tables: One entry per table that is named.
      replicas: What the mesh axis `replica` does to tables: "shard" deals them over it too; "copy" keeps one copy an
        index of it.
    """

    tables: tuple[TablePlan, ...] = ()
    replicas: Literal["shard", "copy"] = "shard"

    def by_table(self, tables: Sequence[str]) -> dict[str, TablePlan]:
        """The entry of every table.

        Raises:
          UserError: a table that does not exist or is named twice.
        """
        named: dict[str, TablePlan] = {}
        for entry in self.tables:
            if entry.table not in tables:
                raise UserError(
                    f"ShardingPlan: there is no table {entry.table!r}; the collection has {', '.join(tables)}."
                )
            if entry.table in named:
                raise UserError(f"ShardingPlan: table {entry.table!r} is named twice; give it one entry.")
            named[entry.table] = entry
        if self.replicas not in ("shard", "copy"):
            raise UserError(f"ShardingPlan: replicas must be 'shard' or 'copy'; got {self.replicas!r}.")
        return {name: named.get(name, TablePlan(table=name)) for name in tables}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Columns [start, stop) of a table and the devices that its rows are dealt out over.

    Attributes:
      start, stop: Columns.
      ranks: Devices; row r is on ranks[(r + shift) % len(ranks)]; empty = on every device.
      update: As in `TablePlan`; read where ranks is empty.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    update: Literal["gather", "psum"] = "gather"


def place(
    tables: Sequence[TableConfig], plan: ShardingPlan, *, devices: int, devices_per_host: int
) -> dict[str, tuple[Slice, ...]]:
    """Slices and devices of every table.

    Entries without ranks go to the devices, or to the host, with the fewest bytes so far: the largest tables first.

    Args:
      tables: The tables.
      plan: How they are sharded.
      devices: Devices that hold one copy of the tables.
      devices_per_host: Of these, devices of one host; divides `devices`.

    Raises:
      UserError: an entry that cannot be built here: see the message.
    """
    entries = plan.by_table([table.name for table in tables])
    for table in tables:
        _check(table, entries[table.name], devices, devices_per_host)
    loads = [0.0] * devices
    placed: dict[str, tuple[Slice, ...]] = {}
    fixed = [t for t in tables if entries[t.name].ranks is not None or entries[t.name].kind in _EVERYWHERE]
    chosen = sorted((t for t in tables if t not in fixed), key=lambda t: -t.rows * row_bytes(t))
    for table in (*fixed, *chosen):
        entry = entries[table.name]
        columns = entry.columns if entry.kind in SLICED else 1
        groups = _groups(entry, devices, devices_per_host, loads)
        width = table.dim // columns
        slices = [
            Slice(i * width, (i + 1) * width, ranks, entry.update) for i, ranks in enumerate(groups)
        ]
        if devices == 1 and not _has_local_statistic(table):
            # One device would hold all slices: the whole table is the same to the bit, and simpler.
            slices = [Slice(0, table.dim, slices[0].ranks, entry.update)]
        placed[table.name] = tuple(slices)
        for ranks in groups:
            for rank in ranks or range(devices):
                loads[rank] += table.rows * row_bytes(table) / columns / max(1, len(ranks))
    return {table.name: placed[table.name] for table in tables}


def row_bytes(table: TableConfig) -> int:
    """Bytes of one row and its optimizer state."""
    # Without jax NumPy knows no bfloat16, and planning needs no jax.
    size = 2 if table.dtype == "bfloat16" else np.dtype(table.dtype).itemsize
    tracking = 4 if table.track == "updates" else 0
    return table.dim * size + row_state_bytes(table.optimizer, table.dim) + tracking


_EVERYWHERE = ("row_wise", "data_parallel")


def _has_local_statistic(table: TableConfig) -> bool:
    return isinstance(table.optimizer, RowwiseAdagrad) and table.optimizer.statistic == "slice"


def _groups(
    entry: TablePlan, devices: int, per_host: int, loads: Sequence[float]
) -> list[tuple[int, ...]]:
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


def _check(table: TableConfig, entry: TablePlan, devices: int, per_host: int) -> None:
    where = f"ShardingPlan: table {table.name!r}"
    if entry.kind not in KINDS:
        raise UserError(f"{where} has kind {entry.kind!r}; known kinds: {', '.join(KINDS)}.")
    if entry.location != "device":
        raise UserError(f"{where} has location {entry.location!r}; known locations: device.")
    if entry.update not in ("gather", "psum"):
        raise UserError(f"{where} has update {entry.update!r}; known updates: gather, psum.")
    if entry.update == "psum" and entry.kind != "data_parallel":
        raise UserError(f"{where} has update 'psum', which only data_parallel tables have; its kind is {entry.kind}.")
    if entry.columns < 1 or (entry.columns > 1 and entry.kind not in SLICED):
        raise UserError(
            f"{where} has columns={entry.columns} and kind {entry.kind}; only {', '.join(SLICED)} cut columns, into at "
            "least 1 slice."
        )
    if table.dim % entry.columns:
        raise UserError(f"{where} is {table.dim} wide, which {entry.columns} equal column slices do not divide.")
    width = table.dim // entry.columns
    if entry.columns > 1 and isinstance(table.optimizer, RowwiseAdagrad):
        if table.optimizer.statistic == "row" and width % GRANULE_COLUMNS:
            raise UserError(
                f"{where} has slices of {width} columns, but the mean square over a row, "
                f"RowwiseAdagrad(statistic='row'), is formed of blocks of {GRANULE_COLUMNS}. Use fewer slices, or "
                "statistic='slice' for one statistic a slice."
            )
    if entry.columns > 1 and table.optimizer.uses_row_norms:
        limit = "" if table.optimizer.max_norm is None else f" with max_norm={table.optimizer.max_norm}"
        raise UserError(
            f"{where} is cut into columns, but {type(table.optimizer).__name__}{limit} needs norms of whole rows. Use a kind "
            "that keeps rows whole: row_wise, table_wise, table_row_wise or data_parallel."
        )
    ranks = entry.ranks
    if ranks is None:
        return
    if entry.kind == "data_parallel":
        raise UserError(f"{where} is data_parallel, on every device: leave ranks out; got {ranks}.")
    if not ranks or min(ranks) < 0 or max(ranks) >= devices:
        raise UserError(
            f"{where} has ranks {ranks}, but the mesh numbers its devices 0 to {devices - 1}. The plan was made for "
            "another mesh: make it again, or leave ranks out."
        )
    wanted = {
        "table_wise": 1,
        "column_wise": entry.columns,
        "table_column_wise": entry.columns,
        "table_row_wise": per_host,
        "grid": entry.columns * per_host,
    }.get(entry.kind, len(ranks))
    if len(ranks) != wanted:
        raise UserError(
            f"{where} of kind {entry.kind} needs {wanted} ranks on this mesh ({devices} devices, {per_host} a host); "
            f"got {len(ranks)}."
        )
    groups = [ranks[i : i + per_host] for i in range(0, len(ranks), per_host)] if entry.kind == "grid" else [ranks]
    for group in groups:
        if entry.kind not in ("column_wise", "table_column_wise") and len(set(group)) != len(group):
            raise UserError(f"{where} names a device twice among the ranks {group}.")
        if entry.kind in ("table_row_wise", "table_column_wise", "grid") and len({r // per_host for r in group}) != 1:
            raise UserError(
                f"{where} of kind {entry.kind} must stay within one host, {per_host} devices that share an index of "
                f"the mesh axis replica; got ranks {group}."
            )

