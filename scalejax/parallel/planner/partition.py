"""Partitioning: devices for the slices of tables, once it is settled how each table is cut.

Memory is that of SPMD arrays: all devices have arrays of one shape, so a stack (pieces of equal width, dtype and
optimizer) takes on *every* device what the fullest device needs, and so do the buffers of the exchanges:

    memory = sum over stacks (row_bytes * max_d rows_d) + max_d buffers_d + what is on every device anyway

Pieces are stacked as the engine stacks them (`embedding.plan.stack_key`).

Three partitioners with one contract: a `ShardPlacement` that fits, or `DoesNotFit`.

- `greedy`: pieces by descending seconds, each to the device with the fewest seconds so far that has room (longest
  processing time first: at most 4/3 - 1/(3N) of the optimum for whole tables and enough memory, Graham 1969).
- `mixed`: pieces by the larger of their share of a device's seconds and of its memory, so that the large and cold ones
  are placed while there is room. Those large in seconds go to the least busy device, those large in bytes to the one
  where memory grows least.
- `memory_balanced`: pieces by descending bytes, each to the device where memory grows least, among those that stay
  below a limit of seconds; the lowest limit that works is found by bisection.

`improve` moves and swaps single pieces of the busiest device as long as that helps.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from scalejax.parallel.embedding.config import MOST_ROWS
from scalejax.parallel.embedding.plan.placement import StackKey
from scalejax.parallel.planner.estimators import Option
from scalejax.parallel.planner.topology import HostTopology

_LOOKED_AT = 64
"""Steps that are checked for room before the search for a better placement ends."""

_MOVABLE = ("table_wise", "column_wise", "table_column_wise")


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
class ShardPlacement:
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


Partitioner = Callable[[Sequence[Option], HostTopology], ShardPlacement]

_Choose = Callable[[Option, np.ndarray], int]
"""Picks one of the devices where the array is at most 0: a piece fits there."""


class _Load:
    """What the devices hold so far."""

    def __init__(self, topology: HostTopology) -> None:
        self.topology = topology
        self.hosts = np.arange(topology.devices) // topology.group_size
        self.seconds = np.zeros(topology.devices)
        self.buffers = np.zeros(topology.devices, np.int64)
        self.fullest_buffers = 0
        self.rows: dict[StackKey, np.ndarray] = {}
        self.fullest_rows: dict[StackKey, int] = {}
        self.stacks_bytes = 0
        self.fixed_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self.stacks_bytes + self.fullest_buffers + self.fixed_bytes

    def add(self, option: Option, devices: "np.ndarray | slice") -> None:
        """A piece to each of these devices, and to every device its share."""
        self.seconds += option.everywhere.total
        self.fixed_bytes += option.everywhere_buffers + option.map_bytes
        if option.kind == "data_parallel":
            self._rows_of(option.stack)[:] += option.rows
            self.fullest_rows[option.stack] += option.rows
            self.fixed_bytes += option.rows * option.row_bytes
            return
        self._change(option, devices, 1)

    def move(self, option: Option, source: int, target: int) -> None:
        """A piece from one device to another."""
        self._change(option, np.array([source]), -1)
        self._change(option, np.array([target]), 1)

    def overflow_bytes(self, stack: StackKey, row_bytes: int) -> int:
        """Bytes above the memory of a device, or of rows that cannot be addressed; at most 0 = all is well."""
        beyond = (self.fullest_rows.get(stack, 0) - MOST_ROWS) * row_bytes
        return max(self.memory_bytes - self.topology.memory_bytes, beyond)

    def lacking(self, option: Option) -> np.ndarray:
        """int64[N]: bytes that a device would lack after taking a piece; at most 0 = it fits."""
        rows, fullest = self._rows_of(option.stack), self.fullest_rows[option.stack]
        grown = np.maximum(rows + option.rows, fullest)
        buffers = np.maximum(self.buffers + option.shard_buffers, self.fullest_buffers)
        fixed = self.stacks_bytes + self.fixed_bytes - self.topology.memory_bytes - option.row_bytes * fullest
        lacking = option.row_bytes * grown + buffers + fixed
        if fullest + option.rows > MOST_ROWS:
            return np.maximum(lacking, (grown - MOST_ROWS) * option.row_bytes)
        return lacking

    def least_busy(self, lacking: np.ndarray) -> int:
        """Of those with room the one with fewest seconds; ties by number, so that equal input gives equal plans."""
        return int(np.where(lacking <= 0, self.seconds, np.inf).argmin())

    def least_growth(self, option: Option, lacking: np.ndarray) -> int:
        """Of those with room the one where memory grows least, then the one with fewest rows of the stack, seconds."""
        free = np.flatnonzero(lacking <= 0)
        order = np.lexsort((self.seconds[free], self._rows_of(option.stack)[free], lacking[free]))
        return int(free[order[0]])

    def place(self, option: Option, choose: _Choose) -> tuple[int, ...]:
        """Takes the pieces in, each on a device of its own that `choose` picks."""
        self.fixed_bytes += option.everywhere_buffers + option.map_bytes  # before room is counted
        self.seconds += option.everywhere.total
        if option.kind in ("table_wise", "column_wise", "row_wise"):
            return self._place_pieces(option, choose, option.host)
        if option.kind == "table_column_wise":
            return self._place_pieces(option, choose, self._host_with_room(option, option.shards))
        taken: list[int] = []
        for _ in range(option.columns):  # table_row_wise and grid: whole hosts, another for every slice
            host = self._host_with_room(option, self.topology.group_size, excluded=taken)
            taken.append(host)
            self._change(option, self._of_host(host), 1)
        return tuple(int(d) for host in taken for d in np.flatnonzero(self._of_host(host)))

    def _place_pieces(self, option: Option, choose: _Choose, host: int | None) -> tuple[int, ...]:
        chosen: list[int] = []
        closed = np.iinfo(np.int64).max
        for _ in range(option.shards):
            lacking = self.lacking(option)
            if host is not None:
                lacking[~self._of_host(host)] = closed
            lacking[chosen] = closed
            if lacking.min() > 0:
                raise DoesNotFit(option, int(lacking.min()))
            device = choose(option, lacking)
            self._change(option, np.array([device]), 1)
            chosen.append(device)
        return tuple(sorted(chosen))  # slices are alike, so any order will do

    def _host_with_room(self, option: Option, count: int, excluded: Sequence[int] = ()) -> int:
        """The host whose `count` least busy devices with room are least busy."""
        shape = (self.topology.groups, self.topology.group_size)
        if option.host is not None:
            excluded = [host for host in range(shape[0]) if host != option.host or host in excluded]
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
        return self.hosts == host

    def _rows_of(self, stack: StackKey) -> np.ndarray:
        if stack not in self.rows:
            self.rows[stack] = np.zeros(self.topology.devices, np.int64)
            self.fullest_rows[stack] = 0
        return self.rows[stack]

    def _change(self, option: Option, devices: "np.ndarray | slice", sign: int) -> None:
        rows = self._rows_of(option.stack)
        before = self.fullest_rows[option.stack]
        rows[devices] += sign * option.rows
        self.buffers[devices] += sign * option.shard_buffers
        self.seconds[devices] += sign * option.shard.total
        if option.forwarded.total:
            pieces = np.bincount(self.hosts[devices], minlength=self.topology.groups)
            self.seconds += sign * option.forwarded.total * pieces[self.hosts]
        self.fullest_rows[option.stack] = after = int(rows.max())
        self.fullest_buffers = int(self.buffers.max())
        self.stacks_bytes += option.row_bytes * (after - before)


def greedy(options: Sequence[Option], topology: HostTopology) -> ShardPlacement:
    """Longest first, each to the least busy device with room.

    Raises:
      DoesNotFit: a table finds no room where it would go.
    """
    load = _Load(topology)
    order = sorted(range(len(options)), key=lambda i: (-options[i].shard.total, -_bytes(options[i]), options[i].table))
    return _place_all(options, order, load, lambda option, lacking: load.least_busy(lacking))


def mixed(options: Sequence[Option], topology: HostTopology) -> ShardPlacement:
    """Largest share of seconds or memory first.

    Raises:
      DoesNotFit: a table finds no room where it would go.
    """
    load = _Load(topology)
    mean = sum(option.work_s(topology.devices) for option in options) / topology.devices or 1.0

    def shares(option: Option) -> tuple[float, float]:
        return option.shard.total / mean, _bytes(option) / topology.memory_bytes

    def choose(option: Option, lacking: np.ndarray) -> int:
        busy, full = shares(option)
        return load.least_busy(lacking) if busy >= full else load.least_growth(option, lacking)

    order = sorted(range(len(options)), key=lambda i: (-max(shares(options[i])), options[i].table))
    return _place_all(options, order, load, choose)


def memory_balanced(options: Sequence[Option], topology: HostTopology) -> ShardPlacement:
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


def improve(placement: ShardPlacement, topology: HostTopology, most_steps: int = 1000) -> ShardPlacement:
    """Moves a piece of the busiest device away, or swaps it, while its seconds fall and everything still fits.

    Tables that lie whole or in column slices move; those bound to a host, or sent by way of it, move inside it; rows
    that are striped stay.
    """
    load = _Load(topology)
    for option, devices in zip(placement.options, placement.ranks, strict=True):
        load.add(option, np.array(devices, np.int64) if devices else slice(None))
    pieces = _Pieces(placement, load)
    for _ in range(most_steps):
        busiest = int(load.seconds.argmax())
        step = pieces.best_step(busiest)
        if step is None:
            break
        pieces.take(step, busiest)
    return ShardPlacement(placement.options, pieces.ranks(), load.seconds.copy(), load.memory_bytes)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A piece goes from the busiest device to another one, and another piece back in its place, if one is named."""

    piece: int
    other: int
    back: int | None


class _Pieces:
    """The pieces that may move, each with its owner."""

    def __init__(self, placement: ShardPlacement, load: _Load) -> None:
        self._options, self._load = placement.options, load
        self._ranks = [list(devices) for devices in placement.ranks]
        movable = [i for i, option in enumerate(self._options) if option.kind in _MOVABLE]
        self._table = [i for i in movable for _ in range(self._options[i].shards)]
        self._slot = [s for i in movable for s in range(self._options[i].shards)]
        self._cost = np.array([self._options[i].shard.total for i in self._table])
        self._in_host = np.array([_stays(self._options[i]) for i in self._table], bool)
        self._owner = np.array([self._ranks[i][s] for i, s in zip(self._table, self._slot, strict=True)], np.int64)

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """As in `ShardPlacement`."""
        return tuple(tuple(devices) for devices in self._ranks)

    def best_step(self, busiest: int) -> _Step | None:
        """What leaves the busier of the two devices least busy; None if nothing helps."""
        seconds, hosts = self._load.seconds, self._load.hosts
        mine, others = np.flatnonzero(self._owner == busiest), np.flatnonzero(self._owner != busiest)
        if not mine.size:
            return None
        # Columns: a swap with each piece of another device, then a plain move to each device.
        targets = np.concatenate([self._owner[others], np.arange(len(seconds))])
        shift = self._cost[mine][:, None] - np.concatenate([self._cost[others], np.zeros(len(seconds))])[None, :]
        after = np.maximum(seconds[busiest] - shift, seconds[targets][None, :] + shift)
        after[:, targets == busiest] = np.inf
        abroad = hosts[targets] != hosts[busiest]
        after[np.ix_(self._in_host[mine], abroad)] = np.inf
        after[:, abroad & np.concatenate([self._in_host[others], np.zeros(len(seconds), bool)])] = np.inf
        flat = after.reshape(-1)
        count = min(_LOOKED_AT, flat.size)
        best = np.flatnonzero(flat <= np.partition(flat, count - 1)[count - 1])
        for place in best[np.argsort(flat[best], kind="stable")]:
            if not flat[place] < seconds[busiest] * (1 - 1e-6):  # less is rounding and could go on forever
                return None
            row, column = divmod(int(place), after.shape[1])
            back = int(others[column]) if column < len(others) else None
            step = _Step(int(mine[row]), int(targets[column]), back)
            if self._allowed(step, busiest):
                return step
        return None

    def take(self, step: _Step, busiest: int) -> None:
        """Moves a piece to another device, and one back where the step is a swap."""
        self._move(step.piece, step.other)
        if step.back is not None:
            self._move(step.back, busiest)

    def _move(self, piece: int, target: int) -> None:
        self._load.move(self._options[self._table[piece]], int(self._owner[piece]), target)
        self._owner[piece] = self._ranks[self._table[piece]][self._slot[piece]] = target

    def _allowed(self, step: _Step, busiest: int) -> bool:
        """Whether slices of a table stay apart and everything fits after the step."""
        moved = [self._table[step.piece]] + ([] if step.back is None else [self._table[step.back]])
        if step.other in self._ranks[moved[0]] or (step.back is not None and busiest in self._ranks[moved[1]]):
            return False
        # Tried and taken back: what is needed follows from the fullest device of all after the step.
        self.take(step, busiest)
        options = [self._options[i] for i in moved]
        fits = all(self._load.overflow_bytes(option.stack, option.row_bytes) <= 0 for option in options)
        self._move(step.piece, busiest)
        if step.back is not None:
            self._move(step.back, step.other)
        return fits


def _place_all(options: Sequence[Option], order: Sequence[int], load: _Load, choose: _Choose) -> ShardPlacement:
    """First what leaves no choice, tables on all devices; then the others in order."""
    ranks: list[tuple[int, ...]] = [()] * len(options)
    everywhere = {i for i, option in enumerate(options) if _on_all(option, load.topology)}
    for index in sorted(everywhere, key=lambda i: options[i].table):
        load.add(options[index], slice(None))
        if (lacking := load.overflow_bytes(options[index].stack, options[index].row_bytes)) > 0:
            raise DoesNotFit(options[index], lacking)
    for index in order:
        if index not in everywhere:
            ranks[index] = load.place(options[index], choose)
    return ShardPlacement(tuple(options), tuple(ranks), load.seconds.copy(), load.memory_bytes)


def _by_memory(options: Sequence[Option], topology: HostTopology, limit: float) -> ShardPlacement:
    load = _Load(topology)

    def choose(option: Option, lacking: np.ndarray) -> int:
        lacking = np.where(load.seconds + option.shard.total <= limit, lacking, 1)
        if lacking.min() > 0:
            raise DoesNotFit(option, 0)
        return load.least_growth(option, lacking)

    order = sorted(range(len(options)), key=lambda i: (-_bytes(options[i]), -options[i].shard.total, options[i].table))
    return _place_all(options, order, load, choose)


def _stays(option: Option) -> bool:
    """Whether pieces move within their host only; what another host would forward is not in the price of a step."""
    return option.kind == "table_column_wise" or option.host is not None or option.forwarded.total > 0


def _on_all(option: Option, topology: HostTopology) -> bool:
    return option.kind == "data_parallel" or (option.kind == "row_wise" and option.row_parts == topology.devices)


def _bytes(option: Option) -> int:
    return option.rows * option.row_bytes + option.shard_buffers
