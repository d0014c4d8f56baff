"""Fresh rows, made where they will live: row r of a table is a function of (key, name of the table, r)."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.parallel.embedding import optimizers
from scalejax.parallel.embedding.stacks import Stack

_CHUNK = 1 << 16
"""Rows made at a time: random bits need several times the memory of their rows."""


def local_state(
    stacks: tuple[Stack, ...], key: jax.Array, *, axes: tuple[str, ...], devices: int
) -> dict[str, dict[str, jax.Array]]:
    """{stack: {"rows": [L, dim], ...}} of this device; padding rows are zeros. Runs inside a shard_map."""
    state = {}
    for stack in stacks:
        table, logical = _logical_rows(stack, lax.axis_index(axes), devices)
        exists = logical < jnp.asarray([m.config.rows for m in stack.members], jnp.int32)[table]
        leaves = {"rows": _uniform(stack, key, table, logical, exists)}
        for name, shape in optimizers.state_shapes(stack.optimizer, stack.local_rows, stack.dim).items():
            mask = exists.reshape((-1,) + (1,) * (len(shape) - 1))
            value = jnp.full(shape, optimizers.initial_value(stack.optimizer), stack.wide_dtype)
            leaves[name] = jnp.where(mask, value, jnp.zeros((), stack.wide_dtype))
        state[stack.name] = leaves
    return state


def _logical_rows(stack: Stack, device: jax.Array, devices: int) -> tuple[jax.Array, jax.Array]:
    """Table number and row number of every local row."""
    ends = jnp.asarray(np.cumsum([m.local_rows for m in stack.members]), jnp.int32)
    local = lax.iota(jnp.int32, stack.local_rows)
    table = jnp.searchsorted(ends, local, side="right").astype(jnp.int32)
    offsets = jnp.asarray([m.offset for m in stack.members], jnp.int32)
    shifts = jnp.asarray([m.shift for m in stack.members], jnp.int32)
    return table, (local - offsets[table]) * devices + (device - shifts[table]) % devices


def _uniform(stack: Stack, key: jax.Array, table: jax.Array, logical: jax.Array, exists: jax.Array) -> jax.Array:
    keys = jnp.stack([jax.random.fold_in(key, zlib.crc32(m.config.name.encode())) for m in stack.members])
    scales = [m.config.init_scale or m.config.rows**-0.5 for m in stack.members]
    scale = jnp.asarray(scales, stack.wide_dtype)

    def one(table: jax.Array, logical: jax.Array, exists: jax.Array) -> jax.Array:
        bound = jnp.where(exists, scale[table], 0)
        draw = jax.random.uniform(jax.random.fold_in(keys[table], logical), (stack.dim,), stack.wide_dtype, -1, 1)
        return (draw * bound).astype(stack.dtype)

    chunk = min(_CHUNK, stack.local_rows)

    def fill(number: jax.Array, rows: jax.Array) -> jax.Array:
        # The last chunk begins earlier and makes some rows again: they come out the same.
        start = jnp.minimum(number * chunk, stack.local_rows - chunk)
        part = [lax.dynamic_slice_in_dim(a, start, chunk) for a in (table, logical, exists)]
        return lax.dynamic_update_slice_in_dim(rows, jax.vmap(one)(*part), start, 0)

    empty = jnp.zeros((stack.local_rows, stack.dim), stack.dtype)
    return lax.fori_loop(0, -(-stack.local_rows // chunk), fill, empty)
