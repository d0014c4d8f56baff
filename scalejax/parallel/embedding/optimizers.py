"""The row optimizers of `config` on arrays."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from scalejax.parallel.embedding.config import Adagrad, RowOptimizer, RowwiseAdagrad, Sgd

Arrays = tuple[jax.Array, ...]


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


def step(optimizer: RowOptimizer, learning_rate_scale: jax.Array) -> Callable[[Arrays, jax.Array], Arrays]:
    """One step of the optimizer on rows: ((weights, *states), gradients) -> (weights, *states).

    Source: FBGEMM's EXACT_SGD, EXACT_ADAGRAD and EXACT_ROWWISE_ADAGRAD; eps is added outside the root and L2 weight
    decay enters the gradient, also where the statistic is formed.
    """

    def apply(arrays: Arrays, grads: jax.Array) -> Arrays:
        weights = arrays[0]
        rate = (optimizer.learning_rate * learning_rate_scale).astype(grads.dtype)
        if optimizer.weight_decay:
            grads = grads + optimizer.weight_decay * weights
        match optimizer:
            case Sgd():
                return (weights - rate * grads,)
            case Adagrad():
                accumulator = arrays[1] + grads * grads
                return weights - rate * grads / (jnp.sqrt(accumulator) + optimizer.eps), accumulator
            case RowwiseAdagrad():
                accumulator = arrays[1] + (grads * grads).mean(axis=1)
                factor = rate / (jnp.sqrt(accumulator) + optimizer.eps)
                return weights - factor[:, None] * grads, accumulator

    return apply
