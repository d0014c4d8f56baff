"""Stacked tables: geometry of the arrays that hold them, without any array.

Tables, or column slices of tables, of equal width, dtype and optimizer lie in one array, so that a hundred tables cost
one gather and one update. A member is striped over its ranks, n devices: row r lies on ranks[(r + shift) mod n], at
local row offset + r div n, where each of the ranks has an offset of its own:

    table 0, 5 rows, ranks (0, 1)     table 1, 3 rows, ranks (1, 0)      local rows of device 0    of device 1
    rows 0 2 4 on device 0            rows 0 2 on device 1               0: t0 r0                  0: t0 r1
    rows 1 3   on device 1            row 1 on device 0                  1: t0 r2                  1: t0 r3
                                                                         2: t0 r4                  2: (unused)
                                                                         3: t1 r1                  3: t1 r0
                                                                         4: (unused)               4: t1 r2

Striping rows one by one spreads hot ids (small ones, where ids are sorted by frequency); the shift, by the place in
the stack, keeps short tables from all beginning on the same device. All devices have the local rows of the fullest one.

A copied stack is whole on every device: its members have no ranks and lie one after the other.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.embedding.config import (
    MOST_ROWS,
    UPDATED,
    Leaf,
    RowOptimizer,
    RowwiseAdagrad,
    TableConfig,
    row_states,
)
from scalejax.parallel.embedding.plan.placement import Slice, StackKey, stack_key


@dataclasses.dataclass(frozen=True)
class Member:
    """One table, or one column slice of a table, in its stack.

    Attributes:
      config: The table.
      start, stop: Its columns.
      number: Place in the stack.
      ranks: Devices that its rows are striped over; empty = on every device.
      offsets: First local row, on each of the ranks (one number if there are none).
      shift: Row 0 is on ranks[shift].
      local_rows: Local rows it occupies on each of the ranks.
    """

    config: TableConfig
    start: int
    stop: int
    number: int
    ranks: tuple[int, ...]
    offsets: tuple[int, ...]
    shift: int
    local_rows: int

    @property
    def parts(self) -> int:
        """Devices that the rows are striped over."""
        return max(1, len(self.ranks))

    @property
    def whole(self) -> bool:
        """Whether it has all columns of its table."""
        return self.stop - self.start == self.config.dim


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that share one array.

    Attributes:
      name: Key of the stack in the state.
      members: The tables.
      devices: Devices that the array is striped over; 1 = no exchange is needed.
      local_rows: Rows of one device.
      spread: "striped" over the devices, or "copied": whole on every device.
      update: For copied stacks, see `TablePlan`.
      hosts: Of the devices, host after host, where the exchange has a hop between hosts; 1 = it has not.
    """

    name: str
    members: tuple[Member, ...]
    devices: int
    local_rows: int
    spread: str
    update: str
    hosts: int = 1

    @property
    def in_host(self) -> int:
        """Devices of a host."""
        return self.devices // self.hosts

    @property
    def dim(self) -> int:
        return self.members[0].stop - self.members[0].start

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.members[0].config.dtype)

    @property
    def wide_dtype(self) -> jnp.dtype:
        """Dtype of sums, of the optimizer and of its state: float32, or wider where the rows are."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def optimizer(self) -> RowOptimizer:
        return self.members[0].config.optimizer

    @property
    def reads(self) -> QuantizationRule | None:
        """The number format that rows are read in."""
        return self.members[0].config.reads

    @property
    def stochastic(self) -> bool:
        """Whether updated rows are rounded stochastically."""
        return self.dtype.itemsize < 4 and self.members[0].config.rounding == "stochastic"

    @property
    def exchanges_statistics(self) -> bool:
        """Whether an update needs sums over columns that other members hold."""
        optimizer = self.optimizer
        return (
            isinstance(optimizer, RowwiseAdagrad)
            and optimizer.statistic == "row"
            and any(not member.whole for member in self.members)
        )

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The arrays that an optimizer step reads and writes, by kind: rows and their states."""
        return {"rows": "element", **row_states(self.optimizer)}

    @property
    def tracked(self) -> bool:
        """Whether rows carry the number of the update that last touched them."""
        return self.members[0].config.track == "updates"

    @property
    def arrays(self) -> dict[str, Leaf]:
        """All arrays of the stack, by kind."""
        return {**self.leaves, UPDATED: "row"} if self.tracked else self.leaves

    def leaf_dtype(self, name: str) -> jnp.dtype:
        """Dtype of one of `arrays`."""
        if name == UPDATED:
            return jnp.dtype(jnp.int32)
        return self.dtype if name == "rows" else self.wide_dtype

    def leaf_shape(self, kind: Leaf, rows: int) -> tuple[int, ...]:
        return (rows, self.dim) if kind == "element" else (rows,)

    @functools.cached_property
    def widths(self) -> np.ndarray:
        """int32[devices, members]: local rows of each member on each device; 0 where it has none."""
        widths = np.zeros((self.devices, len(self.members)), np.int32)
        for member in self.members:
            widths[list(member.ranks) if member.ranks else slice(None), member.number] = member.local_rows
        return widths

    @functools.cached_property
    def places(self) -> np.ndarray:
        """int32[devices, members]: place of each device among the ranks of each member; 0 where it has none."""
        places = np.zeros((self.devices, len(self.members)), np.int32)
        for member in self.members:
            places[list(member.ranks), member.number] = np.arange(len(member.ranks))
        return places

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int32[devices, members]: first local row of each member on each device; members lie in order."""
        return np.cumsum(self.widths, axis=1, dtype=np.int32) - self.widths


def stack_tables(
    tables: tuple[TableConfig, ...], slices: Mapping[str, tuple[Slice, ...]], devices: int, hosts: int = 1
) -> tuple[Stack, ...]:
    """Groups slices that agree in their `StackKey`, in order of first appearance; `hosts` as in `Stack`.

    Raises:
      UserError: a stack has more rows per device than an int32 can count.
    """
    groups: dict[StackKey, list[tuple[TableConfig, Slice]]] = {}
    for table in tables:
        for part in slices[table.name]:
            spread = "striped" if part.ranks else "copied"
            key = stack_key(table, part.stop - part.start, spread=spread, update=part.update)
            groups.setdefault(key, []).append((table, part))
    return tuple(_stack(number, key, parts, devices, hosts) for number, (key, parts) in enumerate(groups.items()))


def _stack(number: int, key: StackKey, parts: list[tuple[TableConfig, Slice]], devices: int, hosts: int) -> Stack:
    dim, dtype, *_, spread, update = key
    ends = [0] * (devices if spread == "striped" else 1)
    members = []
    for index, (config, part) in enumerate(parts):
        ranks = part.ranks
        local_rows = -(-config.rows // max(1, len(ranks)))
        offsets = tuple(ends[rank] for rank in ranks or (0,))
        members.append(
            Member(config, part.start, part.stop, index, ranks, offsets, index % max(1, len(ranks)), local_rows)
        )
        for rank in ranks or (0,):
            ends[rank] += local_rows
    if max(ends) > MOST_ROWS:
        names = ", ".join(dict.fromkeys(config.name for config, _ in parts))
        raise UserError(
            f"EmbeddingCollection: the tables {names} together have {max(ends):,} rows on one device; at most "
            f"{MOST_ROWS:,} can be addressed. Use more devices, or another plan."
        )
    return Stack(
        f"stack{number}_{dim}_{dtype}",
        tuple(members),
        len(ends) if spread == "striped" else 1,
        max(ends),
        spread,
        update,
        hosts if spread == "striped" else 1,
    )
