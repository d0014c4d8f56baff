"""Sums and all-gathers of messages from several devices, in their order."""

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from scalejax.parallel.links import SLOW_AXIS

Rows = TypeVar("Rows")


def summed(
    arrived: Rows, decode: Callable[[Rows], jax.Array], n: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """dtype[n]: the rows that arrived, decoded and summed one after the other, in the order of devices.

    One decoded row exists at a time.

    Args:
      arrived: Pytree of arrays [devices, ...].
      decode: Of a row of it, float32[n].
      n: Values of a row.
      dtype: Of the sums.
    """
    zeros = jnp.zeros(n, dtype)
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrived)))
    if varying:
        zeros = jax.lax.pcast(zeros, tuple(varying), to="varying")
    return jax.lax.scan(lambda total, row: (total + decode(row), None), zeros, arrived)[0]


def gathered_to(axes: tuple[str, ...]) -> Literal["varying", "invarying"]:
    """`to` of an all_gather over the axes: "invarying" inside a shard_map with check_vma=True, which tracks it."""
    return "invarying" if jax.typeof(jax.lax.axis_index(axes)).manual_axis_type.varying else "varying"


def gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-gather over the axes: [devices, ...], in their order; inside a shard_map.

    Between indices of `replica` by an all_to_all, which sends each device's own alone. Of an all_gather between slices
    XLA for TPUs makes a sum of arrays that hold zeros but for one part: twice the bytes and more.

    Args:
      x: Of this device.
      axes: `replica` first, if it is among them.
    """
    fast, to = tuple(axis for axis in axes if axis != SLOW_AXIS), gathered_to(axes)
    if fast == axes or to == "invarying":  # what an all_to_all gives counts as varying
        return jax.lax.all_gather(x, axes, to=to)
    hosts = jax.lax.axis_size(SLOW_AXIS)
    across = jax.lax.all_to_all(jnp.broadcast_to(x, (hosts, *x.shape)), SLOW_AXIS, 0, 0, tiled=True)
    if not fast:
        return across
    return jax.lax.all_gather(across, fast).swapaxes(0, 1).reshape(-1, *x.shape)
