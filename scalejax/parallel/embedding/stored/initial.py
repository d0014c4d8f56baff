"""Fresh rows, made where they will live: row r of a table is a function of (key, name of the table, r)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.parallel.embedding.config import UPDATED
from scalejax.parallel.embedding.ids.occurrences import locate
from scalejax.parallel.embedding.plan.row_numbers import exists, name_hashes, row_numbers
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.sharded_tables import ShardedTables
from scalejax.parallel.embedding.update import optimizers

_CHUNK = 1 << 16
"""Rows made at a time: random bits need several times the memory of their rows."""


def local_leaves(stack: Stack, key: jax.Array, device: jax.Array | int) -> dict[str, jax.Array]:
    """{"rows": [L, dim], ...} of one device; padding rows are zeros.

    Args:
      stack: The tables.
      key: Of the collection.
      device: Number of this device among those that the stack is striped over.
    """
    local = lax.iota(jnp.int32, stack.local_rows)
    real = exists(stack, local, device)
    leaves = {}
    for name, kind in stack.arrays.items():
        if name == "rows":
            leaves[name] = _uniform(stack, key, device)
            continue
        shape = stack.leaf_shape(kind, stack.local_rows)
        if name == UPDATED:
            leaves[name] = jnp.zeros(shape, jnp.int32)
            continue
        mask = real.reshape((-1,) + (1,) * (len(shape) - 1))
        value = jnp.full(shape, optimizers.initial_value(stack.optimizer), stack.wide_dtype)
        leaves[name] = jnp.where(mask, value, jnp.zeros((), stack.wide_dtype))
    return leaves


def fresh_rows(stack: Stack, key: jax.Array, local: jax.Array, device: jax.Array | int) -> dict[str, jax.Array]:
    """{"rows": [U, dim], ...}: what `local_leaves` has at these local rows, int32[U], which are rows of tables."""
    member, row = row_numbers(stack, local, device)
    draws = jax.vmap(_draw(stack, key))(member, row, jnp.ones(local.shape, bool))
    start = jnp.asarray(optimizers.initial_value(stack.optimizer), stack.wide_dtype)
    return {
        name: draws if name == "rows" else jnp.full(stack.leaf_shape(kind, local.shape[0]), start)
        for name, kind in stack.leaves.items()
    }


def _draw(stack: Stack, key: jax.Array) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(member, row, whether it exists) -> one row."""
    keys = jnp.stack([jax.random.fold_in(key, int(name)) for name in name_hashes(stack)])
    scales = [m.config.init_scale or m.config.rows**-0.5 for m in stack.members]
    scale = jnp.asarray(scales, stack.wide_dtype)
    starts = jnp.asarray([m.start for m in stack.members], jnp.int32)
    widths = jnp.asarray([m.config.dim for m in stack.members], jnp.int32)

    def one(member: jax.Array, row: jax.Array, real: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(keys[member], row)
        draw = jnp.zeros(stack.dim, stack.wide_dtype)
        for dim in sorted({m.config.dim for m in stack.members}):
            # A slice has its columns of the draw for the whole row.
            whole = jax.random.uniform(row_key, (dim,), stack.wide_dtype, -1, 1)
            columns = lax.dynamic_slice_in_dim(whole, starts[member], stack.dim)
            draw = jnp.where(widths[member] == dim, columns, draw)
        bound = jnp.where(real, scale[member], 0)
        return (draw * bound).astype(stack.dtype)

    return one


def _uniform(stack: Stack, key: jax.Array, device: jax.Array | int) -> jax.Array:
    one = _draw(stack, key)
    chunk = min(_CHUNK, stack.local_rows)

    def fill(number: jax.Array, rows: jax.Array) -> jax.Array:
        # The last chunk begins earlier and makes some rows again: they come out the same.
        start = jnp.minimum(number * chunk, stack.local_rows - chunk)
        local = start + lax.iota(jnp.int32, chunk)
        member, row = row_numbers(stack, local, device)
        part = jax.vmap(one)(member, row, exists(stack, local, device))
        return lax.dynamic_update_slice_in_dim(rows, part, start, 0)

    empty = jnp.zeros((stack.local_rows, stack.dim), stack.dtype)
    return lax.fori_loop(0, -(-stack.local_rows // chunk), fill, empty)


RESET_ROWS = 256
"""Evicted rows per table and device in one round of resets."""


def reset(
    sharded: ShardedTables,
    leaves: dict[str, dict[str, jax.Array]],
    evicted: dict[str, jax.Array],
    key: jax.Array,
    update: jax.Array,
) -> dict[str, dict[str, jax.Array]]:
    """Gives evicted rows and their optimizer states the values that they began with; tracked ones count as touched.

    Their numbers go to every device in rounds of a fixed size, as many as the fullest needs (none where nothing was
    evicted), and each device resets what it holds: shards, copies and slices alike. Runs inside a shard_map.

    Args:
      sharded: The tables.
      leaves: This device's part of all stacks.
      evicted: Per table int32[A], the rows that were taken in this device's part of its map.
      key: That the tables were made with.
      update: int32[], number of the update that touches them.
    """
    stacks, axes = sharded.stacks, sharded.axes
    rows_of = {member.config.name: member.config.rows for stack in stacks for member in stack.members}
    lists, rounds = {}, jnp.zeros((), jnp.int32)
    for name, gone in evicted.items():
        size = min(RESET_ROWS, gone.shape[0])
        lists[name], count = _front(gone, rows_of[name], size)
        rounds = jnp.maximum(rounds, -(-count // size))
    if sharded.mesh.size > 1:
        rounds = lax.pmax(rounds, axes)
    touched = [stack for stack in stacks if any(member.config.name in lists for member in stack.members)]

    def one(
        carry: tuple[jax.Array, dict[str, dict[str, jax.Array]]],
    ) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
        number, leaves = carry
        rows = {}
        for name, gone in lists.items():
            size = min(RESET_ROWS, gone.shape[0])
            # A list with fewer rounds than others gives its last rows again: they come out the same.
            mine = lax.dynamic_slice_in_dim(gone, number * size, size)
            rows[name] = lax.all_gather(mine, axes, tiled=True) if sharded.mesh.size > 1 else mine
        new = dict(leaves)
        for stack in touched:
            new[stack.name] = _reset_stack(stack, leaves[stack.name], rows, key, update, sharded.group)
        return number + 1, new

    start = (jnp.zeros((), jnp.int32), {stack.name: leaves[stack.name] for stack in touched})
    _, new = lax.while_loop(lambda carry: carry[0] < rounds, one, start)
    return leaves | new


def _reset_stack(
    stack: Stack,
    leaves: dict[str, jax.Array],
    rows: dict[str, jax.Array],
    key: jax.Array,
    update: jax.Array,
    group: tuple[str, ...],
) -> dict[str, jax.Array]:
    here = lax.axis_index(group) if stack.devices > 1 else 0
    places = []
    for member in stack.members:
        if member.config.name in rows:
            gone = rows[member.config.name]
            device, local = locate(member, gone)
            mine = gone < member.config.rows
            if stack.devices > 1:
                mine = mine & (device == here)
            places.append(jnp.where(mine, local, stack.local_rows))
    local = jnp.concatenate(places)
    fresh = fresh_rows(stack, key, local, here) | {UPDATED: update}
    return {name: leaf.at[local].set(fresh[name], mode="drop") for name, leaf in leaves.items()}


def _front(gone: jax.Array, rows: int, size: int) -> tuple[jax.Array, jax.Array]:
    """The taken rows from the front on, filled up to a multiple of `size`, and their number."""
    taken = gone < rows
    place = jnp.where(taken, jnp.cumsum(taken.astype(jnp.int32)) - 1, gone.shape[0])
    front = jnp.full(-(-gone.shape[0] // size) * size, rows, jnp.int32)
    # The others lie beyond the end even where it was filled up.
    place = jnp.where(taken, place, front.shape[0])
    return front.at[place].set(gone, mode="drop"), taken.sum(dtype=jnp.int32)
