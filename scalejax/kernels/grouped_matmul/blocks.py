"""Blocks of rows, one after another, each times the matrix of its one group.

All products are dense and of one size, so that a CPU runs them as fast as any other, and work grows with the rows that
there are and not with the largest group. Blocks behind the last group cost as much as others and give zeros.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.kernels.grouped_matmul import reference

_Pair = tuple[jax.Array, jax.Array]


def lacks(dtype: jax.typing.DTypeLike) -> str | None:
    """Nothing."""
    del dtype
    return None


def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array, *, block: int) -> jax.Array:
    """[R, K] and [n, K, N] -> [R, N] in the dtype of x."""
    return _each_block(lambda group, rows: _product(rows, weights[group]), (x,), sizes, block)


def gated(x: jax.Array, weights: _Pair, sizes: jax.Array, *, block: int) -> jax.Array:
    """silu(x gate) * (x up), of weights (gate, up)."""
    return gated_with_products(x, weights, sizes, block=block)[0]


def gated_with_products(
    x: jax.Array, weights: _Pair, sizes: jax.Array, *, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`gated`, x gate and x up."""

    def one(group: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        gate, up = (_product(rows, w[group]) for w in weights)
        return reference.between(gate, up), gate, up

    return _each_block(one, (x,), sizes, block)


def gate_gradients(
    g: jax.Array, down: jax.Array, products: _Pair, sizes: jax.Array, *, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is between the layers, and the gradients of both products, for the cotangent g [R, E] of the result.

    `products` are x gate and x up, [R, F].
    """

    def one(group: jax.Array, g: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        to_hidden = _product(g, down[group].T)
        return reference.between_gradients(gate.astype(to_hidden.dtype), up.astype(to_hidden.dtype), to_hidden)

    return _each_block(one, (g, *products), sizes, block)


def multiply_transposed(
    grads: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], sizes: jax.Array, *, block: int
) -> jax.Array:
    """Sum over pairs of g [R, N] times the transpose of weights [n, K, N]: [R, K]."""

    def one(group: jax.Array, *rows: jax.Array) -> jax.Array:
        products = [_product(g, w[group].T) for g, w in zip(rows, weights, strict=True)]
        return sum(products[1:], start=products[0])

    return _each_block(one, grads, sizes, block)


def weight_gradients(
    x: jax.Array, grads: tuple[jax.Array, ...], sizes: jax.Array, *, block: int
) -> tuple[jax.Array, ...]:
    """For each g [R, N] of `grads`, the sums over the rows of a group of x^T g: [n, K, N] in the dtype of x."""
    group, used = _groups(sizes, x.shape[0] // block, block)

    def one(totals: tuple[jax.Array, ...], own: Any) -> tuple[tuple[jax.Array, ...], None]:
        group, used, rows, *grads = own
        # In place: the carry of a loop.
        return tuple(
            total.at[group].add(_product(rows.T, jnp.where(used, g, 0)), mode="promise_in_bounds")
            for total, g in zip(totals, grads, strict=True)
        ), None

    wide = jnp.promote_types(x.dtype, jnp.float32)
    zeros = tuple(jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), wide) for g in grads)
    totals, _ = jax.lax.scan(one, zeros, (group, used, *_in_blocks((x, *grads), block)))
    return tuple(total.astype(x.dtype) for total in totals)


def _each_block(one: Callable[..., Any], operands: tuple[jax.Array, ...], sizes: jax.Array, block: int) -> Any:
    """one(group, blocks of the operands) for all blocks; zeros behind the last group."""
    group, used = _groups(sizes, operands[0].shape[0] // block, block)
    dtype = operands[0].dtype

    def step(_: None, own: Any) -> tuple[None, Any]:
        group, used, *rows = own
        return None, jax.tree.map(lambda y: jnp.where(used, y, 0).astype(dtype), one(group, *rows))

    _, results = jax.lax.scan(step, None, (group, used, *_in_blocks(operands, block)))
    return jax.tree.map(lambda y: y.reshape(-1, y.shape[2]), results)


def _in_blocks(operands: tuple[jax.Array, ...], block: int) -> list[jax.Array]:
    return [a.reshape(-1, block, a.shape[1]) for a in operands]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _groups(sizes: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array]:
    """int32[blocks], the group of each, and bool[blocks], whether it has one: the last group stands in where not."""
    ends = jnp.cumsum(sizes)
    starts = block * jnp.arange(count, dtype=sizes.dtype)
    group = (starts[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
    return jnp.minimum(group, sizes.shape[0] - 1), group < sizes.shape[0]
