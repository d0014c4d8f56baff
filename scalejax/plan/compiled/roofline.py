"""The least time that a step can take: the largest of compute, memory, links and network, each at its peak.

A lower bound with everything overlapped, from published peaks, not a forecast: it says what a step runs out of first
and what doubling something does to it. XLA's `optimal_seconds` is not used (it can be negative).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scalejax.numerics.flops import MatmulFlops
from scalejax.plan.compiled.collectives import Collective, Groups
from scalejax.plan.compiled.traffic import Traffic
from scalejax.plan.topology import DeviceLayout, Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds that each resource is busy in one step.

    Attributes:
      compute_s: Matrix products at the peak of their dtype.
      hbm_s: Main memory.
      ici_s: Links between chips, one collective after the other.
      dcn_s: Network between slices.
    """

    compute_s: float
    hbm_s: float
    ici_s: float
    dcn_s: float

    @property
    def predicted_step_s(self) -> float:
        """The largest of them."""
        return max(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """Name of the largest of them: "compute", "hbm", "ici" or "dcn"."""
        terms = {name.removesuffix("_s"): value for name, value in dataclasses.asdict(self).items()}
        return max(terms, key=lambda name: terms[name])


def predict(
    topology: Topology,
    mesh: "Mesh | DeviceLayout",
    flops: MatmulFlops,
    traffic: Traffic,
    collectives: Sequence[Collective],
) -> Roofline:
    """Divides the work of a step by the peaks of the chips.

    Args:
      topology: The machine.
      mesh: How the program lies on it.
      flops: Matrix work of all devices, from the trace.
      traffic: Work of one device, from the compiled program.
      collectives: Communication of one device, from the compiled program.
    """
    chip = topology.chip
    # The trace sees kernels, the compiled program sees recomputation and work repeated on several devices: each may
    # miss what the other has, neither counts too much.
    traced = sum(
        work / (topology.chips * chip.matmul_flops_per_s(dtype, precision))
        for (dtype, precision), work in flops.by_kind.items()
    )
    # The compiled program does not say in which dtype: at the highest peak, so that this stays a lower bound.
    executed = traffic.matmul_flops * chip.devices_per_chip / max(chip.bf16_flops_per_s, chip.int8_ops_per_s or 0.0)
    times = [collective_seconds(c, topology, mesh) for c in collectives]
    return Roofline(
        compute_s=max(traced, executed),
        hbm_s=traffic.hbm_bytes * chip.devices_per_chip / chip.hbm_bytes_per_s,
        ici_s=math.fsum(ici for ici, _ in times),
        dcn_s=math.fsum(dcn for _, dcn in times),
    )


def collective_seconds(collective: Collective, topology: Topology, mesh: "Mesh | DeviceLayout") -> tuple[float, float]:
    """Seconds on the links between chips and on the network between slices.

    On a torus a group that spans k axes can use all their links at once: two an axis that closes to a ring, one
    otherwise. An all_to_all is also limited by the middle of its longest axis: half of all bytes cross it.
    """
    if not collective.axes or not collective.count:
        return 0.0, 0.0
    group = _place(collective.groups, mesh)
    payload = collective.bytes / collective.count
    chip = topology.chip
    dcn = _bytes_between_slices(collective.kind, payload, group)
    # Devices of one chip share its link to the network.
    dcn_s = dcn * chip.devices_per_chip / chip.dcn_bytes_per_s
    return collective.count * _ici_seconds(collective.kind, payload, group, topology), collective.count * dcn_s


@dataclasses.dataclass(frozen=True)
class _Group:
    """Where one group lies.

    Attributes:
      slices: Slices that it spans.
      members: Devices in its first slice.
      chips: Chips in its first slice.
      extents: Chips along each physical axis.
    """

    slices: int
    members: int
    chips: int
    extents: tuple[int, ...]


def _place(groups: Groups, mesh: "Mesh | DeviceLayout") -> _Group:
    """Where the widest group lies (of a permute: the pair that is furthest apart)."""
    devices = list(mesh.devices.flat)
    coordinates = np.array([tuple(d.coords) for d in devices])
    slices = np.array([getattr(d, "slice_index", 0) for d in devices])
    widest = None
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_length.setdefault(len(set(group)), []).append(tuple(dict.fromkeys(group)))
    for alike in by_length.values():
        members = np.array(alike)  # group, member
        spans = _distinct(slices[members])
        first = slices[members] == slices[members].min(axis=1, keepdims=True)
        # A group counts with its part in its first slice; other members are put on top of one there.
        inside = np.take_along_axis(members, np.where(first, np.arange(members.shape[1]), first.argmax(1)[:, None]), 1)
        places = coordinates[inside]  # group, member, axis
        numbers = np.ravel_multi_index(tuple(places.transpose(2, 0, 1)), tuple(coordinates.max(axis=0) + 1))
        chips = _distinct(np.asarray(numbers))
        index = max(range(len(alike)), key=lambda i: (spans[i], chips[i]))
        extents = tuple(int(_distinct(places[index : index + 1, :, axis])[0]) for axis in range(places.shape[2]))
        found = _Group(int(spans[index]), int(first[index].sum()), int(chips[index]), extents)
        if widest is None or (found.slices, found.chips) > (widest.slices, widest.chips):
            widest = found
    assert widest is not None  # a collective has at least one group
    return widest


def _distinct(values: np.ndarray) -> np.ndarray:
    """Different values in each row, [R, N] -> [R]."""
    ordered = np.sort(values, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def _bytes_between_slices(kind: str, payload: float, group: _Group) -> float:
    """Bytes that one device sends to other slices when the part inside a slice is done first."""
    if group.slices == 1:
        return 0.0
    if kind == "collective-permute":
        return payload
    share = payload * (group.slices - 1) / group.slices
    if kind in ("all-to-all", "ragged-all-to-all"):
        return share
    return share / group.members * (2 if kind == "all-reduce" else 1)


def _ici_seconds(kind: str, payload: float, group: _Group, topology: Topology) -> float:
    chip, shape = topology.chip, topology.shape
    if group.chips == 1:
        return 0.0  # between the devices of one chip: no link, the memory counts it
    # As many groups share the links of a chip as it has devices that are not in this one.
    per_chip = group.members / group.chips
    sharing = chip.devices_per_chip / per_chip
    rings = [
        chip.wraps(shape, axis) and extent == shape[axis] for axis, extent in enumerate(group.extents[: len(shape)])
    ]
    used = [2 if ring else 1 for ring, extent in zip(rings, group.extents, strict=False) if extent > 1]
    if kind in ("collective-permute", "collective-broadcast"):
        return payload * chip.devices_per_chip / chip.link_bytes_per_s  # one link to the neighbour
    injected = payload * (group.chips - 1) / group.chips
    if kind in ("all-to-all", "ragged-all-to-all"):
        longest = max(range(len(rings)), key=lambda axis: group.extents[axis] / (2 if rings[axis] else 1))
        middle = payload * group.extents[longest] / (4 * (2 if rings[longest] else 1))
        return max(injected / sum(used), middle) * per_chip * sharing / chip.link_bytes_per_s
    return (2 if kind == "all-reduce" else 1) * injected * sharing / sum(used) / chip.link_bytes_per_s
