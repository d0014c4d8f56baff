"""Row plans made on the host, as part of a batch: sorting ids by row needs nothing but the ids.

Only where one device, a CPU, holds all tables: there XLA sorts several times slower than NumPy, and the input thread
has the time. Where ids are exchanged they are sorted by the device that they arrive at, in the step before.
"""

import numpy as np

from scalejax.kernels.embedding_bag import RowPlan
from scalejax.kernels.embedding_bag.host_row_plan import narrow_plan, plan_tables_host
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.ids.occurrences import Lookup, lookups
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.parallel.embedding.update.rows import alike


class Room:
    """Room for distinct rows in the plans of a run: that of the fullest batch so far and a quarter more.

    A batch names far fewer rows than it has ids, and an update takes time for every place. Shapes of arrays are shapes
    of programs, so room grows and never shrinks: a run compiles its step once, and again each time that a batch has
    more distinct rows than a group of tables has room for. Results do not depend on it.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[str, int, int], int] = {}

    def of(self, stack: str, group: int, occurrences: int, distinct: int) -> int:
        """Places for `distinct` rows of a group of tables that have so many occurrences."""
        key = (stack, group, occurrences)
        if distinct > self._of.get(key, 0):
            self._of[key] = -(-5 * distinct // (4 * _STEP)) * _STEP
        return self._of.get(key, _STEP)


_STEP = 64


def plans(
    stacks: tuple[Stack, ...], packed: DeviceJagged, room: Room | None = None
) -> dict[str, tuple[RowPlan | None, ...]]:
    """{stack: a plan for every group of `update.alike`}: order and slots int32[T, N], rows int32[T, U], in NumPy.

    None for groups with a table that has an id map: the host does not know its rows.

    Args:
      stacks: On one device.
      packed: One shard, with ids in range.
      room: Of the run; None = for whatever ids there may be.
    """
    found = {stack.name: lookups(stack, packed.layout) for stack in stacks}
    return {stack.name: tuple(_plans(stack, packed, found[stack.name], room)) for stack in stacks}


def _plans(stack: Stack, packed: DeviceJagged, found: tuple[Lookup, ...], room: Room | None) -> list[RowPlan | None]:
    made: list[RowPlan | None] = []
    for number, members in enumerate(alike(stack, found)):
        if any(member.config.id_map is not None for member in members):
            made.append(None)
            continue
        bound = max(member.local_rows for member in members)
        rows = np.stack([_rows(member, packed, found, bound) for member in members])
        most = min(bound, rows.shape[1])
        plan = plan_tables_host(rows, bound, most)
        if room is not None:
            distinct = int((plan.rows < bound).sum(axis=1).max())
            plan = narrow_plan(plan, min(most, room.of(stack.name, number, rows.shape[1], distinct)))
        made.append(plan)
    return made


def _rows(member: Member, packed: DeviceJagged, found: tuple[Lookup, ...], nowhere: int) -> np.ndarray:
    """Row of every occurrence of one table, in summation order; `nowhere` for unused slots."""
    looks, shard = [look for look in found if look.member is member], packed.shard()
    rows, bags = [], []
    for look in looks:
        feature = look.feature
        ids, counts = np.asarray(shard.ids(feature)), np.asarray(shard.counts(feature))
        used = int(counts.sum())
        rows.append(ids if used == ids.size else np.where(np.arange(ids.size) < used, ids, nowhere))
        if len(looks) > 1:
            of = np.full(ids.size, feature.bags)
            of[:used] = np.repeat(np.arange(feature.bags), counts)
            bags.append(of)
    joined = np.concatenate(rows)
    if len(looks) == 1 or len({look.feature.group for look in looks}) > 1:
        return joined
    return joined[np.argsort(np.concatenate(bags), kind="stable")]
