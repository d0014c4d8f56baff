"""Row of a table <-> local row of a stack."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.parallel.embedding.plan.stacks import Stack


def row_numbers(stack: Stack, local: jax.Array, device: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Member of the stack and row of its table, of local rows of a device; anything for rows that do not exist.

    Args:
      stack: The tables.
      local: int32[U].
      device: Number of the device among those that the stack is striped over.

    Returns:
      int32[U] each.
    """
    ends = jnp.asarray(stack.offsets + stack.widths)[device]
    member = jnp.searchsorted(ends, local, side="right").astype(jnp.int32)
    member = jnp.minimum(member, len(stack.members) - 1)
    offsets, places = jnp.asarray(stack.offsets)[device], jnp.asarray(stack.places)[device]
    parts = jnp.asarray([m.parts for m in stack.members], jnp.int32)
    shifts = jnp.asarray([m.shift for m in stack.members], jnp.int32)
    first = (places - shifts) % parts
    return member, (local - offsets[member]) * parts[member] + first[member]


def exists(stack: Stack, local: jax.Array, device: jax.Array | int) -> jax.Array:
    """bool[U]: whether local rows of a device are rows of a table."""
    member, row = row_numbers(stack, local, device)
    inside = local < jnp.asarray((stack.offsets + stack.widths)[:, -1])[device]
    return inside & (row < jnp.asarray([m.config.rows for m in stack.members], jnp.int32)[member])


def name_hashes(stack: Stack) -> np.ndarray:
    """uint32[members]: a number for the name of each member's table."""
    return np.asarray([zlib.crc32(m.config.name.encode()) for m in stack.members], np.uint32)
