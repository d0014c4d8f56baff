"""Gather, pool, sum by row and update with XLA's own operations.

    rows    7  2  7  9  2  7           six occurrences of three rows
    order   1  4  0  2  5  3           stable sort: by row, then by occurrence
    slot    1  0  1  2  0  1           which distinct row, per occurrence, in the order of occurrence
    rows'   2  7  9  .  .  .           distinct rows, ascending; unused places hold num_rows, num_rows + 1, ...

A float scatter-add with duplicate indices runs one at a time on a CPU, in order of occurrence: each sum is a left fold
and fast. On other platforms its order is not stated and on GPUs it can be very slow, so the sum there is a tree over
the occurrences of one row. Either way a sum depends on its own occurrences and their order alone, never on what else
is in the batch or on where it lies; that is what makes updates equal to the bit however a table is sharded.
"""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax import compat
from scalejax.kernels.embedding_bag import packing
from scalejax.kernels.embedding_bag.steps import Step


def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    # Negative indices would count from the end, and 64-bit ones wrap into rows.
    ids = jnp.where((ids < 0) | (ids > table.shape[0]), table.shape[0], ids)
    return table.at[ids].get(mode="fill", fill_value=0)


def slot_bags(lengths: jax.Array, slots: int) -> jax.Array:
    """Bag of each slot; `len(lengths)` for slots past the last bag."""
    ends = jnp.cumsum(lengths)
    # The bag of a slot is the number of bags that end at or before it, empty ones included.
    begun = jnp.zeros(slots, jnp.int32).at[ends].add(1, mode="drop", indices_are_sorted=True)
    return jnp.cumsum(begun).astype(jnp.int32)


def pool_rows(rows: jax.Array, bags: jax.Array, num_bags: int, pooling: str) -> jax.Array:
    """Bags are non-decreasing."""
    pooled: jax.Array = sorted_segment_sum(rows, bags, num_bags)  # pyright: ignore[reportAssignmentType]
    if pooling == "mean":
        counts = jnp.zeros(num_bags, jnp.int32).at[bags].add(1, mode="drop", indices_are_sorted=True)
        pooled = pooled / jnp.maximum(counts, 1).astype(pooled.dtype)[:, None]
    return pooled


def stable_order(keys: jax.Array, bound: int) -> tuple[jax.Array, jax.Array]:
    """Sorted keys and the stable permutation that sorts them; keys lie in [0, bound].

    Key and position are packed into one uint32 where they fit: XLA sorts single values five to seven times faster
    than pairs on a CPU.
    """
    count = keys.shape[0]
    position = lax.iota(jnp.uint32, count)
    position_bits = max(1, (count - 1).bit_length())
    if bound.bit_length() + position_bits <= 32:
        packed = (keys.astype(jnp.uint32) << position_bits) | position
        packed = lax.sort(packed, is_stable=False)
        mask = jnp.uint32((1 << position_bits) - 1)
        return (packed >> position_bits).astype(jnp.int32), (packed & mask).astype(jnp.int32)
    sorted_keys, order = lax.sort((keys, position.astype(jnp.int32)), num_keys=1, is_stable=True)
    return sorted_keys, order


def plan_rows(rows: jax.Array, num_rows: int, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, sorted slots, distinct rows) of the drawing above; entries >= num_rows get the slot `capacity`."""
    sorted_rows, order = stable_order(jnp.minimum(rows, num_rows), num_rows)
    valid = sorted_rows < num_rows
    first = jnp.concatenate([jnp.ones(1, bool), sorted_rows[1:] != sorted_rows[:-1]]) & valid
    slots = jnp.where(valid, jnp.cumsum(first.astype(jnp.int32)) - 1, capacity)
    unused = num_rows + lax.iota(jnp.int32, capacity)  # ascending and distinct, as the scatter promises
    distinct = unused.at[jnp.where(first, slots, capacity)].set(sorted_rows, mode="drop")
    return order, slots, distinct


def sum_by_slot_fold(grads: jax.Array, order: jax.Array, slots: jax.Array, capacity: int) -> jax.Array:
    """Left folds, by a scatter-add in order of occurrence: no permuted copy of the gradients."""
    by_occurrence = jnp.zeros_like(slots).at[order].set(slots, unique_indices=True)
    return jnp.zeros((capacity, *grads.shape[1:]), grads.dtype).at[by_occurrence].add(grads, mode="drop")


def sum_by_slot_tree(grads: jax.Array, order: jax.Array, slots: jax.Array, capacity: int) -> jax.Array:
    """Binary trees over the occurrences of each row, without a scatter-add."""
    return sorted_segment_sum_tree(grads[order], slots, capacity)


@compat.custom_vjp(2)
def sorted_segment_sum(values: jax.Array, segments: jax.Array, capacity: int) -> jax.Array:
    """Sums of equal, non-decreasing segments; the fold on CPUs, the tree elsewhere."""
    return lax.platform_dependent(
        values,
        segments,
        cpu=lambda v, s: (
            jnp.zeros((capacity, *v.shape[1:]), v.dtype).at[s].add(v, mode="drop", indices_are_sorted=True)
        ),
        default=lambda v, s: sorted_segment_sum_tree(v, s, capacity),
    )


def _segment_sum_forward(values: jax.Array, segments: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    return sorted_segment_sum(values, segments, capacity), segments


def _segment_sum_backward(capacity: int, segments: jax.Array, grads: jax.Array) -> tuple[jax.Array, None]:
    return grads.at[segments].get(mode="fill", fill_value=0), None


sorted_segment_sum.defvjp(_segment_sum_forward, _segment_sum_backward)


def sorted_segment_sum_tree(values: jax.Array, segments: jax.Array, capacity: int) -> jax.Array:
    """In round k the occurrence of rank j (a multiple of 2^(k+1) within its segment) takes in the one of rank j + 2^k.

    The shape of the tree follows from ranks within a segment, so a sum does not depend on where its segment lies.
    The number of rounds is the logarithm of the longest segment.
    """
    count = values.shape[0]
    index = lax.iota(jnp.int32, count)
    first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    start = lax.cummax(jnp.where(first, index, 0))
    rank = index - start
    longest = jnp.where(segments < capacity, rank, 0).max() + 1

    def take(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        stride, sums = carry
        partner = index + stride
        same = segments.at[partner].get(mode="fill", fill_value=-1) == segments
        takes = same & (rank % (2 * stride) == 0)
        other = sums.at[jnp.minimum(partner, count - 1)].get(mode="promise_in_bounds")
        return 2 * stride, jnp.where(takes[:, None], sums + other, sums)

    _, sums = lax.while_loop(lambda c: c[0] < longest, take, (jnp.int32(1), values))
    where = jnp.where(first, segments, capacity)
    empty = jnp.zeros((capacity, *values.shape[1:]), values.dtype)
    return empty.at[where].set(sums, mode="drop")


def update_rows(
    arrays: tuple[jax.Array, ...], distinct: jax.Array, grads: jax.Array, step: Step
) -> tuple[jax.Array, ...]:
    """One gather and one sorted, unique scatter per array; math in the dtype of `grads`."""
    before = tuple(packing.widen(a.at[distinct].get(mode="fill", fill_value=0), grads.dtype) for a in arrays)
    after = step(before, grads)
    return tuple(
        a.at[distinct].set(packing.narrow(n, a.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)
        for a, n in zip(arrays, after, strict=True)
    )
