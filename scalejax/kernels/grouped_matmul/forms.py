"""The products of rows with matrices of their groups that kernels of every platform make, each by one call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from scalejax.kernels.grouped_matmul import reference
from scalejax.kernels.interpretation import Interpret

Pair = tuple[jax.Array, jax.Array]
Finish = Callable[..., tuple[jax.Array, ...]]
"""float32 sums of a tile, and what was kept of it -> results."""


class RowsCall(Protocol):
    """Products of tiles of rows with matrices of their groups."""

    def __call__(
        self,
        rows: tuple[jax.Array, ...],
        weights: tuple[jax.Array, ...],
        finish: Finish,
        kept: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """finish(*sums, *kept), where sum i is of weights i and of rows i, or of the only rows.

        `kept` are as large as the results, whose last ones take their place.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Forms:
    """Those of a platform; `blocks` says what each of them is.

    Attributes:
      call: (name of the kernel, sizes int32[n], whether the chip is not there, axis of the weights that is summed over,
        1 or 2) -> `RowsCall`.
    """

    call: Callable[[str, jax.Array, Any, int], RowsCall]

    def multiply(
        self, x: jax.Array, weights: jax.Array, sizes: jax.Array, *, interpret: Interpret = False
    ) -> jax.Array:
        """See `blocks.multiply`."""
        return self.call("grouped_matmul", sizes, interpret, 1)((x,), (weights,), lambda y: (y,))[0]

    def gated(self, x: jax.Array, weights: Pair, sizes: jax.Array, *, interpret: Interpret = False) -> jax.Array:
        """See `blocks.gated`."""
        call = self.call("grouped_matmul_gated", sizes, interpret, 1)
        return call((x,), weights, lambda gate, up: (reference.between(gate, up),))[0]

    def gated_with_products(
        self, x: jax.Array, weights: Pair, sizes: jax.Array, *, interpret: Interpret = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `blocks.gated_with_products`."""
        call = self.call("grouped_matmul_gated", sizes, interpret, 1)
        hidden, gate, up = call((x,), weights, lambda gate, up: (reference.between(gate, up), gate, up))
        return hidden, gate, up

    def gate_gradients(
        self, g: jax.Array, down: jax.Array, products: Pair, sizes: jax.Array, *, interpret: Interpret = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `blocks.gate_gradients`; the gradients take the place of the products in memory."""
        call = self.call("grouped_matmul_gate_gradients", sizes, interpret, 2)
        hidden, to_gate, to_up = call(
            (g,), (down,), lambda g, gate, up: reference.between_gradients(gate, up, g), kept=products
        )
        return hidden, to_gate, to_up

    def multiply_transposed(
        self,
        grads: tuple[jax.Array, ...],
        weights: tuple[jax.Array, ...],
        sizes: jax.Array,
        *,
        interpret: Interpret = False,
    ) -> jax.Array:
        """See `blocks.multiply_transposed`."""
        call = self.call("grouped_matmul_transposed", sizes, interpret, 2)
        return call(grads, weights, lambda *sums: (functools.reduce(jnp.add, sums),))[0]
