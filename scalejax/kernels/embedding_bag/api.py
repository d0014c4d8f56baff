"""Signatures, checks and the choice of implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.embedding_bag import fixed_point, reference, xla

Implementation = Literal["reference", "xla"]
Summation = Literal["fold", "tree", "fixed"]


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    lengths: jax.Array,
    *,
    weights: jax.Array | None = None,
    pooling: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums or averages rows of `table` per bag: out[b] = sum over the ids i of bag b of weight * table[i].

    Differentiable with respect to `table` and `weights` (the gradient of a table is dense; training with large tables
    goes through `plan_rows`, `sum_by_row` and `update_rows` instead).

    Args:
      table: float[V, D].
      ids: int32[N], the ids of bag 0, then of bag 1, ...; what is no row of the table contributes zeros.
      lengths: int32[B], ids per bag; slots past their sum are ignored.
      weights: float[N], one per id, or None.
      pooling: "sum" or "mean" (the sum divided by the number of ids, weighted or not); an empty bag gives zeros.
      implementation: None picks; a name never falls back.

    Returns:
      float[B, D], accumulated in float32 or wider and returned so.

    Raises:
      ValueError: an argument has the wrong rank or dtype.
    """
    _check_matrix("embedding_bag", "table", table)
    _check_integers("embedding_bag", "ids", ids)
    _check_integers("embedding_bag", "lengths", lengths)
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"embedding_bag: weights must have the shape of ids, {ids.shape}; got {weights.shape}.")
    if pooling not in ("sum", "mean"):
        raise ValueError(f'embedding_bag: pooling must be "sum" or "mean"; got {pooling!r}.')
    if _choose(implementation) == "reference":
        return reference.embedding_bag(table, ids, lengths, weights, pooling)
    rows = xla.gather_rows(table, ids)
    rows = rows.astype(jnp.promote_types(table.dtype, jnp.float32))
    if weights is not None:
        rows = rows * weights.astype(rows.dtype)[:, None]
    return xla.pool_rows(rows, xla.slot_bags(lengths, ids.shape[0]), lengths.shape[0], pooling)


def gather_rows(table: jax.Array, ids: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    """out[n] = table[ids[n]]; zeros where ids[n] is no row.

    Args:
      table: float[V, D].
      ids: int32[N].
      implementation: None picks; a name never falls back.

    Returns:
      [N, D] in the dtype of `table`.
    """
    _check_matrix("gather_rows", "table", table)
    _check_integers("gather_rows", "ids", ids)
    return (reference if _choose(implementation) == "reference" else xla).gather_rows(table, ids)


def slot_bags(lengths: jax.Array, slots: int) -> jax.Array:
    """Bag of each slot, when bags fill slots from the front: int32[slots], `len(lengths)` past the last bag."""
    _check_integers("slot_bags", "lengths", lengths)
    return xla.slot_bags(lengths, slots)


def pool_rows(
    rows: jax.Array,
    bags: jax.Array,
    num_bags: int,
    *,
    pooling: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
) -> jax.Array:
    """out[b] = sum or mean of the rows n with bags[n] == b.

    Args:
      rows: float[N, D].
      bags: int32[N], non-decreasing; what is not below `num_bags` is ignored.
      num_bags: B.
      pooling: "sum" or "mean"; an empty bag gives zeros for both.
      implementation: None picks; a name never falls back.

    Returns:
      [B, D] in the dtype of `rows`.
    """
    _check_matrix("pool_rows", "rows", rows)
    _check_integers("pool_rows", "bags", bags)
    chosen = reference if _choose(implementation) == "reference" else xla
    return chosen.pool_rows(rows, bags, num_bags, pooling)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which occurrences belong to which row; ids decide it, so it can be made before the gradients exist.

    Attributes:
      order: int32[N], the occurrences sorted by row, equal rows in order of occurrence.
      slots: int32[N], non-decreasing: place in `rows` of occurrence order[i]; len(rows) if it has no row.
      rows: int32[U], the distinct rows, ascending, then fillers >= num_rows, ascending too.
    """

    order: jax.Array
    slots: jax.Array
    rows: jax.Array


def plan_rows(rows: jax.Array, *, num_rows: int, capacity: int) -> RowPlan:
    """Sorts occurrences by row.

    Args:
      rows: int32[N], row of each occurrence, >= 0; values >= num_rows are left out.
      num_rows: Rows of the table.
      capacity: Room for distinct rows; min(N, num_rows) always suffices. Rows beyond it would be left out.
    """
    _check_integers("plan_rows", "rows", rows)
    return RowPlan(*xla.plan_rows(rows, num_rows, capacity))


def sum_by_row(grads: jax.Array, plan: RowPlan, *, summation: Summation | None = None) -> jax.Array:
    """Sums the gradients of each distinct row, in order of occurrence.

    A sum depends on the gradients of its row and on their order alone, to the bit.

    Args:
      grads: float[N, D], per occurrence; summed in this dtype.
      plan: From `plan_rows`.
      summation: "fold" adds one by one (a scatter-add, fast and ordered on CPUs only), "tree" in a binary tree over
        the occurrences of a row; None = "fold" on CPUs, "tree" elsewhere. "fixed" adds in fixed point (float32 only):
        the same to the bit in any order of the occurrences. The three differ by rounding.

    Returns:
      [U, D]: row i belongs to plan.rows[i]; zeros at fillers.
    """
    _check_matrix("sum_by_row", "grads", grads)
    capacity = plan.rows.shape[0]
    if summation == "fold":
        return xla.sum_by_slot_fold(grads, plan.order, plan.slots, capacity)
    if summation == "fixed":
        by_occurrence = jnp.zeros_like(plan.slots).at[plan.order].set(plan.slots, unique_indices=True)
        return fixed_point.sum_by_slot_fixed(grads, by_occurrence, capacity)
    if summation == "tree":
        return xla.sum_by_slot_tree(grads, plan.order, plan.slots, capacity)
    return lax.platform_dependent(
        grads,
        plan.order,
        plan.slots,
        cpu=lambda g, o, s: xla.sum_by_slot_fold(g, o, s, capacity),
        default=lambda g, o, s: xla.sum_by_slot_tree(g, o, s, capacity),
    )


def update_rows(
    arrays: tuple[jax.Array, ...], plan: RowPlan, sums: jax.Array, step: Callable[..., Any]
) -> tuple[jax.Array, ...]:
    """Applies an optimizer to the rows of a plan and to nothing else.

    Args:
      arrays: The table [V, D] and its row states, [V] or [V, D].
      plan: From `plan_rows`.
      sums: float[U, D] from `sum_by_row`; its dtype is the dtype of the computation.
      step: (arrays at the rows, sums) -> new arrays at the rows, row by row.

    Returns:
      The arrays, updated; in place when they are donated.
    """
    return xla.update_rows(arrays, plan.rows, sums, step)


def _choose(implementation: Implementation | None) -> Implementation:
    if implementation is None:
        return "xla"
    if implementation not in ("reference", "xla"):
        raise ValueError(f'embedding_bag: implementation must be "reference" or "xla"; got {implementation!r}.')
    return implementation


def _check_matrix(op: str, name: str, array: jax.Array) -> None:
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} must be a floating-point matrix; got {array.dtype}{list(array.shape)}.")


def _check_integers(op: str, name: str, array: jax.Array) -> None:
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} must be an integer vector; got {array.dtype}{list(array.shape)}.")
