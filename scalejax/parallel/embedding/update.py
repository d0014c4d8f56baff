"""Exact updates of the rows that a step looked up, on the device that owns them.

Two programs for the same result, to the bit: all tables of a stack at once, and table after table. The second keeps its
temporaries in the caches of a CPU, where it is several times faster; on an accelerator it would be many small kernels.
"""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.parallel.embedding import optimizers
from scalejax.parallel.embedding.exchange import Route, send_grads
from scalejax.parallel.embedding.occurrences import Lookup, slots_of_table
from scalejax.parallel.embedding.stacks import Member, Stack

Leaves = dict[str, jax.Array]


def update_stack(
    stack: Stack,
    found: tuple[Lookup, ...],
    leaves: Leaves,
    way: Route,
    grads: list[jax.Array],
    step: optimizers.Step,
    *,
    axes: tuple[str, ...],
    devices: int,
) -> Leaves:
    """One optimizer step on the rows of a stack that live here. Runs inside a shard_map over all axes.

    Args:
      stack: The tables.
      found: Their features.
      leaves: Local rows [L, dim] and row states.
      way: From the lookup.
      grads: Per feature, the gradient of each of its slots, [slots, dim], in the dtype of the computation.
      step: The row optimizer.
      axes: All mesh axes.
      devices: Their product.
    """
    rows, occurrences = way.rows, jnp.concatenate(grads)
    if devices > 1:
        occurrences = send_grads(occurrences, way, axes=axes, devices=devices)
    elif way.order is not None:
        rows, occurrences = rows[way.order], occurrences[way.order]
    distinct = sum(min(devices * slots_of_table(found, m), m.local_rows) for m in stack.members)
    plan = ops.plan_rows(rows, num_rows=stack.local_rows, capacity=min(rows.shape[0], distinct))
    names = _names(stack)
    arrays = ops.update_rows(
        tuple(leaves[name] for name in names),
        plan,
        ops.sum_by_row(occurrences, plan),
        step,
    )
    return dict(zip(names, arrays, strict=True))


def update_stack_one_by_one(
    stack: Stack,
    found: tuple[Lookup, ...],
    leaves: Leaves,
    way: Route,
    grads: list[jax.Array],
    step: optimizers.Step,
    *,
    axes: tuple[str, ...],
    devices: int,
) -> Leaves:
    """`update_stack` as a scan over tables of about the same size. One device only."""
    assert devices == 1
    del axes
    names = _names(stack)
    arrays = tuple(leaves[name] for name in names)
    for members in _alike(stack, found):
        bound = max(member.local_rows for member in members)
        parts = [_occurrences(member, found, way, grads) for member in members]
        capacity = min(bound, parts[0][0].shape[0])

        def one(
            arrays: tuple[jax.Array, ...],
            table: tuple[jax.Array, jax.Array, jax.Array],
            bound: int = bound,
            capacity: int = capacity,
        ) -> tuple[tuple[jax.Array, ...], None]:
            offset, rows, grads = table
            # Relative to the table: short keys sort faster. Occurrences without a row lie beyond every table.
            rows = jnp.where(rows < stack.local_rows, rows - offset, bound)
            plan = ops.plan_rows(rows, num_rows=bound, capacity=capacity)
            sums = ops.sum_by_row(grads, plan)
            fillers = stack.local_rows + (plan.rows - bound)
            plan = ops.RowPlan(plan.order, plan.slots, jnp.where(plan.rows < bound, plan.rows + offset, fillers))
            return ops.update_rows(arrays, plan, sums, step), None

        offsets = jnp.asarray([member.offset for member in members], jnp.int32)
        tables = (offsets, jnp.stack([rows for rows, _ in parts]), jnp.stack([grads for _, grads in parts]))
        arrays, _ = lax.scan(one, arrays, tables)
    return dict(zip(names, arrays, strict=True))


def _names(stack: Stack) -> tuple[str, ...]:
    """Leaves in the order in which the optimizer takes them."""
    return ("rows", *optimizers.state_shapes(stack.optimizer, 0, 0))


def _alike(stack: Stack, found: tuple[Lookup, ...]) -> list[list[Member]]:
    """Tables with the same number of slots and, to a factor of two, of rows that a batch can touch."""
    groups: dict[tuple[int, int], list[Member]] = {}
    for member in stack.members:
        slots = slots_of_table(found, member)
        touched = min(slots, member.local_rows)
        groups.setdefault((slots, touched.bit_length()), []).append(member)
    return list(groups.values())


def _occurrences(
    member: Member, found: tuple[Lookup, ...], way: Route, grads: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(rows, gradients) of the occurrences of one table, in summation order."""
    mine = [number for number, look in enumerate(found) if look.member is member]
    begin = found[mine[0]].occurrence
    count = sum(found[number].feature.capacity for number in mine)
    rows, own = way.rows[begin : begin + count], jnp.concatenate([grads[number] for number in mine])
    if len(mine) == 1 or way.order is None:
        return rows, own
    order = way.order[begin : begin + count] - begin
    return rows[order], own[order]
