"""Which host each tower lies on: as many towers on each, the busiest host as little busy as could be found.

A host is an index of the mesh axis `replica`. With one tower a host there is no choice. With several the most costly
towers are placed first, each on the least busy host with room, and then pairs are swapped while that helps. What a
tower costs is the least work of its tables on one host, as the planner prices it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.placement import towers_of_tables
from scalejax.parallel.planner.estimators import Option
from scalejax.parallel.planner.options import TableConstraints
from scalejax.parallel.planner.topology import HostTopology
from scalejax.parallel.towers import Partition


def on_one_host(
    towers: Partition, tables: Sequence[TableConfig], constraints: Sequence[TableConstraints]
) -> tuple[TableConstraints, ...]:
    """Constraints by which every table stays on one host, and all tables of a tower on the same if one names it.

    Raises:
      UserError: the towers are of other features, share a table, or have tables that must be on two hosts.
    """
    numbers = towers_of_tables(towers, tables, "--towers")
    given = {entry.table: entry for entry in constraints}
    fixed: dict[int, tuple[int, str]] = {}
    for table in tables:
        host = given[table.name].host if table.name in given else None
        if not isinstance(host, int):
            continue
        first, other = fixed.setdefault(numbers[table.name], (host, table.name))
        if first != host:
            raise UserError(
                f"constraints: tower {numbers[table.name]} would be on two indices of the mesh axis replica, with "
                f"table {other!r} on {first} and {table.name!r} on {host}. Give the tables of a tower one."
            )
    return tuple(
        dataclasses.replace(
            given.get(table.name, TableConstraints(table=table.name)),
            host=fixed.get(numbers[table.name], ("any", ""))[0],
        )
        for table in tables
    )


def in_order_of_hosts(
    towers: Partition,
    tables: Sequence[TableConfig],
    choices: Mapping[str, Sequence[Option]],
    topology: HostTopology,
) -> Partition:
    """The towers in the order of the hosts that they shall lie on.

    Args:
      towers: The towers.
      tables: All tables.
      choices: The ways of sharding each on one host, by name.
      topology: The machine.

    Raises:
      UserError: the towers do not go evenly on the hosts, or more must be on one than have room.
    """
    count, numbers = topology.groups, towers_of_tables(towers, tables, "--towers")
    room = towers.on_hosts(count).each
    work, fixed = [0.0] * len(towers.towers), {}
    for name in sorted(choices):
        work[numbers[name]] += min(option.work_s(topology.devices) for option in choices[name])
        if choices[name][0].host is not None:
            fixed[numbers[name]] = choices[name][0].host
    if room == 1 and not fixed:
        return towers
    found = dict(fixed)
    for tower in sorted(range(len(work)), key=lambda t: (-work[t], t)):
        if tower not in found:
            free = [h for h in range(count) if list(found.values()).count(h) < room]
            found[tower] = min(free, key=lambda h: (sum(work[t] for t, at in found.items() if at == h), h))
    crowded = [h for h in range(count) if list(found.values()).count(h) > room]
    if crowded:
        raise UserError(
            f"constraints: {list(found.values()).count(crowded[0])} towers must be on index {crowded[0]} of the mesh "
            f"axis replica, and {room} have room: each has as many. Let the planner choose the host of some."
        )
    _swap(found, work, count, frozenset(fixed))
    # Hosts are alike: without any that is given they come in the order of their first towers.
    order = list(range(count)) if fixed else list(dict.fromkeys(found[t] for t in sorted(found)))
    return Partition(towers=tuple(towers.towers[t] for t in sorted(found, key=lambda t: (order.index(found[t]), t))))


def _swap(found: dict[int, int], work: Sequence[float], count: int, fixed: frozenset[int]) -> None:
    """Swaps a tower of the busiest host with another while the busier of the two hosts becomes less busy by it."""
    while True:
        busy = [sum(work[t] for t, at in found.items() if at == h) for h in range(count)]
        most = max(range(count), key=lambda h: busy[h])
        swaps = [
            (max(busy[most] - work[a] + work[b], busy[found[b]] + work[a] - work[b]), a, b)
            for a in found
            for b in found
            if found[a] == most != found[b] and not fixed & {a, b}
        ]
        best = min(swaps, default=None)
        if best is None or best[0] >= busy[most] * (1 - 1e-9):
            return
        _, a, b = best
        found[a], found[b] = found[b], found[a]
