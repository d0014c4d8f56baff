"""A lookup that stops between its two hops, and its gradient: the towers of a host, for the examples of its peers.

Runs inside a shard_map over all mesh axes. Of each stack a device has, per channel, the pooled vectors of its host's
features for the peer on each of H hosts, [H, U, b, dim]: U features, b examples of a device. Which feature is where
depends on the host, so that towers are filled by tables of places with a row for each. `half_way.HalfWay` says what
comes out. The hop between hosts of what leaves the towers is there, too.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.numerics.rounding import rounded
from scalejax.parallel.embedding.exchange import routed, through_hosts
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine, together
from scalejax.parallel.embedding.exchange.local import LocalStack, between_hosts, carry_hop, end_to_end, most_bags
from scalejax.parallel.embedding.ids.occurrences import Lookup, host_of, shares
from scalejax.parallel.embedding.plan.placement import PlanRefused
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.towers import HostTowers

Pooled = dict[tuple[str, str], jax.Array]
"""{(stack, channel): float[H, U, b, dim]}."""


def in_hosts(
    plan: ShardingPlan, features: Mapping[str, Sequence[str]], towers: HostTowers, inside: int
) -> ShardingPlan:
    """The plan, with tables striped over the devices of the host of their tower where it does not say which.

    Args:
      plan: What was asked for.
      features: Of each table.
      towers: Where they are read.
      inside: Devices of a host.
    """
    named = {entry.table: entry for entry in plan.tables}
    entries = []
    for table, names in features.items():
        entry = named.pop(table, TablePlan(table=table, kind="table_row_wise"))
        if entry.kind == "table_row_wise" and entry.ranks is None and names[0] in towers.places:
            begin = towers.places[names[0]][0] * inside
            entry = dataclasses.replace(entry, ranks=tuple(range(begin, begin + inside)))
        entries.append(entry)
    return dataclasses.replace(plan, tables=(*entries, *named.values()))


def check(stacks: Sequence[Stack], towers: HostTowers) -> None:
    """Refuses tables that a lookup cannot bring to one host.

    Raises:
      PlanRefused: rows of a table are not on the host of its tower.
      ValueError: an exchange of one hop, other features, or a table that is not pooled or has a width of its own.
    """
    widths = {}
    if any(stack.hosts != towers.hosts and stack.spread == "striped" for stack in stacks):
        raise ValueError(
            f"to_towers: towers on {towers.hosts} hosts need an exchange of two hops (Exchange.route) on a mesh with "
            f"replica={towers.hosts}."
        )
    features = {name for stack in stacks for member in stack.members for name in member.config.features}
    if features != set(towers.places):
        raise ValueError(
            f"to_towers: the towers must have the features of the tables; {sorted(features ^ set(towers.places))} are "
            "in one of the two alone."
        )
    for stack in stacks:
        for member in stack.members:
            config = member.config
            widths[config.name] = config.dim
            if config.pooling == "none":
                raise ValueError(f"to_towers: towers read pooled vectors; table {config.name!r} has pooling='none'.")
            for name in config.features:
                host, _, _ = towers.places[name]
                found = sorted({rank // stack.in_host for rank in member.ranks}) or list(range(towers.hosts))
                if found != [host]:
                    raise PlanRefused(
                        f"ShardingPlan: table {config.name!r} has rows on indices {', '.join(map(str, found))} of the "
                        f"mesh axis replica, and feature {name!r} is in a tower of index {host}; with "
                        "tables.exchange.route='towers' they must be on that one alone. Leave the table out of "
                        "tables.sharding, give it ranks of that host, or use --set tables.exchange.route=two_level."
                    )
    if len(set(widths.values())) > 1:
        raise ValueError(f"to_towers: tables must have one width; got {widths}.")


def fetch(
    stacks: Sequence[tuple[LocalStack, jax.Array, routed.Route]], towers: HostTowers
) -> ExchangeCoroutine[jax.Array]:
    """float[b, H * K, F, N] of `HalfWay.vectors`, of (stack, its rows here, route of its ids)."""
    coroutines: dict[tuple[str, str], ExchangeCoroutine[jax.Array]] = {}
    for here, table, way in stacks:
        name, last = here.stack.name, way.ends[1]
        if here.by_bags:
            bags = routed.pool_bags(here, table, way)
            coroutines[name, "bags"] = carry_hop(here, bags, "within hosts", "to senders")
        if way.through is not None:
            rows = routed.read(here, table, way.arrived[last:])
            coroutines[name, "host"] = through_hosts.pool(here, rows, way.through)
    came = yield from together([*coroutines.values()])
    found = [here for here, _, _ in stacks]
    of = {here.stack.name: here for here in found}
    pooled: Pooled = {key: _units(of[key[0]], x) for key, x in zip(coroutines, came, strict=True)}
    width = max(look.member.config.dim for here in found for look in here.lookups)
    host, filled = lax.axis_index("replica"), None
    for key, columns, places in _places(found, towers):
        own, units = jnp.asarray(places)[host], pooled[key]
        vectors = units.at[:, own].get(mode="fill", fill_value=0)  # H K*F b dim
        if filled is None and columns == slice(0, width):
            filled = vectors
            continue
        if filled is None:
            filled = jnp.zeros((*vectors.shape[:-1], width), vectors.dtype)
        has = (own < units.shape[1])[:, None, None]
        filled = filled.at[..., columns].set(jnp.where(has, vectors, filled[..., columns]))
    assert filled is not None
    vectors = yield from _averaged(found, filled, towers)
    vectors = vectors.reshape(towers.hosts, towers.each, towers.room, *vectors.shape[2:])
    vectors = vectors.transpose(3, 0, 1, 2, 4)  # b H K F N
    return vectors.reshape(vectors.shape[0], -1, *vectors.shape[3:])


def pooled_grads(stacks: Sequence[LocalStack], grads: jax.Array, towers: HostTowers) -> ExchangeCoroutine[Pooled]:
    """The gradient of the filling in `fetch`: float[b, H * K, F, N] -> gradients of the pooled vectors."""
    vectors = grads.reshape(grads.shape[0], towers.hosts, -1, grads.shape[-1]).transpose(1, 2, 0, 3)  # H K*F b N
    vectors = vectors.astype(stacks[0].stack.wide_dtype)
    vectors, host, found = (yield from _averaged(stacks, vectors, towers)), lax.axis_index("replica"), {}
    for key, columns, places in _places(stacks, towers):
        count = _count(next(here for here in stacks if here.stack.name == key[0]), key[1])
        back = np.full((towers.hosts, count), places.shape[1], np.int32)
        for own, row in zip(places, back, strict=True):
            row[own[own < count]] = np.flatnonzero(own < count)
        own = jnp.asarray(back)[host]
        part = vectors[..., columns].at[:, own].get(mode="fill", fill_value=0)
        # Slices of a table may share a stack and a channel; each unit belongs to one.
        found[key] = part if key not in found else jnp.where((own < places.shape[1])[:, None, None], part, found[key])
    return found


def return_grads(here: LocalStack, pooled: Pooled, way: routed.Route) -> ExchangeCoroutine[jax.Array]:
    """As `routed.return_grads`, from gradients of the pooled vectors between the hops."""
    stack = here.stack
    coroutines: list[ExchangeCoroutine[jax.Array]] = []
    if here.by_bags:
        bags = pooled[stack.name, "bags"].reshape(stack.devices, -1, stack.dim)
        coroutines.append(_return_bags(here, bags, way))
    if way.through is not None:
        units = pooled[stack.name, "host"]
        coroutines.append(through_hosts.unpool(here, units.reshape(stack.hosts, -1, stack.dim), way.through))
    return end_to_end((yield from together(coroutines)))


def _return_bags(here: LocalStack, bags: jax.Array, way: routed.Route) -> ExchangeCoroutine[jax.Array]:
    came = yield from carry_hop(here, bags, "within hosts", "to owners")
    return routed.unpool_bags(here, came, way)


def _units(here: LocalStack, pooled: jax.Array) -> jax.Array:
    """[..., V, dim] for every peer, of one owner or of several -> [H, U, b, dim]."""
    return pooled.reshape(here.stack.hosts, -1, here.lookups[0].feature.bags, here.stack.dim)


def _count(here: LocalStack, channel: str) -> int:
    """U."""
    bags = here.stack.in_host * most_bags(here.by_bags) if channel == "bags" else most_bags(here.by_host)
    return bags // here.lookups[0].feature.bags


def _unit(here: LocalStack, look: Lookup) -> int:
    """Where a feature is among those of its host."""
    begin = look.member.ranks[0] % here.stack.in_host * most_bags(here.by_bags) if look.channel == "bags" else 0
    return (begin + look.bag) // look.feature.bags


def _places(stacks: Sequence[LocalStack], towers: HostTowers) -> Iterator[tuple[tuple[str, str], slice, np.ndarray]]:
    """(stack, channel), columns, and int32[H, K * F]: which of the pooled vectors there each feature of a host is.

    Where it has none of these columns there, U.
    """
    for here in stacks:
        groups: dict[tuple[str, int, int], np.ndarray] = {}
        for look in here.lookups:
            host, tower, place = towers.places[look.feature.name]
            assert host == host_of(here.stack, look), "`check` comes first"
            key = (look.channel, look.member.start, look.member.stop)
            none = np.full((towers.hosts, towers.each * towers.room), _count(here, look.channel), np.int32)
            groups.setdefault(key, none)[host, tower * towers.room + place] = _unit(here, look)
        for (channel, start, stop), places in groups.items():
            yield (here.stack.name, channel), slice(start, stop), places


def _averaged(stacks: Sequence[LocalStack], vectors: jax.Array, towers: HostTowers) -> ExchangeCoroutine[jax.Array]:
    """float[H, K * F, b, N], sums of bags -> their means where a table wants means.

    Who has the bags knows how many ids they have, and says so by way of the hop between hosts.
    """
    looks = {
        look.feature.name: (here, look)
        for here in stacks
        for look in here.lookups
        if look.member.config.pooling == "mean" and look.feature.length != 1
    }
    if not looks:
        return vectors
    ones = jnp.ones(vectors.shape[2], vectors.dtype)
    parts = [[ones] * (towers.each * towers.room) for _ in range(towers.hosts)]
    for name, (here, look) in looks.items():
        host, tower, place = towers.places[name]
        parts[host][tower * towers.room + place] = shares(here.shard, look, vectors.dtype, here.zero)
    factors = yield from between_hosts(jnp.stack([jnp.stack(part) for part in parts]))  # H K*F b
    return rounded(vectors * factors[..., None], stacks[0].zero)
