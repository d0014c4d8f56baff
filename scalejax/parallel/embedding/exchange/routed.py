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

With `Exchange.route="two_level"` everything travels in two hops, between hosts and within them, see `local.hops`.

Functions that exchange are coroutines (see `coroutines`), so that all channels of all stacks travel together.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.numerics.quantized import products
from scalejax.numerics.rounding import rounded
from scalejax.parallel.compression import packed_blocks
from scalejax.parallel.embedding.exchange import ragged, through_hosts, wire
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine, together
from scalejax.parallel.embedding.exchange.local import (
    ByDevice,
    Direction,
    LocalStack,
    arrange,
    bag_numbers,
    bucket_order,
    capacity,
    carry,
    end_to_end,
    in_blocks,
    most_bags,
    most_slots,
    swap,
)
from scalejax.parallel.embedding.ids.occurrences import (
    Lookup,
    addresses,
    average,
    lost_slots,
    pool,
    summation_order,
    unpool,
)
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where the occurrences of one stack went, on one device. A arrivals: those of "rows", of "bags", of "host".

    Attributes:
      arrived: int32[A], local row of every slot that arrived here; `local_rows` = empty. For "here" the local row of
        every occurrence.
      sequence: int32[A], the arrivals in summation order; None = they are in it.
      slots: "rows": int32[occurrences], bucket slot of every occurrence; N * K = none.
      inverse: "rows": int32[N * K], occurrence in every bucket slot; the number of occurrences = empty.
      runs: "rows", without padding: who sends what to whom. Slots are then places in its runs.
      through: "host": what this device knows between the hops.
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
    through: through_hosts.HostRoute | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """Where the arrivals of "rows" end, and those of "bags"."""
        last = self.arrived.shape[0] - (0 if self.through is None else self.through.inverse.shape[0])
        return last - (0 if self.bags is None else self.bags.shape[0]), last


def exchange_may_lack_room(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange) -> bool:
    """Whether a bucket of the "rows" channel has fewer slots than all ids of a device take."""
    total = sum(look.feature.capacity for look in found if look.channel == "rows")
    by_host = [look for look in found if look.channel == "host"]
    if by_host and through_hosts.capacity(stack, found, exchange) < stack.hosts * most_slots(by_host):
        return True
    return bucket_capacity(stack, found, exchange) < total


def bucket_capacity(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange) -> int:
    """K: slots per destination of the "rows" channel."""
    total = sum(look.feature.capacity for look in found if look.channel == "rows")
    return capacity(stack, found, exchange, "rows", senders=1, total=total)


def route(here: LocalStack) -> "ExchangeCoroutine[tuple[Route, Int32[Array, '2']]]":
    """Sends the ids of one stack to their owners.

    Returns:
      The route, and int32[2]: bad ids, and ids without room.
    """
    stack, shard, found = here.stack, here.shard, here.lookups
    lost = sum((lost_slots(shard, look) for look in found), jnp.zeros((), jnp.int32))
    where = {look: addresses(shard, look, stack.devices, stack.local_rows) for look in found}
    bad = sum((bad for _, _, bad in where.values()), jnp.zeros((), jnp.int32))
    coroutines: list[ExchangeCoroutine[tuple[Route, jax.Array | int]]] = []
    if here.by_rows:
        device = jnp.concatenate([where[look][0] for look in here.by_rows])
        row = jnp.concatenate([where[look][1] for look in here.by_rows])
        order = summation_order(shard, here.by_rows)
        if stack.devices == 1:
            return Route(row, order), jnp.stack([bad, lost])
        found = ByDevice.sort(device, order, stack.devices)
        if here.exchange.all_to_all == "padded":
            coroutines.append(_send_ids(here, found, row))
        else:
            coroutines.append(_send_runs(here, found, row))
    if here.by_bags:
        coroutines.append(_send_bags(here, {look: where[look][1] for look in here.by_bags}))
    if here.by_host:
        coroutines.append(_send_through_hosts(here, {look: where[look][:2] for look in here.by_host}))
    ways, without_room = zip(*(yield from together(coroutines)), strict=True)
    return _joined(ways), jnp.stack([bad, sum(without_room, lost)])


def fetch(
    here: LocalStack, table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']", way: Route
) -> "ExchangeCoroutine[list[Float[Array, 'bags *positions dim']]]":
    """What the model sees of every feature, per lookup: float[b, dim], or [b, positions, dim] for pooling "none"."""
    stack, (arrivals, last) = here.stack, way.ends
    if stack.devices == 1:
        # A gather per feature: one gather for all would be cut into pieces, a second pass over all rows.
        return [_pooled(here, table, way.arrived[look.part], look) for look in here.lookups]
    coroutines: list[ExchangeCoroutine[dict[Lookup, jax.Array]]] = []
    if here.by_rows:
        coroutines.append(_fetch_rows(here, read(here, table, way.arrived[:arrivals]), way))
    if here.by_bags:
        coroutines.append(_fetch_bags(here, pool_bags(here, table, way)))
    if way.through is not None:
        coroutines.append(through_hosts.fetch(here, read(here, table, way.arrived[last:]), way.through))
    results = _merged((yield from together(coroutines)))
    return [results[look] for look in here.lookups]


def pool_bags(
    here: LocalStack, table: "Float[Array, 'rows dim'] | UInt32[Array, 'rows words']", way: Route
) -> "Float[Array, 'devices bags dim']":
    """Sums of the bags of "bags" here, at the owner, for every device."""
    assert way.bags is not None
    stack, (arrivals, last) = here.stack, way.ends
    ids, count = way.arrived[arrivals:last], stack.devices * most_bags(here.by_bags)
    if here.pooled_by == "pallas_gpu" and way.weights is None and stack.reads is None:
        return in_blocks(here, ops.gather_and_pool_rows(table, ids, way.bags, count, implementation=here.pooled_by))
    rows = read(here, table, ids).astype(stack.wide_dtype)
    if way.weights is not None:
        rows = rounded(rows * way.weights.astype(rows.dtype)[:, None], here.zero)
    return in_blocks(here, ops.pool_rows(rows, way.bags, count, implementation=here.pooled_by))


def unpool_bags(here: LocalStack, bags: "Float[Array, 'devices bags dim']", way: Route) -> "Float[Array, 'slots dim']":
    """The gradient of `pool_bags`: one for every arrival of "bags"."""
    assert way.bags is not None
    slots = bags.reshape(-1, here.stack.dim).at[way.bags].get(mode="fill", fill_value=0)
    if way.weights is not None:
        slots = rounded(slots * way.weights.astype(slots.dtype)[:, None], here.zero)
    return slots


def read(here: LocalStack, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows, in the number format that the stack is read in."""
    rows, stack = ops.gather_rows(table, ids, implementation=here.implementation), here.stack
    if stack.reads is None:
        return rows
    where = f"tables/{stack.members[0].config.name}"
    return products.read_rows(rows, stack.reads, where=where, quantizer=packed_blocks.quantize)


def _pooled(here: LocalStack, table: jax.Array, ids: jax.Array, look: Lookup) -> jax.Array:
    """`pool` of the rows of a feature; by one kernel, which adds in the same order, where there is one."""
    stack, shard, length = here.stack, here.shard, look.feature.length
    plain = stack.reads is None and shard.weights_of(look.feature) is None and look.member.config.pooling != "none"
    if here.pooled_by == "pallas_gpu" and plain and length != 1:
        lengths = shard.counts(look.feature) if length is None else jnp.full(look.feature.bags, length, jnp.int32)
        sums = ops.embedding_bag(table, ids, lengths, implementation=here.pooled_by)
        return average(shard, look, sums, here.zero)
    rows = read(here, table, ids).astype(stack.wide_dtype)
    return pool(shard, look, rows, here.zero, here.pooled_by)


def return_grads(
    here: LocalStack, grads: Sequence["Float[Array, 'bags *positions dim']"], way: Route
) -> "ExchangeCoroutine[Float[Array, 'arrivals dim']]":
    """The gradient of `fetch`: per lookup -> float[A, dim], one for every arrival, beside `way.arrived`."""
    of = dict(zip(here.lookups, grads, strict=True))
    coroutines: list[ExchangeCoroutine[jax.Array]] = []
    if here.by_rows:
        occurrences = jnp.concatenate([unpool(here.shard, look, of[look], here.zero) for look in here.by_rows])
        if way.inverse is None:
            return occurrences
        sent = occurrences.at[way.inverse].get(mode="fill", fill_value=0)
        coroutines.append(_carry_rows(here, sent, way, "to owners"))
    if here.by_bags:
        coroutines.append(_return_bags(here, of, way))
    if way.through is not None:
        coroutines.append(through_hosts.return_grads(here, of, way.through))
    return end_to_end((yield from together(coroutines)))


def to_senders(here: LocalStack, values: jax.Array, way: Route) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    """[A, ...] at the owners -> what belongs to every slot of each feature, at the devices that hold the examples."""
    if here.stack.devices == 1:
        return {look: values[look.part] for look in here.lookups}
    arrivals, last = way.ends
    coroutines: list[ExchangeCoroutine[dict[Lookup, jax.Array]]] = []
    if way.slots is not None:
        coroutines.append(_rows_to_senders(here, values[:arrivals], way))
    if here.by_bags:
        coroutines.append(_bags_to_senders(here, values[arrivals:last]))
    if way.through is not None:
        coroutines.append(through_hosts.to_senders(here, values[last:], way.through))
    return _merged((yield from together(coroutines)))


def to_owners(here: LocalStack, values: dict[Lookup, jax.Array], way: Route) -> ExchangeCoroutine[jax.Array]:
    """The inverse of `to_senders`: one value a slot of each feature -> [A, ...]; zeros where nothing arrived."""
    if here.stack.devices == 1:
        return jnp.concatenate([values[look] for look in here.lookups])
    coroutines: list[ExchangeCoroutine[jax.Array]] = []
    if way.inverse is not None:
        occurrences = jnp.concatenate([values[look] for look in here.by_rows])
        coroutines.append(_forth(here, occurrences.at[way.inverse].get(mode="fill", fill_value=0), way))
    if here.by_bags:
        coroutines.append(_bags_to_owners(here, {look: values[look] for look in here.by_bags}))
    if way.through is not None:
        coroutines.append(through_hosts.to_owners(here, values, way.through))
    return end_to_end((yield from together(coroutines)))


def _merged(parts: Sequence[dict[Lookup, jax.Array]]) -> dict[Lookup, jax.Array]:
    return {look: value for part in parts for look, value in part.items()}


def _fetch_rows(here: LocalStack, rows: jax.Array, way: Route) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    assert way.slots is not None
    rows, results = (yield from _carry_rows(here, rows, way, "to senders")), {}
    for look in here.by_rows:
        own = rows.at[way.slots[look.part]].get(mode="fill", fill_value=0)
        results[look] = pool(here.shard, look, own.astype(here.stack.wide_dtype), here.zero, here.pooled_by)
    return results


def _fetch_bags(here: LocalStack, sums: jax.Array) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    sums, results = (yield from carry(here, sums, "to senders")), {}
    for look in here.by_bags:
        bags = sums[_owner(look), look.bag : look.bag + look.feature.bags]
        results[look] = average(here.shard, look, bags, here.zero)
    return results


def _return_bags(here: LocalStack, of: dict[Lookup, jax.Array], way: Route) -> ExchangeCoroutine[jax.Array]:
    shares = {look: average(here.shard, look, of[look], here.zero) for look in here.by_bags}
    blocks = arrange(shares, here.stack.devices, _owner, lambda look: look.bag, most_bags(here.by_bags), 0)
    bags = yield from carry(here, blocks, "to owners")
    return unpool_bags(here, bags, way)


def _rows_to_senders(here: LocalStack, values: jax.Array, way: Route) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    assert way.slots is not None
    flat = yield from _back(here, values, way)
    return {look: flat.at[way.slots[look.part]].get(mode="fill", fill_value=0) for look in here.by_rows}


def _bags_to_senders(here: LocalStack, values: jax.Array) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    blocks = yield from swap(here, in_blocks(here, values), "to senders")
    return {look: blocks[_owner(look), look.part] for look in here.by_bags}


def _bags_to_owners(here: LocalStack, values: dict[Lookup, jax.Array]) -> ExchangeCoroutine[jax.Array]:
    blocks = arrange(values, here.stack.devices, _owner, lambda look: look.occurrence, most_slots(values), 0)
    arrived = yield from swap(here, blocks, "to owners")
    return arrived.reshape(-1, *blocks.shape[2:])


def _send_ids(here: LocalStack, found: ByDevice, row: jax.Array) -> ExchangeCoroutine[tuple[Route, jax.Array | int]]:
    stack, count = here.stack, row.shape[0]
    devices, room = stack.devices, bucket_capacity(stack, here.lookups, here.exchange)
    ranks = found.ranks
    has_room = (found.devices < devices) & (ranks < room)
    slots = found.slots(jnp.where(has_room, found.devices * room + ranks, devices * room))
    lost = ((found.devices < devices) & ~has_room).sum(dtype=jnp.int32)

    wanted = found.starts[:-1, None] + lax.iota(jnp.int32, room)[None, :]  # N K
    filled = wanted < found.starts[1:, None]
    inverse = jnp.where(filled, found.occurrences.at[wanted].get(mode="clip"), count)
    sent = row.at[inverse].get(mode="fill", fill_value=stack.local_rows)
    arrived = yield from swap(here, sent, "to owners")
    return Route(arrived.reshape(-1), None, slots, inverse.reshape(-1)), lost


def _send_runs(here: LocalStack, found: ByDevice, row: jax.Array) -> ExchangeCoroutine[tuple[Route, jax.Array | int]]:
    stack, count, axes = here.stack, row.shape[0], here.axes.route_axes
    most = bucket_capacity(stack, here.lookups, here.exchange)
    wanted = found.starts[1:] - found.starts[:-1]
    room, slots = (ragged.slots_for(n, stack.devices) for n in (stack.devices * most, count))
    runs = yield from ragged.agree(wanted, room=room, axes=axes)
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


def _send_bags(here: LocalStack, rows: dict[Lookup, jax.Array]) -> ExchangeCoroutine[tuple[Route, jax.Array | int]]:
    stack, shard = here.stack, here.shard
    slots, vectors = most_slots(rows), most_bags(rows)

    def block(parts: dict[Lookup, jax.Array], fill: int) -> jax.Array:
        return arrange(parts, stack.devices, _owner, lambda look: look.occurrence, slots, fill)

    numbers = {look: bag_numbers(shard, look) for look in rows}
    # Filled up with the number of the last bag: `pool_rows` wants bags in order, and rows that are none add zeros.
    planes = [block(rows, stack.local_rows), block(numbers, vectors - 1)]
    if shard.weights is not None:
        # As bits among the ids, so that one all_to_all carries all of it.
        weights = {look: shard.weights[look.feature.slots].astype(jnp.float32) for look in rows}
        planes.append(block({look: lax.bitcast_convert_type(w, jnp.int32) for look, w in weights.items()}, 0))
    orders = [
        bucket_order(shard, [look for look in rows if look.member.ranks[0] == d], slots) for d in range(stack.devices)
    ]
    ordered = any(order is not None for order in orders)
    if ordered:
        as_they_are = lax.iota(jnp.int32, slots)
        planes.append(jnp.stack([as_they_are if order is None else order for order in orders]))
    arrived = yield from swap(here, jnp.stack(planes, axis=1), "to owners")  # N planes K'
    source = lax.iota(jnp.int32, stack.devices)[:, None]
    way = Route(
        arrived=arrived[:, 0].reshape(-1),
        sequence=(source * slots + arrived[:, -1]).reshape(-1) if ordered else None,
        bags=(source * vectors + arrived[:, 1]).reshape(-1),
        weights=None if shard.weights is None else lax.bitcast_convert_type(arrived[:, 2], jnp.float32).reshape(-1),
    )
    return way, 0


def _send_through_hosts(
    here: LocalStack, where: dict[Lookup, tuple[jax.Array, jax.Array]]
) -> ExchangeCoroutine[tuple[Route, jax.Array | int]]:
    arrived, sequence, through, without_room = yield from through_hosts.send(here, where)
    return Route(arrived, sequence, through=through), without_room


def _joined(ways: Sequence[Route]) -> Route:
    """Of "rows", of "bags" and of "host", in this order, some of which may be missing."""
    if len(ways) == 1:
        return ways[0]
    fields: dict[str, Any] = {}
    for way in ways:
        own = {field.name: getattr(way, field.name) for field in dataclasses.fields(way)}
        fields |= {name: value for name, value in own.items() if value is not None}
    fields["arrived"] = jnp.concatenate([way.arrived for way in ways])
    fields["sequence"] = None
    if any(way.sequence is not None for way in ways):
        begins = itertools.accumulate((way.arrived.shape[0] for way in ways[:-1]), initial=0)
        parts = [begin + _sequence(way) for begin, way in zip(begins, ways, strict=True)]
        fields["sequence"] = jnp.concatenate(parts)
    return Route(**fields)


def _sequence(way: Route) -> jax.Array:
    return lax.iota(jnp.int32, way.arrived.shape[0]) if way.sequence is None else way.sequence


def _owner(look: Lookup) -> int:
    return look.member.ranks[0]


def _forth(here: LocalStack, values: jax.Array, way: Route) -> ExchangeCoroutine[jax.Array]:
    """[slots, ...] at the senders -> [arrivals of "rows", ...] at the owners; zeros where nothing arrived."""
    if way.runs is None:
        arrived = yield from swap(here, in_blocks(here, values), "to owners")
        return arrived.reshape(-1, *values.shape[1:])
    return ragged.to_owners(values, way.runs, room=way.ends[0], fill=0, axes=here.axes.route_axes)


def _back(here: LocalStack, values: jax.Array, way: Route) -> ExchangeCoroutine[jax.Array]:
    """The inverse of `_forth`."""
    if way.runs is None:
        arrived = yield from swap(here, in_blocks(here, values), "to senders")
        return arrived.reshape(-1, *values.shape[1:])
    assert way.inverse is not None
    return ragged.to_senders(values, way.runs, count=way.inverse.shape[0], axes=here.axes.route_axes)


def _carry_rows(here: LocalStack, vectors: jax.Array, way: Route, direction: Direction) -> ExchangeCoroutine[jax.Array]:
    """Vectors of the "rows" channel, [slots or arrivals, D], in the formats of the exchange."""
    exchange = here.exchange
    if way.runs is None:
        blocks = yield from carry(here, in_blocks(here, vectors), direction)
        return blocks.reshape(-1, vectors.shape[-1])
    if direction == "to senders":
        return (yield from wire.carry(vectors, exchange.forward, lambda x: _back(here, x, way)))
    scale = exchange.loss_scale
    return (yield from wire.carry(vectors, exchange.backward, lambda x: _forth(here, x, way), loss_scale=scale))
