"""Bytes by the level of the links that they cross: within an index of the mesh axis `replica`, or between two."""

import dataclasses
import math
from collections.abc import Mapping

from scalejax.units import size

SLOW_AXIS = "replica"
"""The mesh axis between whose indices links are slow."""


@dataclasses.dataclass(frozen=True)
class SentBytes:
    """The least that a device sends, on average over devices.

    Attributes:
      within: To devices of its index of `replica`.
      between: To those of others.
    """

    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(self.within + other.within, self.between + other.between)


def levels(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Indices of `replica` along mesh axes, and devices in each."""
    hosts = sizes[SLOW_AXIS] if SLOW_AXIS in axes else 1
    return hosts, math.prod(sizes[axis] for axis in axes) // hosts


def sent(kind: str, payload: float, hosts: int, local: int) -> SentBytes:
    """What a collective sends over `hosts` indices of `replica` with `local` devices each.

    Where it spans both levels no byte crosses to another index more often than it must: sums within come first, and
    what is gathered is handed on within. An all_to_all sends each part to its device.

    Args:
      kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all"; others (a permute) send all of it.
      payload: The larger of what a device puts in and takes out.
      hosts: Indices of `replica` in a group.
      local: Devices of each.
    """
    if kind == "all-to-all":
        return SentBytes(payload * (local - 1) / (hosts * local), payload * (hosts - 1) / hosts)
    once = SentBytes(payload * (local - 1) / local, payload * (hosts - 1) / (hosts * local))
    if kind == "all-reduce":
        return once + once
    if kind in ("all-gather", "reduce-scatter"):
        return once
    return SentBytes(between=payload) if hosts > 1 else SentBytes(within=payload)


def described(name: str, parts: Mapping[str, SentBytes]) -> str:
    """What a strategy sends, as a sentence.

    Args:
      name: Of the strategy.
      parts: What travels -> its bytes.
    """
    total = sum(parts.values(), SentBytes())
    apart = "; ".join(f"{what} {size(part.within)} and {size(part.between)}" for what, part in parts.items())
    return (
        f"{name}: each device sends at least {size(total.within)} a step within its host (an index of {SLOW_AXIS}) and "
        f"{size(total.between)} to other hosts" + (f" ({apart})." if len(parts) > 1 else ".")
    )
