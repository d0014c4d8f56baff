"""A check that the tables fit, before anything is allocated.

Counts rows, row states and id maps of the fullest device, padding included, as they are allocated; what a step needs
comes on top.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import row_bytes
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.units import size

_SHOWN = 3
_GPUS = ("gpu", "cuda", "rocm")


def device_bytes(stacks: Sequence[Stack], devices: int) -> int:
    """Bytes of all tables on one device; every device has the local rows of the fullest one.

    Args:
      stacks: Of a collection.
      devices: Of the mesh.
    """
    rows = sum(stack.local_rows * _row_bytes(stack.members[0]) for stack in stacks)
    return rows + sum(_map_bytes(table, devices) for table in _tables(stacks))


def largest_tables(stacks: Sequence[Stack], devices: int) -> dict[str, int]:
    """Bytes of each table on the device that has most of it, the largest first; arguments as `device_bytes`."""
    found: dict[str, Counter[int]] = {}
    for stack in stacks:
        for member in stack.members:
            held = found.setdefault(member.config.name, Counter())
            for rank in member.ranks or (0,):
                held[rank] += member.local_rows * _row_bytes(member)
    most = {t.name: max(found[t.name].values()) + _map_bytes(t, devices) for t in _tables(stacks)}
    return dict(sorted(most.items(), key=lambda entry: (-entry[1], entry[0])))


def check_fits(stacks: tuple[Stack, ...], room: int, devices: int, *, copies: int = 1, platform: str = "cpu") -> None:
    """Refuses tables that a device has no room for.

    Args:
      stacks: Of a collection.
      room: Bytes of a device.
      devices: Of the mesh.
      copies: Of the tables on the mesh.
      platform: Of the devices, as jax names it.

    Raises:
      UserError: rows, states and id maps take more; says which tables, by how much, and what helps.
    """
    wanted = device_bytes(stacks, devices)
    if wanted <= room:
        return
    pool = (
        " in XLA's pool (three quarters of a GPU, unless the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION sets "
        "another share)"
    )
    raise UserError(
        f"The embedding tables take {size(wanted)} on each of {devices} device(s), which has {size(room)}"
        f"{pool if platform in _GPUS else ''}: {size(wanted - room)} too much. {describe_largest(stacks, devices)}. "
        f"{_what_helps(_tables(stacks), room, devices, copies)}"
    )


def _what_helps(tables: Sequence[TableConfig], room: int, devices: int, copies: int) -> str:
    for over, how in ((devices // copies, "kind='row_wise'"), (devices, "replicas='shard' and kind='row_wise'")):
        if (each := _sharded_bytes(tables, over, devices)) <= room:
            return (
                f"Rows that are striped over {over} devices take {size(each)} on each: set {how} in the "
                "ShardingPlan, or let `scalejax shard` choose a plan."
            )
    least = _fewest_devices(tables, room)
    if least is None:
        more = "Not even a row of each has room on one device"
    else:
        alone = "" if copies == 1 else " and replicas='shard'"
        more = f"Rows that are striped evenly need at least {least} such devices{alone}"
    return (
        f"{more}; otherwise set fewer rows, a narrower dtype (--set tables.dtype=bfloat16) or an optimizer with less "
        "state."
    )


def _sharded_bytes(tables: Sequence[TableConfig], over: int, devices: int) -> int:
    """Bytes on the fullest device if every table is striped by rows over `over` of the devices of a mesh."""
    return sum(-(-table.rows // over) * row_bytes(table) + _map_bytes(table, devices) for table in tables)


def _fewest_devices(tables: Sequence[TableConfig], room: int) -> int | None:
    """The smallest mesh with room for one copy, striped over all of it; None where no number is enough."""
    most = max(table.rows for table in tables)
    numbers = range(1, most + 1)
    before = bisect.bisect_left(numbers, True, key=lambda number: _sharded_bytes(tables, number, number) <= room)
    return None if before == most else before + 1


def describe_largest(stacks: tuple[Stack, ...], devices: int) -> str:
    """The largest tables, in words; arguments as `device_bytes`."""
    shown = list(largest_tables(stacks, devices).items())[:_SHOWN]
    return "The largest tables, on the device that has most of each: " + ", ".join(
        f"{name} {size(count)}" for name, count in shown
    )


def _tables(stacks: Sequence[Stack]) -> list[TableConfig]:
    return list({m.config.name: m.config for stack in stacks for m in stack.members}.values())


def _map_bytes(table: TableConfig, devices: int) -> int:
    return 0 if table.id_map is None else table.id_map.device_bytes(devices)


def _row_bytes(member: Member) -> int:
    return row_bytes(member.config, member.stop - member.start)
