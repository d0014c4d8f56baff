"""Proposals: an option for each table, to be partitioned and judged by the busiest device.

A proposal is one option for every table. In the order in which they are tried:

- *every combination*, where there are few;
- *uniform*: every table in the same kind where its constraints allow it, else in its cheapest option;
- *limited*: for a limit of seconds, every table in the option that costs all devices together least among those whose
  single piece stays below the limit. Without a limit that is the least work of all, unevenly spread; the lower the
  limit, the more tables are cut, and the more is paid for cutting. One number to search instead of one choice per
  table, and a second one, a limit on the bytes of a piece, where memory is short;
- *least memory*: every table in the option that leaves least bytes on a device, for machines that are nearly full;
- *greedy*: from the best so far, the largest piece of the busiest device is cut finer, again and again.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from scalejax.parallel.embedding.plan.sharding_plan import Kind
from scalejax.parallel.planner.estimators import Option
from scalejax.parallel.planner.options import KINDS
from scalejax.parallel.planner.partition import ShardPlacement
from scalejax.parallel.planner.topology import HostTopology

Choices = Sequence[Sequence[Option]]
"""All options of every table."""

Proposal = tuple[int, ...]
"""One option of every table, by number."""

MOST_COMBINATIONS = 512
"""Every combination is tried up to so many."""

LIMITS = (math.inf, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.08)
"""Limits on the seconds of a piece, as multiples of what the busiest device has at least."""

SHARES = (1.0, 1 / 3, 1 / 8, 1 / 32)
"""Limits on the bytes of a piece, as shares of the memory of a device."""


def combinations(choices: Choices) -> Iterator[tuple[str, Proposal]]:
    """Every combination, if there are at most 512."""
    if math.prod(len(found) for found in choices) <= MOST_COMBINATIONS:
        for proposal in itertools.product(*(range(len(found)) for found in choices)):
            yield "every combination", proposal


def uniform(choices: Choices, devices: int) -> Iterator[tuple[str, Proposal]]:
    """One proposal for each kind that any table may have."""
    for kind in KINDS:
        if any(option.kind == kind for found in choices for option in found):
            yield f"uniform {kind}", tuple(_cheapest_of_kind(found, kind, devices) for found in choices)


def limited(choices: Choices, topology: HostTopology) -> Iterator[tuple[str, list[Proposal]]]:
    """For each limit on the seconds of a piece proposals with ever lower limits on its bytes: a lower one is more work,
    and of use only where the others do not fit."""
    least = lower_bound(choices, topology.devices)
    for multiple in LIMITS:
        name = "least work" if math.isinf(multiple) else f"pieces below {multiple:g} of the bound"
        limits = [(multiple * least, share * topology.memory_bytes) for share in SHARES]
        yield name, [tuple(_cheapest_below(found, *limit, topology.devices) for found in choices) for limit in limits]


def least_memory(choices: Choices, devices: int) -> Iterator[tuple[str, Proposal]]:
    """Every table in the option that leaves least bytes on a device."""

    def bytes_left(option: Option) -> tuple[float, float]:
        held = option.rows * option.row_bytes * (devices if option.kind == "data_parallel" else 1)
        return held + option.shard_buffers + option.everywhere_buffers, option.work_s(devices)

    yield "least memory", tuple(min(range(len(found)), key=lambda i: bytes_left(found[i])) for found in choices)


def finer(choices: Choices, proposal: Proposal, placement: ShardPlacement, devices: int) -> Proposal | None:
    """The proposal with the largest piece of the busiest device cut finer; None if nothing there can be."""
    busiest = int(placement.seconds.argmax())
    pieces = [
        (options[chosen].shard.total, table)
        for table, (options, chosen) in enumerate(zip(choices, proposal, strict=True))
        if busiest in placement.ranks[table]
    ]
    for seconds, table in sorted(pieces, key=lambda piece: (-piece[0], choices[piece[1]][0].table)):
        smaller = [i for i, option in enumerate(choices[table]) if option.shard.total < seconds * (1 - 1e-9)]
        if smaller:
            chosen = min(smaller, key=lambda i: (choices[table][i].work_s(devices), i))
            return (*proposal[:table], chosen, *proposal[table + 1 :])
    return None


def mean_of_least_work(choices: Choices, devices: int) -> float:
    """Seconds of a device if every table took its cheapest option and all were spread evenly: no plan is below."""
    return math.fsum(min(option.work_s(devices) for option in found) for found in choices) / devices


def lower_bound(choices: Choices, devices: int) -> float:
    """Seconds that the busiest device of any plan has at least: the mean of the least work, or a piece that must be."""
    piece = max(min(option.shard.total + option.everywhere.total for option in found) for found in choices)
    return max(mean_of_least_work(choices, devices), piece)


def _cheapest_of_kind(found: Sequence[Option], kind: Kind, devices: int) -> int:
    of_kind = [i for i, option in enumerate(found) if option.kind == kind]
    return min(of_kind or range(len(found)), key=lambda i: (found[i].work_s(devices), i))


def _cheapest_below(found: Sequence[Option], seconds: float, held: float, devices: int) -> int:
    """Least work within both limits; else what exceeds them least."""

    def excess(option: Option) -> float:
        piece = option.shard.total + option.everywhere.total
        return max(piece / seconds if seconds else 0.0, option.rows * option.row_bytes / held)

    below = [i for i, option in enumerate(found) if excess(option) <= 1]
    if below:
        return min(below, key=lambda i: (found[i].work_s(devices), i))
    return min(range(len(found)), key=lambda i: (excess(found[i]), i))
