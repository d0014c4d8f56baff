"""How tables are sharded and what their exchange does: plain values, which a file can hold.

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
from typing import Any, Literal, cast, get_args

from scalejax import json_reading
from scalejax.errors import UserError, check_one_of
from scalejax.parallel.compression.wire_formats import WireFormat
from scalejax.parallel.towers import Partition

Kind = Literal["row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"]
KINDS: tuple[str, ...] = get_args(Kind)
SLICED = ("column_wise", "table_column_wise", "grid")
Accumulate = Literal["ordered", "exact"]
Route = Literal["flat", "two_level", "towers"]
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
      overflow: Ids that find no capacity embed as zeros and update nothing. "fail": training or scoring stops, before
        the batch travels where its process can count them: not ids of tables with an id map, not those of all
        processes together between two hops, and not with "ragged"; these are found with the next metrics. "count": it
        goes on, and their number is the metric "overflow_ids", of training and of every evaluation.
      all_to_all: "padded": every device sends every other one buckets of fixed size; everywhere. "ragged": only what
        there is travels; TPU and GPU. The results are equal to the bit while every id has room. "padded" has room for a
        number of ids from each device to each other, "ragged" for as many in all at each owner: a batch that is too
        uneven for one may fit the other.
      route: "flat": one all_to_all over all devices. "two_level": two, between the devices of one place in their hosts
        (over the mesh axis `replica`) and between those of a host, so that fewer and larger messages cross the slow
        links: ids and gradients first between hosts, vectors first within them (the tower transform of DMT, arXiv
        2403.00877). The results are equal to the bit. Only "padded", and not with tables that are copied to hosts.
        "towers": as "two_level", and the modules of a model over towers run between the hops, each tower on one index
        of `replica` with its parameters, so that only what leaves them crosses to other hosts.
      within_host: With "two_level" and "towers", what vectors and gradients travel as within a host; `forward` and
        `backward` are then of those between hosts.
    """

    capacity_factor: float = 2.0
    roomy_below_bytes: int = 0
    forward: Wire = "full"
    backward: Wire = "full"
    loss_scale: float = 1.0
    overflow: Literal["fail", "count"] = "fail"
    all_to_all: Literal["padded", "ragged"] = "padded"
    route: Route = "flat"
    within_host: Wire = "full"

    def __post_init__(self) -> None:
        if not self.capacity_factor >= 1.0:
            raise UserError(
                f"Exchange: capacity_factor must be at least 1, what evenly spread ids need; got "
                f"{self.capacity_factor}. Set it with --set tables.exchange.capacity_factor=2."
            )
        for name in ("forward", "backward", "within_host"):
            check_one_of(f"Exchange: {name}", getattr(self, name), get_args(Wire))
        if not (self.loss_scale > 0 and math.isfinite(self.loss_scale)):
            raise UserError(f"Exchange: loss_scale must be a positive number; got {self.loss_scale}.")
        check_one_of("Exchange: overflow", self.overflow, ("fail", "count"))
        check_one_of("Exchange: all_to_all", self.all_to_all, ("padded", "ragged"))
        check_one_of("Exchange: route", self.route, get_args(Route))
        if self.route != "flat" and self.all_to_all == "ragged":
            raise UserError(
                f"Exchange: route={self.route!r} exchanges blocks of one size; got all_to_all='ragged'. Use --set "
                "tables.exchange.all_to_all=padded, or --set tables.exchange.route=flat."
            )
        if self.route == "flat" and self.within_host != "full":
            raise UserError(
                f"Exchange: within_host is of the hop within a host, which route='flat' does not have; got "
                f"{self.within_host!r}. Use --set tables.exchange.route=two_level, or forward and backward."
            )


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
      towers: Features of each tower, whose tables all lie on one host (`Partition.on_hosts`); () = tables lie where
        their entries say. A model with other towers refuses it.
    """

    tables: tuple[TablePlan, ...] = ()
    replicas: Literal["shard", "copy"] = "shard"
    devices: int | None = None
    towers: tuple[tuple[str, ...], ...] = ()

    @property
    def partition(self) -> Partition | None:
        """The towers.

        Raises:
          UserError: one is empty, or a feature is in two.
        """
        return Partition(towers=self.towers) if self.towers else None

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "ShardingPlan":
        """Reads what `save` wrote.

        Raises:
          UserError: the file cannot be read, is no JSON object, or has a field of another name or type.
        """
        try:
            found = json_reading.read_sealed(path)
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
        towers = Partition.from_json(fields, where).towers if fields.get("towers") else ()
        return cls(tables=tables, replicas=cast(Any, replicas), devices=devices, towers=towers)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it as a JSON object with its digest, a line for each table; fields as by default are left out.

        Raises:
          UserError: the file cannot be written.
        """
        tables = [_changed(entry) for entry in self.tables]
        lines = ",\n".join("    " + json.dumps(table) for table in tables)
        rest = {name: value for name, value in _changed(self).items() if name != "tables"}
        rest["digest"] = json_reading.digest({**rest, "tables": tables})
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
        check_one_of("ShardingPlan: replicas", self.replicas, ("shard", "copy"))
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
