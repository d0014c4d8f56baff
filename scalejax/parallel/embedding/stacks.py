"""Stacked tables: geometry of the arrays that hold them, without any array.

Tables of equal width, dtype and optimizer lie in one array, so that a hundred tables cost one exchange. Over N
devices, table number t of a stack keeps row r on device (r + t) mod N, at local row offset_t + r div N:

    table 0, 5 rows, N = 2        table 1, 3 rows        local rows of device 0    of device 1
    rows 0 2 4 on device 0        row 1 on device 0      0: t0 r0                  0: t0 r1
    rows 1 3   on device 1        rows 0 2 on device 1   1: t0 r2                  1: t0 r3
                                                         2: t0 r4                  2: (unused)
                                                         3: t1 r1                  3: t1 r0
                                                         4: (unused)               4: t1 r2

Dealing rows out one by one spreads hot ids (small ones, where ids are sorted by frequency); the shift by t keeps
short tables from all beginning on device 0.
"""

import dataclasses

import jax.numpy as jnp

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import RowOptimizer, TableConfig


@dataclasses.dataclass(frozen=True)
class Member:
    """One table in its stack.

    Attributes:
      config: The table.
      shift: Device of its row 0.
      offset: Its first local row, equal on all devices.
      local_rows: Local rows it occupies, the same on every device.
    """

    config: TableConfig
    shift: int
    offset: int
    local_rows: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that share one array.

    Attributes:
      name: Key of the stack in the state.
      members: The tables.
      local_rows: Rows of one device.
    """

    name: str
    members: tuple[Member, ...]
    local_rows: int

    @property
    def dim(self) -> int:
        return self.members[0].config.dim

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


def stack_tables(tables: tuple[TableConfig, ...], devices: int) -> tuple[Stack, ...]:
    """Groups tables of equal width, dtype and optimizer, in order of first appearance.

    Raises:
      UserError: a stack has more rows per device than an int32 can count.
    """
    groups: dict[tuple[int, str, RowOptimizer], list[TableConfig]] = {}
    for table in tables:
        groups.setdefault((table.dim, str(jnp.dtype(table.dtype)), table.optimizer), []).append(table)
    stacks = []
    for number, ((dim, dtype, _), configs) in enumerate(groups.items()):
        members, offset = [], 0
        for index, config in enumerate(configs):
            local_rows = -(-config.rows // devices)
            members.append(Member(config, index % devices, offset, local_rows))
            offset += local_rows
        if offset > 2**31 - 2**24:  # fillers of an update need room above the last row
            raise UserError(
                f"EmbeddingCollection: the tables {', '.join(c.name for c in configs)} together have {offset:,} rows "
                f"per device; at most {2**31 - 2**24:,} can be addressed. Use more devices."
            )
        stacks.append(Stack(f"stack{number}_{dim}_{dtype}", tuple(members), offset))
    return tuple(stacks)
