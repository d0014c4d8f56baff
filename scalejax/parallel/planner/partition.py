"""Which devices hold the pieces, once it is settled how each table is cut.

Memory is that of SPMD arrays: all devices have arrays of one shape, so a stack (pieces of equal width, dtype and
optimizer) takes on *every* device what the fullest device needs, and so do the buffers of the exchanges:

    memory = sum over stacks (row_bytes * max_d rows_d) + max_d buffers_d + what is on every device anyway

Two partitioners with one contract: a `Placement` that fits, or `DoesNotFit`.

- `greedy`: pieces by descending seconds, each to the device with the fewest seconds so far that has room (longest
  processing time first: at most 4/3 - 1/(3N) of the optimum for pieces of their own and enough memory, Graham 1969).
- `memory_balanced`: pieces by descending bytes, each to the device where memory grows least, among those that stay
  below a limit of seconds; the lowest limit that works is found by bisection.

`improve` moves and swaps single pieces of the busiest device as long as that helps.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from scalejax.parallel.planner.estimators import Option, StackKey
from scalejax.parallel.planner.topology import Topology

MOST_ROWS = 2**31 - 2**24
"""Rows of a stack that one device can address with int32, with room for fillers above (`embedding.stacks`)."""


class DoesNotFit(Exception):
    """A table found no device.

    Attributes:
      option: What could not be placed.
      missing_bytes: Bytes that lacked where most was left; 0 if it was the number of rows.
    """

    def __init__(self, option: Option, missing_bytes: int) -> None:
        super().__init__(f"{option.table} as {option.label}: {missing_bytes} bytes lack")
        self.option, self.missing_bytes = option, missing_bytes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the pieces of all tables lie.

    Attributes:
      options: What was placed, in the order given.
      ranks: For each the devices of its pieces, slice after slice; () where every device has one.
      seconds: float64[N], seconds of a step on each device.
      memory_bytes: Memory of a device.
    """

    options: tuple[Option, ...]
    ranks: tuple[tuple[int, ...], ...]
    seconds: np.ndarray
    memory_bytes: int


Partitioner = Callable[[Sequence[Option], Topology], Placement]

_Choose = Callable[[Option, np.ndarray], int | None]
"""Picks a device for a piece among those where the array is true; None = none of them will do."""


def greedy(options: Sequence[Option], topology: Topology) -> Placement:
    """Longest first, each to the least busy device with room.

    Raises:
      DoesNotFit: a table finds no room where it would go.
    """
    load = _Load(topology)
    ranks = _place_everywhere(options, load)

    def least_busy(option: Option, free: np.ndarray) -> int:
        # Ties by number of the device, so that equal input gives equal plans.
        return int(np.where(free, load.seconds, np.inf).argmin())

    for index in sorted(ranks.missing, key=lambda i: (-options[i].shard.total, -_bytes(options[i]), options[i].table)):
        ranks.found[index] = load.place(options[index], least_busy)
    return _placement(options, ranks, load)


def memory_balanced(options: Sequence[Option], topology: Topology) -> Placement:
    """Largest first, each where memory grows least, below the lowest limit of seconds that can be kept.

    Raises:
      DoesNotFit: not even without a limit.
    """
    best = _by_memory(options, topology, np.inf)
    low, high = float(best.seconds.mean()), float(best.seconds.max())
    for _ in range(6):
        if high - low <= 0.01 * low:
            break
        limit = (low + high) / 2
        try:
            best = _by_memory(options, topology, limit)
            high = float(best.seconds.max())
        except DoesNotFit:
            low = limit
    return best


def improve(placement: Placement, topology: Topology, most_steps: int = 1000) -> Placement:
    """Moves a piece of the busiest device away, or swaps it, while its seconds fall and everything still fits.

    Only pieces of tables that lie whole or in column slices move: the others are bound to the devices of a host.
    """
    options = placement.options
    load = _Load(topology)
    ranks = [list(devices) for devices in placement.ranks]
    for option, devices in zip(options, ranks, strict=True):
        load.add(option, np.array(devices, np.int64) if devices else slice(None))
    owner_of = [(i, s) for i, o in enumerate(options) if o.kind in ("table_wise", "column_wise") for s in range(o.shards)]
    if not owner_of:
        return placement
    cost = np.array([options[i].shard.total for i, _ in owner_of])
    where = np.array([ranks[i][s] for i, s in owner_of])
    for _ in range(most_steps):
        busiest = int(load.seconds.argmax())
        step = _best_step(busiest, owner_of, cost, where, ranks, options, load)
        if step is None:
            break
        mine, theirs, other = step
        for piece, target in ((mine, other), (theirs, busiest)):
            if piece is not None:
                i, s = owner_of[piece]
                load.move(options[i], int(where[piece]), target)
                where[piece] = ranks[i][s] = target
    settled = tuple(tuple(devices) for devices in ranks)
    return Placement(options, settled, load.seconds.copy(), load.memory_bytes)


class _Load:
    """What the devices hold so far."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.seconds = np.zeros(topology.devices)
        self.buffers = np.zeros(topology.devices, np.int64)
        self.rows: dict[StackKey, np.ndarray] = {}
        self.stacks_bytes = 0
        self.fixed_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self.stacks_bytes + int(self.buffers.max()) + self.fixed_bytes

    def add(self, option: Option, devices: "np.ndarray | slice") -> None:
        """A piece to each of these devices, and to every device its share."""
        self.seconds += option.everywhere.total
        self.fixed_bytes += option.everywhere_buffers
        if option.kind == "data_parallel":
            self.fixed_bytes += option.rows * option.row_bytes
            return
        self._change(option, devices, 1)

    def move(self, option: Option, source: int, target: int) -> None:
        """A piece from one device to another."""
        self._change(option, np.array([source]), -1)
        self._change(option, np.array([target]), 1)

    def lacking(self, option: Option) -> np.ndarray:
        """int64[N]: bytes that a device would lack after taking a piece; at most 0 = it fits."""
        return self._lacking(option, self.rows_of(option.stack), self.buffers)

    def place(self, option: Option, choose: _Choose) -> tuple[int, ...]:
        """Takes the pieces in, each on a device of its own that `choose` picks."""
        self.fixed_bytes += option.everywhere_buffers  # before room is counted
        self.seconds += option.everywhere.total
        if option.kind in ("table_wise", "column_wise"):
            return tuple(self._place_pieces(option, choose, np.ones(self.topology.devices, bool), option.shards))
        if option.kind == "row_wise":  # over some devices: all of them are placed before
            return tuple(sorted(self._place_pieces(option, choose, np.ones(self.topology.devices, bool), option.shards)))
        if option.kind == "table_column_wise":
            host = self._host_with_room(option, option.shards)
            return tuple(self._place_pieces(option, choose, self._of_host(host), option.shards))
        taken: list[int] = []
        for _ in range(option.columns):  # table_row_wise and grid: whole hosts, another for every slice
            host = self._host_with_room(option, self.topology.devices_per_host, excluded=taken)
            taken.append(host)
            self._change(option, self._of_host(host), 1)
        return tuple(int(d) for host in taken for d in np.flatnonzero(self._of_host(host)))

    def _place_pieces(
        self, option: Option, choose: _Choose, allowed: np.ndarray, count: int
    ) -> list[int]:
        chosen: list[int] = []
        for _ in range(count):
            lacking = self.lacking(option)
            free = allowed & (lacking <= 0)
            free[chosen] = False
            if not free.any():
                candidates = allowed.copy()
                candidates[chosen] = False
                raise DoesNotFit(option, max(0, int(lacking[candidates].min())))
            device = choose(option, free)
            if device is None:
                raise DoesNotFit(option, 0)
            self._change(option, np.array([device]), 1)
            chosen.append(device)
        return chosen

    def _host_with_room(self, option: Option, count: int, excluded: Sequence[int] = ()) -> int:
        """The host whose `count` least busy devices with room are least busy."""
        shape = (self.topology.hosts, self.topology.devices_per_host)
        lacking = self.lacking(option).reshape(shape)
        seconds = np.where(lacking <= 0, self.seconds.reshape(shape), np.inf)
        busy = np.sort(seconds, axis=1)[:, count - 1]
        busy[list(excluded)] = np.inf
        host = int(busy.argmin())
        if np.isinf(busy[host]):
            left = np.sort(lacking, axis=1)[:, count - 1]
            left[list(excluded)] = np.iinfo(np.int64).max
            raise DoesNotFit(option, max(0, int(left.min())))
        return host

    def _of_host(self, host: int) -> np.ndarray:
        return np.arange(self.topology.devices) // self.topology.devices_per_host == host

    def rows_of(self, stack: StackKey) -> np.ndarray:
        """int64[N], rows of a stack on each device."""
        if stack not in self.rows:
            self.rows[stack] = np.zeros(self.topology.devices, np.int64)
        return self.rows[stack]

    def _lacking(self, option: Option, rows: np.ndarray, buffers: np.ndarray) -> np.ndarray:
        grown = np.maximum(rows + option.rows, rows.max())
        memory = self.stacks_bytes + option.row_bytes * (grown - rows.max()) + self.fixed_bytes
        memory = memory + np.maximum(buffers + option.shard_buffers, buffers.max())
        lacking = memory - self.topology.memory_bytes
        # Too many rows to address are as bad as too many bytes, and cannot be mended by a few bytes more.
        return np.where(grown > MOST_ROWS, np.maximum(lacking, (grown - MOST_ROWS) * option.row_bytes), lacking)

    def _change(self, option: Option, devices: "np.ndarray | slice", sign: int) -> None:
        rows = self.rows_of(option.stack)
        before = int(rows.max())
        rows[devices] += sign * option.rows
        self.stacks_bytes += option.row_bytes * (int(rows.max()) - before)
        self.buffers[devices] += sign * option.shard_buffers
        self.seconds[devices] += sign * option.shard.total


@dataclasses.dataclass
class _Ranks:
    found: list[tuple[int, ...]]
    missing: list[int]


def _place_everywhere(options: Sequence[Option], load: _Load) -> _Ranks:
    """First what leaves no choice: tables on all devices."""
    ranks = _Ranks([()] * len(options), [])
    for index in sorted(range(len(options)), key=lambda i: options[i].table):
        option = options[index]
        if option.kind == "data_parallel" or (option.kind == "row_wise" and option.row_parts == load.topology.devices):
            load.add(option, slice(None))
            lacking = load.memory_bytes - load.topology.memory_bytes
            if option.kind == "row_wise":
                lacking = max(lacking, (int(load.rows[option.stack].max()) - MOST_ROWS) * option.row_bytes)
            if lacking > 0:
                raise DoesNotFit(option, lacking)
        else:
            ranks.missing.append(index)
    return ranks


def _by_memory(options: Sequence[Option], topology: Topology, limit: float) -> Placement:
    load = _Load(topology)
    ranks = _place_everywhere(options, load)

    def least_growth(option: Option, free: np.ndarray) -> int | None:
        candidates = np.flatnonzero(free & (load.seconds + option.shard.total <= limit))
        if not candidates.size:
            return None
        rows, lacking = load.rows_of(option.stack), load.lacking(option)
        order = np.lexsort((load.seconds[candidates], rows[candidates], lacking[candidates]))
        return int(candidates[order[0]])

    for index in sorted(ranks.missing, key=lambda i: (-_bytes(options[i]), -options[i].shard.total, options[i].table)):
        ranks.found[index] = load.place(options[index], least_growth)
    return _placement(options, ranks, load)


def _placement(options: Sequence[Option], ranks: _Ranks, load: _Load) -> Placement:
    return Placement(tuple(options), tuple(ranks.found), load.seconds.copy(), load.memory_bytes)


def _bytes(option: Option) -> int:
    return option.rows * option.row_bytes + option.shard_buffers


def _best_step(
    busiest: int,
    owner_of: Sequence[tuple[int, int]],
    cost: np.ndarray,
    where: np.ndarray,
    ranks: Sequence[Sequence[int]],
    options: Sequence[Option],
    load: _Load,
) -> tuple[int, int | None, int] | None:
    """(piece of the busiest device, piece to swap it with or None, the other device) that helps most, if any does."""
    mine = np.flatnonzero(where == busiest)
    if not mine.size:
        return None
    top, seconds = load.seconds[busiest], load.seconds
    others = np.flatnonzero(where != busiest)
    targets = np.concatenate([where[others], np.arange(len(seconds))])  # swaps, then plain moves
    given_back = np.concatenate([cost[others], np.zeros(len(seconds))])
    shift = cost[mine][:, None] - given_back[None, :]
    after = np.maximum(top - shift, seconds[targets][None, :] + shift)
    after[:, targets == busiest] = np.inf
    # Steps that leave less than a millionth are rounding and could go on forever.
    order = np.argsort(after, axis=None, kind="stable")[:64]
    for flat in order:
        row, column = divmod(int(flat), after.shape[1])
        if not after[row, column] < top * (1 - 1e-6):
            return None
        piece, other = int(mine[row]), int(targets[column])
        swapped = int(others[column]) if column < len(others) else None
        if _allowed(piece, swapped, busiest, other, owner_of, ranks, options, load):
            return piece, swapped, other
    return None


def _allowed(
    piece: int,
    swapped: int | None,
    busiest: int,
    other: int,
    owner_of: Sequence[tuple[int, int]],
    ranks: Sequence[Sequence[int]],
    options: Sequence[Option],
    load: _Load,
) -> bool:
    """Whether slices stay apart and everything fits after the step; the load is left as it was."""
    a = owner_of[piece][0]
    b = None if swapped is None else owner_of[swapped][0]
    if other in ranks[a] or (b is not None and busiest in ranks[b]):
        return False
    load.move(options[a], busiest, other)
    if b is not None:
        load.move(options[b], other, busiest)
    fits = load.memory_bytes <= load.topology.memory_bytes and all(
        int(load.rows[options[i].stack].max()) <= MOST_ROWS for i in (a, b) if i is not None
    )
    if b is not None:
        load.move(options[b], busiest, other)
    load.move(options[a], other, busiest)
    return fits
