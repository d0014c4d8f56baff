"""Softmax over the edges of each row, as attention on graphs needs it."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax import compat
from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm.gathers import take
from scalejax.kernels.sampled_spmm.sparse_plan import SparsePlan, check_plan
from scalejax.kernels.sampled_spmm.xla import reduce_edges

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def segment_softmax(plan: SparsePlan, scores: "Float[Array, 'edges *heads']") -> "Float[Array, 'edges *heads']":
    """out[e] = exp(scores[e]) / sum over the edges i of the row of e of exp(scores[i]).

    A score of -inf gives 0, and so does every edge of a row whose scores are all -inf. Differentiable in `scores`.

    Args:
      plan: From `sparse_plan`.
      scores: float[nnz] or float[nnz, heads], in the order of the edges of `plan.csr`.

    Returns:
      Like `scores`; computed in float32, or float64 for float64.

    Raises:
      UserError: `scores` has a wrong shape or dtype.
    """
    check_plan("segment_softmax", plan)
    scores = jnp.asarray(scores)
    if scores.ndim not in (1, 2) or scores.shape[0] != plan.nnz or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise UserError(
            f"segment_softmax: scores must be floating-point [{plan.nnz}] or [{plan.nnz}, heads], one for each edge; "
            f"got {scores.dtype}{list(scores.shape)}."
        )
    if scores.size == 0:
        return scores
    wide = scores.astype(jnp.float64 if scores.dtype == jnp.float64 else jnp.float32)
    out = _softmax(plan, wide.reshape(plan.nnz, -1))
    return out.reshape(scores.shape).astype(scores.dtype)


@compat.custom_vjp()
def _softmax(plan: SparsePlan, scores: jax.Array) -> jax.Array:
    """Softmax over the edges of each row, scores [nnz, heads]."""
    most = reduce_edges(plan, scores, "max")
    # A row whose scores are all -inf would have -inf - -inf, which is NaN, where its edges get 0.
    raised = jnp.exp(scores - take(jnp.where(jnp.isneginf(most), 0, most), plan.row_ids))
    total = reduce_edges(plan, raised, "sum")
    return raised / take(jnp.where(total == 0, 1, total), plan.row_ids)


def _softmax_forward(plan: SparsePlan, scores: jax.Array) -> tuple[jax.Array, tuple[SparsePlan, jax.Array]]:
    out = _softmax(plan, scores)
    return out, (plan, out)


def _softmax_backward(saved: tuple[SparsePlan, jax.Array], grads: jax.Array) -> tuple[None, jax.Array]:
    plan, out = saved
    weighted = out * grads
    return None, weighted - out * take(reduce_edges(plan, weighted, "sum"), plan.row_ids)


_softmax.defvjp(_softmax_forward, _softmax_backward)
