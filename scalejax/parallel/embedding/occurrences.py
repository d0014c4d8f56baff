"""Occurrences: one lookup of one id, as seen by the device that holds the examples. Per-shard arrays, no collectives.

The occurrences of a stack are the slots of its features, table after table, feature after feature. Where several
features share a table, the order that sums of gradients follow is another one, by example first:

    occurrence order   f1 of example 0, f1 of example 1, ..., f2 of example 0, f2 of example 1, ...
    summation order    f1 of example 0, f2 of example 0, f1 of example 1, f2 of example 1, ...

because examples are cut over devices: only then do the shards, laid end to end, give the same order for every number
of devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.parallel.embedding.jagged import FeatureLayout
from scalejax.parallel.embedding.rounding import rounded
from scalejax.parallel.embedding.stacks import Member, Stack


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One feature's part in its stack.

    Attributes:
      member: The table.
      feature: Its place in the device form.
      row: Row of the feature in `lengths`.
      start: Its first slot in `values`.
      occurrence: Its first occurrence in the stack.
    """

    member: Member
    feature: FeatureLayout
    row: int
    start: int
    occurrence: int


def lookups(stack: Stack, layout: tuple[FeatureLayout, ...]) -> tuple[Lookup, ...]:
    """The features that look up a stack, in order of occurrence."""
    starts, start = {}, 0
    for row, feature in enumerate(layout):
        starts[feature.name] = (row, start, feature)
        start += feature.capacity
    found, occurrence = [], 0
    for member in stack.members:
        for name in member.config.features:
            row, start, feature = starts[name]
            found.append(Lookup(member, feature, row, start, occurrence))
            occurrence += feature.capacity
    return tuple(found)


def slots_of_table(found: tuple[Lookup, ...], member: Member) -> int:
    """Occurrences per shard of all features of one table."""
    return sum(look.feature.capacity for look in found if look.member is member)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a `KeyedJagged` that one device holds.

    Attributes:
      values: int32[C].
      lengths: int32[F, b].
      weights: float32[C] or None.
    """

    values: jax.Array
    lengths: jax.Array
    weights: jax.Array | None

    @property
    def examples(self) -> int:
        return self.lengths.shape[1]

    def ids(self, look: Lookup) -> jax.Array:
        return self.values[look.start : look.start + look.feature.capacity]

    def weights_of(self, look: Lookup) -> jax.Array | None:
        return None if self.weights is None else self.weights[look.start : look.start + look.feature.capacity]

    def bags(self, look: Lookup) -> jax.Array:
        """Example of each slot; the number of examples for unused slots. Jagged features only."""
        return ops.slot_bags(self.lengths[look.row], look.feature.capacity)


def addresses(shard: Shard, look: Lookup, devices: int, nowhere: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Device and local row of each slot of a feature, and the number of bad ids.

    Unused slots and bad ids get (devices, nowhere).
    """
    ids, member = shard.ids(look), look.member
    used = jnp.ones(ids.shape, bool)
    if look.feature.length is None:
        used = lax.iota(jnp.int32, ids.shape[0]) < shard.lengths[look.row].sum()
    good = used & (ids >= 0) & (ids < member.config.rows)
    bad = (used & ~good).sum(dtype=jnp.int32)
    device = jnp.where(good, (ids + member.shift) % devices, devices)
    row = jnp.where(good, member.offset + ids // devices, nowhere)
    return device, row, bad


def lost_slots(shard: Shard, look: Lookup) -> jax.Array:
    """Ids of a jagged feature that its slots had no room for."""
    if look.feature.length is not None:
        return jnp.zeros((), jnp.int32)
    return jnp.maximum(shard.lengths[look.row].sum() - look.feature.capacity, 0).astype(jnp.int32)


def summation_order(shard: Shard, found: tuple[Lookup, ...]) -> jax.Array | None:
    """int32[occurrences]: the occurrences in summation order; None where that is the order they are in."""
    members = list(dict.fromkeys(look.member for look in found))
    parts = [[look for look in found if look.member is member] for member in members]
    if all(len(part) == 1 for part in parts):
        return None
    return jnp.concatenate([_by_example(shard, part) for part in parts])


def _by_example(shard: Shard, part: list[Lookup]) -> jax.Array:
    slots = [look.occurrence + lax.iota(jnp.int32, look.feature.capacity) for look in part]
    if len(part) == 1:
        return slots[0]
    if all(look.feature.length is not None for look in part):
        return jnp.concatenate([s.reshape(shard.examples, -1) for s in slots], axis=1).reshape(-1)
    # The place of an id: ids of earlier examples, then of earlier features of its example, then its own position.
    lengths = jnp.stack([shard.lengths[look.row] for look in part])  # F b
    before_example = jnp.cumsum(lengths.sum(axis=0)) - lengths.sum(axis=0)  # b
    before_feature = jnp.cumsum(lengths, axis=0) - lengths  # F b
    places, spare = [], lengths.sum()
    for number, look in enumerate(part):
        capacity = look.feature.capacity
        bags = shard.bags(look)
        own_start = (jnp.cumsum(lengths[number]) - lengths[number]).at[bags].get(mode="fill", fill_value=0)
        begin = (before_example + before_feature[number]).at[bags].get(mode="fill", fill_value=0)
        index = lax.iota(jnp.int32, capacity)
        used = bags < shard.examples
        unused_rank = jnp.cumsum((~used).astype(jnp.int32)) - 1
        places.append(jnp.where(used, begin + index - own_start, spare + unused_rank))
        spare = spare + (~used).sum(dtype=jnp.int32)
    place = jnp.concatenate(places)
    return jnp.zeros_like(place).at[place].set(jnp.concatenate(slots), unique_indices=True)


def pool(shard: Shard, look: Lookup, rows: jax.Array) -> jax.Array:
    """Rows of a feature's slots -> what the model sees of it: [b, dim], or [b, length, dim] for pooling "none"."""
    weights = shard.weights_of(look)
    if weights is not None:
        rows = rows * weights.astype(rows.dtype)[:, None]
    length, pooling = look.feature.length, look.member.config.pooling
    if length is None:
        assert pooling != "none"  # the collection refuses it
        return ops.pool_rows(rows, shard.bags(look), shard.examples, pooling=pooling)
    rows = rows.reshape(shard.examples, length, rows.shape[-1])
    if pooling == "none":
        return rows
    pooled = rows[:, 0] if length == 1 else rows.sum(axis=1)
    return pooled / length if pooling == "mean" and length > 1 else pooled


def unpool(shard: Shard, look: Lookup, grads: jax.Array, zero: jax.Array) -> jax.Array:
    """Gradient of `pool`: [b, dim] or [b, length, dim] -> one gradient per slot; zeros in unused slots.

    `zero` is from `rounding.runtime_zero`: what is summed by row later has been rounded by itself.
    """
    length, pooling = look.feature.length, look.member.config.pooling
    if pooling == "mean" and length != 1:
        # A product with the reciprocal, which is what compilers make of a division, or not.
        counts = shard.lengths[look.row] if length is None else jnp.full(shard.examples, length)
        share = 1 / jnp.maximum(counts, 1).astype(grads.dtype)
        grads = rounded(grads * share[:, None], zero)
    if length is None:
        slots = grads.at[shard.bags(look)].get(mode="fill", fill_value=0)
    elif pooling == "none":
        slots = grads.reshape(-1, grads.shape[-1])
    else:
        slots = grads if length == 1 else jnp.repeat(grads, length, axis=0)
    weights = shard.weights_of(look)
    return slots if weights is None else rounded(slots * weights.astype(slots.dtype)[:, None], zero)
