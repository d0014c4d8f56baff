"""The row optimizers of `config` on arrays."""

from typing import Protocol

import jax
import jax.numpy as jnp

from scalejax.numerics.rounding import rounded
from scalejax.parallel.embedding.config import (
    GRANULE_COLUMNS,
    Adagrad,
    Adam,
    Lamb,
    LarsSgd,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowOptimizer,
    RowwiseAdagrad,
    Sgd,
)

Arrays = tuple[jax.Array, ...]


class Step(Protocol):
    """One step on distinct rows: ((weights, *states), gradients) -> (weights, *states).

    `means` are the means of their squares over whole rows, where the arrays hold slices of them.
    """

    def __call__(self, arrays: Arrays, grads: jax.Array, means: jax.Array | None = None) -> Arrays: ...


def initial_value(optimizer: RowOptimizer) -> float:
    """The value that row states start from."""
    return optimizer.initial_accumulator if isinstance(optimizer, Adagrad | RowwiseAdagrad) else 0.0


def add_columns(blocks: jax.Array) -> jax.Array:
    """[U, blocks] -> [U], added one by one."""
    total = blocks[:, 0]
    for number in range(1, blocks.shape[1]):
        total = total + blocks[:, number]
    return total


def square_blocks(grads: jax.Array, zero: jax.Array) -> jax.Array:
    """Sums of g^2 over blocks of 16 columns: [U, dim] -> [U, blocks], each a binary tree, every product rounded."""
    squares = rounded(grads * grads, zero)
    dim = squares.shape[1]
    # Zeros behind 1, 2, 4 or 8 columns would change no sum, and a kernel for GPUs cannot append them.
    block = dim if dim in (1, 2, 4, 8) else GRANULE_COLUMNS
    if dim % block:
        squares = jnp.pad(squares, ((0, 0), (0, -dim % block)))
    parts = squares.reshape(squares.shape[0], -1, block)  # U blocks 16
    # In a tree of its own for each block, whatever surrounds it: a slice of whole blocks has the bits of the whole row.
    while parts.shape[2] > 1:
        half = parts.shape[2] // 2
        parts = parts[:, :, :half] + parts[:, :, half:]
    return parts[:, :, 0]


def with_decay(optimizer: RowOptimizer, weights: jax.Array, grads: jax.Array, zero: jax.Array) -> jax.Array:
    """The gradient that the statistics and the update see: with L2 weight decay in it."""
    if not optimizer.weight_decay or optimizer.weight_decay_mode != "l2" or isinstance(optimizer, Lamb | LarsSgd):
        return grads
    # The sum of the gradients too: XLA would fold it and this addition into one scatter, in another order.
    return rounded(grads, zero) + rounded(optimizer.weight_decay * weights, zero)


def step(optimizer: RowOptimizer, learning_rate_scale: jax.Array, updates: jax.Array, zero: jax.Array) -> Step:
    """One step of the optimizer on rows.

    Every product is rounded by itself (`zero` is from `rounding.runtime_zero`), so that the step is the same to the bit
    in every program.

    Args:
      optimizer: Which.
      learning_rate_scale: Factor on its learning rate.
      updates: int32[], updates of the collection before this one.
      zero: From `rounding.runtime_zero`.

    Source: the formulas are those of FBGEMM's EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM,
    PARTIAL_ROWWISE_ADAM, LAMB, PARTIAL_ROWWISE_LAMB and LARS_SGD; eps is added outside the root.
    """

    def apply(arrays: Arrays, grads: jax.Array, means: jax.Array | None = None) -> Arrays:
        weights, states = arrays[0], arrays[1:]
        dtype = grads.dtype
        rate = (optimizer.learning_rate * learning_rate_scale).astype(dtype)
        grads = with_decay(optimizer, weights, grads, zero)
        match optimizer:
            case Sgd():
                change, states = rounded(rate * grads, zero), ()
            case Adagrad():
                accumulator = states[0] + rounded(grads * grads, zero)
                change, states = rate * grads / (jnp.sqrt(accumulator) + optimizer.eps), (accumulator,)
            case RowwiseAdagrad():
                if means is None:
                    # A compiler turns a division by the width into this product, or not; written out it always is one.
                    means = add_columns(square_blocks(grads, zero)) * (1.0 / grads.shape[1])
                accumulator = states[0] + rounded(means, zero)
                factor = rate / (jnp.sqrt(accumulator) + optimizer.eps)
                change, states = rounded(factor[:, None] * grads, zero), (accumulator,)
            case LarsSgd():
                change, states = _lars(optimizer, weights, states, grads, rate, zero)
            case Lamb() | PartialRowwiseLamb():
                direction, states = _adam_direction(optimizer, states, grads, updates, zero)
                direction = rounded(direction, zero) + rounded(optimizer.weight_decay * weights, zero)
                ratio = _ratio(_norm(weights, zero), _norm(direction, zero), 1.0)
                change = rounded(rounded(rate * ratio, zero)[:, None] * direction, zero)
            case Adam() | PartialRowwiseAdam():
                direction, states = _adam_direction(optimizer, states, grads, updates, zero)
                change = rounded(rate * direction, zero)
        decoupled = optimizer.weight_decay_mode == "decoupled" and not isinstance(optimizer, Lamb | LarsSgd)
        if optimizer.weight_decay and decoupled:
            keep = 1.0 - rounded(rate * optimizer.weight_decay, zero)
            weights = rounded(keep * weights, zero)
        weights = weights - change
        if optimizer.max_norm is not None:
            norm = _norm(weights, zero)
            factor = jnp.where(norm > optimizer.max_norm, optimizer.max_norm / norm, 1.0).astype(dtype)
            weights = rounded(weights, zero) * factor[:, None]
        return (weights, *states)

    return apply


def _adam_direction(
    optimizer: Adam | PartialRowwiseAdam | Lamb, states: Arrays, grads: jax.Array, updates: jax.Array, zero: jax.Array
) -> tuple[jax.Array, Arrays]:
    """m' / (sqrt(v') + eps), and the new moments."""
    beta1, beta2, dtype = optimizer.beta1, optimizer.beta2, grads.dtype
    by_row = isinstance(optimizer, PartialRowwiseAdam | PartialRowwiseLamb)
    moment1 = rounded(beta1 * states[0], zero) + rounded((1 - beta1) * grads, zero)
    if by_row:
        square = rounded(add_columns(square_blocks(grads, zero)) * (1.0 / grads.shape[1]), zero)
    else:
        square = rounded(grads * grads, zero)
    moment2 = rounded(beta2 * states[1], zero) + rounded((1 - beta2) * square, zero)
    count = (updates + 1).astype(dtype)
    # A compiler turns a division by one number into a product with its inverse, or not; written out it always is one.
    inverse1, inverse2 = (rounded(1 / (1 - _power(beta, count)), zero) for beta in (beta1, beta2))
    unbiased1 = rounded(moment1 * inverse1, zero)
    root = jnp.sqrt(rounded(moment2 * inverse2, zero)) + optimizer.eps
    return unbiased1 / (root[:, None] if by_row else root), (moment1, moment2)


def _power(base: float, exponent: jax.Array) -> jax.Array:
    return jnp.power(jnp.asarray(base, exponent.dtype), exponent)


def _lars(
    optimizer: LarsSgd, weights: jax.Array, states: Arrays, grads: jax.Array, rate: jax.Array, zero: jax.Array
) -> tuple[jax.Array, Arrays]:
    decay = optimizer.weight_decay
    length, slope = _norm(weights, zero), _norm(grads, zero)
    adapted = _ratio(rounded(optimizer.eta * length, zero), slope + rounded(decay * length, zero), optimizer.eta)
    direction = rounded(grads, zero) + rounded(decay * weights, zero)
    pushed = rounded(rounded(rate * adapted, zero)[:, None] * direction, zero)
    momentum = rounded(optimizer.momentum * states[0], zero) + pushed
    return rounded(momentum, zero), (momentum,)


def _norm(rows: jax.Array, zero: jax.Array) -> jax.Array:
    """[U, dim] -> 2-norms [U]."""
    return jnp.sqrt(add_columns(square_blocks(rows, zero)))


def _ratio(over: jax.Array, under: jax.Array, otherwise: float) -> jax.Array:
    """over / under where both are positive."""
    good = (over > 0) & (under > 0)
    return jnp.where(good, over / jnp.where(good, under, 1.0), otherwise).astype(over.dtype)
