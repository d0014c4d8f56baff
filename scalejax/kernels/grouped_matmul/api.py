"""Signature, checks and choice of implementation.

`implementation` names one of

    reference     every row gathers its matrix; for tests of a few rows
    blocks        one block of rows after another, each times the matrix of its group; what None picks on a CPU
    ragged_dot    `jax.lax.ragged_dot`, which a TPU and a GPU have kernels for; what None picks there

On a CPU XLA makes one dense product a group over all rows of `ragged_dot`.
"""

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.errors import check_one_of
from scalejax.kernels.grouped_matmul import blocks, reference

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

Implementation = Literal["reference", "blocks", "ragged_dot"]


def grouped_matmul(
    x: "Float[Array, 'rows inner']",
    weights: "Float[Array, 'groups inner outer']",
    sizes: "Int[Array, 'groups']",
    *,
    block: int = 1,
    implementation: Implementation | None = None,
) -> "Float[Array, 'rows outer']":
    """y_r = x_r W_g for the rows r of each group g, summed in float32 or wider; zeros behind the last group.

    Gradients are of the same kind: that of x is a grouped product, that of the weights sums over the rows of a group.

    Args:
      x: float[R, K]; the rows of group 0 come first, then those of group 1, and so on.
      weights: float[n, K, N] in the dtype of x.
      sizes: int32[n], rows of each group; their sum is at most R.
      block: Number that divides R and all sizes. Larger blocks read the weights of "blocks" less often.
      implementation: See above.

    Returns:
      float[R, N] in the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not go together, or R is no multiple of `block`.
    """
    check_one_of("grouped_matmul: implementation", implementation, (None, "reference", "blocks", "ragged_dot"))
    groups, inner = weights.shape[:2]
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != inner or sizes.shape != (groups,):
        raise ValueError(
            "grouped_matmul: x, weights and sizes must be [R, K], [n, K, N] and [n]; got "
            f"{x.shape}, {weights.shape} and {sizes.shape}."
        )
    if x.dtype != weights.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"grouped_matmul: x and weights must be of one float dtype; got {x.dtype} and {weights.dtype}."
        )
    if block < 1 or x.shape[0] % block:
        raise ValueError(f"grouped_matmul: block must divide the {x.shape[0]} rows of x; got {block}.")
    sizes = sizes.astype(jnp.int32)
    if implementation is None:
        implementation = "blocks" if compat.platform() == "cpu" else "ragged_dot"
    if implementation == "ragged_dot":
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=wide).astype(x.dtype)
    return (
        blocks.multiply(x, weights, sizes, block)
        if implementation == "blocks"
        else reference.multiply(x, weights, sizes)
    )
