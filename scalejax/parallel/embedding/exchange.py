"""The routed exchange: ids to the devices that own their rows, rows back, gradients there again.

Runs inside a shard_map over all mesh axes. A device puts its occurrences into N buckets of K slots, one per
destination; one all_to_all carries the local row numbers, one the rows back, one the gradients:

    sender    bucket of device 0 | bucket of device 1 | ...      inverse: bucket slot -> occurrence
              [ 4  9  9  . ]       [ 2  .  .  . ]                slots: occurrence -> bucket slot
    owner     from device 0      | from device 1      | ...      rows: local row of every slot that arrived

Within a bucket occurrences keep the summation order, so that what arrives at an owner, read from the front, is in the
order of examples. Occurrences that found no room have no slot: they embed as zeros, update nothing and are counted.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.embedding_bag import xla
from scalejax.parallel.embedding.occurrences import (
    Lookup,
    Shard,
    addresses,
    lost_slots,
    slots_of_table,
    summation_order,
)
from scalejax.parallel.embedding.plan import Exchange
from scalejax.parallel.embedding.stacks import Stack

SLACK = 8
"""Slots per destination on top of the factor: small batches scatter more around their mean."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where the occurrences of one stack went, on one device.

    Attributes:
      rows: int32[N * K], local row of every slot that arrived here; `local_rows` = empty. With one device there are no
        buckets and this is the local row of every occurrence.
      slots: int32[occurrences], bucket slot of every occurrence; N * K = none. None with one device.
      order: int32: with one device the summation order or None; otherwise occurrence in each bucket slot [N * K], the
        number of occurrences = empty.
    """

    rows: jax.Array
    slots: jax.Array | None
    order: jax.Array | None


def bucket_capacity(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange, devices: int) -> int:
    """K: slots per destination. Ids of a table of V rows reach min(N, V) devices."""
    total = sum(look.feature.capacity for look in found)
    if devices * total * stack.dim * stack.wide_dtype.itemsize <= exchange.roomy_below_bytes:
        return total
    wanted = SLACK
    for member in stack.members:
        slots = slots_of_table(found, member)
        wanted += min(slots, math.ceil(exchange.capacity_factor * slots / min(devices, member.config.rows)))
    return min(total, wanted)


def route(
    shard: Shard, stack: Stack, found: tuple[Lookup, ...], *, axes: tuple[str, ...], devices: int, capacity: int
) -> tuple[Route, jax.Array]:
    """Sends the ids of one stack to their owners.

    Returns:
      The route, and int32[2]: bad ids, and ids without room.
    """
    parts = [addresses(shard, look, devices, stack.local_rows) for look in found]
    device = jnp.concatenate([p[0] for p in parts])
    row = jnp.concatenate([p[1] for p in parts])
    bad = sum((p[2] for p in parts), jnp.zeros((), jnp.int32))
    lost = sum((lost_slots(shard, look) for look in found), jnp.zeros((), jnp.int32))
    order = summation_order(shard, found)
    if devices == 1:
        return Route(row, None, order), jnp.stack([bad, lost])

    count = device.shape[0]
    sorted_device, by_device = xla.stable_order(device if order is None else device[order], devices)
    if order is not None:
        by_device = order[by_device]
    starts = jnp.searchsorted(sorted_device, jnp.arange(devices + 1, dtype=jnp.int32)).astype(jnp.int32)  # N + 1
    rank = lax.iota(jnp.int32, count) - starts[sorted_device]
    has_room = (sorted_device < devices) & (rank < capacity)
    slot = jnp.where(has_room, sorted_device * capacity + rank, devices * capacity)
    slots = jnp.zeros_like(slot).at[by_device].set(slot, unique_indices=True)
    lost = lost + ((sorted_device < devices) & ~has_room).sum(dtype=jnp.int32)

    wanted = starts[:-1, None] + lax.iota(jnp.int32, capacity)[None, :]  # N K
    filled = wanted < starts[1:, None]
    inverse = jnp.where(filled, by_device.at[wanted].get(mode="clip"), count)
    sent = row.at[inverse].get(mode="fill", fill_value=stack.local_rows)
    arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True)
    return Route(arrived.reshape(-1), slots, inverse.reshape(-1)), jnp.stack([bad, lost])


def fetch_rows(
    table: jax.Array, way: Route, found: tuple[Lookup, ...], *, axes: tuple[str, ...], devices: int
) -> list[jax.Array]:
    """The row of every occurrence, per feature: [slots, dim] each; zeros where there is none."""

    def part(array: jax.Array, look: Lookup) -> jax.Array:
        return array[look.occurrence : look.occurrence + look.feature.capacity]

    if way.slots is None:
        # A gather per feature: one gather for all would be cut into pieces, a second pass over all rows.
        return [xla.gather_rows(table, part(way.rows, look)) for look in found]
    slots = way.slots
    rows = xla.gather_rows(table, way.rows)
    rows = lax.all_to_all(rows.reshape(devices, -1, rows.shape[-1]), axes, 0, 0, tiled=True)
    rows = rows.reshape(-1, rows.shape[-1])
    return [rows.at[part(slots, look)].get(mode="fill", fill_value=0) for look in found]


def send_grads(grads: jax.Array, way: Route, *, axes: tuple[str, ...], devices: int) -> jax.Array:
    """Gradients of the occurrences -> float[N * K, dim], at the owners of their rows, beside `way.rows`."""
    assert way.order is not None
    sent = grads.at[way.order].get(mode="fill", fill_value=0)
    arrived = lax.all_to_all(sent.reshape(devices, -1, sent.shape[-1]), axes, 0, 0, tiled=True)
    return arrived.reshape(-1, arrived.shape[-1])
