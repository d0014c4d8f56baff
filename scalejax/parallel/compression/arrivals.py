"""Sums of what arrived from several devices."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Rows = TypeVar("Rows")


def summed(arrived: Rows, decode: Callable[[Rows], jax.Array], n: int) -> jax.Array:
    """float32[n]: rows of what arrived, decoded and added up.

    One after the other: the order is that of devices, and one decoded row exists at a time.

    Args:
      arrived: Pytree of arrays [devices, ...].
      decode: Of a row of it, float32[n].
      n: Values of a row.
    """
    zeros = jnp.zeros(n, jnp.float32)
    return jax.lax.scan(lambda total, row: (total + decode(row), None), zeros, arrived)[0]
