"""What is on one device during an exchange: its part of a stack, blocks for other devices, and how blocks travel.

Everything is per shard, inside a shard_map over all mesh axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.embedding_bag import xla
from scalejax.parallel.embedding.exchange import coroutines, wire
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.ids.occurrences import Channel, Lookup, slots_of_member, summation_order
from scalejax.parallel.embedding.lookup_kernels import Implementation
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.sharded_tables import StackAxes

SLACK = 8
"""Slots per destination on top of the factor: small batches scatter more around their mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalStack:
    """One stack on one device, and the lookups of a batch in it: what every function of a shard_map works on.

    Attributes:
      stack: The tables.
      lookups: Their features, in order of occurrence.
      shard: The examples of this device.
      axes: Where the stack is striped and copied.
      exchange: What vectors travel as.
      zero: From `numerics.rounding.runtime_zero`.
      implementation: What looks rows up.
    """

    stack: Stack
    lookups: tuple[Lookup, ...]
    shard: DeviceJagged
    axes: StackAxes
    exchange: Exchange
    zero: jax.Array
    implementation: Implementation

    @property
    def pooled_by(self) -> Literal["xla", "pallas_gpu"]:
        """What adds up the rows of bags, in the same order wherever they lie."""
        return "pallas_gpu" if self.implementation == "pallas_gpu" else "xla"

    @property
    def by_rows(self) -> tuple[Lookup, ...]:
        """Lookups of which every row travels, or none."""
        return tuple(look for look in self.lookups if look.channel in ("here", "rows"))

    @property
    def by_bags(self) -> tuple[Lookup, ...]:
        """Lookups of which pooled vectors travel."""
        return tuple(look for look in self.lookups if look.channel == "bags")

    @property
    def by_host(self) -> tuple[Lookup, ...]:
        """Lookups of which vectors travel that a device of their host has pooled."""
        return tuple(look for look in self.lookups if look.channel == "host")


@dataclasses.dataclass(frozen=True)
class ByDevice:
    """Occurrences sorted by destination, and within it in summation order; those of no device last.

    Attributes:
      devices: int32[occurrences], destination of each; N = none.
      occurrences: int32[occurrences], which.
      starts: int32[N + 1], where each destination begins.
    """

    devices: jax.Array
    occurrences: jax.Array
    starts: jax.Array

    @staticmethod
    def sort(device: jax.Array, order: jax.Array | None, count: int) -> "ByDevice":
        devices, occurrences = xla.stable_order(device if order is None else device[order], count)
        if order is not None:
            occurrences = order[occurrences]
        starts = jnp.searchsorted(devices, jnp.arange(count + 1, dtype=jnp.int32)).astype(jnp.int32)
        return ByDevice(devices, occurrences, starts)

    @property
    def ranks(self) -> jax.Array:
        """Place of each among those of its destination."""
        return lax.iota(jnp.int32, self.devices.shape[0]) - self.starts[self.devices]

    def slots(self, slot: jax.Array) -> jax.Array:
        """A slot for each sorted one -> for each occurrence."""
        return jnp.zeros_like(slot).at[self.occurrences].set(slot, unique_indices=True)


def bag_numbers(shard: DeviceJagged, look: Lookup) -> jax.Array:
    """Place of the bag of every slot in the bucket of its owner, non-decreasing.

    Unused slots, whose rows are zeros, count to the last bag.
    """
    if look.feature.length is not None:
        return look.bag + lax.iota(jnp.int32, look.feature.capacity) // max(1, look.feature.length)
    return look.bag + jnp.minimum(shard.bags(look.feature), look.feature.bags - 1)


def bucket_order(shard: DeviceJagged, looks: list[Lookup], slots: int) -> jax.Array | None:
    order = summation_order(shard, tuple(looks)) if looks else None
    if order is None:
        return None
    rest = lax.iota(jnp.int32, slots - order.shape[0]) + order.shape[0]
    return jnp.concatenate([order, rest])


def capacity(
    stack: Stack, found: tuple[Lookup, ...], exchange: Exchange, channel: Channel, *, senders: int, total: int
) -> int:
    """Slots per destination of a channel: what the fullest device can expect, or room for all where that is small.

    Ids of a table of V rows reach min(n, V) of its n devices.

    Args:
      stack: The tables.
      found: Their lookups.
      exchange: How much room there is.
      channel: Which.
      senders: Devices whose ids a destination gets together.
      total: Slots that all ids of these take.
    """
    destinations = stack.devices // senders
    if destinations * total * stack.dim * stack.wide_dtype.itemsize <= exchange.roomy_below_bytes:
        return total
    wanted, most = [SLACK] * stack.devices, [0] * stack.devices
    for member in dict.fromkeys(look.member for look in found if look.channel == channel):
        slots = senders * slots_of_member(found, member)
        spread = min(member.parts, member.config.rows)
        for rank in member.ranks:
            wanted[rank] += min(slots, math.ceil(exchange.capacity_factor * slots / spread))
            most[rank] += slots
    return max(map(min, wanted, most))


def most_slots(looks: Sequence[Lookup] | dict[Lookup, jax.Array]) -> int:
    return max(look.occurrence + look.feature.capacity for look in looks)


def most_bags(looks: Sequence[Lookup] | dict[Lookup, jax.Array]) -> int:
    return max(look.bag + look.feature.bags for look in looks)


def arrange(
    parts: dict[Lookup, jax.Array],
    count: int,
    goes_to: Callable[[Lookup], int],
    begin: Callable[[Lookup], int],
    size: int,
    fill: int,
) -> jax.Array:
    """[count, size, ...]: block n has the parts of the lookups that go to n, each at its place."""
    sample = next(iter(parts.values()))
    blocks = []
    for number in range(count):
        own = [part for look, part in sorted(parts.items(), key=lambda p: begin(p[0])) if goes_to(look) == number]
        missing = size - sum(part.shape[0] for part in own)
        blocks.append(jnp.concatenate([*own, jnp.full((missing, *sample.shape[1:]), fill, sample.dtype)]))
    return jnp.stack(blocks)


Direction = Literal["to owners", "to senders"]
Hop = Literal["all", "between hosts", "within hosts"]


def carry(here: LocalStack, blocks: jax.Array, direction: Direction) -> ExchangeCoroutine[jax.Array]:
    """Vectors [N, ..., D] as `swap` moves them, in the formats of the exchange."""
    for hop in hops(here, direction):
        blocks = yield from carry_hop(here, blocks, hop, direction)
    return blocks


def carry_hop(here: LocalStack, blocks: jax.Array, hop: Hop, direction: Direction) -> ExchangeCoroutine[jax.Array]:
    """Vectors as `move` moves them, in the format of the hop."""
    exchange = here.exchange
    form, scale = (exchange.forward, 1.0) if direction == "to senders" else (exchange.backward, exchange.loss_scale)
    if hop == "within hosts":
        form = exchange.within_host
    return wire.carry(blocks, form, functools.partial(move, here, hop), loss_scale=scale)


def swap(here: LocalStack, blocks: jax.Array, direction: Direction) -> ExchangeCoroutine[jax.Array]:
    """[N, ...]: block n goes to device n, and that of device n comes."""
    for hop in hops(here, direction):
        blocks = yield from move(here, hop, blocks)
    return blocks


def hops(here: LocalStack, direction: Direction) -> tuple[Hop, ...]:
    """In two hops vectors leave their host last: between the two a device has all of its host for its peers' examples,
    those of the devices in its place in the other hosts."""
    if here.stack.hosts == 1:
        return ("all",)
    both: tuple[Hop, ...] = ("between hosts", "within hosts")
    return both if direction == "to owners" else both[::-1]


def move(here: LocalStack, hop: Hop, blocks: jax.Array) -> ExchangeCoroutine[jax.Array]:
    """A part of the way of `swap`, all of it by way of both hops in either order.

    Args:
      here: The stack.
      hop: Which.
      blocks: [N, size, ...], a block for every device. For a hop between hosts it may be [T, size, ...], a block for
        every host: that of host t goes to this device's peer there; for one within them [L, size, ...], a block for
        every device of a host.
    """
    axes, inside, tail = here.axes.route_axes, here.stack.in_host, blocks.shape[2:]
    if hop == "all":
        return (yield from coroutines.send(axes, blocks))
    if hop == "between hosts":
        came = yield from between_hosts(blocks.reshape(here.stack.hosts, -1, *tail))
        return came.reshape(blocks.shape)
    by_device = blocks.reshape(-1, inside, *blocks.shape[1:]).swapaxes(0, 1)  # L hosts size ...
    within = tuple(name for name in axes if name != "replica")
    came = yield from coroutines.send(within, by_device.reshape(inside, -1, *tail))
    return came.reshape(by_device.shape).swapaxes(0, 1).reshape(blocks.shape)


def between_hosts(blocks: jax.Array) -> ExchangeCoroutine[jax.Array]:
    """[T, size, ...]: block t goes to this device's peer on host t, and that of the peer comes."""
    return coroutines.send(("replica",), blocks)


def in_blocks(here: LocalStack, flat: jax.Array) -> jax.Array:
    return flat.reshape(here.stack.devices, -1, *flat.shape[1:])


def end_to_end(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
