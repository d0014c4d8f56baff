"""Where the rows of each table live, and how much room an exchange has."""

import dataclasses
from typing import Literal

from scalejax.errors import UserError

Kind = Literal[
    "row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel"
]

KINDS = ("row_wise",)
"""Kinds that an `EmbeddingCollection` can run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Room in the routed all_to_all.

    Attributes:
      capacity_factor: Slots per destination, as a multiple of what evenly spread ids would need.
      roomy_below_bytes: While the rows of one exchange take at most this many bytes on a device even with room for the
        worst case (all ids go to one device), they get that room, and no batch can be too uneven. Larger exchanges go
        by `capacity_factor`, so that memory per device falls as devices are added.
    """

    capacity_factor: float = 2.0
    roomy_below_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.capacity_factor >= 1.0:
            raise UserError(
                f"Exchange: capacity_factor must be at least 1, what evenly spread ids need; got "
                f"{self.capacity_factor}. Set it with --set exchange.capacity_factor=2."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """How one table is sharded.

    Attributes:
      table: Name of the table.
      kind: What is cut and where the pieces go.
      ranks: Devices by number in the group, the flat index over the mesh axes that shard tables. row_wise: rows are
        dealt out over them (None = all); table_wise: one; column_wise: one per slice; table_row_wise: the devices of
        one host; table_column_wise: one per slice, all in one host; grid: the devices of one host for the first slice,
        then of another for the second, and so on; data_parallel: None.
      columns: Number of equal column slices (column_wise, table_column_wise, grid).
      location: Memory that holds the rows.
    """

    table: str
    kind: Kind = "row_wise"
    ranks: tuple[int, ...] | None = None
    columns: int = 1
    location: Literal["device"] = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How every table is sharded; tables that are not named are row-wise.

    Attributes:
      tables: One entry per table that is named.
    """

    tables: tuple[TablePlan, ...] = ()

    def check(self, tables: tuple[str, ...]) -> None:
        """Refuses what cannot be built.

        Raises:
          UserError: a table that does not exist or is named twice, or a kind that does not exist.
        """
        named = [entry.table for entry in self.tables]
        for entry in self.tables:
            if entry.table not in tables:
                raise UserError(
                    f"ShardingPlan: there is no table {entry.table!r}; the collection has {', '.join(tables)}."
                )
            if named.count(entry.table) > 1:
                raise UserError(f"ShardingPlan: table {entry.table!r} is named twice; give it one entry.")
            if entry.kind not in KINDS:
                raise UserError(
                    f"ShardingPlan: table {entry.table!r} has kind {entry.kind!r}; known kinds: {', '.join(KINDS)}."
                )
