"""The routed exchange: ids to the devices that own their rows, rows back, gradients there again.

Runs inside a shard_map over all mesh axes. Features come by one of three channels (see `Lookup`):

*here*: the rows are on this device; nothing travels.

*rows*: a device puts its occurrences into N buckets of K slots, one per destination; one all_to_all carries the local
row numbers, one the rows back, one the gradients:

    sender    bucket of device 0 | bucket of device 1 | ...      inverse: bucket slot -> occurrence
              [ 4  9  9  . ]       [ 2  .  .  . ]                slots: occurrence -> bucket slot
    owner     from device 0      | from device 1      | ...      rows: local row of every slot that arrived

Within a bucket occurrences keep the summation order, so that what arrives at an owner, read from the front, is in the
order of examples. Occurrences that found no room have no slot: they embed as zeros, update nothing and are counted.
Where XLA has it, `ragged_all_to_all` carries the same without the empty slots (see `ragged`).

*bags*: one device has all rows of a feature, so its bucket has a place for every slot and no id can lack room. Ids
travel with the number of their bag; the owner adds up each bag and one vector a bag travels back, one gradient a bag
there again.

With `Exchange.route="two_level"` everything travels in two hops, between hosts and within them, see `_hops`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag import xla
from scalejax.numerics.quantized import products
from scalejax.numerics.rounding import rounded
from scalejax.parallel.embedding.exchange import ragged, wire
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.ids.occurrences import (
    Lookup,
    addresses,
    average,
    lost_slots,
    pool,
    slots_of_member,
    summation_order,
    unpool,
)
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.sharded_tables import StackAxes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int32, UInt32

SLACK = 8
"""Slots per destination on top of the factor: small batches scatter more around their mean."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where the occurrences of one stack went, on one device. A arrivals: those of "rows", then those of "bags".

    Attributes:
      arrived: int32[A], local row of every slot that arrived here; `local_rows` = empty. For "here" the local row of
        every occurrence.
      sequence: int32[A], the arrivals in summation order; None = they are in it.
      slots: "rows": int32[occurrences], bucket slot of every occurrence; N * K = none.
      inverse: "rows": int32[N * K], occurrence in every bucket slot; the number of occurrences = empty.
      runs: "rows", without padding: who sends what to whom. Slots are then places in its runs.
      bags: "bags": int32[N * K'], place of the bag of every arrival among the vectors that go back, non-decreasing.
      weights: "bags": float32[N * K'], weight of every arrival.
    """

    arrived: jax.Array
    sequence: jax.Array | None = None
    slots: jax.Array | None = None
    inverse: jax.Array | None = None
    bags: jax.Array | None = None
    weights: jax.Array | None = None
    runs: ragged.RaggedSplits | None = None


@dataclasses.dataclass(frozen=True)
class LocalStack:
    """One stack on one device, and the lookups of a batch in it: what every function of a shard_map works on.

    Attributes:
      stack: The tables.
      lookups: Their features, in order of occurrence.
      shard: The examples of this device.
      axes: Where the stack is striped and copied.
      exchange: What vectors travel as.
      zero: From `numerics.rounding.runtime_zero`.
    """

    stack: Stack
    lookups: tuple[Lookup, ...]
    shard: DeviceJagged
    axes: StackAxes
    exchange: Exchange
    zero: jax.Array

    @property
    def by_rows(self) -> tuple[Lookup, ...]:
        """Lookups of which every row travels, or none."""
        return tuple(look for look in self.lookups if look.channel != "bags")

    @property
    def by_bags(self) -> tuple[Lookup, ...]:
        """Lookups of which pooled vectors travel."""
        return tuple(look for look in self.lookups if look.channel == "bags")


def exchange_may_lack_room(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange) -> bool:
    """Whether a bucket of the "rows" channel has fewer slots than all ids of a device take."""
    total = sum(look.feature.capacity for look in found if look.channel == "rows")
    return bucket_capacity(stack, found, exchange) < total


def bucket_capacity(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange) -> int:
    """K: slots per destination of the "rows" channel: what the fullest device can expect.

    Ids of a table of V rows reach min(n, V) of its n devices.
    """
    total = sum(look.feature.capacity for look in found if look.channel == "rows")
    if stack.devices * total * stack.dim * stack.wide_dtype.itemsize <= exchange.roomy_below_bytes:
        return total
    wanted = [SLACK] * stack.devices
    most = [0] * stack.devices
    for member in dict.fromkeys(look.member for look in found if look.channel == "rows"):
        slots = slots_of_member(found, member)
        spread = min(member.parts, member.config.rows)
        expected = slots if spread == 1 else min(slots, math.ceil(exchange.capacity_factor * slots / spread))
        for rank in member.ranks:
            wanted[rank] += expected
            most[rank] += slots
    return max(map(min, wanted, most))


def route(here: LocalStack) -> tuple[Route, "Int32[Array, '2']"]:
    """Sends the ids of one stack to their owners.

    Returns:
      The route, and int32[2]: bad ids, and ids without room.
    """
    stack, shard, found = here.stack, here.shard, here.lookups
    lost = sum((lost_slots(shard, look) for look in found), jnp.zeros((), jnp.int32))
    where = {look: addresses(shard, look, stack.devices, stack.local_rows) for look in found}
    bad = sum((bad for _, _, bad in where.values()), jnp.zeros((), jnp.int32))
    ways = []
    if here.by_rows:
        device = jnp.concatenate([where[look][0] for look in here.by_rows])
        row = jnp.concatenate([where[look][1] for look in here.by_rows])
        order = summation_order(shard, here.by_rows)
        if stack.devices == 1:
            ways.append(Route(row, order))
        else:
            send = _send_ids if here.exchange.all_to_all == "padded" else _send_runs
            way, without_room = send(here, _ByDevice.sort(device, order, stack.devices), row)
            ways.append(way)
            lost = lost + without_room
    if here.by_bags:
        ways.append(_send_bags(here, {look: where[look][1] for look in here.by_bags}))
    return _joined(ways), jnp.stack([bad, lost])


def fetch(
    here: LocalStack, table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']", way: Route
) -> list["Float[Array, 'bags *positions dim']"]:
    """What the model sees of every feature, per lookup: float[b, dim], or [b, positions, dim] for pooling "none"."""
    stack, shard, zero = here.stack, here.shard, here.zero
    results: dict[Lookup, jax.Array] = {}
    arrivals = way.arrived.shape[0] - (0 if way.bags is None else way.bags.shape[0])
    if here.by_rows and way.slots is None:
        for look in here.by_rows:
            # A gather per feature: one gather for all would be cut into pieces, a second pass over all rows.
            rows = _read(table, way.arrived[look.part], stack)
            results[look] = pool(shard, look, rows.astype(stack.wide_dtype), zero)
    elif here.by_rows:
        assert way.slots is not None
        rows = _read(table, way.arrived[:arrivals], stack)
        rows = _carry_rows(here, rows, way, "to senders")
        for look in here.by_rows:
            own = rows.at[way.slots[look.part]].get(mode="fill", fill_value=0)
            results[look] = pool(shard, look, own.astype(stack.wide_dtype), zero)
    if here.by_bags:
        assert way.bags is not None
        rows = _read(table, way.arrived[arrivals:], stack).astype(stack.wide_dtype)
        if way.weights is not None:
            rows = rounded(rows * way.weights.astype(rows.dtype)[:, None], zero)
        sums = ops.pool_rows(rows, way.bags, stack.devices * _most_bags(here.by_bags))
        sums = _carry(here, _in_blocks(here, sums), "to senders")
        for look in here.by_bags:
            (rank,) = look.member.ranks
            results[look] = average(shard, look, sums[rank, look.bag : look.bag + look.feature.bags], zero)
    return [results[look] for look in here.lookups]


def _read(table: jax.Array, ids: jax.Array, stack: Stack) -> jax.Array:
    """Rows, in the number format that the stack is read in."""
    rows = ops.gather_rows(table, ids)
    if stack.reads is None:
        return rows
    return products.read_rows(rows, stack.reads, where=f"tables/{stack.members[0].config.name}")


def return_grads(
    here: LocalStack, grads: Sequence["Float[Array, 'bags *positions dim']"], way: Route
) -> "Float[Array, 'arrivals dim']":
    """The gradient of `fetch`: per lookup -> float[A, dim], one for every arrival, beside `way.arrived`."""
    shard, zero = here.shard, here.zero
    of = dict(zip(here.lookups, grads, strict=True))
    parts = []
    if here.by_rows:
        occurrences = jnp.concatenate([unpool(shard, look, of[look], zero) for look in here.by_rows])
        if way.inverse is not None:
            sent = occurrences.at[way.inverse].get(mode="fill", fill_value=0)
            occurrences = _carry_rows(here, sent, way, "to owners")
        parts.append(occurrences)
    if here.by_bags:
        assert way.bags is not None
        shares = {look: average(shard, look, of[look], zero) for look in here.by_bags}
        blocks = _blocks(shares, here.stack, lambda look: look.bag, _most_bags(here.by_bags), 0)
        arrived = _carry(here, blocks, "to owners").reshape(-1, here.stack.dim)
        slots = arrived.at[way.bags].get(mode="fill", fill_value=0)
        if way.weights is not None:
            slots = rounded(slots * way.weights.astype(slots.dtype)[:, None], zero)
        parts.append(slots)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def to_senders(here: LocalStack, values: jax.Array, way: Route) -> dict[Lookup, jax.Array]:
    """[A, ...] at the owners -> what belongs to every slot of each feature, at the devices that hold the examples."""
    if here.stack.devices == 1:
        return {look: values[look.part] for look in here.lookups}
    arrivals = values.shape[0] - (0 if way.bags is None else way.bags.shape[0])
    back: dict[Lookup, jax.Array] = {}
    if way.slots is not None:
        flat = _back(here, values[:arrivals], way)
        for look in here.by_rows:
            back[look] = flat.at[way.slots[look.part]].get(mode="fill", fill_value=0)
    if here.by_bags:
        blocks = _swap(here, _in_blocks(here, values[arrivals:]), "to senders")
        for look in here.by_bags:
            (rank,) = look.member.ranks
            back[look] = blocks[rank, look.part]
    return back


def to_owners(here: LocalStack, values: dict[Lookup, jax.Array], way: Route) -> jax.Array:
    """The inverse of `to_senders`: one value a slot of each feature -> [A, ...]; zeros where nothing arrived."""
    if here.stack.devices == 1:
        return jnp.concatenate([values[look] for look in here.lookups])
    parts = []
    if way.inverse is not None:
        occurrences = jnp.concatenate([values[look] for look in here.by_rows])
        sent = occurrences.at[way.inverse].get(mode="fill", fill_value=0)
        parts.append(_forth(here, sent, way))
    if here.by_bags:
        by_bags = {look: values[look] for look in here.by_bags}
        blocks = _blocks(by_bags, here.stack, lambda look: look.occurrence, _most_slots(by_bags), 0)
        parts.append(_swap(here, blocks, "to owners").reshape(-1, *blocks.shape[2:]))
    return jnp.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class _ByDevice:
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
    def sort(device: jax.Array, order: jax.Array | None, count: int) -> "_ByDevice":
        devices, occurrences = xla.stable_order(device if order is None else device[order], count)
        if order is not None:
            occurrences = order[occurrences]
        starts = jnp.searchsorted(devices, jnp.arange(count + 1, dtype=jnp.int32)).astype(jnp.int32)
        return _ByDevice(devices, occurrences, starts)

    @property
    def ranks(self) -> jax.Array:
        """Place of each among those of its destination."""
        return lax.iota(jnp.int32, self.devices.shape[0]) - self.starts[self.devices]

    def slots(self, slot: jax.Array) -> jax.Array:
        """A slot for each sorted one -> for each occurrence."""
        return jnp.zeros_like(slot).at[self.occurrences].set(slot, unique_indices=True)


def _send_ids(here: LocalStack, found: _ByDevice, row: jax.Array) -> tuple[Route, jax.Array]:
    stack, count = here.stack, row.shape[0]
    devices, capacity = stack.devices, bucket_capacity(stack, here.lookups, here.exchange)
    ranks = found.ranks
    has_room = (found.devices < devices) & (ranks < capacity)
    slots = found.slots(jnp.where(has_room, found.devices * capacity + ranks, devices * capacity))
    lost = ((found.devices < devices) & ~has_room).sum(dtype=jnp.int32)

    wanted = found.starts[:-1, None] + lax.iota(jnp.int32, capacity)[None, :]  # N K
    filled = wanted < found.starts[1:, None]
    inverse = jnp.where(filled, found.occurrences.at[wanted].get(mode="clip"), count)
    sent = row.at[inverse].get(mode="fill", fill_value=stack.local_rows)
    return Route(_swap(here, sent, "to owners").reshape(-1), None, slots, inverse.reshape(-1)), lost


def _send_runs(here: LocalStack, found: _ByDevice, row: jax.Array) -> tuple[Route, jax.Array]:
    stack, count, axes = here.stack, row.shape[0], here.axes.route_axes
    capacity = bucket_capacity(stack, here.lookups, here.exchange)
    wanted = found.starts[1:] - found.starts[:-1]
    room, slots = (ragged.slots_for(n, stack.devices) for n in (stack.devices * capacity, count))
    runs = ragged.agree(wanted, room=room, axes=axes)
    none = jnp.zeros(1, jnp.int32)
    sent = found.ranks < jnp.concatenate([runs.sizes, none])[found.devices]
    slot = jnp.concatenate([runs.starts, none])[found.devices] + found.ranks
    # Those that are not sent get places outside that differ: the scatter is promised unique indices.
    place = jnp.where(sent, slot, slots + lax.iota(jnp.int32, count))
    inverse = jnp.full(slots, count, jnp.int32).at[place].set(found.occurrences, mode="drop", unique_indices=True)
    numbers = row.at[inverse].get(mode="fill", fill_value=stack.local_rows)
    arrived = ragged.to_owners(numbers, runs, room=room, fill=stack.local_rows, axes=axes)
    way = Route(arrived, None, found.slots(jnp.where(sent, slot, slots)), inverse, runs=runs)
    return way, (wanted - runs.sizes).sum(dtype=jnp.int32)


def _send_bags(here: LocalStack, rows: dict[Lookup, jax.Array]) -> Route:
    stack, shard = here.stack, here.shard
    slots, vectors = _most_slots(rows), _most_bags(rows)

    def block(parts: dict[Lookup, jax.Array], fill: int) -> jax.Array:
        return _blocks(parts, stack, lambda look: look.occurrence, slots, fill)

    numbers = {look: _bag_numbers(shard, look) for look in rows}
    # Filled up with the number of the last bag: `pool_rows` wants bags in order, and rows that are none add zeros.
    planes = [block(rows, stack.local_rows), block(numbers, vectors - 1)]
    if shard.weights is not None:
        # As bits among the ids, so that one all_to_all carries all of it.
        weights = {look: shard.weights[look.feature.slots].astype(jnp.float32) for look in rows}
        planes.append(block({look: lax.bitcast_convert_type(w, jnp.int32) for look, w in weights.items()}, 0))
    orders = [
        _bucket_order(shard, [look for look in rows if look.member.ranks[0] == d], slots) for d in range(stack.devices)
    ]
    ordered = any(order is not None for order in orders)
    if ordered:
        as_they_are = lax.iota(jnp.int32, slots)
        planes.append(jnp.stack([as_they_are if order is None else order for order in orders]))
    arrived = _swap(here, jnp.stack(planes, axis=1), "to owners")  # N planes K'
    source = lax.iota(jnp.int32, stack.devices)[:, None]
    return Route(
        arrived=arrived[:, 0].reshape(-1),
        sequence=(source * slots + arrived[:, -1]).reshape(-1) if ordered else None,
        bags=(source * vectors + arrived[:, 1]).reshape(-1),
        weights=None if shard.weights is None else lax.bitcast_convert_type(arrived[:, 2], jnp.float32).reshape(-1),
    )


def _joined(ways: list[Route]) -> Route:
    if len(ways) == 1:
        return ways[0]
    rows, bags = ways
    sequence = None
    count = rows.arrived.shape[0]
    if rows.sequence is not None or bags.sequence is not None:
        parts = [_sequence(rows), count + _sequence(bags)]
        sequence = jnp.concatenate(parts)
    arrived = jnp.concatenate([rows.arrived, bags.arrived])
    return Route(arrived, sequence, rows.slots, rows.inverse, bags.bags, bags.weights, rows.runs)


def _sequence(way: Route) -> jax.Array:
    return lax.iota(jnp.int32, way.arrived.shape[0]) if way.sequence is None else way.sequence


def _bag_numbers(shard: DeviceJagged, look: Lookup) -> jax.Array:
    """Place of the bag of every slot in the bucket of its owner, non-decreasing.

    Unused slots, whose rows are zeros, count to the last bag.
    """
    if look.feature.length is not None:
        return look.bag + lax.iota(jnp.int32, look.feature.capacity) // max(1, look.feature.length)
    return look.bag + jnp.minimum(shard.bags(look.feature), look.feature.bags - 1)


def _bucket_order(shard: DeviceJagged, looks: list[Lookup], slots: int) -> jax.Array | None:
    order = summation_order(shard, tuple(looks)) if looks else None
    if order is None:
        return None
    rest = lax.iota(jnp.int32, slots - order.shape[0]) + order.shape[0]
    return jnp.concatenate([order, rest])


def _most_slots(looks: Sequence[Lookup] | dict[Lookup, jax.Array]) -> int:
    return max(look.occurrence + look.feature.capacity for look in looks)


def _most_bags(looks: Sequence[Lookup] | dict[Lookup, jax.Array]) -> int:
    return max(look.bag + look.feature.bags for look in looks)


def _blocks(
    parts: dict[Lookup, jax.Array], stack: Stack, begin: Callable[[Lookup], int], size: int, fill: int
) -> jax.Array:
    """[N, size, ...]: block n has the parts of the lookups that device n owns, each at its place."""
    sample = next(iter(parts.values()))
    blocks = []
    for device in range(stack.devices):
        own = [
            part for look, part in sorted(parts.items(), key=lambda p: begin(p[0])) if look.member.ranks[0] == device
        ]
        missing = size - sum(part.shape[0] for part in own)
        blocks.append(jnp.concatenate([*own, jnp.full((missing, *sample.shape[1:]), fill, sample.dtype)]))
    return jnp.stack(blocks)


def _forth(here: LocalStack, values: jax.Array, way: Route) -> jax.Array:
    """[slots, ...] at the senders -> [arrivals of "rows", ...] at the owners; zeros where nothing arrived."""
    if way.runs is None:
        return _swap(here, _in_blocks(here, values), "to owners").reshape(-1, *values.shape[1:])
    room = way.arrived.shape[0] - (0 if way.bags is None else way.bags.shape[0])
    return ragged.to_owners(values, way.runs, room=room, fill=0, axes=here.axes.route_axes)


def _back(here: LocalStack, values: jax.Array, way: Route) -> jax.Array:
    """The inverse of `_forth`."""
    if way.runs is None:
        return _swap(here, _in_blocks(here, values), "to senders").reshape(-1, *values.shape[1:])
    assert way.inverse is not None
    return ragged.to_senders(values, way.runs, count=way.inverse.shape[0], axes=here.axes.route_axes)


Direction = Literal["to owners", "to senders"]
Hop = Literal["all", "between hosts", "within hosts"]


def _carry_rows(here: LocalStack, vectors: jax.Array, way: Route, direction: Direction) -> jax.Array:
    """Vectors of the "rows" channel, [slots or arrivals, D], in the formats of the exchange."""
    if way.runs is None:
        return _carry(here, _in_blocks(here, vectors), direction).reshape(-1, vectors.shape[-1])
    exchange = here.exchange
    if direction == "to senders":
        return wire.carry(vectors, exchange.forward, lambda x: _back(here, x, way))
    return wire.carry(vectors, exchange.backward, lambda x: _forth(here, x, way), loss_scale=exchange.loss_scale)


def _carry(here: LocalStack, blocks: jax.Array, direction: Direction) -> jax.Array:
    """Vectors [N, ..., D] as `_swap` moves them, in the formats of the exchange."""
    exchange = here.exchange
    wanted, scale = (exchange.forward, 1.0) if direction == "to senders" else (exchange.backward, exchange.loss_scale)
    for hop in _hops(here, direction):
        form = exchange.within_host if hop == "within hosts" else wanted
        blocks = wire.carry(blocks, form, functools.partial(_hop, here, hop), loss_scale=scale)
    return blocks


def _swap(here: LocalStack, blocks: jax.Array, direction: Direction) -> jax.Array:
    """[N, ...]: block n goes to device n, and that of device n comes."""
    for hop in _hops(here, direction):
        blocks = _hop(here, hop, blocks)
    return blocks


def _hops(here: LocalStack, direction: Direction) -> tuple[Hop, ...]:
    """In two hops vectors leave their host last: between the two a device has all of its host for its peers' examples,
    those of the devices in its place in the other hosts."""
    if here.exchange.route == "flat":
        return ("all",)
    hops: tuple[Hop, ...] = ("between hosts", "within hosts")
    return hops if direction == "to owners" else hops[::-1]


def _hop(here: LocalStack, hop: Hop, blocks: jax.Array) -> jax.Array:
    """[N, ...]: a part of the way of `_swap`, all of it by way of both hops in either order."""
    if hop == "all":
        return lax.all_to_all(blocks, here.axes.route_axes, 0, 0, tiled=True)
    by_host = blocks.reshape(here.axes.hosts, -1, *blocks.shape[1:])  # T L ...
    if hop == "between hosts":
        moved = lax.all_to_all(by_host, "replica", 0, 0, tiled=True)
    else:
        inside = tuple(axis for axis in here.axes.route_axes if axis != "replica")
        moved = lax.all_to_all(by_host, inside, 1, 1, tiled=True)
    return moved.reshape(blocks.shape)


def _in_blocks(here: LocalStack, flat: jax.Array) -> jax.Array:
    return flat.reshape(here.stack.devices, -1, *flat.shape[1:])
