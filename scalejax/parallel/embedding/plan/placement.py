"""Placement of the rows of each table, and the settings of the exchange of ids, rows and gradients.

    kind                 rows of a table                          columns                         ranks name
    row_wise             striped over the ranks                   whole                           the devices (all)
    table_wise           on one device                            whole                           that device
    column_wise          whole on each of its devices             one slice a device              one per slice
    table_row_wise       striped over the devices of one host     whole                           those devices
    table_column_wise    whole on each of its devices             one slice a device of a host    one per slice
    grid                 striped over the devices of one host,    one slice a host                slice after slice
                         for each slice another host or the same
    data_parallel        whole on every device                    whole                           (nothing)

Devices are numbered along the flattened mesh; a host is what shares an index of the mesh axis `replica`. With
`replicas="copy"` ("2-D" sharding) each index of `replica` holds all tables, sharded over its own devices only, which
are then numbered from 0; updates are gathered over the copies, which stay equal to the bit.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np

from scalejax import json_reading
from scalejax.errors import UserError
from scalejax.parallel.compression.wire_formats import WireFormat
from scalejax.parallel.embedding.config import (
    GRANULE_COLUMNS,
    RowOptimizer,
    RowwiseAdagrad,
    TableConfig,
    row_state_bytes,
)

if TYPE_CHECKING:
    from scalejax.numerics.quantized.rules import QuantizationRule

Kind = Literal["row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"]
KINDS: tuple[str, ...] = get_args(Kind)
SLICED = ("column_wise", "table_column_wise", "grid")
Accumulate = Literal["ordered", "exact"]
Wire = Literal["full", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", WireFormat]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Room in the routed all_to_all, and what travels.

    Attributes:
      capacity_factor: Slots per destination, as a multiple of what evenly spread ids would need.
      roomy_below_bytes: While the rows of one exchange take at most this many bytes on a device even with room for the
        worst case (all ids go to one device), they get that room, and no batch can be too uneven. Larger exchanges go
        by `capacity_factor`, so that memory per device falls as devices are added.
      forward: What rows and pooled vectors travel as. "full" keeps the dtype of the computation; float16 is clamped to
        its range; float8 and int8 carry one float32 scale a vector; block formats (`numerics.formats`) have blocks
        along the vector, each vector beginning one.
      backward: What gradients travel as.
      loss_scale: Gradients are multiplied by it before they travel and divided after; for float16 and float8.
      overflow: Ids that find no capacity embed as zeros and update nothing. "fail": training or scoring stops; "count":
        it goes on, and their number is the metric "overflow_ids", of training and of every evaluation.
      all_to_all: "padded": every device sends every other one buckets of fixed size; everywhere. "ragged": only what
        there is travels; TPU and GPU. The results are equal to the bit while every id has room. "padded" has room for a
        number of ids from each device to each other, "ragged" for as many in all at each owner: a batch that is too
        uneven for one may fit the other.
    """

    capacity_factor: float = 2.0
    roomy_below_bytes: int = 0
    forward: Wire = "full"
    backward: Wire = "full"
    loss_scale: float = 1.0
    overflow: Literal["fail", "count"] = "fail"
    all_to_all: Literal["padded", "ragged"] = "padded"

    def __post_init__(self) -> None:
        if not self.capacity_factor >= 1.0:
            raise UserError(
                f"Exchange: capacity_factor must be at least 1, what evenly spread ids need; got "
                f"{self.capacity_factor}. Set it with --set tables.exchange.capacity_factor=2."
            )
        for name in ("forward", "backward"):
            if getattr(self, name) not in get_args(Wire):
                raise UserError(
                    f"Exchange: {name} must be one of {', '.join(get_args(Wire))}; got {getattr(self, name)!r}."
                )
        if not (self.loss_scale > 0 and math.isfinite(self.loss_scale)):
            raise UserError(f"Exchange: loss_scale must be a positive number; got {self.loss_scale}.")
        if self.overflow not in ("fail", "count"):
            raise UserError(f"Exchange: overflow must be 'fail' or 'count'; got {self.overflow!r}.")
        if self.all_to_all not in ("padded", "ragged"):
            raise UserError(f"Exchange: all_to_all must be 'padded' or 'ragged'; got {self.all_to_all!r}.")


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
      replicas: What the mesh axis `replica` does to tables: "shard" stripes them over it too; "copy" keeps one copy an
        index of it.
      devices: Devices that it was made for, those of one copy of the tables; None = any number. A mesh of another
        number refuses it.
    """

    tables: tuple[TablePlan, ...] = ()
    replicas: Literal["shard", "copy"] = "shard"
    devices: int | None = None

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "ShardingPlan":
        """Reads what `save` wrote.

        Raises:
          UserError: the file cannot be read, is no JSON object, or has a field of another name or type.
        """
        try:
            found = json_reading.read(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"ShardingPlan: cannot read {path} as JSON ({error}). Give a file that `scalejax shard --save` wrote."
            ) from error
        return cls.from_json(found, str(path))

    @classmethod
    def from_json(cls, found: object, where: str) -> "ShardingPlan":
        """The plan of a JSON object as `save` writes it; fields may also be as by default.

        Args:
          found: What `json_reading.read` gave.
          where: Where it is from, for messages.

        Raises:
          UserError: it is no object, or has a field of another name or type.
        """
        fields = _fields_of(cls, found, where)
        entries = fields.pop("tables", [])
        if not isinstance(entries, list):
            raise UserError(f"ShardingPlan: tables in {where} must be a list; got {type(entries).__name__}.")
        tables = tuple(TablePlan(**_entry_of(entry, f"tables[{i}] of {where}")) for i, entry in enumerate(entries))
        devices, replicas = fields.get("devices"), fields.get("replicas", "shard")
        if not (devices is None or type(devices) is int) or not isinstance(replicas, str):
            raise UserError(
                f"ShardingPlan: devices in {where} must be a whole number or null and replicas a text; got {devices!r} "
                f"and {replicas!r}."
            )
        return cls(tables=tables, replicas=cast(Any, replicas), devices=devices)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it as a JSON object, a line for each table; fields that are as by default are left out.

        Raises:
          UserError: the file cannot be written.
        """
        lines = ",\n".join("    " + json.dumps(_changed(entry)) for entry in self.tables)
        rest = {name: value for name, value in _changed(self).items() if name != "tables"}
        head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in rest.items())
        try:
            pathlib.Path(path).write_text(f'{{\n{head}  "tables": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"ShardingPlan: cannot write {path} ({error.strerror}). Give a file in a folder that exists and is "
                "writable."
            ) from error

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


def _changed(config: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _fields_of(config: type, found: object, where: str) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(config)]
    if not isinstance(found, dict) or set(found) - set(known):
        given = ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__
        raise UserError(f"ShardingPlan: {where} must be an object with any of {', '.join(known)}; got {given}.")
    return dict(found)


def _entry_of(found: object, where: str) -> dict[str, Any]:
    fields = _fields_of(TablePlan, found, where)
    if isinstance(ranks := fields.get("ranks"), list):
        fields["ranks"] = tuple(ranks)
    right = {
        "table": isinstance(fields.get("table"), str),
        "kind": isinstance(fields.get("kind", ""), str),
        "columns": type(fields.get("columns", 1)) is int,
        "ranks": ranks is None or (isinstance(ranks, list) and all(type(rank) is int for rank in ranks)),
    }
    for name, good in right.items():
        if not good:
            raise UserError(
                f"ShardingPlan: {name} in {where} is missing or of the wrong type; got {fields.get(name)!r}."
            )
    return fields


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
      PlanRefused: a plan for another number of devices, or an entry that cannot be built here: see the message.
      UserError: a table that does not exist or is named twice.
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
    return {table.name: placed[table.name] for table in tables}


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
