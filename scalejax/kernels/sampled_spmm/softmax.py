"""Softmax over the edges of each row, as attention on graphs needs it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm.api import spmm
from scalejax.kernels.sampled_spmm.plan import SparsePlan


def segment_softmax(plan: SparsePlan, scores: jax.Array) -> jax.Array:
    """out[e] = exp(scores[e]) / sum over the edges i of the row of e of exp(scores[i]).

    A score of -inf gives 0, and so does every edge of a row whose scores are all -inf. Differentiable in `scores`.

    Args:
      plan: From `plan`.
      scores: float[nnz] or float[nnz, heads], in the order of the edges of `plan.csr`.

    Returns:
      Like `scores`; computed in float32, or float64 for float64.

    Raises:
      UserError: `scores` has a wrong shape or dtype.
    """
    scores = jnp.asarray(scores)
    if scores.ndim not in (1, 2) or scores.shape[0] != plan.nnz or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise UserError(
            f"segment_softmax: scores must be floating-point [{plan.nnz}] or [{plan.nnz}, heads], one for each edge; "
            f"got {scores.dtype}{list(scores.shape)}."
        )
    if scores.size == 0:
        return scores
    wide = scores.astype(jnp.float64 if scores.dtype == jnp.float64 else jnp.float32)
    if wide.ndim == 1:
        out: Any = _softmax(plan, wide)
    else:
        out = jnp.stack([_softmax(plan, wide[:, head]) for head in range(wide.shape[1])], axis=1)
    return out.astype(scores.dtype)


@jax.custom_vjp
def _softmax(plan: SparsePlan, scores: jax.Array) -> jax.Array:
    most = jax.ops.segment_max(scores, plan.row_ids, plan.shape[0], indices_are_sorted=True)
    most = lax.stop_gradient(jnp.where(jnp.isneginf(most), 0, most))
    raised = jnp.exp(scores - _of_edges(plan, most))
    total = _row_sums(plan, raised)
    return raised / _of_edges(plan, jnp.where(total == 0, 1, total))


def _softmax_forward(plan: SparsePlan, scores: jax.Array) -> Any:
    out: Any = _softmax(plan, scores)
    return out, (plan, out)


def _softmax_backward(saved: Any, grads: jax.Array) -> Any:
    plan, out = saved
    weighted = out * grads
    return None, weighted - out * _of_edges(plan, _row_sums(plan, weighted))


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _row_sums(plan: SparsePlan, numbers: jax.Array) -> jax.Array:
    return spmm(plan, jnp.ones((plan.shape[1], 1), numbers.dtype), values=numbers)[:, 0]


def _of_edges(plan: SparsePlan, of_rows: jax.Array) -> jax.Array:
    return of_rows.at[plan.row_ids].get(mode="promise_in_bounds")
