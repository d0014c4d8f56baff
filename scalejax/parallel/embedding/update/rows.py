"""Exact updates of the rows that a step looked up, on the devices that own them.

Two programs for the same result, to the bit: all tables of a stack at once, and table after table. The second keeps its
temporaries in the caches of a CPU, where it is several times faster; on an accelerator it would be many small kernels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.numerics.stochastic import hash_bits, stochastic_round
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine
from scalejax.parallel.embedding.exchange.local import LocalStack
from scalejax.parallel.embedding.exchange.routed import Route, to_owners, to_senders
from scalejax.parallel.embedding.ids.occurrences import Lookup, slots_of_member, unpool
from scalejax.parallel.embedding.plan.row_numbers import name_hashes, row_numbers
from scalejax.parallel.embedding.plan.sharding_plan import Accumulate
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.parallel.embedding.sharded_tables import StackAxes
from scalejax.parallel.embedding.update import optimizers

Leaves = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of a step that all tables share.

    Attributes:
      scale: float[], factor on learning rates.
      updates: int32[], updates before this one.
      accumulate: How gradients of a row add up.
      when: bool[], whether the step is taken: where not, no row is written. None = it is.
    """

    scale: jax.Array
    updates: jax.Array
    accumulate: Accumulate
    when: jax.Array | None = None

    @property
    def summation(self) -> Literal["fixed"] | None:
        return "fixed" if self.accumulate == "exact" else None

    def of(self, here: LocalStack) -> optimizers.Step:
        stack = here.stack
        return optimizers.step(stack.optimizer, self.scale.astype(stack.wide_dtype), self.updates, here.zero)


def most_rows(stack: Stack, found: tuple[Lookup, ...], copies: int) -> int:
    """Distinct rows that an update can touch on one device."""
    most = 0
    for device in range(stack.devices):
        most = max(
            most,
            sum(
                min(copies * stack.devices * slots_of_member(found, m), m.local_rows)
                for m in stack.members
                if not m.ranks or device in m.ranks
            ),
        )
    return most


def touched_rows(here: LocalStack, way: Route) -> jax.Array:
    """int32[A * copies]: local row of every occurrence that updates this device, in summation order."""
    rows = way.arrived if way.sequence is None else way.arrived[way.sequence]
    return lax.all_gather(rows, here.axes.copy_axes, tiled=True) if here.axes.copy_axes else rows


def plan_update(here: LocalStack, way: Route, copies: int) -> ops.RowPlan:
    """Which occurrences belong to which row: made from ids alone, before there are gradients."""
    rows = touched_rows(here, way)
    capacity = min(rows.shape[0], most_rows(here.stack, here.lookups, copies))
    return ops.plan_rows(rows, num_rows=here.stack.local_rows, capacity=capacity)


def update_stack(
    here: LocalStack, leaves: Leaves, way: Route, plan: ops.RowPlan, arrived: jax.Array, inputs: StepInputs
) -> ExchangeCoroutine[Leaves]:
    """One optimizer step on the rows of a stack that live here. Runs inside a shard_map over all axes.

    Args:
      here: The stack and its lookups.
      leaves: Local rows [L, dim] and row states.
      way: From the lookup.
      plan: From `plan_update`.
      arrived: float[A, dim], the gradient of every arrival, from `routed.return_grads`.
      inputs: Of this step.
    """
    stack, axes = here.stack, here.axes
    if way.sequence is not None:
        arrived = arrived[way.sequence]
    if axes.copy_axes:
        arrived = lax.all_gather(arrived, axes.copy_axes, tiled=True)
    sums = ops.sum_by_row(arrived, plan, summation=inputs.summation)
    means = (yield from _whole_means(here, leaves, way, plan, sums)) if stack.exchanges_statistics else None
    device = lax.axis_index(axes.route_axes) if stack.devices > 1 else 0
    return _write(here, leaves, plan, sums, means, inputs, device)


def update_stack_one_by_one(
    here: LocalStack,
    leaves: Leaves,
    way: Route,
    grads: Sequence[jax.Array],
    inputs: StepInputs,
    plans: tuple[ops.RowPlan, ...] | None = None,
) -> Leaves:
    """`update_stack` as a scan over tables of about the same size. One device only.

    `plans` are from the host, for each group of `alike`, with rows counted within their table; None = they are made.
    """
    stack, found = here.stack, here.lookups
    assert stack.devices == 1
    names = tuple(stack.leaves)
    slots = [unpool(here.shard, look, grad, here.zero) for look, grad in zip(found, grads, strict=True)]
    arrays = tuple(leaves[name] for name in names)
    for number, members in enumerate(alike(stack, found)):
        bound = max(member.local_rows for member in members)
        parts = [_occurrences(member, found, way, slots) for member in members]
        capacity = min(bound, parts[0][0].shape[0])

        def one(
            arrays: tuple[jax.Array, ...],
            table: tuple[jax.Array | int, jax.Array, jax.Array, ops.RowPlan | None],
            bound: int = bound,
            capacity: int = capacity,
        ) -> tuple[tuple[jax.Array, ...], None]:
            offset, rows, grads, plan = table
            if plan is None:
                # Relative to the table: short keys sort faster. Occurrences without a row lie beyond every table.
                rows = jnp.where(rows < stack.local_rows, rows - offset, bound)
                plan = ops.plan_rows(rows, num_rows=bound, capacity=capacity)
            sums = ops.sum_by_row(grads, plan, summation=inputs.summation)
            fillers = stack.local_rows + (plan.rows - bound)
            plan = ops.RowPlan(plan.order, plan.slots, jnp.where(plan.rows < bound, plan.rows + offset, fillers))
            new = _write(here, dict(zip(names, arrays, strict=True)), plan, sums, None, inputs, 0)
            return tuple(new[name] for name in names), None

        given = None if plans is None else plans[number]
        if len(members) <= _WRITTEN_OUT:
            # A scan would first copy all gradients into one array, as much memory traffic as the update itself.
            for index, (member, (rows, own)) in enumerate(zip(members, parts, strict=True)):
                plan = None if given is None else jax.tree.map(lambda x, i=index: x[i], given)
                arrays, _ = one(arrays, (member.offsets[0], rows, own, plan))
            continue
        offsets = jnp.asarray([member.offsets[0] for member in members], jnp.int32)
        rows, own = (jnp.stack([part[i] for part in parts]) for i in (0, 1))
        arrays, _ = lax.scan(one, arrays, (offsets, rows, own, given))
    return dict(zip(names, arrays, strict=True))


_WRITTEN_OUT = 64
"""Most alike tables whose updates are written out one after the other; more would take long to compile."""


def update_dense(
    here: LocalStack, leaves: Leaves, way: Route, grads: Sequence[jax.Array], inputs: StepInputs, axes: tuple[str, ...]
) -> Leaves:
    """One step of a copied stack by dense gradients, summed over all devices: order and rounding are the platform's."""
    stack, looks = here.stack, zip(here.lookups, grads, strict=True)
    slots = jnp.concatenate([unpool(here.shard, look, grad, here.zero) for look, grad in looks])
    dense = jnp.zeros((stack.local_rows, stack.dim), slots.dtype).at[way.arrived].add(slots, mode="drop")
    seen = jnp.zeros(stack.local_rows, jnp.int32).at[way.arrived].add(1, mode="drop")
    dense, seen = lax.psum((dense, seen), axes)
    touched = seen > 0 if inputs.when is None else (seen > 0) & inputs.when
    rows = lax.iota(jnp.int32, stack.local_rows)
    arrays = tuple(leaves[name].astype(stack.wide_dtype) for name in stack.leaves)
    after = inputs.of(here)(arrays, dense)
    new = {}
    for name, value in zip(stack.leaves, after, strict=True):
        value = _narrow(stack, value, rows, 0, inputs.updates) if name == "rows" else value
        mask = touched.reshape((-1,) + (1,) * (value.ndim - 1))
        new[name] = jnp.where(mask, value.astype(leaves[name].dtype), leaves[name])
    return new


def _write(
    here: LocalStack,
    leaves: Leaves,
    plan: ops.RowPlan,
    sums: jax.Array,
    means: jax.Array | None,
    inputs: StepInputs,
    device: jax.Array | int,
) -> Leaves:
    stack, step = here.stack, inputs.of(here)
    if inputs.when is not None:
        # Rows beyond the last are not written. To choose between new and old tables would copy them.
        beyond = stack.local_rows + lax.iota(plan.rows.dtype, plan.rows.shape[0])
        plan = ops.RowPlan(plan.order, plan.slots, jnp.where(inputs.when, plan.rows, beyond))

    def apply(arrays: tuple[jax.Array, ...], grads: jax.Array) -> tuple[jax.Array, ...]:
        rows, *states = step(arrays, grads, means)
        return (_narrow(stack, rows, plan.rows, device, inputs.updates), *states)

    names = tuple(stack.leaves)
    arrays = ops.update_rows(tuple(leaves[name] for name in names), plan, sums, apply)
    return dict(zip(names, arrays, strict=True))


def _narrow(stack: Stack, rows: jax.Array, local: jax.Array, device: jax.Array | int, updates: jax.Array) -> jax.Array:
    """Updated rows in the dtype they rest in; stochastic rounding is a function of table, row, column and step."""
    if not stack.stochastic:
        return rows
    member, row = row_numbers(stack, local, device)
    starts = jnp.asarray([m.start for m in stack.members], jnp.int32)
    columns = starts[member][:, None] + lax.iota(jnp.int32, stack.dim)[None, :]
    bits = hash_bits(updates, jnp.asarray(name_hashes(stack))[member][:, None], row[:, None], columns)
    return stochastic_round(rows, stack.dtype, bits)


def _whole_means(
    here: LocalStack, leaves: Leaves, way: Route, plan: ops.RowPlan, sums: jax.Array
) -> ExchangeCoroutine[jax.Array]:
    """float[U]: the mean of g^2 over all columns of each row, of which this device has a slice.

    Every owner sends the sums over its blocks of columns to the devices that looked the row up; there they are added,
    column after column, and the totals go to all owners of the row: the additions of an unsliced table.
    """
    weights = leaves["rows"].at[plan.rows].get(mode="fill", fill_value=0).astype(sums.dtype)
    grads = optimizers.with_decay(here.stack.optimizer, weights, sums, here.zero)
    blocks = optimizers.square_blocks(grads, here.zero)  # U blocks
    place_of = _slot_of_arrival(way, plan, here.axes)
    at_arrivals = blocks.at[place_of].get(mode="fill", fill_value=0)
    back = yield from to_senders(here, at_arrivals, way)
    totals = {}
    for looks in _by_feature(here.lookups):
        total = optimizers.add_columns(jnp.concatenate([back[look] for look in looks], axis=1))
        mean = total * (1.0 / looks[0].member.config.dim)
        totals |= dict.fromkeys(looks, mean)
    forth = yield from to_owners(here, totals, way)  # A
    means = jnp.zeros(blocks.shape[0], blocks.dtype).at[place_of].set(forth, mode="drop")
    # Rows that only other copies looked up have no arrival here; means are not negative, and equal where they are
    # known.
    return lax.pmax(means, here.axes.copy_axes) if here.axes.copy_axes else means


def _slot_of_arrival(way: Route, plan: ops.RowPlan, axes: StackAxes) -> jax.Array:
    """int32[A]: which distinct row of the plan each arrival of this device is of."""
    in_sequence = jnp.zeros_like(plan.slots).at[plan.order].set(plan.slots, unique_indices=True)
    count = way.arrived.shape[0]
    if axes.copy_axes:
        in_sequence = lax.dynamic_slice_in_dim(in_sequence, lax.axis_index(axes.copy_axes) * count, count)
    if way.sequence is None:
        return in_sequence
    return jnp.zeros_like(in_sequence).at[way.sequence].set(in_sequence, unique_indices=True)


def _by_feature(found: tuple[Lookup, ...]) -> list[list[Lookup]]:
    """Lookups of the same feature in the slices of one table, in the order of columns."""
    groups: dict[str, list[Lookup]] = {}
    for look in found:
        groups.setdefault(look.feature.name, []).append(look)
    return [sorted(group, key=lambda look: look.member.start) for group in groups.values()]


def alike(stack: Stack, found: tuple[Lookup, ...]) -> list[list[Member]]:
    """Tables with the same number of slots and, to a factor of two, of rows that a batch can touch."""
    groups: dict[tuple[int, int], list[Member]] = {}
    for member in stack.members:
        slots = slots_of_member(found, member)
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
    rows, own = way.arrived[begin : begin + count], jnp.concatenate([grads[number] for number in mine])
    if len(mine) == 1 or way.sequence is None:
        return rows, own
    order = way.sequence[begin : begin + count] - begin
    return rows[order], own[order]
