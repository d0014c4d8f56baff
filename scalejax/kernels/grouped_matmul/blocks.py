"""Blocks of rows, one after another, each times the matrix of its one group.

All products are dense and of one size, so that a CPU runs them as fast as any other, and work grows with the rows that
there are and not with the largest group. Blocks behind the last group cost as much as others and give zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import compat


@compat.custom_vjp(3)
def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    """See `api.grouped_matmul`."""
    group, used = _groups(sizes, x.shape[0] // block, block)

    def one(_: None, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        rows, group, used = own
        return None, jnp.where(used, _product(rows, weights[group]), 0).astype(x.dtype)

    _, y = jax.lax.scan(one, None, (x.reshape(-1, block, x.shape[1]), group, used))
    return y.reshape(x.shape[0], weights.shape[2])


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(x: jax.Array, weights: jax.Array, sizes: jax.Array, block: int) -> tuple[jax.Array, _Saved]:
    return multiply(x, weights, sizes, block), (x, weights, sizes)


def _backward(block: int, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    x, weights, sizes = saved
    group, used = _groups(sizes, x.shape[0] // block, block)

    def one(total: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, g, group, used = own
        g = jnp.where(used, g, 0)
        # In place: the carry of a loop.
        total = total.at[group].add(_product(rows.T, g), mode="promise_in_bounds")
        return total, _product(g, weights[group].T).astype(x.dtype)

    zeros = jnp.zeros(weights.shape, jnp.promote_types(x.dtype, jnp.float32))
    blocks = (x.reshape(-1, block, x.shape[1]), g.reshape(-1, block, g.shape[1]), group, used)
    to_weights, to_x = jax.lax.scan(one, zeros, blocks)
    return to_x.reshape(x.shape), to_weights.astype(weights.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


multiply.defvjp(_forward, _backward)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _groups(sizes: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array]:
    """int32[blocks], the group of each, and bool[blocks], whether it has one: the last group stands in where not."""
    ends = jnp.cumsum(sizes)
    starts = block * jnp.arange(count, dtype=sizes.dtype)
    group = (starts[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
    return jnp.minimum(group, sizes.shape[0] - 1), group < sizes.shape[0]
