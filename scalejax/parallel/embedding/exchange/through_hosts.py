"""The exchange of tables that are striped within one host, pooled on their way: the tower transform of DMT.

Device (h, l) is number l of host h; its peers are the devices l of all hosts. The ids of a table on host t go to the
peer (t, l), which is between the two hops: it sends them to the devices of its host that own the rows, adds up the rows
that come back, bag by bag, and sends one vector a bag over the slow links:

    (h, l)  --ids-->    (t, l)  --rows by number-->   (t, l')
            <--bags--           <--rows--                       between hosts | within a host

Between the hops a device has the pooled features of its host for the examples of all its peers. What arrives at an
owner comes from the device l of its host with the ids of peers (0, l), (1, l), ...: `sequence` brings it into the order
of examples, which is that of (h, l). Paper: L. Luo et al., MLSys 2024 (arXiv 2403.00877), section 3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag import xla
from scalejax.numerics.rounding import rounded
from scalejax.parallel.embedding.exchange import local
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine
from scalejax.parallel.embedding.exchange.local import (
    ByDevice,
    LocalStack,
    arrange,
    bag_numbers,
    bucket_order,
    carry_hop,
    most_bags,
    most_slots,
    move,
)
from scalejax.parallel.embedding.ids.occurrences import Lookup, average, host_of
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRoute:
    """What a device between the hops knows. S slots of a peer, V bags of a peer, K slots of a device of the host.

    Attributes:
      slots: int32[T * S], slot among what went to the devices of the host, of every id that came; L * K = none.
      inverse: int32[L * K], the id in every such slot; T * S = empty.
      bags: int32[T * S], bag of every id among the vectors that go back, non-decreasing.
      weights: float32[T * S], or None.
    """

    slots: jax.Array
    inverse: jax.Array
    bags: jax.Array
    weights: jax.Array | None


def capacity(stack: Stack, found: tuple[Lookup, ...], exchange: Exchange) -> int:
    """K: slots per device of a host, for the ids of all peers together."""
    total = stack.hosts * most_slots([look for look in found if look.channel == "host"])
    return local.capacity(stack, found, exchange, "host", senders=stack.hosts, total=total)


def send(
    here: LocalStack, where: dict[Lookup, tuple[jax.Array, jax.Array]]
) -> ExchangeCoroutine[tuple[jax.Array, jax.Array, HostRoute, jax.Array]]:
    """Sends ids to the devices of their host by way of the peer there.

    Args:
      here: The stack.
      where: Device and local row of every slot of each feature.

    Returns:
      int32[L * K] local rows that arrived here, int32[L * K] the arrivals in summation order, the route, and the number
      of ids without room.
    """
    stack, shard, hosts, inside = here.stack, here.shard, here.stack.hosts, here.stack.in_host
    looks = here.by_host
    slots, vectors = most_slots(looks), most_bags(looks)

    def block(parts: dict[Lookup, jax.Array], fill: int) -> jax.Array:
        return arrange(parts, hosts, lambda look: host_of(stack, look), lambda look: look.occurrence, slots, fill)

    devices = {look: jnp.where(device < stack.devices, device % inside, inside) for look, (device, _) in where.items()}
    planes = [
        block(devices, inside),
        block({look: row for look, (_, row) in where.items()}, stack.local_rows),
        block({look: bag_numbers(shard, look) for look in looks}, vectors - 1),
    ]
    if shard.weights is not None:
        weights = {look: shard.weights[look.feature.slots].astype(jnp.float32) for look in looks}
        planes.append(block({look: lax.bitcast_convert_type(w, jnp.int32) for look, w in weights.items()}, 0))
    orders = [bucket_order(shard, [look for look in looks if host_of(stack, look) == t], slots) for t in range(hosts)]
    ordered = any(order is not None for order in orders)
    if ordered:
        as_they_are = lax.iota(jnp.int32, slots)
        planes.append(jnp.stack([as_they_are if order is None else order for order in orders]))
    came = yield from move(here, "between hosts", jnp.stack(planes, axis=1))  # T planes S
    peer = lax.iota(jnp.int32, hosts)[:, None]
    order = (peer * slots + came[:, -1]).reshape(-1) if ordered else None
    row, count = came[:, 1].reshape(-1), hosts * slots

    room = capacity(stack, here.lookups, here.exchange)
    found = ByDevice.sort(came[:, 0].reshape(-1), order, inside)
    has_room = (found.devices < inside) & (found.ranks < room)
    slot = found.slots(jnp.where(has_room, found.devices * room + found.ranks, inside * room))
    wanted = found.starts[:-1, None] + lax.iota(jnp.int32, room)[None, :]  # L K
    filled = wanted < found.starts[1:, None]
    inverse = jnp.where(filled, found.occurrences.at[wanted].get(mode="clip"), count)
    sent = jnp.stack([row.at[inverse].get(mode="fill", fill_value=stack.local_rows), inverse // slots], axis=1)
    arrived = yield from move(here, "within hosts", sent)  # L 2 K
    _, sequence = xla.stable_order(arrived[:, 1].reshape(-1), hosts)
    way = HostRoute(
        slots=slot,
        inverse=inverse.reshape(-1),
        bags=(peer * vectors + came[:, 2]).reshape(-1),
        weights=None if shard.weights is None else lax.bitcast_convert_type(came[:, 3], jnp.float32).reshape(-1),
    )
    lost = ((found.devices < inside) & ~has_room).sum(dtype=jnp.int32)
    return arrived[:, 0].reshape(-1), sequence, way, lost


def fetch(here: LocalStack, rows: jax.Array, way: HostRoute) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    """float[L * K, dim] of what arrived -> the pooled vectors of each feature, where the examples are."""
    sums = yield from pool(here, rows, way)
    sums = yield from carry_hop(here, sums, "between hosts", "to senders")  # T V dim
    return {
        look: average(
            here.shard, look, sums[host_of(here.stack, look), look.bag : look.bag + look.feature.bags], here.zero
        )
        for look in here.by_host
    }


def pool(here: LocalStack, rows: jax.Array, way: HostRoute) -> ExchangeCoroutine[jax.Array]:
    """float[L * K, dim] of what arrived -> float[T, V, dim] between the hops: sums of bags of the peer on each host."""
    stack, hosts = here.stack, here.stack.hosts
    blocks, count = rows.reshape(stack.in_host, -1, stack.dim), hosts * most_bags(here.by_host)
    came = (yield from carry_hop(here, blocks, "within hosts", "to senders")).reshape(-1, stack.dim)
    if here.pooled_by == "pallas_gpu" and way.weights is None:
        sums = ops.gather_and_pool_rows(came, way.slots, way.bags, count, implementation=here.pooled_by)
        return sums.reshape(hosts, -1, stack.dim)
    own = came.at[way.slots].get(mode="fill", fill_value=0).astype(stack.wide_dtype)  # T*S dim
    if way.weights is not None:
        own = rounded(own * way.weights.astype(own.dtype)[:, None], here.zero)
    return ops.pool_rows(own, way.bags, count, implementation=here.pooled_by).reshape(hosts, -1, stack.dim)


def return_grads(here: LocalStack, of: dict[Lookup, jax.Array], way: HostRoute) -> ExchangeCoroutine[jax.Array]:
    """The gradient of `fetch`: float[L * K, dim], one for every arrival."""
    stack = here.stack
    shares = {look: average(here.shard, look, of[look], here.zero) for look in here.by_host}
    vectors = most_bags(here.by_host)
    blocks = arrange(
        shares, stack.hosts, lambda look: host_of(stack, look), lambda look: look.bag, vectors, 0
    )  # T V dim
    bags = yield from carry_hop(here, blocks, "between hosts", "to owners")
    return (yield from unpool(here, bags, way))


def unpool(here: LocalStack, bags: jax.Array, way: HostRoute) -> ExchangeCoroutine[jax.Array]:
    """The gradient of `pool`: float[T, V, dim] -> float[L * K, dim], one for every arrival."""
    stack = here.stack
    slots = bags.reshape(-1, stack.dim).at[way.bags].get(mode="fill", fill_value=0)
    if way.weights is not None:
        slots = rounded(slots * way.weights.astype(slots.dtype)[:, None], here.zero)
    sent = slots.at[way.inverse].get(mode="fill", fill_value=0).reshape(stack.in_host, -1, stack.dim)
    came = yield from carry_hop(here, sent, "within hosts", "to owners")
    return came.reshape(-1, stack.dim)


def to_senders(here: LocalStack, values: jax.Array, way: HostRoute) -> ExchangeCoroutine[dict[Lookup, jax.Array]]:
    """As `routed.to_senders`, of what arrived through hosts."""
    stack, tail = here.stack, values.shape[1:]
    came = yield from move(here, "within hosts", values.reshape(stack.in_host, -1, *tail))
    own = came.reshape(-1, *tail).at[way.slots].get(mode="fill", fill_value=0)
    blocks = yield from move(here, "between hosts", own.reshape(stack.hosts, -1, *tail))
    return {look: blocks[host_of(stack, look), look.part] for look in here.by_host}


def to_owners(here: LocalStack, values: dict[Lookup, jax.Array], way: HostRoute) -> ExchangeCoroutine[jax.Array]:
    """As `routed.to_owners`, of what arrived through hosts."""
    stack = here.stack
    parts = {look: values[look] for look in here.by_host}
    slots = most_slots(here.by_host)
    blocks = arrange(parts, stack.hosts, lambda look: host_of(stack, look), lambda look: look.occurrence, slots, 0)
    own = yield from move(here, "between hosts", blocks)
    flat = own.reshape(-1, *own.shape[2:])
    sent = flat.at[way.inverse].get(mode="fill", fill_value=0)
    came = yield from move(here, "within hosts", sent.reshape(stack.in_host, -1, *flat.shape[1:]))
    return came.reshape(-1, *flat.shape[1:])
