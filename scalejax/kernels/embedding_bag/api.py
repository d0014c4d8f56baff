"""Signatures, checks, derivatives and the choice of implementation.

`implementation` names one of

    reference    the definition, for tests
    xla          XLA's own gathers, sorts and scatters
    pallas_tpu   row copies by DMA (`pallas_tpu`)
    pallas_gpu   Triton kernels (`pallas_gpu`)

A name never falls back: what it cannot do is a ValueError that says what it wants. None picks "pallas_gpu" for lookups
on a GPU in tables of a dtype that it takes, and "xla" otherwise; updates of rows, which have not been timed, are left
to XLA (`gpu_choices`). Pallas kernels are not partitioned by the compiler: over several devices call them inside
`jax.shard_map` with check_vma=False, or name "xla".

The kernels for GPUs add the rows of a bag one by one, in their order; XLA does so on CPUs, and elsewhere adds in a
binary tree. A table of bfloat16 may be packed, uint32[V, D/2] from `pack_rows`, which is the only form of bfloat16
whose rows a TPU's DMA can address; for "pallas_gpu" it is none.
"""

import dataclasses
import importlib
import types
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax import compat
from scalejax.kernels import gpu_choices
from scalejax.kernels.embedding_bag import blocks, fixed_point, packing, reference, xla
from scalejax.kernels.embedding_bag.steps import Step

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Int32, Shaped, UInt32

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
Summation = Literal["fold", "tree", "fixed"]


def embedding_bag(
    table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']",
    ids: "Int[Array, 'num_ids']",
    lengths: "Int[Array, 'bags']",
    *,
    weights: "Float[Array, 'num_ids'] | None" = None,
    pooling: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'bags dim']":
    """Sums or averages rows of `table` per bag: out[b] = sum over the ids i of bag b of weight * table[i].

    Differentiable with respect to `table` and `weights` (the gradient of a table is dense; training with large tables
    goes through `plan_rows`, `sum_by_row` and `update_rows` instead).

    Args:
      table: float[V, D], or packed uint32[V, D/2] (not differentiable).
      ids: int32[N], the ids of bag 0, then of bag 1, ...; what is no row of the table contributes zeros.
      lengths: int32[B], ids per bag; slots past their sum are ignored.
      weights: float[N], one per id, or None.
      pooling: "sum" or "mean" (the sum divided by the number of ids, weighted or not); an empty bag gives zeros.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      float[B, D], accumulated in float32 or wider and returned so.

    Raises:
      ValueError: an argument has the wrong rank or dtype, or the named implementation cannot take it.
    """
    _check_table("embedding_bag", table)
    _check_integers("embedding_bag", "ids", ids)
    _check_integers("embedding_bag", "lengths", lengths)
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"embedding_bag: weights must have the shape of ids, {ids.shape}; got {weights.shape}.")
    if pooling not in ("sum", "mean"):
        raise ValueError(f'embedding_bag: pooling must be "sum" or "mean"; got {pooling!r}.')
    chosen = _choose("embedding_bag", implementation, table=table)
    if chosen not in ("reference", "xla"):
        return _kernel_bag(_Call(chosen, interpret, implementation, pooling), table, ids, lengths, weights)
    if chosen == "reference":
        return reference.embedding_bag(table, ids, lengths, weights, pooling)
    rows = packing.widen(xla.gather_rows(table, ids), packing.sum_dtype(table))
    if weights is not None:
        rows = rows * weights.astype(rows.dtype)[:, None]
    return xla.pool_rows(rows, xla.slot_bags(lengths, ids.shape[0]), lengths.shape[0], pooling)


def gather_rows(
    table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']",
    ids: "Int[Array, 'num_ids']",
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'num_ids dim'] | UInt32[Array, 'num_ids words']":
    """out[n] = table[ids[n]]; zeros where ids[n] is no row. Differentiable with respect to `table`.

    Args:
      table: float[V, D], or packed uint32[V, D/2].
      ids: int32[N].
      implementation: None picks; a name never falls back.
      interpret: As in `embedding_bag`.

    Returns:
      [N, D] in the dtype of `table`; rows of a packed table stay packed.

    Raises:
      ValueError: an argument has the wrong rank or dtype, or the named implementation cannot take it.
    """
    _check_table("gather_rows", table)
    _check_integers("gather_rows", "ids", ids)
    chosen = _choose("gather_rows", implementation, table=table)
    if chosen not in ("reference", "xla"):
        return _kernel_gather(_Call(chosen, interpret, implementation), table, ids)
    return (reference if chosen == "reference" else xla).gather_rows(table, ids)


def slot_bags(lengths: "Int[Array, 'bags']", slots: int) -> "Int32[Array, '{slots}']":
    """Bag of each slot, when bags fill slots from the front: int32[slots], `len(lengths)` past the last bag."""
    _check_integers("slot_bags", "lengths", lengths)
    return xla.slot_bags(lengths, slots)


def pool_rows(
    rows: "Float[Array, 'num_ids dim']",
    bags: "Int[Array, 'num_ids']",
    num_bags: int,
    *,
    pooling: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, '{num_bags} dim']":
    """out[b] = sum or mean of the rows n with bags[n] == b.

    Args:
      rows: float[N, D].
      bags: int32[N], non-decreasing; what is not below `num_bags` is ignored.
      num_bags: B.
      pooling: "sum" or "mean"; an empty bag gives zeros for both.
      implementation: None picks; a name never falls back. "pallas_gpu" takes rows of float32 and has no derivative.
      interpret: As in `embedding_bag`.

    Returns:
      [B, D] in the dtype of `rows`.
    """
    _check_matrix("pool_rows", "rows", rows)
    _check_integers("pool_rows", "bags", bags)
    chosen = _choose("pool_rows", implementation, ("reference", "xla", "pallas_gpu"))
    if chosen == "pallas_gpu":
        return _backend(chosen).pool_rows(rows, bags, num_bags, pooling, interpret=interpret)
    return (reference if chosen == "reference" else xla).pool_rows(rows, bags, num_bags, pooling)


def gather_and_pool_rows(
    table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']",
    ids: "Int[Array, 'num_ids']",
    bags: "Int[Array, 'num_ids']",
    num_bags: int,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, '{num_bags} dim']":
    """`pool_rows(gather_rows(table, ids), bags, num_bags)` in float32 or wider: out[b] = sum of table[ids[n]] of bag b.

    Not differentiable by a kernel.

    Args:
      table: float[V, D], or packed uint32[V, D/2].
      ids: int32[N]; what is no row of the table contributes zeros.
      bags: int32[N], non-decreasing; what is not below `num_bags` is ignored.
      num_bags: B.
      implementation: None picks; a name never falls back. "pallas_gpu" does not write the rows to memory, and does not
        walk over ids that are no rows at the end of a bag.
      interpret: As in `embedding_bag`.

    Returns:
      float[B, D].

    Raises:
      ValueError: an argument has the wrong rank or dtype, or the named implementation cannot take it.
    """
    op = "gather_and_pool_rows"
    _check_table(op, table)
    _check_integers(op, "ids", ids)
    _check_integers(op, "bags", bags)
    chosen = _choose(op, implementation, ("reference", "xla", "pallas_gpu"), table=table)
    if chosen == "pallas_gpu":
        return _backend(chosen).gather_and_pool_rows(table, ids, bags, num_bags, interpret=interpret)
    rows = packing.widen(gather_rows(table, ids, implementation=chosen), packing.sum_dtype(table))
    return pool_rows(rows, bags, num_bags, implementation=chosen)


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


def plan_rows(rows: "Int[Array, 'num_ids']", *, num_rows: int, capacity: int) -> RowPlan:
    """Sorts occurrences by row.

    Args:
      rows: int32[N], row of each occurrence, >= 0; values >= num_rows are left out.
      num_rows: Rows of the table.
      capacity: Room for distinct rows; min(N, num_rows) always suffices. Rows beyond it would be left out.
    """
    _check_integers("plan_rows", "rows", rows)
    return RowPlan(*xla.plan_rows(rows, num_rows, capacity))


def sum_by_row(
    grads: "Float[Array, 'num_ids dim']",
    plan: RowPlan,
    *,
    summation: Summation | None = None,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'capacity dim']":
    """Sums the gradients of each distinct row, in order of occurrence.

    A sum depends on the gradients of its row and on their order alone, to the bit.

    Args:
      grads: float[N, D], per occurrence; summed in this dtype.
      plan: From `plan_rows`.
      summation: "fold" adds one by one (a scatter-add, fast and ordered on CPUs only), "tree" in a binary tree over
        the occurrences of a row; None = "fold" on CPUs, "tree" elsewhere. "fixed" adds in fixed point (float32 only):
        the same to the bit in any order of the occurrences. The three differ by rounding.
      implementation: None picks; a name never falls back. "pallas_gpu" sums runs of 64 occurrences, then runs: a third
        order, and takes no `summation`.
      interpret: As in `embedding_bag`.

    Returns:
      [U, D]: row i belongs to plan.rows[i]; zeros at fillers.

    Raises:
      ValueError: `grads` is no matrix of floating point, or the named implementation cannot take it.
    """
    _check_matrix("sum_by_row", "grads", grads)
    capacity = plan.rows.shape[0]
    chosen = _choose("sum_by_row", implementation, ("reference", "xla", "pallas_gpu"))
    if chosen != "xla":
        if summation is not None:
            raise ValueError(
                f'sum_by_row: summation is a choice of implementation "xla"; got {summation!r} with "{chosen}". '
                "Leave one of them out."
            )
        if chosen == "reference":
            return reference.pool_rows(grads[plan.order], plan.slots, capacity, "sum")
        return _backend(chosen).sum_by_row(grads, plan.order, plan.slots, capacity, interpret=interpret)
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
    arrays: tuple["Shaped[Array, 'rows ...']", ...],
    plan: RowPlan,
    sums: "Float[Array, 'capacity dim']",
    step: Step,
    *,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> tuple["Shaped[Array, 'rows ...']", ...]:
    """Applies an optimizer to the rows of a plan and to nothing else.

    Args:
      arrays: The table [V, D], or packed uint32[V, D/2], and its row states, [V] or [V, D].
      plan: From `plan_rows`.
      sums: float[U, D] from `sum_by_row`; its dtype is the dtype of the computation.
      step: (arrays at the rows, sums) -> new arrays at the rows, row by row: kernels hand it blocks of rows. It may
        use scalars of the program around it.
      implementation: None picks; a name never falls back.
      interpret: As in `embedding_bag`.

    Returns:
      The arrays, updated; in place when they are donated.

    Raises:
      ValueError: the named implementation cannot take the arrays, the sums or the step.
    """
    chosen = _choose("update_rows", implementation)
    if chosen == "reference":
        return reference.update_rows(arrays, plan.rows, sums, step)
    if chosen == "xla":
        return xla.update_rows(arrays, plan.rows, sums, step)
    return _backend(chosen).update_rows(arrays, plan.rows, sums, step, interpret=interpret)


_BagSaved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Table, ids, lengths and weights."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static: the implementation, how Pallas kernels run, the name that was given, and how rows are pooled."""

    implementation: Implementation
    interpret: "Interpret"
    named: Implementation | None
    pooling: str = "sum"


@compat.custom_vjp(0)
def _kernel_bag(
    call: _Call, table: jax.Array, ids: jax.Array, lengths: jax.Array, weights: jax.Array | None
) -> jax.Array:
    backend = _backend(call.implementation)
    return backend.embedding_bag(table, ids, lengths, weights, call.pooling, interpret=call.interpret)


def _bag_forward(
    call: _Call, table: jax.Array, ids: jax.Array, lengths: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, _BagSaved]:
    return _kernel_bag(call, table, ids, lengths, weights), (table, ids, lengths, weights)


def _bag_backward(call: _Call, saved: _BagSaved, grads: jax.Array) -> tuple[jax.Array | None, ...]:
    table, ids, lengths, weights = saved
    if call.pooling == "mean":
        ends = jnp.minimum(jnp.cumsum(lengths), ids.shape[0])
        counts = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
        grads = grads / jnp.maximum(counts, 1).astype(grads.dtype)[:, None]
    by_slot = grads.at[xla.slot_bags(lengths, ids.shape[0])].get(mode="fill", fill_value=0)
    weight_grads = None
    if weights is not None:
        rows = gather_rows(table, ids, implementation=call.implementation, interpret=call.interpret)
        rows = packing.widen(rows, by_slot.dtype)
        weight_grads = (rows * by_slot).sum(axis=1).astype(weights.dtype)
        by_slot = by_slot * weights.astype(by_slot.dtype)[:, None]
    return _table_gradient(call, table, ids, by_slot), None, None, weight_grads


_kernel_bag.defvjp(_bag_forward, _bag_backward)


@compat.custom_vjp(0)
def _kernel_gather(call: _Call, table: jax.Array, ids: jax.Array) -> jax.Array:
    return _backend(call.implementation).gather_rows(table, ids, interpret=call.interpret)


def _gather_forward(call: _Call, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _kernel_gather(call, table, ids), (table, ids)


def _gather_backward(
    call: _Call, saved: tuple[jax.Array, jax.Array], grads: jax.Array
) -> tuple[jax.Array | None, None]:
    return _table_gradient(call, *saved, grads.astype(jnp.float32)), None


_kernel_gather.defvjp(_gather_forward, _gather_backward)


def _table_gradient(call: _Call, table: jax.Array, ids: jax.Array, by_slot: jax.Array) -> jax.Array | None:
    """Dense gradient of a table from the gradient of each looked-up row; None for packed tables."""
    if table.dtype == jnp.uint32:
        return None
    num_rows = table.shape[0]
    plan = plan_rows(jnp.where(ids < 0, num_rows, ids), num_rows=num_rows, capacity=min(ids.shape[0], num_rows))
    summing = "xla" if call.named == "pallas_tpu" else call.named
    sums = sum_by_row(by_slot, plan, implementation=summing, interpret=call.interpret).astype(table.dtype)
    empty = jnp.zeros(table.shape, table.dtype)
    return empty.at[plan.rows].set(sums, mode="drop", indices_are_sorted=True, unique_indices=True)


def _choose(
    op: str,
    implementation: Implementation | None,
    known: tuple[str, ...] = ("reference", "xla", "pallas_tpu", "pallas_gpu"),
    table: jax.Array | None = None,
) -> Implementation:
    if implementation is None:
        first = gpu_choices.first("embedding_bag", op, elsewhere={})
        takes = table is not None and table.dtype.name in blocks.GPU_TABLES
        return "pallas_gpu" if first == "pallas_gpu" and takes else "xla"
    if implementation not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"{op}: implementation must be None or one of {names}; got {implementation!r}.")
    return implementation


def _backend(name: Implementation) -> types.ModuleType:
    # Pallas takes longer to import than all the rest, and most programs never need it.
    return importlib.import_module(f"scalejax.kernels.embedding_bag.{name}")


def _check_table(op: str, array: jax.Array) -> None:
    if array.dtype != jnp.uint32 or array.ndim != 2:
        _check_matrix(op, "table", array)


def _check_matrix(op: str, name: str, array: jax.Array) -> None:
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} must be a floating-point matrix; got {array.dtype}{list(array.shape)}.")


def _check_integers(op: str, name: str, array: jax.Array) -> None:
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} must be an integer vector; got {array.dtype}{list(array.shape)}.")
