"""Whether the tables fit, before anything is allocated.

Counts rows and row states of the fullest device, padding included, as they are allocated; what a step needs comes on top.
"""

from collections import Counter
from collections.abc import Iterable

from scalejax.errors import UserError
from scalejax.parallel.embedding.plan import row_bytes
from scalejax.parallel.embedding.stacks import Member, Stack
from scalejax.units import size

_SHOWN = 3


def device_bytes(stacks: Iterable[Stack]) -> int:
    """Bytes of all tables on one device; every device has the local rows of the fullest one."""
    return sum(stack.local_rows * _row_bytes(stack.members[0]) for stack in stacks)


def largest_tables(stacks: Iterable[Stack]) -> dict[str, int]:
    """Bytes of each table on the device that has most of it, the largest first."""
    found: dict[str, Counter[int]] = {}
    for stack in stacks:
        for member in stack.members:
            held = found.setdefault(member.config.name, Counter())
            for rank in member.ranks or (0,):
                held[rank] += member.local_rows * _row_bytes(member)
    most = {name: max(held.values()) for name, held in found.items()}
    return dict(sorted(most.items(), key=lambda entry: (-entry[1], entry[0])))


def check_fits(stacks: tuple[Stack, ...], room: int, devices: int) -> None:
    """Refuses tables that a device has no room for.

    Args:
      stacks: Of a collection.
      room: Bytes of a device.
      devices: Of the mesh.

    Raises:
      UserError: rows and states take more; says which tables, by how much, and what helps.
    """
    wanted = device_bytes(stacks)
    if wanted <= room:
        return
    raise UserError(
        f"The embedding tables take {size(wanted)} on each of {devices} device(s), which has {size(room)}: "
        f"{size(wanted - room)} too much. {describe_largest(stacks)}. Rows that are dealt out evenly need at least "
        f"{-(-wanted * devices // room)} such devices; otherwise set fewer rows, a narrower dtype (--set "
        "precision.tables=bfloat16) or an optimizer with less state, or let `scalejax shard` choose a plan."
    )


def describe_largest(stacks: tuple[Stack, ...]) -> str:
    """The largest tables, in words."""
    shown = list(largest_tables(stacks).items())[:_SHOWN]
    return "The largest tables, on the device that has most of each: " + ", ".join(f"{name} {size(count)}" for name, count in shown)


def _row_bytes(member: Member) -> int:
    return row_bytes(member.config, member.stop - member.start)
