"""Every collective of a compiled program: kind, mesh axes, bytes, how often, and the least that must cross a link.

"Is this really FSDP?" becomes a table. The forms that XLA writes differ by chip and size: plain and start/done pairs,
`call-start` to a SparseCore (tpu7x), `AsyncCollectiveStart` fusions that repeat one collective three times (v5e), host
transfers between slices (Megascale). All of them end up as the same `Collective`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from scalejax import units
from scalejax.parallel import links
from scalejax.parallel.links import SLOW_AXIS, SentBytes
from scalejax.plan.compiled import hlo

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Compiled

    from scalejax.plan.topology import DeviceLayout

Kind = Literal[
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
]  # fmt: skip
_KINDS: tuple[Kind, ...] = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_MEGASCALE: dict[str, Kind] = {
    "ALL_GATHER": "all-gather", "ALL_REDUCE": "all-reduce", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute",
}  # fmt: skip

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a step, on one device.

    Attributes:
      kind: What it does.
      axes: Mesh axes along which its groups extend; empty if each group is one device.
      group_size: Devices per group (for a permute: devices along `axes`).
      bytes: Payload of all executions: what a device gathers, reduces, scatters or sends, the larger of input and
        output.
      count: Executions a step.
      minimum_bytes: The least that a device must send for them, whatever the algorithm: (n-1)/n of the payload, twice
        that for an all-reduce (Patarasuk and Yuan 2009), all of it for a permute.
      trip_count_known: False if a loop around it has no readable trip count; `count` then takes the body once.
      groups: Positions in the flattened mesh that talk to each other; pairs (source, target) for a permute.
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    count: int
    minimum_bytes: int
    trip_count_known: bool
    groups: Groups = dataclasses.field(repr=False)

    @property
    def axis(self) -> str:
        """The axes as one word, "replica+fsdp"; "none" if no data moves."""
        return "+".join(self.axes) or "none"


def explain_sharding(compiled: "Compiled", mesh: "Mesh | None" = None) -> list[Collective]:
    """Lists the collectives of a compiled program.

    Args:
      compiled: What `jitted.lower(...).compile()` returned, for any platform.
      mesh: Names the axes. None = the mesh of the first argument that has one.

    Returns:
      One entry per instruction, in the order of the schedule, loop bodies multiplied by their trip counts;
      `collectives_table` makes text of them.

    Raises:
      ValueError: no mesh is given and no argument has a `NamedSharding`.
    """
    return of_module(hlo.parse(compiled.as_text()), mesh or _mesh_of(compiled))


def of_module(module: hlo.Module, mesh: "Mesh") -> list[Collective]:
    """Lists the collectives of a parsed program; see `explain_sharding`."""
    found = []
    for execution in module.executions():
        computation = execution.computation
        starts = any('"AsyncCollectiveStart"' in i.attributes for i in computation.instructions)
        for instruction in computation.instructions:
            kind = _kind(instruction)
            if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # as a fusion, which leaves each device its part of the sum
            # An asynchronous collective of v5e stands in three fusions with one chain_id: where it starts, beside the
            # compute that hides it, and where it ends.
            if kind is None or ("chain_id=" in instruction.attributes and not starts):
                continue
            found.append(_collective(kind, instruction, execution, mesh))
    return found


def total(collectives: Iterable[Collective]) -> list[Collective]:
    """Adds up the collectives of each kind and axis, largest first."""
    rows: dict[tuple[str, tuple[str, ...], int], list[Collective]] = {}
    for c in collectives:
        rows.setdefault((c.kind, c.axes, c.group_size), []).append(c)
    merged = [
        dataclasses.replace(
            row[0],
            bytes=sum(c.bytes for c in row),
            count=sum(c.count for c in row),
            minimum_bytes=sum(c.minimum_bytes for c in row),
            trip_count_known=all(c.trip_count_known for c in row),
        )
        for row in rows.values()
    ]
    return sorted(merged, key=lambda c: -c.bytes)


def sent(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> SentBytes:
    """The least that a device sends for collectives, by the level of the links.

    Args:
      collectives: Of a program on one device.
      sizes: Devices along the axes of its mesh; those of size 1 may lack.
    """
    total = SentBytes()
    for c in collectives:
        hosts = min(sizes.get(SLOW_AXIS, 1), c.group_size) if SLOW_AXIS in c.axes else 1
        if c.axes:
            total += links.sent(c.kind, c.bytes, hosts, max(1, c.group_size // hosts))
    return total


def collectives_table(collectives: Iterable[Collective]) -> str:
    """What `explain_sharding` found, as text: one line a kind and axis, bytes per device, largest first.

        kind            axis   devices  count  bytes      least to send
        all-gather      fsdp   8        6      12 MiB     10.5 MiB
        reduce-scatter  fsdp   8        3      6 MiB      5.25 MiB

    "bytes" is the payload of all executions, loops multiplied by their trip counts; a count with "?" stands in a loop
    whose trip count depends on data, and counts once.
    """
    rows = [("kind", "axis", "devices", "count", "bytes", "least to send")]
    for c in total(collectives):
        known = "" if c.trip_count_known else "?"
        least = units.size(c.minimum_bytes)
        rows.append((c.kind, c.axis, str(c.group_size), f"{c.count}{known}", units.size(c.bytes), least))
    if len(rows) == 1:
        return "no collectives"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def minimum_bytes(kind: Kind, payload: int, group_size: int) -> int:
    """The least bytes that some device of a group must send for a collective of this payload."""
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    once = payload * (group_size - 1) // group_size
    return 2 * once if kind == "all-reduce" else once


def axes_of(groups: Sequence[Sequence[int]], mesh: "Mesh | DeviceLayout") -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ."""
    shape = mesh.devices.shape
    varies = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(np.asarray(group), shape))  # axis, member
        varies |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(mesh.axis_names, varies, strict=True) if differs)


def positions_along(axes: tuple[str, ...], mesh: "Mesh | DeviceLayout") -> Groups:
    """Groups of positions in the flattened mesh that differ along these axes only."""
    grid = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    along = [mesh.axis_names.index(axis) for axis in axes]
    rest = [axis for axis in range(grid.ndim) if axis not in along]
    width = math.prod(grid.shape[axis] for axis in along)
    return tuple(map(tuple, grid.transpose([*rest, *along]).reshape(-1, width).tolist()))


def parse_groups(text: str, devices: int) -> Groups:
    """Reads the value of `replica_groups` in any of the forms that XLA writes.

    Args:
      text: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}`, or `{}` for all devices.
      devices: Number of devices of the program.

    Raises:
      ValueError: none of these.
    """
    text = text.strip()
    if text in ("", "{}"):
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        return tuple(
            tuple(int(d) for d in group.split(",") if d.strip()) for group in re.findall(r"\{([\d,\s]+)\}", text)
        )
    if text.startswith("mesh["):
        return _mesh_groups(text)
    match = re.match(r"\[([\d,]+)\]<=", text)
    if match is None:
        raise ValueError(f"parse_groups: text must be a list, an iota or a mesh of devices; got {text!r}.")
    order = _iota(text[match.end() :], devices)
    return tuple(map(tuple, order.reshape([int(d) for d in match.group(1).split(",")]).tolist()))


def _iota(text: str, devices: int) -> np.ndarray:
    """Reads `[4,2]T(1,0)`: 0, 1, 2, ... in this shape, axes permuted, flattened."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return np.arange(devices)
    shape = [int(d) for d in match.group(1).split(",")]
    order = np.arange(math.prod(shape)).reshape(shape)
    if match.group(2):
        order = order.transpose([int(a) for a in match.group(2).split(",")])
    return order.reshape(-1)


def _mesh_groups(text: str) -> Groups:
    """Reads `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b','a':(1)2}`: groups along axes or parts of axes."""
    head, _, tail = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    devices = math.prod(sizes.values())
    stated = re.search(r"device_ids=\(([^{]*)\)", tail)
    if stated is None:
        ids = np.arange(devices)
    elif stated.group(1).startswith("["):
        ids = _iota(stated.group(1), devices)
    else:
        ids = np.array([int(d) for d in stated.group(1).split(",")])
    # Cut every axis where a sub-axis begins or ends: 'a':(2)4 is the part of size 4 below a leading part of size 2.
    parts: list[int] = []
    chosen: list[int] = []
    references = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", tail[tail.rindex("{") :])
    named: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in references:
        named.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    for name, size in sizes.items():
        done = 1
        for before, length in sorted(named.get(name, [])):
            if before > done:
                parts.append(before // done)
            chosen.append(len(parts))
            parts.append(length)
            done = before * length
        if done < size:
            parts.append(size // done)
    grid = ids.reshape(parts or [1])
    rest = [axis for axis in range(grid.ndim) if axis not in chosen]
    width = math.prod(parts[axis] for axis in chosen)
    return tuple(map(tuple, grid.transpose([*rest, *chosen]).reshape(-1, width).tolist()))


def _kind(instruction: hlo.Instruction) -> Kind | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _KINDS:
        return opcode
    if instruction.opcode == "send":
        match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        return _MEGASCALE.get(match.group(1)) if match else None
    return None


def _collective(kind: Kind, instruction: hlo.Instruction, execution: hlo.Execution, mesh: "Mesh") -> Collective:
    if instruction.opcode == "send":
        groups = _megascale_groups(kind, instruction.attributes, mesh)
    elif kind == "collective-permute":
        groups = parse_groups(_value(instruction.attributes, "source_target_pairs"), mesh.size)
    else:
        groups = parse_groups(_value(instruction.attributes, "replica_groups"), mesh.size)
    axes = axes_of(groups, mesh)
    if kind == "collective-permute":
        members = math.prod(mesh.shape[a] for a in axes)
    else:
        members = max((len(group) for group in groups), default=1)
    by_name = execution.computation.by_name
    sizes = [by_name[name].bytes for name in instruction.operands if name in by_name]
    if kind == "ragged-all-to-all":
        payload = min(sizes[:2], default=0)  # there is no more than what is sent of, nor than there is room for
    else:
        payload = sum(sizes[:1] if instruction.opcode == "send" else sizes)
    # Operands are what a device puts in, and the payload is what it takes out, which is larger.
    if kind == "all-gather":
        payload *= members
    least = minimum_bytes(kind, payload, members) if axes else 0
    return Collective(
        kind=kind,
        axes=axes,
        group_size=members,
        bytes=payload * execution.count,
        count=execution.count,
        minimum_bytes=least * execution.count,
        trip_count_known=execution.known,
        groups=groups,
    )


def _value(attributes: str, name: str) -> str:
    """The text of an attribute: a bracketed list, an iota or a mesh."""
    match = re.search(rf"\b{name}=", attributes)
    if match is None:
        return ""
    text = attributes[match.end() :]
    if text.startswith("mesh["):
        return text[: text.index("}", text.index("{")) + 1]
    if text.startswith("["):
        found = re.match(r"\[[\d,]+\]<=\[[\d,]+\](T\([\d,]+\))?", text)
        return found.group(0) if found else text
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[: index + 1]
    return text


def _megascale_groups(kind: Kind, attributes: str, mesh: "Mesh") -> Groups:
    """Groups of a transfer between slices. Device ids are jax's; groups that are not listed join equal places."""
    positions = {device.id: index for index, device in enumerate(mesh.devices.flat)}
    pairs = re.findall(r"\{(\d+)->(\d+)\}", attributes)
    if kind == "collective-permute" and pairs:
        return tuple((positions[int(a)], positions[int(b)]) for a, b in pairs)
    target = _value(attributes, "_xla_megascale_target")
    if target.startswith("{{"):
        return tuple(
            tuple(positions[int(d)] for d in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", target)
        )
    across: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for index, device in enumerate(mesh.devices.flat):
        place = (tuple(device.coords), getattr(device, "core_on_chip", 0))
        across.setdefault(place, []).append(index)
    return tuple(tuple(group) for group in across.values())


def _mesh_of(compiled: "Compiled") -> "Mesh":
    import jax
    from jax.sharding import NamedSharding

    arguments, keywords = compiled.input_shardings
    for sharding in itertools.chain(jax.tree.leaves(arguments), jax.tree.leaves(keywords)):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh  # pyright: ignore[reportReturnType]
    raise ValueError("explain_sharding: mesh must be given, since no argument of the program has a NamedSharding.")
