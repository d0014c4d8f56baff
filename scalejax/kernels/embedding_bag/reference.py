"""The definitions in plain jax.numpy, written to be believed: quadratic in places, no sorting, no scatter."""

import jax
import jax.numpy as jnp

from scalejax.kernels.embedding_bag import packing
from scalejax.kernels.embedding_bag.steps import Step


def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """out[n] = table[ids[n]], zeros where ids[n] is no row."""
    one_hot = ids[:, None] == jnp.arange(table.shape[0])[None, :]  # N V
    picked = jnp.where(one_hot[:, :, None], table[None], jnp.zeros((), table.dtype))  # N V D
    return picked.sum(axis=1, dtype=table.dtype)


def pool_rows(rows: jax.Array, bags: jax.Array, num_bags: int, pooling: str) -> jax.Array:
    """out[b] = sum or mean of the rows n with bags[n] == b; zeros for an empty bag."""
    member = (bags[None, :] == jnp.arange(num_bags)[:, None]).astype(rows.dtype)  # B N
    pooled = (member[:, :, None] * rows[None]).sum(axis=1)
    if pooling == "mean":
        pooled = pooled / jnp.maximum(member.sum(axis=1), 1)[:, None]
    return pooled


def embedding_bag(
    table: jax.Array, ids: jax.Array, lengths: jax.Array, weights: jax.Array | None, pooling: str
) -> jax.Array:
    """out[b] = sum over the ids of bag b of weight * table[id], divided by their number for "mean"."""
    ends = jnp.cumsum(lengths)
    slots = jnp.arange(ids.shape[0])
    bags = (slots[:, None] >= ends[None, :]).sum(axis=1)  # the number of bags that end before the slot
    rows = packing.widen(gather_rows(table, ids), packing.sum_dtype(table))
    if weights is not None:
        rows = rows * weights.astype(rows.dtype)[:, None]
    return pool_rows(rows, bags, lengths.shape[0], pooling)


def sum_by_row(rows: jax.Array, grads: jax.Array, num_rows: int) -> jax.Array:
    """[num_rows, D]: the sum of grads[n] over all n with rows[n] == row."""
    return pool_rows(grads, rows, num_rows, "sum")


def update_rows(
    arrays: tuple[jax.Array, ...],
    rows: jax.Array,
    grads: jax.Array,
    step: Step,
) -> tuple[jax.Array, ...]:
    """Applies `step` to the full arrays with the full gradient and keeps the result where a row was touched."""
    num_rows = arrays[0].shape[0]
    wide = tuple(packing.widen(a, grads.dtype) for a in arrays)
    new = step(wide, sum_by_row(rows, grads, num_rows))
    touched = (rows[None, :] == jnp.arange(num_rows)[:, None]).any(axis=1)

    def keep(before: jax.Array, after: jax.Array) -> jax.Array:
        mask = touched.reshape((-1,) + (1,) * (before.ndim - 1))
        return jnp.where(mask, packing.narrow(after, before.dtype), before)

    return tuple(keep(a, n) for a, n in zip(arrays, new, strict=True))
