"""Inner products between the vectors of each example."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.nn.linear import wide

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


@compat.custom_vjp()
def products(x: "Float[Array, 'n batch dim']", z: "Float[Array, 'k batch dim']") -> "Float[Array, 'batch n k']":
    """Inner products of each example's vectors: float[n, B, d], float[k, B, d] -> wide[B, n, k].

    The gradient is written out for the CPU's sake, whose batched products are fast only where both operands lie batch
    first and row by row. Given copies in that form, forward and backward took, in ms of CPU time, at (n, B, d, k) =
    (16, 1024, 16, 8) 0.60 instead of 1.05, at (16, 8192, 32, 12) 9.7 instead of 13.5, at (27, 4096, 128, 24) 48 instead
    of 52 (AMD EPYC, 2 shared cores, jax 0.10.2, 2026-11, memory reused between steps; where each step faults its memory
    in anew, the last case gains nothing).
    """
    return jnp.einsum("nbd,kbd->bnk", x, z, preferred_element_type=wide(x.dtype))


def _products_forward(x: jax.Array, z: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return products(x, z), (x, z)


def _products_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, z = saved
    return jax.lax.platform_dependent(x, z, g.astype(x.dtype), cpu=_gradients_batch_first, default=_gradients)


def _gradients(x: jax.Array, z: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.einsum("bnk,kbd->nbd", g, z), jnp.einsum("bnk,nbd->kbd", g, x)


def _gradients_batch_first(x: jax.Array, z: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    copies = (x.swapaxes(0, 1), z.swapaxes(0, 1), g.swapaxes(1, 2))
    x, z, g_t = jax.lax.optimization_barrier(copies)  # else XLA folds the transpositions into the products again
    return (g @ z).swapaxes(0, 1), (g_t @ x).swapaxes(0, 1)


products.defvjp(_products_forward, _products_backward)
