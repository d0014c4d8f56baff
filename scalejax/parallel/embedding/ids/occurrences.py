"""Occurrences: one lookup of one id, as seen by the device that holds the examples. Per-shard arrays, no collectives.

The occurrences of a stack are the slots of its features, table after table, feature after feature. Where several
features share a table, the order that sums of gradients follow is another one, by example first:

    occurrence order   f1 of example 0, f1 of example 1, ..., f2 of example 0, f2 of example 1, ...
    summation order    f1 of example 0, f2 of example 0, f1 of example 1, f2 of example 1, ...

because examples are cut over devices: only then do the shards, laid end to end, give the same order for every number
of devices.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.numerics.rounding import rounded
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, FeatureLayout
from scalejax.parallel.embedding.plan.stacks import Member, Stack

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int32

Channel = Literal["here", "rows", "bags", "host"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One feature's part in its stack.

    Attributes:
      member: The table, or slice of it.
      feature: Its place in the device form.
      channel: How its rows are fetched. "here": they are on this device. "rows": each is sent by the
        device that has it and pooled here. "bags": the one device that has them all pools them and sends one vector a
        bag. "host": a device of the one host that has them all does.
      occurrence: Its first occurrence in the channel; for "bags", in the bucket of the one device; for "host", of the
        host.
      bag: For "bags" and "host": its first vector in that bucket.
    """

    member: Member
    feature: FeatureLayout
    channel: Channel
    occurrence: int
    bag: int = 0

    @property
    def part(self) -> slice:
        """The occurrences of the feature in the channel."""
        return slice(self.occurrence, self.occurrence + self.feature.capacity)


def lookups(stack: Stack, layout: tuple[FeatureLayout, ...]) -> tuple[Lookup, ...]:
    """The features that look up a stack, in order of occurrence."""
    by_name = {feature.name: feature for feature in layout}
    found: list[Lookup] = []
    occurrence = 0
    ends: dict[tuple[Channel, int], tuple[int, int]] = {}  # of each bucket: slots, bags
    for member in stack.members:
        features = [by_name[name] for name in member.config.features]
        channel = _channel(stack, member, features)
        for feature in features:
            if channel in ("bags", "host"):
                bucket = (channel, member.ranks[0] // (1 if channel == "bags" else stack.in_host))
                slots, bags = ends.get(bucket, (0, 0))
                found.append(Lookup(member, feature, channel, slots, bags))
                ends[bucket] = slots + feature.capacity, bags + feature.bags
            else:
                found.append(Lookup(member, feature, channel, occurrence))
                occurrence += feature.capacity
    return tuple(found)


def _channel(stack: Stack, member: Member, features: list[FeatureLayout]) -> Channel:
    if stack.devices == 1:
        return "here"
    if member.config.pooling == "none":
        return "rows"
    if stack.hosts > 1 and len({rank // stack.in_host for rank in member.ranks}) == 1:
        return "bags" if len(member.ranks) == 1 else "host"
    if len(member.ranks) == 1 and any(f.length != 1 for f in features):
        return "bags"
    return "rows"


def host_of(stack: Stack, look: Lookup) -> int:
    """The host of a feature whose rows are all on one."""
    return look.member.ranks[0] // stack.in_host


def slots_of_member(found: tuple[Lookup, ...], member: Member) -> int:
    """Occurrences per shard of all features of one table."""
    return sum(look.feature.capacity for look in found if look.member is member)


def addresses(shard: DeviceJagged, look: Lookup, devices: int, nowhere: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Device and local row of each slot of a feature, and the number of bad ids.

    Unused slots and bad ids get (devices, nowhere).
    """
    ids, member, used = shard.ids(look.feature), look.member, shard.used(look.feature)
    good = used & (ids >= 0) & (ids < member.config.rows)
    wrong = used & ~good
    if member.config.id_map is not None:
        wrong = wrong & (ids != LOST)
    bad = wrong.sum(dtype=jnp.int32)
    device, row = locate(member, ids)
    return jnp.where(good, device, devices), jnp.where(good, row, nowhere), bad


LOST = -(2**31)
"""Stands for an id that found no room on its way to an id map, where it was counted."""


def locate(member: Member, ids: "Int32[Array, 'ids']") -> tuple["Int32[Array, 'ids']", "Int32[Array, 'ids']"]:
    """Device and local row of rows of a table, int32[U] each."""
    ranks, offsets = member.ranks or (0,), member.offsets
    if len(ranks) == 1:
        device, row = jnp.full_like(ids, ranks[0]), offsets[0] + ids
    else:
        place = (ids + member.shift) % len(ranks)
        device = place if ranks == tuple(range(len(ranks))) else _pick(ranks, place)
        row = (offsets[0] if len(set(offsets)) == 1 else _pick(offsets, place)) + ids // len(ranks)
    return device, row


def _pick(values: tuple[int, ...], place: jax.Array) -> jax.Array:
    return jnp.asarray(values, jnp.int32).at[place].get(mode="clip")


def lost_slots(shard: DeviceJagged, look: Lookup) -> jax.Array:
    """Ids of a jagged feature that its slots, or the positions of their bags, had no room for."""
    if look.feature.length is not None:
        return jnp.zeros((), jnp.int32)
    return (shard.counts(look.feature).sum() - shard.used(look.feature).sum()).astype(jnp.int32)


def summation_order(shard: DeviceJagged, found: tuple[Lookup, ...]) -> jax.Array | None:
    """int32[occurrences]: the occurrences in summation order; None where that is the order they are in.

    Args:
      shard: The examples.
      found: Features whose occurrences follow each other without gaps.
    """
    members = list(dict.fromkeys(look.member for look in found))
    parts = [[look for look in found if look.member is member] for member in members]
    if all(len(part) == 1 for part in parts):
        return None
    return jnp.concatenate([_by_example(shard, part) for part in parts])


def _by_example(shard: DeviceJagged, part: list[Lookup]) -> jax.Array:
    slots = [look.occurrence + lax.iota(jnp.int32, look.feature.capacity) for look in part]
    if len({look.feature.group for look in part}) > 1:
        return jnp.concatenate(slots)  # distinct rows of different groups have no common order
    bags = part[0].feature.bags
    if len(part) == 1:
        return slots[0]
    if all(look.feature.length is not None for look in part):
        return jnp.concatenate([s.reshape(bags, -1) for s in slots], axis=1).reshape(-1)
    # The place of an id: ids of earlier examples, then of earlier features of its example, then its own position.
    lengths = jnp.stack([shard.counts(look.feature) for look in part])  # F b
    before_example = jnp.cumsum(lengths.sum(axis=0)) - lengths.sum(axis=0)  # b
    before_feature = jnp.cumsum(lengths, axis=0) - lengths  # F b
    places, spare = [], lengths.sum()
    for number, look in enumerate(part):
        bag_of = shard.bags(look.feature)
        begin = (before_example + before_feature[number]).at[bag_of].get(mode="fill", fill_value=0)
        used = bag_of < bags
        unused_rank = jnp.cumsum((~used).astype(jnp.int32)) - 1
        places.append(jnp.where(used, begin + shard.positions(look.feature), spare + unused_rank))
        spare = spare + (~used).sum(dtype=jnp.int32)
    place = jnp.concatenate(places)
    return jnp.zeros_like(place).at[place].set(jnp.concatenate(slots), unique_indices=True)


def pool(
    shard: DeviceJagged,
    look: Lookup,
    rows: "Float[Array, 'slots dim']",
    zero: jax.Array,
    by: Literal["xla", "pallas_gpu"],
) -> "Float[Array, 'bags *positions dim']":
    """Rows of a feature's slots -> what the model sees of it: [b, dim], or [b, positions, dim] for pooling "none".

    The rows of a bag are added in order of position, each weighted row rounded by itself (`zero` is from
    `rounding.runtime_zero`): the sum is the same to the bit wherever it is formed `by` the same.
    """
    weights = shard.weights_of(look.feature)
    if weights is not None:
        rows = rounded(rows * weights.astype(rows.dtype)[:, None], zero)
    length, pooling = look.feature.length, look.member.config.pooling
    if length is None and pooling == "none":
        return _by_position(shard, look, rows)
    if length is None:
        sums = ops.pool_rows(rows, shard.bags(look.feature), look.feature.bags, implementation=by)
        return average(shard, look, sums, zero)
    if pooling == "none":
        return rows.reshape(look.feature.bags, length, rows.shape[-1])
    return average(shard, look, _sum_positions(rows, look.feature.bags, length, by), zero)


def _by_position(shard: DeviceJagged, look: Lookup, rows: jax.Array) -> jax.Array:
    """[slots, dim] -> [b, max_length, dim], zeros behind the last row of each bag."""
    assert look.feature.max_length is not None  # the collection refuses the rest
    counts, position = shard.counts(look.feature)[:, None], lax.iota(jnp.int32, look.feature.max_length)[None, :]
    starts = jnp.cumsum(counts, axis=0) - counts
    slots = jnp.where(position < counts, starts + position, rows.shape[0])  # b max_length
    return rows.at[slots].get(mode="fill", fill_value=0)


def average(shard: DeviceJagged, look: Lookup, sums: jax.Array, zero: jax.Array) -> jax.Array:
    """Sums of bags -> their means where the table wants means."""
    if look.member.config.pooling != "mean" or look.feature.length == 1:
        return sums
    return rounded(sums * shares(shard, look, sums.dtype, zero)[:, None], zero)


def shares(shard: DeviceJagged, look: Lookup, dtype: jnp.dtype, zero: jax.Array) -> jax.Array:
    """float[b]: 1 / ids of each bag. A compiler makes this product of a division, or not; written out it always is."""
    length = look.feature.length
    counts = shard.counts(look.feature) if length is None else jnp.full(look.feature.bags, length)
    return rounded(1 / jnp.maximum(counts, 1).astype(dtype), zero)


def _sum_positions(rows: jax.Array, bags: int, length: int, by: Literal["xla", "pallas_gpu"]) -> jax.Array:
    """Sums of consecutive rows, in the order that `ops.pool_rows` adds in on the platform at hand."""
    if length == 1:
        return rows
    if length > _UNROLLED or by == "pallas_gpu":
        return ops.pool_rows(rows, jnp.repeat(jnp.arange(bags, dtype=jnp.int32), length), bags, implementation=by)

    def fold(x: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, [x[:, i] for i in range(length)])

    def tree(x: jax.Array) -> jax.Array:
        parts = [x[:, i] for i in range(length)]
        while len(parts) > 1:
            parts = [functools.reduce(jnp.add, parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]

    return lax.platform_dependent(rows.reshape(bags, length, -1), cpu=fold, default=tree)


_UNROLLED = 32
"""Longest fixed length whose sum is written out."""


def unpool(
    shard: DeviceJagged, look: Lookup, grads: "Float[Array, 'bags *positions dim']", zero: jax.Array
) -> "Float[Array, 'slots dim']":
    """Gradient of `pool`: [b, dim] or [b, positions, dim] -> one gradient per slot; zeros in unused slots.

    What stands at the positions behind the last row of a bag is not read.

    `zero` is from `rounding.runtime_zero`: what is summed by row later has been rounded by itself.
    """
    length, pooling = look.feature.length, look.member.config.pooling
    grads = average(shard, look, grads, zero)  # which is linear
    if length is None and pooling == "none":
        slots = grads.at[shard.bags(look.feature), shard.positions(look.feature)].get(mode="fill", fill_value=0)
    elif length is None:
        slots = grads.at[shard.bags(look.feature)].get(mode="fill", fill_value=0)
    elif pooling == "none":
        slots = grads.reshape(-1, grads.shape[-1])
    else:
        slots = grads if length == 1 else jnp.repeat(grads, length, axis=0)
    weights = shard.weights_of(look.feature)
    return slots if weights is None else rounded(slots * weights.astype(slots.dtype)[:, None], zero)
