"""Sums over examples: kept on the devices inside the train step, added up on the host, exact in both.

On the devices a long sum is an unevaluated pair of float32 (float64 under `jax_enable_x64`): value plus the rounding
error of every addition so far (two-sum), so that a window of any length loses nothing to accumulation. The sum over one
batch is an ordinary reduction, about 1e-7 relative. On the host everything is float64.

Sums of a metric are a pytree of `Pair`s and integer arrays. They are merged by adding.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An unevaluated sum `value + error`, both of one floating dtype and any shape."""

    value: jax.Array
    error: jax.Array


Total = TypeVar("Total", Pair, np.ndarray)
"""Of sums on the devices `Pair`, of sums on the host float64 arrays."""


def pair_zeros(*shape: int) -> Pair:
    """A sum of nothing in the widest floating dtype there is, in two buffers: sums are donated."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    return Pair(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def add(total: Pair, x: jax.Array) -> Pair:
    """total + x, elementwise, by two-sum (Knuth, The Art of Computer Programming 2, 4.2.2): the error is exact."""
    x = x.astype(total.value.dtype)
    s = total.value + x
    back = s - total.value
    return Pair(s, total.error + ((total.value - (s - back)) + (x - back)))


def to_host(sums: object) -> Any:
    """Waits for sums; pairs become float64 arrays, everything else NumPy arrays."""
    host = jax.device_get(sums)

    def whole(leaf: Pair | np.ndarray) -> np.ndarray:
        if isinstance(leaf, Pair):
            return np.asarray(leaf.value, np.float64) + np.asarray(leaf.error, np.float64)
        return np.asarray(leaf)

    return jax.tree.map(whole, host, is_leaf=lambda x: isinstance(x, Pair))


def merge(a: Tree, b: Tree) -> Tree:
    """Sums on the host of the examples of both."""
    return jax.tree.map(np.add, a, b)


def to_json(sums: object) -> list[ArrayLike]:
    """Leaves of sums on the host as lists; `json` writes floats by their shortest exact form: nothing is lost."""
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(sums)]


def from_json(values: list[ArrayLike], like: Tree) -> Tree:
    """The inverse of `to_json`.

    Args:
      values: What it returned.
      like: Sums on the host of the same structure.
    """
    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(
        structure, [np.asarray(value, leaf.dtype) for value, leaf in zip(values, leaves, strict=True)]
    )


def ratio(numerator: float | np.ndarray, denominator: float | np.ndarray) -> float:
    """The quotient, NaN where the denominator is 0."""
    return float(numerator / denominator) if denominator else float("nan")
