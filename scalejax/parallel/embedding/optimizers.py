"""The row optimizers of `config` on arrays."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from scalejax.parallel.embedding.config import Adagrad, RowOptimizer, RowwiseAdagrad, Sgd
from scalejax.parallel.embedding.rounding import rounded

Arrays = tuple[jax.Array, ...]
Step = Callable[[Arrays, jax.Array], Arrays]


def state_shapes(optimizer: RowOptimizer, rows: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Shape of each row state of a table of `rows` rows."""
    match optimizer:
        case Sgd():
            return {}
        case Adagrad():
            return {"accumulator": (rows, dim)}
        case RowwiseAdagrad():
            return {"accumulator": (rows,)}


def initial_value(optimizer: RowOptimizer) -> float:
    """What row states start from."""
    return 0.0 if isinstance(optimizer, Sgd) else optimizer.initial_accumulator


def _mean_square(grads: jax.Array, zero: jax.Array) -> jax.Array:
    # A compiler turns a division by the width into this product, or not; written out it always is one.
    return rounded(grads * grads, zero).sum(axis=1) * (1.0 / grads.shape[1])


def step(optimizer: RowOptimizer, learning_rate_scale: jax.Array, zero: jax.Array) -> Step:
    """One step of the optimizer on rows: ((weights, *states), gradients) -> (weights, *states).

    Every product is rounded by itself (`zero` is from `rounding.runtime_zero`).

    Source: FBGEMM's EXACT_SGD, EXACT_ADAGRAD and EXACT_ROWWISE_ADAGRAD; eps is added outside the root and L2 weight
    decay enters the gradient, also where the statistic is formed.
    """

    def apply(arrays: Arrays, grads: jax.Array) -> Arrays:
        weights = arrays[0]
        rate = (optimizer.learning_rate * learning_rate_scale).astype(grads.dtype)
        if optimizer.weight_decay:
            # The sum of the gradients too: XLA would fold it and this addition into one scatter, in another order.
            grads = rounded(grads, zero) + rounded(optimizer.weight_decay * weights, zero)
        match optimizer:
            case Sgd():
                return (weights - rounded(rate * grads, zero),)
            case Adagrad():
                accumulator = arrays[1] + rounded(grads * grads, zero)
                return weights - rate * grads / (jnp.sqrt(accumulator) + optimizer.eps), accumulator
            case RowwiseAdagrad():
                accumulator = arrays[1] + rounded(_mean_square(grads, zero), zero)
                factor = rate / (jnp.sqrt(accumulator) + optimizer.eps)
                return weights - rounded(factor[:, None] * grads, zero), accumulator

    return apply
