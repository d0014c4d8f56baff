"""Sums of what arrived from several devices."""

from collections.abc import Callable
from typing import TypeVar

import jax

Row = TypeVar("Row")


def summed(arrived: Row, decode: Callable[[Row], jax.Array]) -> jax.Array:
    """float32[n]: rows of what arrived, decoded and added up.

    One after the other: the order is that of devices, and one decoded row exists at a time.

    Args:
      arrived: Pytree of arrays [devices, ...].
      decode: Of a row of it, float32[n].
    """
    first, rest = (jax.tree.map(lambda x, part=part: x[part], arrived) for part in (0, slice(1, None)))
    return jax.lax.scan(lambda total, row: (total + decode(row), None), decode(first), rest)[0]
