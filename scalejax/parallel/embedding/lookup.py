"""Lookups of a batch in all tables and their update, over a whole mesh; `EmbeddingCollection` says how they are used.

Each function is a shard_map over all mesh axes; what a device does in it stands in `exchange` and `update`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalejax.kernels.embedding_bag import RowPlan, plan_rows, sum_by_row
from scalejax.numerics.rounding import runtime_zero
from scalejax.parallel.embedding import lookup_kernels
from scalejax.parallel.embedding.config import UPDATED
from scalejax.parallel.embedding.exchange import routed, to_towers
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine, complete, together
from scalejax.parallel.embedding.exchange.local import LocalStack
from scalejax.parallel.embedding.half_way import HalfWay
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, expand
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.packing import plain_layout
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.sharded_tables import ShardedTables, StackLeaves, State
from scalejax.parallel.embedding.stored import tracking
from scalejax.parallel.embedding.update.rows import (
    StepInputs,
    plan_update,
    update_dense,
    update_stack,
    update_stack_one_by_one,
)
from scalejax.parallel.towers import HostTowers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The way of a batch to the rows of its ids: all that `fetch` and `update` need to know of it.

    Attributes:
      features: The ids that were looked up.
      routes: Per stack, where its occurrences went.
      plans: Per stack, which occurrences belong to which row, for all tables or (from the host) for every group of
        alike ones; stacks without one plan when they are updated.
      faults: int32[M, 2], bad ids and ids without room of this lookup, per device.
      plain: For features in groups whose gradients add up in fixed point: the routing without groups, by which they are
        updated. (Fixed point needs every occurrence by itself: sums over the examples of a distinct row are rounded.)
    """

    features: DeviceJagged
    routes: dict[str, routed.Route]
    plans: dict[str, RowPlan | tuple[RowPlan | None, ...]]
    faults: jax.Array
    plain: "Routing | None"


def plans_on_host(sharded: ShardedTables) -> bool:
    """Whether tables are updated one by one, on the only device, a CPU; the host can then sort ids by row."""
    return sharded.mesh.size == 1 and sharded.mesh.devices.flat[0].platform == "cpu"


def _plans_ahead(sharded: ShardedTables, stack: Stack) -> bool:
    """Whether occurrences are sorted by row with the exchange of ids: not where tables are updated one by one, nor
    where gradients are dense."""
    return stack.update != "psum" and not plans_on_host(sharded)


def exchange_ids(sharded: ShardedTables, features: DeviceJagged) -> Routing:
    """Sends ids to the devices that own their rows: see `EmbeddingCollection.exchange_ids`."""
    if features.high is not None:
        names = ", ".join(feature.name for feature in features.layout if feature.map is not None)
        raise ValueError(f"exchange_ids: {names} still hold 64-bit ids; call map_ids or find_ids first.")
    routing = _exchange(sharded, features)
    if features.inverse is None or sharded.accumulate == "ordered":
        return routing
    layout, everywhere = plain_layout(features.layout, features.inverse.shape[2]), P(sharded.axes)
    plain = sharded.everywhere(lambda f: expand(f, layout), in_specs=everywhere, out_specs=everywhere)(features)
    return dataclasses.replace(routing, plain=_exchange(sharded, plain))


def _exchange(sharded: ShardedTables, features: DeviceJagged) -> Routing:
    def local(
        features: DeviceJagged,
    ) -> tuple[dict[str, routed.Route], dict[str, RowPlan | tuple[RowPlan, ...]], jax.Array]:
        routes, plans, faults = {}, {}, jnp.zeros(2, jnp.int32)
        stacks = _local_stacks(sharded, features)
        found = complete(together([routed.route(here) for here in stacks]))
        for here, (way, counts) in zip(stacks, found, strict=True):
            stack = here.stack
            routes[stack.name], faults = way, faults + counts
            if _plans_ahead(sharded, stack):
                plans[stack.name] = plan_update(here, way, sharded.mesh.size // stack.devices)
        return routes, plans, faults[None]

    all_axes, ids = P(sharded.axes), dataclasses.replace(features, plans=None)
    routes, plans, faults = sharded.everywhere(local, in_specs=all_axes, out_specs=all_axes)(ids)
    return Routing(ids, routes, plans | (features.plans or {}), faults, None)


def fetch(sharded: ShardedTables, state: State, routing: Routing) -> dict[str, jax.Array]:
    """Rows of all features, from where their ids went: see `EmbeddingCollection.fetch`."""

    def local(
        tables: dict[str, jax.Array], routes: dict[str, routed.Route], features: DeviceJagged
    ) -> dict[str, jax.Array]:
        slices: dict[str, list[tuple[int, jax.Array]]] = {}
        stacks = _local_stacks(sharded, features)
        coroutines = [routed.fetch(here, tables[here.stack.name], routes[here.stack.name]) for here in stacks]
        for here, parts in zip(stacks, complete(together(coroutines)), strict=True):
            for look, part in zip(here.lookups, parts, strict=True):
                part = here.shard.by_example(look.feature, part)
                slices.setdefault(look.feature.name, []).append((look.member.start, part))
        # A feature of a table that is cut into columns has a part in each of its slices.
        return {
            name: parts[0][1]
            if len(parts) == 1
            else jnp.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], axis=-1)
            for name, parts in slices.items()
        }

    tables = {name: leaves["rows"] for name, leaves in state["stacks"].items()}
    specs, all_axes = {stack.name: sharded.spec(stack) for stack in sharded.stacks}, P(sharded.axes)
    embedded = sharded.everywhere(local, in_specs=(specs, all_axes, all_axes), out_specs=all_axes)(
        tables, routing.routes, routing.features
    )
    # The order of the configuration, whatever a pytree made of it.
    return {name: embedded[name] for table in sharded.tables for name in table.features}


def fetch_half_way(sharded: ShardedTables, state: State, routing: Routing, towers: HostTowers) -> HalfWay:
    """Rows of all features, as far as the hosts of their towers: see `EmbeddingCollection.fetch_half_way`."""
    to_towers.check(sharded.stacks, towers)
    if routing.features.inverse is not None:
        raise ValueError("fetch_half_way: a host has no bags of examples whose features are deduplicated elsewhere.")

    def local(tables: dict[str, jax.Array], routes: dict[str, routed.Route], features: DeviceJagged) -> jax.Array:
        stacks = _local_stacks(sharded, features)
        own = [(here, tables[here.stack.name], routes[here.stack.name]) for here in stacks]
        return complete(to_towers.fetch(own, towers))

    tables = {name: leaves["rows"] for name, leaves in state["stacks"].items()}
    specs, all_axes = {stack.name: sharded.spec(stack) for stack in sharded.stacks}, P(sharded.axes)
    vectors = sharded.everywhere(local, in_specs=(specs, all_axes, all_axes), out_specs=all_axes)(
        tables, routing.routes, routing.features
    )
    return HalfWay(vectors, towers, sharded.exchange)


def lengths(sharded: ShardedTables, features: DeviceJagged) -> dict[str, jax.Array]:
    """How many positions of unpooled features hold rows: see `EmbeddingCollection.lengths`."""
    unpooled = {name for table in sharded.tables if table.pooling == "none" for name in table.features}
    if not unpooled:
        return {}

    def local(features: DeviceJagged) -> dict[str, jax.Array]:
        shard, found = features.shard(), {}
        for feature in features.layout:
            if feature.name in unpooled:
                assert feature.positions is not None  # `layout` refuses the rest
                own = jnp.minimum(shard.counts(feature), feature.positions)
                found[feature.name] = shard.by_example(feature, own)
        return found

    all_axes, ids = P(sharded.axes), dataclasses.replace(features, plans=None)
    found = sharded.everywhere(local, in_specs=all_axes, out_specs=all_axes)(ids)
    return {name: found[name] for table in sharded.tables for name in table.features if name in unpooled}


def update(
    sharded: ShardedTables,
    state: State,
    routing: Routing,
    grads: dict[str, jax.Array] | HalfWay,
    learning_rate_scale: jax.typing.ArrayLike,
    when: jax.Array | None,
) -> State:
    """One optimizer step on the rows that were looked up: see `EmbeddingCollection.update`."""
    _check_grads(sharded, routing.features, grads)
    if routing.plain is not None:
        routing = dataclasses.replace(routing.plain, faults=routing.faults + routing.plain.faults)

    def local(
        stacks: StackLeaves,
        routes: dict[str, routed.Route],
        plans: Any,
        features: DeviceJagged,
        grads: dict[str, jax.Array] | HalfWay,
        rest: tuple[jax.Array, jax.Array, jax.Array | None],
    ) -> StackLeaves:
        scale, updates, when = rest
        inputs = StepInputs(scale, updates, sharded.accumulate, when)
        all_here = _local_stacks(sharded, features)
        half_way = isinstance(grads, HalfWay)
        pooled = complete(to_towers.pooled_grads(all_here, grads.vectors, grads.towers)) if half_way else {}
        by_feature = {} if half_way else _by_distinct_row(grads, features.shard())

        def updated(here: LocalStack) -> ExchangeCoroutine[dict[str, jax.Array]]:
            stack, leaves, way = here.stack, stacks[here.stack.name], routes[here.stack.name]
            plan, ahead = plans.get(stack.name), _plans_ahead(sharded, stack)
            own = [
                by_feature[look.feature.name][..., look.member.start : look.member.stop].astype(stack.wide_dtype)
                for look in (() if half_way else here.lookups)
            ]
            if stack.update == "psum":
                new = update_dense(here, leaves, way, own, inputs, sharded.axes)
            elif ahead:
                if half_way:
                    arrived = yield from to_towers.return_grads(here, pooled, way)
                else:
                    arrived = yield from routed.return_grads(here, own, way)
                new = yield from update_stack(here, leaves, way, plan, arrived, inputs)
            else:
                new = update_stack_one_by_one(here, leaves, way, own, inputs, plan)
            if stack.tracked:
                axes = sharded.axes if stack.update == "psum" else ()
                new = new | {UPDATED: tracking.mark(leaves[UPDATED], way, plan if ahead else None, updates + 1, axes)}
            return new

        new = complete(together([updated(here) for here in all_here]))
        return {here.stack.name: leaves for here, leaves in zip(all_here, new, strict=True)}

    all_axes = P(sharded.axes)
    stacks = sharded.everywhere(
        local,
        in_specs=(sharded.stack_specs, all_axes, all_axes, all_axes, all_axes, P()),
        out_specs=sharded.stack_specs,
    )(
        state["stacks"],
        routing.routes,
        routing.plans,
        routing.features,
        grads,
        (jnp.asarray(learning_rate_scale), state["updates"], when),
    )
    faults = state["faults"] + routing.faults
    taken = 1 if when is None else when.astype(jnp.int32)
    return {**state, "stacks": stacks, "updates": state["updates"] + taken, "faults": faults}


def _local_stacks(sharded: ShardedTables, features: DeviceJagged) -> list[LocalStack]:
    """The stacks as a device sees them, inside a shard_map."""
    shard = features.shard()
    # Lengths are what `runtime_zero` wants: an input of every program here, and never negative.
    zero = runtime_zero(shard.lengths[0])
    return [
        LocalStack(
            stack=stack,
            lookups=lookups(stack, features.layout),
            shard=shard,
            axes=sharded.axes_of(stack),
            exchange=sharded.exchange,
            zero=zero,
            implementation=lookup_kernels.choose(sharded.implementation, stack, sharded.mesh),
        )
        for stack in sharded.stacks
    ]


def _check_grads(sharded: ShardedTables, features: DeviceJagged, grads: dict[str, jax.Array] | HalfWay) -> None:
    if isinstance(grads, HalfWay):
        return  # of a shape that only `fetch_half_way` makes
    looked_up = {feature.name: feature for feature in features.layout}
    if set(grads) != set(looked_up):
        raise ValueError(
            "EmbeddingCollection.update: grads must have the features that were looked up, "
            f"{', '.join(looked_up)}; missing: {sorted(set(looked_up) - set(grads))}, unknown: "
            f"{sorted(set(grads) - set(looked_up))}. Pass the gradient with respect to all that `lookup` returned."
        )
    for table in sharded.tables:
        for name in table.features:
            feature = looked_up[name]
            per_shard = feature.bags if features.inverse is None else features.inverse.shape[2]
            shape = (sharded.mesh.size * per_shard, table.dim)
            if table.pooling == "none":
                shape = (shape[0], feature.positions, table.dim)
            if grads[name].shape != shape:
                raise ValueError(
                    f"EmbeddingCollection.update: the gradient of feature {name!r} must have the shape of what "
                    f"`lookup` returned, {shape}; got {grads[name].shape}."
                )


def _by_distinct_row(grads: dict[str, jax.Array], shard: DeviceJagged) -> dict[str, jax.Array]:
    """Gradients of examples -> of the distinct rows of features in groups, added in the order of examples.

    Examples of one distinct row have the same positions without a row, whose sums nobody reads.
    """
    if shard.inverse is None:
        return grads
    new, plans = dict(grads), {}
    for feature in shard.layout:
        if feature.group is not None and feature.name in grads:
            if feature.group not in plans:
                rows = shard.inverse[feature.group]
                plan = plan_rows(rows, num_rows=feature.bags, capacity=min(rows.shape[0], feature.bags))
                plans[feature.group] = plan
            plan, value = plans[feature.group], grads[feature.name]
            flat = value.reshape(value.shape[0], -1)
            sums = sum_by_row(flat.astype(jnp.promote_types(flat.dtype, jnp.float32)), plan)
            empty = jnp.zeros((feature.bags, sums.shape[1]), sums.dtype)
            sums = empty.at[plan.rows].set(sums, mode="drop", unique_indices=True)
            new[feature.name] = sums.reshape(feature.bags, *value.shape[1:])
    return new
