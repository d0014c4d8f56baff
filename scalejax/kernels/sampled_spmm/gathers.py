"""Values of edges and nodes, by place."""

import jax
import jax.numpy as jnp

_ROWS = 16
_LONG = 1 << 14


def take(values: jax.Array, places: jax.Array) -> jax.Array:
    """values[places], of rows or single values, for a vector of places that are all in bounds.

    On a CPU the gather of a matrix of places runs three times as fast as that of a vector, whose loop XLA leaves with
    one load in flight.
    """
    count = places.shape[0] // _ROWS * _ROWS
    if count < _LONG:
        return values.at[places].get(mode="promise_in_bounds")
    most = values.at[places[:count].reshape(_ROWS, -1)].get(mode="promise_in_bounds")
    most = most.reshape(count, *values.shape[1:])
    return jnp.concatenate([most, values.at[places[count:]].get(mode="promise_in_bounds")])
