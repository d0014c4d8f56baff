"""Between the stacked, padded view of one mesh and arrays of shapes that know no mesh.

A checkpoint must have the same shapes on every mesh, and a table of V rows does not divide over N devices in general.
So a table is stored in two parts: a body of the first floor(V / 1024) * 1024 rows, sharded over the devices in equal
consecutive ranges, and a tail of the remaining rows (fewer than 1024), whole on every device. A part without rows is
left out. Where N does not divide 1024 the body is whole on every device too.

The body moves by one all_to_all per array: consecutive ranges <-> rows dealt out one by one. Bits are only moved.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax.parallel.embedding.stacks import Member, Stack

GRANULE = 1024
"""Bodies are multiples of this many rows."""

Tree = dict[str, dict[str, Any]]


def body_rows(rows: int) -> int:
    """Rows of the body of a table."""
    return rows // GRANULE * GRANULE


def body_spec(axes: tuple[str, ...], devices: int) -> P:
    """How bodies lie on a mesh."""
    return P(axes) if GRANULE % devices == 0 else P()


def parts(rows: int) -> dict[str, int]:
    """Rows of each part that a table has, by the suffix of its name."""
    body = body_rows(rows)
    return {name: count for name, count in (("body", body), ("tail", rows - body)) if count}


def local_to_stored(stacks: tuple[Stack, ...], state: Tree, *, axes: tuple[str, ...], devices: int) -> Tree:
    """Local part of the view -> local part of the stored form. Runs inside a shard_map over all axes."""
    device = lax.axis_index(axes)
    stored: Tree = {}
    for stack in stacks:
        for member in stack.members:
            leaves = {}
            for name, view in state[stack.name].items():
                block = lax.slice_in_dim(view, member.offset, member.offset + member.local_rows)
                present = parts(member.config.rows)
                body = present.get("body", 0)
                if body and GRANULE % devices == 0:
                    leaves[f"{name}_body"] = _deal_in(block, member, body, axes, devices, device)
                elif body:
                    leaves[f"{name}_body"] = gather_range(block, member, 0, body, axes, devices, device)
                if "tail" in present:
                    rows = member.config.rows
                    leaves[f"{name}_tail"] = gather_range(block, member, body, rows, axes, devices, device)
            stored[member.config.name] = leaves
    return stored


def local_from_stored(stacks: tuple[Stack, ...], stored: Tree, *, axes: tuple[str, ...], devices: int) -> Tree:
    """The inverse of `local_to_stored`; padding rows are zeros."""
    device = lax.axis_index(axes)
    state: Tree = {}
    for stack in stacks:
        names = dict.fromkeys(
            leaf.rpartition("_")[0] for member in stack.members for leaf in stored[member.config.name]
        )
        state[stack.name] = {}
        for name in names:
            blocks = []
            for member in stack.members:
                leaves = stored[member.config.name]
                body, tail = leaves.get(f"{name}_body"), leaves.get(f"{name}_tail")
                blocks.append(_deal_out(member, body, tail, axes, devices, device))
            state[stack.name][name] = jnp.concatenate(blocks)
    return state


def gather_range(
    block: jax.Array, member: Member, low: int, high: int, axes: tuple[str, ...], devices: int, device: jax.Array
) -> jax.Array:
    """Rows [low, high) of a table, whole on every device."""
    first = _first_at_or_above(low, _residue(device, member, devices), devices)
    width = -(-(high - low) // devices)
    mine = block.at[first + jnp.arange(width)].get(mode="clip")
    everyone = lax.all_gather(mine, axes)  # N width ...
    row = jnp.arange(low, high)
    owner = (row + member.shift) % devices
    place = row // devices - _first_at_or_above(low, row % devices, devices)
    return everyone[owner, place]


def _deal_in(
    block: jax.Array, member: Member, body: int, axes: tuple[str, ...], devices: int, device: jax.Array
) -> jax.Array:
    """Rows dealt out one by one -> this device's consecutive range of the body."""
    span = body // devices
    width = -(-span // devices)
    low = jnp.arange(devices) * span  # N
    first = _first_at_or_above(low, _residue(device, member, devices), devices)
    sent = block.at[first[:, None] + jnp.arange(width)[None, :]].get(mode="clip")  # N width ...
    arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True)
    row = device * span + jnp.arange(span)
    owner = (row + member.shift) % devices
    place = row // devices - _first_at_or_above(device * span, row % devices, devices)
    return arrived[owner, place]


def _deal_out(
    member: Member,
    body: jax.Array | None,
    tail: jax.Array | None,
    axes: tuple[str, ...],
    devices: int,
    device: jax.Array,
) -> jax.Array:
    """This device's local rows, from its range of the body (or the whole body) and the tail."""
    local = jnp.arange(member.local_rows)
    row = local * devices + _residue(device, member, devices)
    end = body_rows(member.config.rows)
    sample = body if body is not None else tail
    assert sample is not None  # a table has at least one row
    block = jnp.zeros((member.local_rows, *sample.shape[1:]), sample.dtype)
    if body is not None:
        if body.shape[0] == end:
            from_body = body.at[row].get(mode="clip")
        else:
            span = end // devices
            width = -(-span // devices)
            residues = _residue(jnp.arange(devices), member, devices)  # of each receiver
            first = _first_at_or_above(device * span, residues, devices) * devices + residues - device * span
            sent = body.at[first[:, None] + jnp.arange(width)[None, :] * devices].get(mode="clip")
            arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True)
            source = jnp.minimum(row // span, devices - 1)
            place = local - _first_at_or_above(source * span, row % devices, devices)
            from_body = arrived.at[source, place].get(mode="clip")
        block = jnp.where(_column(row < end, block), from_body, block)
    if tail is not None:
        from_tail = tail.at[row - end].get(mode="clip")
        inside = (row >= end) & (row < member.config.rows)
        block = jnp.where(_column(inside, block), from_tail, block)
    return block


def _residue(device: Any, member: Member, devices: int) -> Any:
    """Rows of a device are those equal to this, modulo the number of devices."""
    return (device - member.shift) % devices


def _first_at_or_above(low: Any, residue: Any, devices: int) -> Any:
    """The smallest q with q * devices + residue >= low."""
    return (low - residue + devices - 1) // devices


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape((-1,) + (1,) * (like.ndim - 1))
