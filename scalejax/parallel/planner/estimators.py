"""Costs of a way of sharding a table: bytes of memory and seconds of a step, as explicit formulas.

Every piece ("shard") of one option is alike, so an option is described by one shard, the number of shards, and what
every device pays, owner or not. With

    B     examples of the global batch           R, D, e   rows, width, bytes of a number of the table
    O     ids of the batch in this table         V         vectors that readers want: B x features, or O without pooling
    U     distinct rows among them               N         devices;  n  row parts of a slice;  d = D / columns
    w     bytes of a number in sums and gradients, max(4, e)
    H     vectors that readers hold: V, or B x positions where rows of jagged features are spread out unpooled
    g(b)  bytes fetched for a row of b bytes (whole granules)          S(d)  optimizer state of a row

a shard gets O/n ids and U/n distinct rows. What travels per shard are T vectors: pooled ones (T = V, of w bytes a
number) where rows lie whole on their owner, and one row per id (T = O/n, of e bytes a number) where rows are striped.
Seconds:

    forward compute   (4 O/n + g(d e) O/n + w d T) / memory + c O/n          ids, rows, vectors written
    forward comm      (4 O/n + x d T) * exchange                             ids to the owner, vectors (x = w or e) back
    backward comm     w d T * exchange                                       gradients of the vectors
    backward compute  (w d O/n + 64 O/n + 2 (g(d e) + S(d)) U/n) / memory + c O/n
                                                     gradients in row order, the sort, rows and states read and written

and every device, for tables striped by rows and pooled by the readers:

    forward compute   (e D O/N + w D V/N) / memory         backward compute   (w D V/N + w D O/N) / memory

or, where unpooled rows of any kind are spread over more positions than there are ids:

    forward compute   (w D O/N + w D H/N) / memory         backward compute   2 w D O/N / memory

A data-parallel table is looked up where its examples are, all devices gather all ids and gradients, and each updates
all:

    forward compute   ((4 + g(D e)) O/N + w D H/N) / memory + c O/N
    backward comm     (4 + w D) O * gather
    backward compute  the one above with n = 1, d = D

With `Exchange.route="two_level"` what a piece sends and gets goes over the L devices of its host on its way to and from
other hosts: the owner pays `within` in place of `exchange`, and every device of the host, for each piece,

    forward comm      (4 O/n + x d T) / L * between           backward comm      w d T / L * between

Rows that are striped within a host are pooled there, so that T = V/n, w for x, travel between hosts, and what stands
above for readers is paid by the devices of the host, e d O/n + w d V/n bytes for a piece, divided by L.

`memory` is bytes/s, `exchange`, `within`, `between` and `gather` seconds/byte, c seconds/id, all of the topology. 64
bytes are the least of a radix sort of 32-bit keys with 32-bit positions: 4 passes of 8 bits, 8 bytes read and 8 written
in each. TorchRec's planner takes the backward as twice the forward instead; here it follows from the distinct rows.
"""

import dataclasses
import math

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import StackKey, itemsize, row_bytes, stack_key
from scalejax.parallel.embedding.plan.sharding_plan import Kind, Route
from scalejax.parallel.planner.statistics import TableStatistics
from scalejax.parallel.planner.topology import HostTopology

SORT_BYTES = 64
"""Memory traffic of sorting one id: see the module."""

ID_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one step on one device."""

    forward_compute: float = 0.0
    forward_comm: float = 0.0
    backward_compute: float = 0.0
    backward_comm: float = 0.0

    @property
    def total(self) -> float:
        """All four, one after the other."""
        return self.forward_compute + self.forward_comm + self.backward_compute + self.backward_comm


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableWork:
    """What a step asks of one table, wherever it lies.

    Attributes:
      table: The table.
      itemsize: Bytes of a number of it.
      occurrences: O.
      vectors: V.
      distinct: U.
      held: H.
    """

    table: TableConfig
    itemsize: int
    occurrences: float
    vectors: float
    distinct: float
    held: float

    @property
    def wide_itemsize(self) -> int:
        """w, bytes of an element in which rows are summed."""
        return max(4, self.itemsize)

    def row_bytes(self, width: int) -> int:
        """Bytes of `width` columns of a row, with state, as the engine allocates them."""
        return row_bytes(self.table, width)

    def state_bytes(self, width: int) -> int:
        """S(width)."""
        return self.row_bytes(width) - width * self.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One way of sharding one table, with its costs.

    Attributes:
      table: Name of the table.
      kind: As in `TablePlan`.
      columns: Number of column slices.
      row_parts: Devices over which the rows of a slice are striped.
      stack: Which array a piece lies in, as the engine stacks them.
      rows: Rows of a piece; of the whole table for data_parallel.
      row_bytes: Bytes of one of its rows with state.
      shard: Seconds of the owner of a piece.
      shard_buffers: Bytes of exchange and gradients at the owner of a piece.
      everywhere: Seconds of every device, besides.
      forwarded: Seconds of every device of the host of a piece, for each piece, besides.
      host_devices: Devices of a host.
      host: Host that all pieces must be on; None = any.
      everywhere_buffers: Bytes of every device, besides.
      map_bytes: Bytes of the id map on every device, whatever the kind; 0 where ids are rows.
    """

    table: str
    kind: Kind
    columns: int
    row_parts: int
    stack: StackKey
    rows: int
    row_bytes: int
    shard: Seconds
    shard_buffers: int
    everywhere: Seconds
    everywhere_buffers: int
    map_bytes: int = 0
    forwarded: Seconds = Seconds()
    host_devices: int = 1
    host: int | None = None

    @property
    def shards(self) -> int:
        """Number of pieces with an owner; a data-parallel table has none."""
        return 0 if self.kind == "data_parallel" else self.columns * self.row_parts

    @property
    def label(self) -> str:
        """For reports: "column_wise x4"."""
        return self.kind if self.columns == 1 else f"{self.kind} x{self.columns}"

    def work_s(self, devices: int) -> float:
        """Seconds of all devices together."""
        piece = self.shard.total + self.host_devices * self.forwarded.total
        return self.shards * piece + devices * self.everywhere.total


def work(table: TableConfig, statistics: TableStatistics, batch_size: int) -> TableWork:
    """The work of a table in a step of `batch_size` examples over all devices.

    Raises:
      UserError: statistics for other features than the table's.
    """
    if len(statistics.pooling_factors) != len(table.features):
        raise UserError(
            f"TableStatistics {statistics.table!r}: pooling_factors must have one number for each feature "
            f"({', '.join(table.features)}); got {statistics.pooling_factors}. Give them in this order."
        )
    occurrences = batch_size * statistics.ids_per_example
    vectors = occurrences if table.pooling == "none" else float(batch_size * len(table.features))
    spread = table.pooling == "none" and statistics.positions
    return TableWork(
        table=table,
        itemsize=itemsize(table.dtype),
        occurrences=occurrences,
        vectors=vectors,
        distinct=statistics.popularity.distinct_rows(occurrences, table.rows),
        held=float(batch_size * sum(statistics.positions)) if spread else vectors,
    )


def estimate(
    asked: TableWork,
    topology: HostTopology,
    *,
    kind: Kind,
    columns: int = 1,
    row_parts: int = 1,
    capacity_factor: float = 2.0,
    route: Route = "flat",
    host: int | None = None,
) -> Option:
    """Costs of one way of sharding.

    Args:
      asked: The work.
      topology: The machine.
      kind: As in `TablePlan`.
      columns: Column slices; divides the width of the table.
      row_parts: Devices over which the rows of a slice are striped.
      capacity_factor: Room of an exchange as a multiple of what it carries (`Exchange.capacity_factor`).
      route: As in `Exchange`.
      host: As in `Option`.
    """
    width = asked.table.dim // columns
    rows = -(-asked.table.rows // row_parts)
    owned = kind != "data_parallel"
    hops = owned and route != "flat" and topology.groups > 1
    pooled_there = hops and sharded_by_rows(kind) and kind != "row_wise" and asked.table.pooling != "none"
    return Option(
        table=asked.table.name,
        kind=kind,
        columns=columns,
        row_parts=row_parts,
        stack=stack_key(asked.table, width, spread="striped" if owned else "copied"),
        rows=rows,
        row_bytes=asked.row_bytes(width),
        shard=_shard_seconds(asked, topology, kind, width, row_parts, hops=hops) if owned else Seconds(),
        shard_buffers=_shard_buffers(asked, kind, width, row_parts, capacity_factor, pooled_there) if owned else 0,
        everywhere=Seconds() if pooled_there else _everywhere_seconds(asked, topology, kind),
        everywhere_buffers=_everywhere_buffers(asked, topology, kind, capacity_factor, pooled_there),
        forwarded=_forwarded(asked, topology, kind, width, row_parts, pooled_there) if hops else Seconds(),
        host_devices=topology.group_size,
        host=host,
        map_bytes=0 if asked.table.id_map is None else asked.table.id_map.device_bytes(topology.devices),
    )


def sharded_by_rows(kind: Kind) -> bool:
    """Whether the rows of a slice lie on several devices, so that rows travel and not pooled vectors."""
    return kind in ("row_wise", "table_row_wise", "grid")


def _travelling(asked: TableWork, kind: Kind, row_parts: int) -> tuple[float, int]:
    """T, and the bytes of a number on the way back."""
    if sharded_by_rows(kind):
        return asked.occurrences / row_parts, asked.itemsize
    return asked.vectors, asked.wide_itemsize


def _update_s(asked: TableWork, topology: HostTopology, width: int, row_parts: int) -> float:
    ids, wide = asked.occurrences / row_parts, asked.wide_itemsize
    row = topology.fetched_bytes(width * asked.itemsize) + asked.state_bytes(width)
    moved = (wide * width + SORT_BYTES) * ids + 2 * row * asked.distinct / row_parts
    return moved / topology.memory_bandwidth + topology.occurrence_s * ids


def _shard_seconds(
    asked: TableWork, topology: HostTopology, kind: Kind, width: int, row_parts: int, *, hops: bool
) -> Seconds:
    ids, wide = asked.occurrences / row_parts, asked.wide_itemsize
    exchange = topology.within_s_per_byte if hops else topology.exchange_s_per_byte
    vectors, number = _travelling(asked, kind, row_parts)
    read = (ID_BYTES + topology.fetched_bytes(width * asked.itemsize)) * ids
    return Seconds(
        forward_compute=(read + wide * width * vectors) / topology.memory_bandwidth + topology.occurrence_s * ids,
        forward_comm=(ID_BYTES * ids + number * width * vectors) * exchange,
        backward_compute=_update_s(asked, topology, width, row_parts),
        backward_comm=wide * width * vectors * exchange,
    )


def _forwarded(
    asked: TableWork, topology: HostTopology, kind: Kind, width: int, row_parts: int, pooled_there: bool
) -> Seconds:
    ids, wide = asked.occurrences / row_parts, asked.wide_itemsize
    vectors, number = _travelling(asked, kind, row_parts)
    pooling = 0.0
    if pooled_there:
        vectors, number = asked.vectors / row_parts, wide
        pooling = width / topology.memory_bandwidth / topology.group_size
    between = topology.between_s_per_byte / topology.group_size
    return Seconds(
        forward_compute=(asked.itemsize * ids + wide * vectors) * pooling,
        forward_comm=(ID_BYTES * ids + number * width * vectors) * between,
        backward_compute=wide * (ids + vectors) * pooling,
        backward_comm=wide * width * vectors * between,
    )


def _everywhere_seconds(asked: TableWork, topology: HostTopology, kind: Kind) -> Seconds:
    n, dim, wide = topology.devices, asked.table.dim, asked.wide_itemsize
    ids, vectors, held = asked.occurrences / n, asked.vectors / n, asked.held / n
    if kind == "data_parallel":
        read = (ID_BYTES + topology.fetched_bytes(dim * asked.itemsize)) * ids + wide * dim * held
        return Seconds(
            forward_compute=read / topology.memory_bandwidth + topology.occurrence_s * ids,
            backward_comm=(ID_BYTES + wide * dim) * asked.occurrences * topology.gather_s_per_byte,
            backward_compute=_update_s(asked, topology, dim, 1),
        )
    if sharded_by_rows(kind) and asked.table.pooling != "none":
        return Seconds(
            forward_compute=(asked.itemsize * dim * ids + wide * dim * vectors) / topology.memory_bandwidth,
            backward_compute=wide * dim * (vectors + ids) / topology.memory_bandwidth,
        )
    if held != vectors:
        return Seconds(
            forward_compute=wide * dim * (ids + held) / topology.memory_bandwidth,
            backward_compute=2 * wide * dim * ids / topology.memory_bandwidth,
        )
    return Seconds()


def _shard_buffers(
    asked: TableWork, kind: Kind, width: int, row_parts: int, capacity_factor: float, pooled_there: bool
) -> int:
    """Ids, vectors and their gradients in the slots of the exchange, and the gradients in row order.

    Where rows are pooled between two hops, also their slots there: each device of the host has a piece.
    """
    ids, wide = asked.occurrences / row_parts, asked.wide_itemsize
    vectors, number = _travelling(asked, kind, row_parts)
    slots = ID_BYTES * ids + (2 if pooled_there else 1) * (number + wide) * width * vectors
    return math.ceil(capacity_factor * slots + wide * width * ids)


def _everywhere_buffers(
    asked: TableWork, topology: HostTopology, kind: Kind, capacity_factor: float, pooled_there: bool
) -> int:
    """What a reader holds: its vectors and their gradients; by kind also rows on the way, or all gathered gradients."""
    dim, wide = asked.table.dim, asked.wide_itemsize
    held = 2 * wide * dim * asked.held / topology.devices
    if kind == "data_parallel":
        held += (ID_BYTES + 2 * wide * dim) * asked.occurrences  # gathered, and once more in row order
    elif sharded_by_rows(kind) and not pooled_there:
        held += capacity_factor * (asked.itemsize + wide) * dim * asked.occurrences / topology.devices
    return math.ceil(held)
