"""Grouped products of others, with the derivatives that they have: XLA's, and by name those of jax and of tokamax.

Of `ragged_dot` XLA makes a kernel on a TPU, and one of the gradient of its rows; that of the weights is a dense product
of all rows with masks for each group. On a CPU and on a GPU all three are such products, n times the work, and the GPU
first copies the rows once a group.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.errors import UserError

_MEGABLOX_ROWS = 512


def ragged_dot(x: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """[R, N] in the dtype of x by `jax.lax.ragged_dot`."""
    del interpret
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=wide).astype(x.dtype)


def megablox(x: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """[R, N] in the dtype of x by jax's kernels for a TPU.

    They leave tiles behind the last group as they find them, in the product and in the gradient of the rows: what is
    there is masked on both sides.
    """
    # Pallas takes longer to import than all the rest.
    from jax.experimental.pallas.ops.tpu import megablox

    multiply: Any = megablox.gmm
    rows, inner, outer = x.shape[0], x.shape[1], weights.shape[2]
    tile = min(_MEGABLOX_ROWS, -(-rows // 16) * 16)
    tiling = (tile, *(min(length, 512) for length in (inner, outer)))
    used = (jnp.arange(rows) < sizes.sum())[:, None]
    padded = jnp.pad(jnp.where(used, x, 0), ((0, -rows % tile), (0, 0)))
    y = multiply(padded, weights, sizes, x.dtype, tiling, interpret=interpret)
    return jnp.where(used, y[:rows], 0)


def tokamax(x: jax.Array, weights: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """[R, N] in the dtype of x by what tokamax takes for the best on the device at hand.

    Raises:
      UserError: tokamax is not installed.
    """
    del interpret
    try:
        library: Any = importlib.import_module("tokamax")
        flags: Any = importlib.import_module("absl.flags").FLAGS
    except ModuleNotFoundError as error:
        raise UserError(
            f'grouped_matmul: implementation="tokamax" needs {error.name}, which is not installed: '
            "pip install 'scalejax[tokamax]', or take implementation=None."
        ) from error
    # It asks absl for options at its first call, and absl would take the words of this program's command line for its.
    if not flags.is_parsed():
        flags.mark_as_parsed()
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return library.ragged_dot(x, weights, sizes, preferred_element_type=wide).astype(x.dtype)


PRODUCTS = {"ragged_dot": ragged_dot, "megablox": megablox, "tokamax": tokamax}
"""By the name of the implementation."""
