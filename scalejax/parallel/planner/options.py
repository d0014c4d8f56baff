"""All the ways in which a table may be sharded, under the user's constraints."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import refusal, refused_map
from scalejax.parallel.embedding.plan.sharding_plan import SLICED, Accumulate, Kind, Route, TablePlan
from scalejax.parallel.planner import estimators
from scalejax.parallel.planner.estimators import Option, TableWork
from scalejax.parallel.planner.topology import HostTopology

KINDS: tuple[Kind, ...] = get_args(Kind)

MIN_SLICE_WIDTH = 32
"""Narrower column slices are not proposed: each fetches whole granules and repeats ids and sort."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConstraints:
    """What the user allows for one table.

    Attributes:
      table: Name of the table.
      kinds: Allowed kinds; None = all.
      min_slice_width: Least width of a column slice.
      columns: Allowed numbers of column slices; None = all that divide the width.
      max_devices: Most devices that may hold a piece; None = no limit.
      host: Index of the mesh axis `replica` that all pieces must be on; "any" = one of them; None = they may be on
        several.
    """

    table: str
    kinds: tuple[Kind, ...] | None = None
    min_slice_width: int = MIN_SLICE_WIDTH
    columns: tuple[int, ...] | None = None
    max_devices: int | None = None
    host: int | Literal["any"] | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds or ():
            if kind not in KINDS:
                raise UserError(
                    f"TableConstraints {self.table!r}: kinds must be some of {', '.join(KINDS)}; got {kind!r}."
                )
        for name, least in (("min_slice_width", 1), ("max_devices", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"TableConstraints {self.table!r}: {name} must be at least {least}; got {value}.")
        if isinstance(self.host, str) and self.host != "any":
            raise UserError(
                f"TableConstraints {self.table!r}: host must be an index of the mesh axis replica, 'any' or None; got "
                f"{self.host!r}."
            )
        if any(count < 1 for count in self.columns or ()):
            raise UserError(f"TableConstraints {self.table!r}: columns must be at least 1; got {self.columns}.")


def check_constraints(tables: Sequence[TableConfig], constraints: Sequence[TableConstraints]) -> None:
    """Refuses constraints that could not be kept.

    Raises:
      UserError: a table that does not exist or is named twice, or a number of slices that does not divide its width.
    """
    by_name = {table.name: table for table in tables}
    seen: set[str] = set()
    for entry in constraints:
        if entry.table not in by_name:
            raise UserError(
                f"constraints: there is no table {entry.table!r}; the tables are {', '.join(by_name)}. Correct the "
                "name."
            )
        if entry.table in seen:
            raise UserError(f"constraints: table {entry.table!r} is named twice; give it one entry.")
        seen.add(entry.table)
        dim = by_name[entry.table].dim
        for count in entry.columns or ():
            if dim % count:
                raise UserError(
                    f"constraints: columns of table {entry.table!r} must divide its width of {dim}; got {count}. "
                    f"Divisors: {', '.join(map(str, divisors(dim)))}."
                )


def options(
    asked: TableWork,
    topology: HostTopology,
    constraint: TableConstraints | None = None,
    *,
    capacity_factor: float = 2.0,
    accumulate: Accumulate = "ordered",
    route: Route = "flat",
) -> tuple[Option, ...]:
    """Every way of sharding one table that is allowed and that the engine builds, each priced.

    The kinds that stay in one host need more hosts than one: with one host they are their plain forms. With several, a
    table that must stay on one has these, and `table_wise`.

    Args:
      asked: The work of the table.
      topology: The machine.
      constraint: What the user allows; None = everything.
      capacity_factor: As in `Exchange`.
      accumulate: As in `EmbeddingCollection`.
      route: As in `Exchange`.

    Raises:
      UserError: there is no such host. Nothing is left; says what the engine refuses and what would be possible. Or the
        table has an id map that the engine cannot cut over these devices.
    """
    limits = constraint or TableConstraints(table=asked.table.name)
    if (why := refused_map(asked.table, topology.devices)) is not None:
        raise UserError(f"plan: table {asked.table.name!r} {why}")
    in_host, hosts = topology.group_size, topology.groups
    if isinstance(limits.host, int) and not 0 <= limits.host < hosts:
        raise UserError(
            f"constraints: host of table {asked.table.name!r} must be an index of the mesh axis replica, 0 to "
            f"{hosts - 1} on this mesh; got {limits.host}."
        )
    bound = limits.host is not None and hosts > 1
    most = min(in_host if bound else topology.devices, limits.max_devices or topology.devices)
    slices = [
        count
        for count in divisors(asked.table.dim)
        if count > 1
        and asked.table.dim // count >= limits.min_slice_width
        and (limits.columns is None or count in limits.columns)
    ]
    whole = limits.columns is None or 1 in limits.columns
    shapes: list[tuple[Kind, int, int]] = []  # kind, columns, row parts
    refused: dict[Kind, str] = {}

    def offer(kind: Kind, columns: int, row_parts: int) -> None:
        why = refusal(
            asked.table,
            TablePlan(table=asked.table.name, kind=kind, columns=columns),
            devices=topology.devices,
            devices_per_host=in_host,
            accumulate=accumulate,
        )
        if why is None:
            shapes.append((kind, columns, row_parts))
        else:
            refused[kind] = why

    if whole:
        offer("table_wise", 1, 1)
        if not bound and (most > 1 or topology.devices == 1):
            offer("row_wise", 1, most)
    for count in slices:
        if count <= most and not bound:
            offer("column_wise", count, 1)
        if hosts > 1 and count <= min(in_host, most):
            offer("table_column_wise", count, 1)
        if 1 < hosts >= count and count * in_host <= most and not bound:
            offer("grid", count, in_host)
    if whole and hosts > 1 and in_host <= most:
        offer("table_row_wise", 1, in_host)
    if whole and most == topology.devices:
        offer("data_parallel", 1, 1)
    allowed = [shape for shape in shapes if limits.kinds is None or shape[0] in limits.kinds]
    if not allowed:
        possible = dict.fromkeys(kind for kind, _, _ in shapes)
        sliced = next((f" As {kind} the table {why}" for kind, why in refused.items() if kind in SLICED), "")
        raise UserError(
            f"constraints: table {asked.table.name!r} (width {asked.table.dim}) cannot be sharded as they ask (kinds "
            f"{', '.join(limits.kinds or KINDS)}; slices of at least {limits.min_slice_width}; columns "
            f"{limits.columns or 'any'}; at most {most} of {topology.devices} devices in {hosts} hosts"
            f"{', all of one host' if bound else ''}). With the rest "
            f"unchanged these kinds are possible: {', '.join(possible) or 'none'}. Loosen one of them."
            f"{sliced}"
        )
    return tuple(
        estimators.estimate(
            asked,
            topology,
            kind=kind,
            columns=columns,
            row_parts=row_parts,
            capacity_factor=capacity_factor,
            route=route,
            host=limits.host if isinstance(limits.host, int) else None,
        )
        for kind, columns, row_parts in allowed
    )


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [count for count in range(1, number + 1) if number % count == 0]
