"""Between the stacked, padded view of one mesh and plan, and arrays of shapes that know neither.

A checkpoint must have the same shapes on every mesh, and a table of V rows does not divide over N devices in general.
So a table is stored in two parts: a body of the first floor(V / 1024) * 1024 rows, sharded over the devices in equal
consecutive ranges, and a tail of the remaining rows (fewer than 1024), whole on every device. A part without rows is
left out. Where N does not divide 1024 the body is whole on every device too. Column slices are joined.

The body moves by one all_to_all per array: consecutive ranges <-> rows striped over the ranks of a table.
Bits are only moved.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax.parallel.embedding.config import UPDATED, Leaf, RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.parallel.embedding.sharded_tables import ShardedTables

GRANULE = 1024
"""Bodies are multiples of this many rows."""

Tree = dict[str, dict[str, Any]]


def cuts_bodies(sharded: ShardedTables) -> bool:
    """Whether bodies are sharded over all devices; otherwise they are whole on every device."""
    return GRANULE % sharded.mesh.size == 0


def body_rows(rows: int) -> int:
    """Rows of the body of a table."""
    return rows // GRANULE * GRANULE


def body_spec(sharded: ShardedTables) -> P:
    """How bodies lie on a mesh."""
    return P(sharded.axes) if cuts_bodies(sharded) else P()


def parts(rows: int) -> dict[str, int]:
    """Rows of each part that a table has, by the suffix of its name."""
    body = body_rows(rows)
    return {name: count for name, count in (("body", body), ("tail", rows - body)) if count}


def slices_of(stacks: tuple[Stack, ...], table: TableConfig) -> list[tuple[Stack, Member]]:
    """Where the slices of a table are, in the order of columns."""
    found = [(stack, member) for stack in stacks for member in stack.members if member.config.name == table.name]
    return sorted(found, key=lambda pair: pair[1].start)


def joins(table: TableConfig, name: str, kind: Leaf) -> str:
    """How the slices of a leaf make the leaf of the table: "columns", "first" (all are equal) or "stack"."""
    if kind == "element":
        return "columns"
    if name == UPDATED:
        return "first"
    optimizer = table.optimizer
    return "stack" if isinstance(optimizer, RowwiseAdagrad) and optimizer.statistic == "slice" else "first"


def local_to_stored(sharded: ShardedTables, tables: tuple[TableConfig, ...], state: Tree) -> Tree:
    """Local part of the view -> local part of the stored form. Runs inside a shard_map over all axes."""
    stored: Tree = {}
    for table in tables:
        pieces = slices_of(sharded.stacks, table)
        leaves = {}
        for name, kind in pieces[0][0].arrays.items():
            how = joins(table, name, kind)
            moved = [_slice_to_stored(stack, m, state[stack.name][name], sharded) for stack, m in pieces]
            for part in parts(table.rows):
                each = [one[part] for one in moved]
                if how == "columns":
                    leaves[f"{name}_{part}"] = jnp.concatenate(each, axis=1)
                elif how == "stack" and len(each) > 1:
                    leaves[f"{name}_{part}"] = jnp.stack(each, axis=1)
                else:
                    leaves[f"{name}_{part}"] = each[0]
        stored[table.name] = leaves
    return stored


def local_from_stored(sharded: ShardedTables, stored: Tree) -> Tree:
    """The inverse of `local_to_stored`; padding rows are zeros."""
    number = {table.name: [m for _, m in slices_of(sharded.stacks, table)] for table in sharded.tables}
    state: Tree = {}
    for stack in sharded.stacks:
        state[stack.name] = {}
        for name, kind in stack.arrays.items():
            blocks = []
            for member in stack.members:
                table = member.config
                how = joins(table, name, kind)
                found = {}
                for part in parts(table.rows):
                    leaf = stored[table.name][f"{name}_{part}"]
                    if how == "columns":
                        leaf = leaf[:, member.start : member.stop]
                    elif how == "stack" and not member.whole:
                        leaf = leaf[:, number[table.name].index(member)]
                    found[part] = leaf
                blocks.append(_slice_from_stored(stack, member, found, sharded))
            state[stack.name][name] = _assembled(stack, blocks, sharded)
    return state


def _assembled(stack: Stack, blocks: list[jax.Array], sharded: ShardedTables) -> jax.Array:
    """The local rows of a device from the blocks of all members, of which it may have only some."""
    if (stack.offsets == stack.offsets[0]).all() and (stack.widths == stack.widths[0]).all():
        return jnp.concatenate(blocks)
    device = lax.axis_index(sharded.group)
    offsets, widths = jnp.asarray(stack.offsets)[device], jnp.asarray(stack.widths)[device]
    longest = max(member.local_rows for member in stack.members)
    sample = blocks[0]
    # Room for the longest block behind the last row: an update past the end would be moved back over other rows.
    view = jnp.zeros((stack.local_rows + longest, *sample.shape[1:]), sample.dtype)
    for number, block in enumerate(blocks):
        # What a device has not goes behind its last row.
        start = jnp.where(widths[number] > 0, offsets[number], stack.local_rows)
        view = lax.dynamic_update_slice_in_dim(view, block, start, 0)
    return view[: stack.local_rows]


def _slice_to_stored(stack: Stack, member: Member, view: jax.Array, sharded: ShardedTables) -> dict[str, jax.Array]:
    rows = member.config.rows
    present = parts(rows)
    found = {}
    if not member.ranks:
        (offset,) = member.offsets
        body = lax.slice_in_dim(view, offset, offset + body_rows(rows))
        if "body" in present:
            if cuts_bodies(sharded):
                span = body_rows(rows) // sharded.mesh.size
                body = lax.dynamic_slice_in_dim(body, lax.axis_index(sharded.axes) * span, span)
            found["body"] = body
        if "tail" in present:
            found["tail"] = lax.slice_in_dim(view, offset + body_rows(rows), offset + rows)
        return found
    offset = jnp.asarray(stack.offsets[:, member.number])[lax.axis_index(sharded.group)]
    # A device without rows of this table reads some others, of which nobody takes any.
    offset = jnp.minimum(offset, view.shape[0] - member.local_rows)
    block = lax.dynamic_slice_in_dim(view, offset, member.local_rows)
    if "body" in present:
        found["body"] = (
            _stripe(block, stack, member, present["body"], sharded)
            if cuts_bodies(sharded)
            else gather_range(block, stack, member, 0, present["body"], sharded)
        )
    if "tail" in present:
        found["tail"] = gather_range(block, stack, member, body_rows(rows), rows, sharded)
    return found


def _slice_from_stored(stack: Stack, member: Member, found: dict[str, jax.Array], sharded: ShardedTables) -> jax.Array:
    body, tail = found.get("body"), found.get("tail")
    if not member.ranks:
        if body is not None and cuts_bodies(sharded):
            body = lax.all_gather(body, sharded.axes, tiled=True)
        return jnp.concatenate([part for part in (body, tail) if part is not None])
    return _unstripe(stack, member, body, tail, sharded)


def gather_range(
    block: jax.Array, stack: Stack, member: Member, low: int, high: int, sharded: ShardedTables
) -> jax.Array:
    """Rows [low, high) of a table, whole on every device."""
    n = member.parts
    mine = _residue(_place(stack, member, lax.axis_index(sharded.group)), member)
    width = -(-(high - low) // n)
    sent = block.at[_first_at_or_above(low, mine, n) + jnp.arange(width)].get(mode="clip")
    everyone = lax.all_gather(sent, sharded.group)  # N width ...
    row = jnp.arange(low, high)
    owner = jnp.asarray(member.ranks)[(row + member.shift) % n]
    return everyone[owner, row // n - _first_at_or_above(low, row % n, n)]


def _stripe(block: jax.Array, stack: Stack, member: Member, body: int, sharded: ShardedTables) -> jax.Array:
    """Striped rows -> this device's consecutive range of the body."""
    n, span = member.parts, body // sharded.mesh.size
    width = -(-span // n)
    device = lax.axis_index(sharded.group)
    own = lax.axis_index(sharded.axes)
    # The ranges of the devices of this group, to which this device sends.
    low = (own - device + jnp.arange(sharded.group_devices)) * span  # N
    first = _first_at_or_above(low, _residue(_place(stack, member, device), member), n)
    sent = block.at[first[:, None] + jnp.arange(width)[None, :]].get(mode="clip")
    arrived = lax.all_to_all(sent, sharded.group, 0, 0, tiled=True)
    row = own * span + jnp.arange(span)
    owner = jnp.asarray(member.ranks)[(row + member.shift) % n]
    return arrived[owner, row // n - _first_at_or_above(own * span, row % n, n)]


def _unstripe(
    stack: Stack, member: Member, body: jax.Array | None, tail: jax.Array | None, sharded: ShardedTables
) -> jax.Array:
    """This device's local rows, from its range of the body (or the whole body) and the tail."""
    n = member.parts
    device, own = lax.axis_index(sharded.group), lax.axis_index(sharded.axes)
    local = jnp.arange(member.local_rows)
    row = local * n + _residue(_place(stack, member, device), member)
    end = body_rows(member.config.rows)
    sample = body if body is not None else tail
    assert sample is not None  # a table has at least one row
    block = jnp.zeros((member.local_rows, *sample.shape[1:]), sample.dtype)
    if body is not None:
        if not cuts_bodies(sharded) or sharded.mesh.size == 1:
            from_body = body.at[row].get(mode="clip")
        else:
            span = end // sharded.mesh.size
            width = -(-span // n)
            receivers = jnp.arange(sharded.mesh.size) % sharded.group_devices  # their numbers in their groups
            residues = _residue(_place(stack, member, receivers), member)
            first = _first_at_or_above(own * span, residues, n) * n + residues - own * span
            sent = body.at[first[:, None] + jnp.arange(width)[None, :] * n].get(mode="clip")
            arrived = lax.all_to_all(sent, sharded.axes, 0, 0, tiled=True)
            source = jnp.minimum(row // span, sharded.mesh.size - 1)
            place = local - _first_at_or_above(source * span, row % n, n)
            from_body = arrived.at[source, place].get(mode="clip")
        block = jnp.where(_column(row < end, block), from_body, block)
    if tail is not None:
        from_tail = tail.at[row - end].get(mode="clip")
        inside = (row >= end) & (row < member.config.rows)
        block = jnp.where(_column(inside, block), from_tail, block)
    return block


def _place(stack: Stack, member: Member, device: jax.Array) -> jax.Array:
    """Place of devices among the ranks of a member; 0 for those that are none."""
    return jnp.asarray(stack.places[:, member.number])[device]


def _residue(place: jax.Array, member: Member) -> jax.Array:
    """Rows at a place are those equal to this, modulo the number of places."""
    return (place - member.shift) % member.parts


def _first_at_or_above(low: jax.Array | int, residue: jax.Array, n: int) -> jax.Array:
    """The smallest q with q * n + residue >= low."""
    return (low - residue + n - 1) // n


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape((-1,) + (1,) * (like.ndim - 1))
