"""Embedding tables over all devices of a mesh: a dataclass of plain values and pure functions.

    routing = collection.exchange_ids(batch.features)
    embedded = collection.fetch(state, routing)
    lengths = collection.lengths(batch.features)           # of unpooled features: where their rows end
    grads = jax.grad(loss)(embedded)
    state = collection.update(state, routing, grads, learning_rate_scale)

With tables that have an id map, ids become rows first (where there are none, this changes nothing):

    features, assignment = collection.map_ids(state, batch.features)     # training
    state = collection.admit(state, assignment)
    features, faults = collection.find_ids(state, batch.features)        # evaluation
    state = collection.expire(state)                                     # where ids past their TTL are to leave at once

`lookup` is the first two in one. Each is a shard_map over all mesh axes. The exchange of ids reads no state, so that it
can run a step ahead. An update is exact and deterministic: the gradients of a row are summed in the order of examples,
features, positions (or in fixed point, where no order matters), then its optimizer runs once. Given identical gradients
per occurrence the result is the same to the bit on any number of devices and under any plan.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.data.examples import dedup
from scalejax.data.examples.dedup import DedupKeyedJagged
from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.kernels.embedding_bag import RowPlan, plan_rows, sum_by_row
from scalejax.parallel.embedding import mapped
from scalejax.parallel.embedding.config import UPDATED, TableConfig
from scalejax.parallel.embedding.exchange import host_check, ragged
from scalejax.parallel.embedding.exchange.routed import Route, exchange_may_lack_room, fetch, route
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import (
    DedupGroup,
    DeviceJagged,
    FeatureLayout,
    PackedIds,
    expand,
    expanded_fits,
    pack,
    pack_deduplicated,
    to_device,
)
from scalejax.parallel.embedding.ids.occurrences import Lookup, Shard, lookups
from scalejax.parallel.embedding.mapped import Assignment
from scalejax.parallel.embedding.plan import memory
from scalejax.parallel.embedding.plan.placement import Exchange, ShardingPlan, place
from scalejax.parallel.embedding.plan.stacks import Stack, stack_tables
from scalejax.parallel.embedding.rounding import runtime_zero
from scalejax.parallel.embedding.stored import initial, logical, tracking
from scalejax.parallel.embedding.update import host_plan
from scalejax.parallel.embedding.update.rows import (
    Accumulate,
    Place,
    StepInputs,
    plan_update,
    update_dense,
    update_stack,
    update_stack_one_by_one,
)
from scalejax.parallel.mesh import check_batch, device_memory_bytes

State = dict[str, Any]
"""{"stacks": {stack: {"rows": [N * L, dim], "accumulator": ...}}, "updates": int32[], "faults": int32[M, 2]}.

Stacks are sharded on dimension 0 over the devices that they are striped over, or copied. Updates are counted since
the tables began; faults count, per device, bad ids and ids that an exchange had no room for, since the state was made.

Where tables have id maps, also {"maps": {table: see `id_map.State`}, "key": uint32[...]}: the maps, sharded on
dimension 0 over all devices, and the data of the key that the tables were made with, which evicted rows are made with
again."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What `update` needs to know of a `lookup`.

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
    routes: dict[str, Route]
    plans: dict[str, RowPlan | tuple[RowPlan, ...]]
    faults: jax.Array
    plain: "Routing | None"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingCollection:
    """Tables on a mesh.

    Attributes:
      tables: The tables; every feature belongs to one table.
      mesh: All its axes together shard examples, and rows unless the plan says otherwise.
      plan: How each table is sharded; None = all row-wise.
      exchange: Room in the exchange, and what travels.
      accumulate: How the gradients of a row add up. "ordered": one by one in the order of examples, features,
        positions, the same to the bit for the same batch on any mesh. "exact": in fixed point, the same to the bit
        also if the batch is permuted or cut in another way (float32 tables).
    """

    tables: tuple[TableConfig, ...]
    mesh: Mesh
    plan: ShardingPlan | None = None
    exchange: Exchange = dataclasses.field(default_factory=Exchange)
    accumulate: Accumulate = "ordered"

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"EmbeddingCollection: table names must be unique; got {', '.join(names)}.")
        features = [feature for table in self.tables for feature in table.features]
        twice = sorted({f for f in features if features.count(f) > 1})
        if twice:
            raise ValueError(
                f"EmbeddingCollection: a feature belongs to one table; {', '.join(twice)} appear in several. For "
                "several embeddings of one feature use a wider table and split its vector."
            )
        if self.accumulate not in ("ordered", "exact"):
            raise ValueError(f"EmbeddingCollection: accumulate must be 'ordered' or 'exact'; got {self.accumulate!r}.")
        double = [table.name for table in self.tables if table.dtype == "float64"]
        if self.accumulate == "exact" and double:
            raise UserError(
                f"EmbeddingCollection: accumulate='exact' adds up gradients in float32 as fixed point, and table "
                f"{double[0]!r} is of float64. Use accumulate='ordered' (--set tables.accumulate=ordered), or tables "
                "of float32 (--set tables.dtype=float32)."
            )
        if self.exchange.all_to_all == "ragged":
            ragged.check_platform(self.mesh)
        _ = self.stacks  # which refuse a plan that cannot be built

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that examples are sharded over: all."""
        return tuple(self.mesh.axis_names)

    @property
    def group(self) -> tuple[str, ...]:
        """The mesh axes whose devices together hold one copy of the tables."""
        copies = self.plan is not None and self.plan.replicas == "copy"
        return tuple(axis for axis in self.axes if not (copies and axis == "replica"))

    @property
    def group_devices(self) -> int:
        """Devices that together hold one copy of the tables."""
        return math.prod(self.mesh.shape[axis] for axis in self.group)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Tables, or slices of them, of equal width, dtype and optimizer, stacked."""
        inside = math.prod(size for axis, size in self.mesh.shape.items() if axis != "replica")
        slices = place(
            self.tables,
            self.plan or ShardingPlan(),
            devices=self.group_devices,
            devices_per_host=inside,
            accumulate=self.accumulate,
            mesh_devices=self.mesh.size,
        )
        return stack_tables(self.tables, slices, self.group_devices)

    @functools.cached_property
    def mapped_tables(self) -> tuple[TableConfig, ...]:
        """The tables with an id map."""
        return tuple(table for table in self.tables if table.id_map is not None)

    @functools.cached_property
    def moves(self) -> logical.Axes:
        """The mesh, as moves to and from the stored form see it."""
        return logical.Axes(self.axes, self.mesh.size, self.group, self.group_devices)

    def _axes_of(self, stack: Stack) -> Place:
        if stack.spread == "copied":
            return Place((), self.axes if self.mesh.size > 1 else ())
        copies = tuple(axis for axis in self.axes if axis not in self.group)
        return Place(self.group, copies if self.group_devices < self.mesh.size else ())

    def _spec(self, stack: Stack) -> P:
        """How the arrays of a stack lie on the mesh."""
        return P() if stack.spread == "copied" else P(self.group)

    def layout(self, schema: Schema, batch_size: int, groups: tuple[DedupGroup, ...] = ()) -> tuple[FeatureLayout, ...]:
        """Where each feature lies in the device form of a global batch.

        Args:
          schema: Features and their capacities.
          batch_size: Global.
          groups: Features that are deduplicated together.

        Raises:
          UserError: the batch does not divide over the devices, a table looks up a feature that the schema lacks, or
            unpooled one that may have any number of ids, or a group names a feature that is not looked up or has a
            group already.
          ValueError: tables and schema do not fit.
        """
        check_batch(batch_size, self.mesh)
        examples = batch_size // self.mesh.size
        group_of = self._groups(groups)
        found = {}
        for table in self.tables:
            for name in table.features:
                if name not in schema.keys:
                    raise UserError(
                        f"EmbeddingCollection: table {table.name!r} looks up the feature {name!r}, which the data "
                        f"does not have; it has {', '.join(schema.keys)}. Rename it in TableConfig.features, or read "
                        "the column."
                    )
                feature = schema[name]
                if feature.rows is None and table.id_map is None:
                    raise UserError(
                        f"EmbeddingCollection: feature {name!r} has ids of any 64 bits (rows=None), but table "
                        f"{table.name!r} has no id map. Give it one: TableConfig(id_map=IdMapConfig(...)), or "
                        f"Tables(id_maps=(MappedFeatures(features=({name!r},), id_map=IdMapConfig(...)),)) in an "
                        "experiment; or give the feature a number of rows."
                    )
                if table.id_map is None and feature.rows is not None and feature.rows > table.rows:
                    raise ValueError(
                        f"EmbeddingCollection: feature {name!r} has ids below {feature.rows}, but table {table.name!r} "
                        f"has {table.rows} rows."
                    )
                if feature.length is None and feature.max_length is None and table.pooling == "none":
                    raise UserError(
                        f"EmbeddingCollection: table {table.name!r} has pooling 'none', and feature {name!r} has any "
                        "number of ids (length=None, max_length=None); its rows need a number of positions. Give it "
                        f"the largest number of ids of an example: Categorical(name={name!r}, length=None, "
                        "max_length=...)."
                    )
                group, plain = group_of.get(name), feature.capacity_for(examples)
                bags = examples if group is None else groups[group].bags(examples)
                capacity = plain if group is None else feature.capacity_for(bags)
                by_map = None if table.id_map is None else table.name
                found[name] = FeatureLayout(
                    name, capacity, feature.length, bags, group, plain, by_map, max_length=feature.max_length
                )
        return tuple(found[name] for name in schema.keys if name in found)

    def _groups(self, groups: tuple[DedupGroup, ...]) -> dict[str, int]:
        looked_up = [name for table in self.tables for name in table.features]
        group_of: dict[str, int] = {}
        for number, group in enumerate(groups):
            for name in group.features:
                if name not in looked_up:
                    raise UserError(f"DedupGroup: no table looks {name!r} up; the features are {', '.join(looked_up)}.")
                if name in group_of:
                    raise UserError(f"DedupGroup: feature {name!r} is in two groups; name it in one.")
                group_of[name] = number
        return group_of

    def to_device(self, features: HostKeyedJagged, layout: tuple[FeatureLayout, ...]) -> DeviceJagged:
        """This process's slice of a global batch, checked and on its devices: what `lookup` takes.

        Args:
          features: The slice: global batch size / number of processes examples.
          layout: From `layout`, without groups.

        Raises:
          UserError: as `pack`.
        """
        processes = len({device.process_index for device in self.mesh.devices.flat})
        return to_device(self.pack(features, self.mesh.size // processes, layout), layout, self.mesh)

    def pack(self, features: HostKeyedJagged, shards: int, layout: tuple[FeatureLayout, ...]) -> PackedIds:
        """The device form of this process's examples, as NumPy, checked exactly before it travels.

        Args:
          features: This process's slice of a global batch.
          shards: Devices that the slice goes to.
          layout: From `layout`, without groups.

        Raises:
          UserError: an id out of range, a weight that is not a number, more ids in an example than max_length, or more
            for one device than its buckets have room for; says which feature, what was met and what to set.
        """
        host_check.check_ids(self.stacks, features, layout)
        packed = pack(features, layout, shards)
        self._check_room(packed, layout)
        return packed

    def _check_room(self, packed: PackedIds, layout: tuple[FeatureLayout, ...]) -> None:
        host_check.check_room(self.stacks, packed, layout, self.exchange)
        mapped.check_room(self.tables, packed, layout, self.exchange, self.mesh.size)

    def pack_deduplicated(
        self,
        features: DedupKeyedJagged,
        shards: int,
        layout: tuple[FeatureLayout, ...],
        groups: tuple[DedupGroup, ...],
    ) -> PackedIds | None:
        """As `pack`, of deduplicated features; None if they have more distinct rows, or ids, than there is room for.

        Args:
          features: This process's slice of a global batch.
          shards: Devices that the slice goes to.
          layout: From `layout`, with groups.
          groups: The groups.
        """
        host_check.check_ids(self.stacks, features.plain, layout)
        for part in features.distinct:
            host_check.check_ids(self.stacks, part, layout, bag="distinct row")
        packed = pack_deduplicated(features, layout, groups, shards)
        if packed is None:
            return None
        self._check_room(packed, layout)
        if self.accumulate == "exact":  # all occurrences travel for the update: the device expands what lies here
            if not expanded_fits(features, layout, shards):
                return None
            whole = _plain_layout(layout, features.num_examples // shards)
            if any(exchange_may_lack_room(stack, lookups(stack, whole), self.exchange) for stack in self.stacks):
                self._check_room(pack(dedup.expand(features), whole, shards), whole)
        return packed

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings."""
        stacks = {}
        for stack in self.stacks:
            sharding = NamedSharding(self.mesh, self._spec(stack))
            stacks[stack.name] = {
                name: jax.ShapeDtypeStruct(
                    stack.leaf_shape(kind, stack.devices * stack.local_rows),
                    stack.leaf_dtype(name),
                    sharding=sharding,
                )
                for name, kind in stack.arrays.items()
            }
        everywhere, whole = NamedSharding(self.mesh, P(self.axes)), NamedSharding(self.mesh, P())
        return {
            "stacks": stacks,
            "updates": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            "faults": jax.ShapeDtypeStruct((self.mesh.size, 2), jnp.int32, sharding=everywhere),
            **({"maps": self._abstract_maps(), "key": self._abstract_key()} if self.mapped_tables else {}),
        }

    def _abstract_maps(self) -> mapped.Maps:
        everywhere = NamedSharding(self.mesh, P(self.axes))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(self._empty_maps),
        )

    def _empty_maps(self) -> mapped.Maps:
        return {t.name: id_map.init(t.id_map, self.mesh.size) for t in self.mapped_tables if t.id_map is not None}

    def _abstract_key(self) -> jax.ShapeDtypeStruct:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(self.mesh, P()))

    def check_fits(self) -> None:
        """Refuses tables that take more than the memory of a device.

        Raises:
          UserError: names the largest tables, what lacks, and what helps.
        """
        room = device_memory_bytes(self.mesh)
        if room is not None:
            memory.check_fits(
                self.stacks,
                room,
                self.mesh.size,
                copies=self.mesh.size // self.group_devices,
                platform=self.mesh.devices.flat[0].platform,
            )

    def init(self, key: jax.Array) -> State:
        """A fresh state: a row depends on the key, the name of its table and its number, and on no mesh.

        Raises:
          UserError: the tables do not fit the devices; names the largest.
          ValueError: tables have id maps, which keep the key, and it is not of jax's default kind.
        """
        self.check_fits()
        shapes = self.abstract_state()
        if self.mapped_tables and key.dtype != jax.eval_shape(lambda: jax.random.key(0)).dtype:
            raise ValueError(f"EmbeddingCollection.init: key must be what jax.random.key makes; got {key.dtype}.")

        def fill(key: jax.Array) -> Any:
            return {
                stack.name: initial.local_leaves(stack, key, jax.lax.axis_index(self.group) if stack.devices > 1 else 0)
                for stack in self.stacks
            }

        def create(key: jax.Array) -> State:
            specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes["stacks"])
            stacks = self._everywhere(fill, in_specs=P(), out_specs=specs)(key)
            return {
                "stacks": stacks,
                "updates": jnp.zeros((), jnp.int32),
                "faults": jnp.zeros((self.mesh.size, 2), jnp.int32),
                **({"maps": self._empty_maps(), "key": jax.random.key_data(key)} if self.mapped_tables else {}),
            }

        return jax.jit(create, out_shardings=self._shardings(shapes))(key)

    def lookup(self, state: State, features: DeviceJagged) -> tuple[dict[str, jax.Array], Routing]:
        """Rows of all features: `exchange_ids`, then `fetch`."""
        routing = self.exchange_ids(features)
        return self.fetch(state, routing), routing

    def map_ids(self, state: State, features: DeviceJagged, *, steps_ahead: int = 0) -> tuple[DeviceJagged, Assignment]:
        """Gives the ids of tables with an id map their rows, for a training step.

        Reads the maps and the count of updates alone, and changes neither: `admit` does, before rows are fetched.

        Args:
          state: The state.
          features: A batch.
          steps_ahead: Updates that come before the one by this batch.

        Returns:
          The features with rows in the place of ids, ready for `exchange_ids`, and what becomes of the maps.
        """
        if not self.mapped_tables:
            return features, Assignment({}, {}, jnp.zeros((self.mesh.size, 2), jnp.int32))
        step = state["updates"] + steps_ahead

        def local(maps: mapped.Maps, features: DeviceJagged, step: jax.Array) -> Any:
            asked = mapped.requests(self.tables, features.layout)
            where = {"exchange": self.exchange, "devices": self.mesh.size, "axes": self.axes}
            return mapped.assign(asked, maps, features, step, **where)

        all_axes = P(self.axes)
        ids = dataclasses.replace(features, plans=None)
        values, assignment = self._everywhere(local, in_specs=(all_axes, all_axes, P()), out_specs=all_axes)(
            state["maps"], ids, step
        )
        return dataclasses.replace(features, values=values, high=None), assignment

    def admit(self, state: State, assignment: Assignment) -> State:
        """The state with the maps of an assignment, and the rows that it took from other ids as fresh as at `init`."""
        if not self.mapped_tables:
            return state

        def local(stacks: Any, evicted: dict[str, jax.Array], key: jax.Array, update: jax.Array) -> Any:
            return mapped.reset(
                self.stacks,
                stacks,
                evicted,
                jax.random.wrap_key_data(key),
                update,
                devices=self.mesh.size,
                axes=self.axes,
                group=self.group,
            )

        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_state()["stacks"])
        stacks = self._everywhere(local, in_specs=(specs, P(self.axes), P(), P()), out_specs=specs)(
            state["stacks"], assignment.evicted, state["key"], state["updates"] + 1
        )
        faults = state["faults"] + assignment.faults
        return {**state, "stacks": stacks, "maps": assignment.maps, "faults": faults}

    def expire(self, state: State) -> State:
        """The state without the ids that policy "ttl" lets go at the next step, whether or not others want their rows.

        Their rows and row states are as fresh as at `init`; tracked ones count as touched by the next update. Jittable.
        Training does not need it: rows that are wanted are taken by `map_ids`.

        Raises:
          ValueError: no table has an id map of that policy.
        """
        if all(table.id_map is None or table.id_map.policy != "ttl" for table in self.tables):
            raise ValueError("expire: no table has an id map of policy 'ttl'; the ids of others do not expire.")

        def local(maps: mapped.Maps, step: jax.Array) -> Any:
            return mapped.expire(self.tables, maps, step, devices=self.mesh.size, axes=self.axes)

        all_axes = P(self.axes)
        maps, evicted = self._everywhere(local, in_specs=(all_axes, P()), out_specs=all_axes)(
            state["maps"], state["updates"]
        )
        return self.admit(state, Assignment(maps, evicted, jnp.zeros((self.mesh.size, 2), jnp.int32)))

    def find_ids(self, state: State, features: DeviceJagged) -> tuple[DeviceJagged, jax.Array]:
        """As `map_ids`, for evaluation: changes nothing, and ids without a row get row 0.

        Returns:
          The features, and int32[M, 2]: per device 0 and the ids that found no room on their way to their map.
        """
        if not self.mapped_tables:
            return features, jnp.zeros((self.mesh.size, 2), jnp.int32)

        def local(maps: mapped.Maps, features: DeviceJagged) -> Any:
            asked = mapped.requests(self.tables, features.layout)
            where = {"exchange": self.exchange, "devices": self.mesh.size, "axes": self.axes}
            return mapped.find(asked, maps, features, **where)

        all_axes = P(self.axes)
        ids = dataclasses.replace(features, plans=None)
        values, faults = self._everywhere(local, in_specs=all_axes, out_specs=all_axes)(state["maps"], ids)
        return dataclasses.replace(features, values=values, high=None), faults

    def exchange_ids(self, features: DeviceJagged) -> Routing:
        """Sends ids to the devices that own their rows, and sorts what arrives by row. Reads no state.

        Bad ids and ids without room are counted in the result; they will embed as zeros. Of deduplicated features only
        distinct rows travel; with `accumulate="exact"` all of them for the update too.

        Raises:
          ValueError: ids of tables with an id map are not rows yet.
        """
        if features.high is not None:
            names = ", ".join(feature.name for feature in features.layout if feature.map is not None)
            raise ValueError(f"exchange_ids: {names} still hold 64-bit ids; call map_ids or find_ids first.")
        routing = self._exchange(features)
        if features.inverse is None or self.accumulate == "ordered":
            return routing
        layout = _plain_layout(features.layout, features.inverse.shape[2])
        plain = self._everywhere(lambda f: expand(f, layout), in_specs=P(self.axes), out_specs=P(self.axes))(features)
        return dataclasses.replace(routing, plain=self._exchange(plain))

    def _exchange(self, features: DeviceJagged) -> Routing:
        found = self._found(features)

        def local(features: DeviceJagged) -> Any:
            shard = _shard(features)
            routes, plans, faults = {}, {}, jnp.zeros(2, jnp.int32)
            for stack in self.stacks:
                where = self._axes_of(stack)
                way, counts = route(
                    shard,
                    stack,
                    found[stack.name],
                    exchange=self.exchange,
                    axes=where.route_axes,
                )
                routes[stack.name], faults = way, faults + counts
                if self._plans_ahead(stack):
                    copies = self.mesh.size // stack.devices
                    plans[stack.name] = plan_update(stack, found[stack.name], way, where, copies)
            return routes, plans, faults[None]

        all_axes = P(self.axes)
        ids = dataclasses.replace(features, plans=None)
        routes, plans, faults = self._everywhere(local, in_specs=all_axes, out_specs=all_axes)(ids)
        return Routing(ids, routes, plans | (features.plans or {}), faults, None)

    def fetch(self, state: State, routing: Routing) -> dict[str, jax.Array]:
        """Rows of all features, from where their ids went.

        Returns:
          {feature: float[B, dim], or [B, length, dim] for pooling "none"}, sharded over all mesh axes along B, in
          float32 or wider. Unpooled jagged features come as [B, max_length, dim]: the rows of an example in the order
          of its ids, then zeros; `lengths` says where they end.
        """
        features, found = routing.features, self._found(routing.features)

        def local(tables: dict[str, jax.Array], routes: Any, features: DeviceJagged) -> Any:
            shard = _shard(features)
            zero = runtime_zero(shard.lengths[0])
            slices: dict[str, list[tuple[int, jax.Array]]] = {}
            for stack in self.stacks:
                parts = fetch(
                    tables[stack.name],
                    routes[stack.name],
                    shard,
                    stack,
                    found[stack.name],
                    zero,
                    exchange=self.exchange,
                    axes=self._axes_of(stack).route_axes,
                )
                for look, part in zip(found[stack.name], parts, strict=True):
                    if look.feature.group is not None:
                        assert features.inverse is not None
                        part = part[features.inverse[0, look.feature.group]]
                    slices.setdefault(look.feature.name, []).append((look.member.start, part))
            # A feature of a table that is cut into columns has a part in each of its slices.
            return {
                name: parts[0][1]
                if len(parts) == 1
                else jnp.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], axis=-1)
                for name, parts in slices.items()
            }

        tables = {name: leaves["rows"] for name, leaves in state["stacks"].items()}
        all_axes = P(self.axes)
        embedded = self._everywhere(local, in_specs=(self._table_specs(), all_axes, all_axes), out_specs=all_axes)(
            tables, routing.routes, features
        )
        # The order of the configuration, whatever a pytree made of it.
        return {name: embedded[name] for table in self.tables for name in table.features}

    def lengths(self, features: DeviceJagged) -> dict[str, jax.Array]:
        """How many positions of unpooled features hold rows, for masks. Nothing moves; reads neither ids nor tables.

            positions = jnp.arange(embedded["clicks"].shape[1])
            mask = positions[None, :] < lengths["clicks"][:, None]      # bool[B, max_length]

        Args:
          features: A batch, before or after its ids were exchanged.

        Returns:
          {feature: int32[B]} for the features of tables with pooling "none", sharded as `fetch` shards their rows. A
          feature of fixed length has that many in every example.
        """
        unpooled = [name for table in self.tables if table.pooling == "none" for name in table.features]
        if not unpooled:
            return {}
        firsts, first = {}, 0
        for feature in features.layout:
            firsts[feature.name] = feature, first
            first += feature.bags

        def local(lengths: jax.Array, inverse: jax.Array | None) -> dict[str, jax.Array]:
            found = {}
            for name in unpooled:
                feature, first = firsts[name]
                own = jnp.minimum(lengths[0, first : first + feature.bags], feature.positions)
                if feature.group is not None:
                    assert inverse is not None
                    own = own[inverse[0, feature.group]]
                found[name] = own
            return found

        all_axes = P(self.axes)
        return self._everywhere(local, in_specs=all_axes, out_specs=all_axes)(features.lengths, features.inverse)

    def update(
        self,
        state: State,
        routing: Routing,
        grads: dict[str, jax.Array],
        learning_rate_scale: jax.typing.ArrayLike = 1.0,
        when: jax.Array | None = None,
    ) -> State:
        """One optimizer step on the rows that were looked up; everything else keeps its bits.

        Args:
          state: The state that was looked up.
          routing: From that lookup.
          grads: Gradients of the loss, shaped like what the lookup returned. Those of positions without a row are not
            read.
          learning_rate_scale: Factor on the learning rate of every table.
          when: bool[], whether the step is taken; where not, no row is written and nothing is counted but faults. None
            = it is.

        Raises:
          ValueError: `grads` has other features than were looked up, or other shapes.
        """
        self._check_grads(routing.features, grads)
        if routing.plain is not None:
            routing = dataclasses.replace(routing.plain, faults=routing.faults + routing.plain.faults)
        features, found = routing.features, self._found(routing.features)

        def local(stacks: Any, routes: Any, plans: Any, features: DeviceJagged, grads: Any, rest: Any) -> Any:
            shard = _shard(features)
            scale, updates, when = rest
            inputs = StepInputs(scale, updates, runtime_zero(shard.lengths[0]), self.accumulate, self.exchange, when)
            grads = _by_distinct_row(grads, features)
            new = {}
            for stack in self.stacks:
                looks, leaves, way = found[stack.name], stacks[stack.name], routes[stack.name]
                own = [
                    grads[look.feature.name][..., look.member.start : look.member.stop].astype(stack.wide_dtype)
                    for look in looks
                ]
                if stack.update == "psum":
                    new[stack.name] = update_dense(stack, looks, leaves, way, own, shard, inputs, self.axes)
                elif self._plans_ahead(stack):
                    new[stack.name] = update_stack(
                        stack, looks, leaves, way, plans[stack.name], own, shard, inputs, self._axes_of(stack)
                    )
                else:
                    made = plans.get(stack.name)
                    new[stack.name] = update_stack_one_by_one(stack, looks, leaves, way, own, shard, inputs, made)
                if stack.tracked:
                    plan = plans.get(stack.name) if self._plans_ahead(stack) else None
                    axes = self.axes if stack.update == "psum" else ()
                    marks = tracking.mark(leaves[UPDATED], way, plan, updates + 1, axes)
                    new[stack.name] = new[stack.name] | {UPDATED: marks}
            return new

        all_axes = P(self.axes)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_state()["stacks"])
        stacks = self._everywhere(
            local,
            in_specs=(specs, all_axes, all_axes, all_axes, all_axes, P()),
            out_specs=specs,
        )(
            state["stacks"],
            routing.routes,
            routing.plans,
            features,
            grads,
            (jnp.asarray(learning_rate_scale), state["updates"], when),
        )
        faults = state["faults"] + routing.faults
        taken = 1 if when is None else when.astype(jnp.int32)
        return {**state, "stacks": stacks, "updates": state["updates"] + taken, "faults": faults}

    def _check_grads(self, features: DeviceJagged, grads: dict[str, jax.Array]) -> None:
        looked_up = {feature.name: feature for feature in features.layout}
        if set(grads) != set(looked_up):
            raise ValueError(
                "EmbeddingCollection.update: grads must have the features that were looked up, "
                f"{', '.join(looked_up)}; missing: {sorted(set(looked_up) - set(grads))}, unknown: "
                f"{sorted(set(grads) - set(looked_up))}. Pass the gradient with respect to all that `lookup` returned."
            )
        for table in self.tables:
            for name in table.features:
                feature = looked_up[name]
                per_shard = feature.bags if features.inverse is None else features.inverse.shape[2]
                shape = (self.mesh.size * per_shard, table.dim)
                if table.pooling == "none":
                    shape = (shape[0], feature.positions, table.dim)
                if grads[name].shape != shape:
                    raise ValueError(
                        f"EmbeddingCollection.update: the gradient of feature {name!r} must have the shape of what "
                        f"`lookup` returned, {shape}; got {grads[name].shape}."
                    )

    def faults(self, state: State) -> jax.Array:
        """int32[2]: bad ids and ids without room since the state was made; see `check_faults`."""
        return state["faults"].sum(axis=0, dtype=jnp.int32)

    def id_counts(self, state: State) -> dict[str, jax.Array]:
        """{table: uint32[len(COUNTS), 2]}: the counters of each id map since it was made; see `id_totals`."""
        return {name: id_map.merged_counts(leaves["counts"]) for name, leaves in state.get("maps", {}).items()}

    def id_totals(self, counts: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
        """What `id_counts` gave, on the host -> {table: {counter: number}}, see `id_map.COUNTS`.

        Raises:
          UserError: ids came to a device that does not own their buckets.
        """
        found = {name: id_map.totals(np.asarray(words)[None]) for name, words in counts.items()}
        for totals in found.values():
            id_map.check_totals(totals)
        return found

    def check_faults(self, counts: np.ndarray) -> None:
        """Raises if the counts of `faults` are not zero.

        With `Exchange(overflow="count")` ids without room may be any: whoever has the counts says how many, as training
        and scoring do ("overflow_ids").

        Raises:
          UserError: some are not.
        """
        bad, lost = (int(c) for c in counts)
        if bad or (lost and self.exchange.overflow == "fail"):
            rooms = "make every batch with it, and see --set tables.exchange.capacity_factor."
            if self.mapped_tables:
                rooms = (
                    "make every batch with it. Only the devices know the rows of table "
                    f"{self.mapped_tables[0].name!r}, which has an id map: give its rows more room with --set "
                    "tables.exchange.capacity_factor=4 or tables.exchange.roomy_below_bytes; ids without a row of "
                    "their own all go to the device of row 0."
                )
            raise UserError(
                f"Embedding lookups met {bad} ids out of range and {lost} ids for which an exchange, or a max_length, "
                "had no room; they were embedded as zeros. Batches that `EmbeddingCollection.pack` makes never do "
                f"this: {rooms}"
            )

    def to_stored(self, state: State) -> logical.Tree:
        """{table: {"rows_body", "rows_tail", "accumulator_body", ...}, COUNTS: {"updates": int32[], "faults":
        int32[2]}}: shapes free of the mesh and of the plan (see `stored`).

        With id maps also {MAPS: {table: {"key_hi", ..., "counts": uint32[len(COUNTS), 2]}}}, as they are but for the
        counters, which are summed over the devices, and COUNTS has the data of the "key" of the tables.
        """
        return {**self._to_stored(state["stacks"]), **self._counts_to_stored(state)}

    def _counts_to_stored(self, state: State) -> logical.Tree:
        """All but the tables."""
        counts = {"updates": state["updates"], "faults": self._sum_faults(state["faults"])}
        if not self.mapped_tables:
            return {COUNTS: counts}
        sums = self._merge_id_counts(state)
        maps = {name: leaves | {"counts": sums[name]} for name, leaves in state["maps"].items()}
        return {COUNTS: counts | {"key": state["key"]}, MAPS: maps}

    def from_stored(self, tree: logical.Tree) -> State:
        """The state of this mesh."""
        tables = {table.name: tree[table.name] for table in self.tables}
        counts = tree[COUNTS]
        return {
            "stacks": self._from_stored(tables),
            "updates": counts["updates"],
            "faults": self._spread_faults(counts["faults"]),
            **({"maps": self._spread_id_counts(tree[MAPS]), "key": counts["key"]} if self.mapped_tables else {}),
        }

    def abstract_stored(self) -> logical.Tree:
        """Shapes, dtypes and shardings of `to_stored` on this mesh."""
        whole = NamedSharding(self.mesh, P())
        counts = {
            "updates": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            "faults": jax.ShapeDtypeStruct((2,), jnp.int32, sharding=whole),
        }
        tree = {**self._abstract_stored_tables(), COUNTS: counts}
        if self.mapped_tables:
            counts["key"] = self._abstract_key()
            tree[MAPS] = {
                name: leaves | {"counts": jax.ShapeDtypeStruct((len(id_map.COUNTS), 2), jnp.uint32, sharding=whole)}
                for name, leaves in self._abstract_maps().items()
            }
        return tree

    def untracked_to_stored(self, state: State) -> logical.Tree:
        """As `to_stored`, of the counts, the id maps and tables that are not tracked: what goes with
        `tracking.touched_rows`."""
        rest = tuple(table for table in self.tables if table.track == "nothing")
        tables = self.part_to_stored(rest)(state["stacks"]) if rest else {}
        return {**tables, **self._counts_to_stored(state)}

    def _abstract_stored_tables(self) -> logical.Tree:
        specs = {"body": logical.body_spec(self.moves), "tail": P()}
        return {
            table.name: {
                f"{leaf}_{part}": jax.ShapeDtypeStruct(
                    (rows, *shape[1:]), dtype, sharding=NamedSharding(self.mesh, specs[part])
                )
                for leaf, (shape, dtype) in self._logical_shapes(table).items()
                for part, rows in logical.parts(table.rows).items()
            }
            for table in self.tables
        }

    def to_logical(self, state: State) -> dict[str, dict[str, jax.Array]]:
        """{table: {"rows": [V, dim], "accumulator": ...}}: unpadded and free of the mesh.

        Tables whose rows do not divide over the devices come out whole on every device: for checkpoints of large tables
        use `to_stored`.
        """

        def join(tree: logical.Tree) -> dict[str, dict[str, jax.Array]]:
            return {
                table.name: {
                    leaf: jnp.concatenate([tree[table.name][f"{leaf}_{part}"] for part in logical.parts(table.rows)])
                    for leaf in self._logical_shapes(table)
                }
                for table in self.tables
            }

        return jax.jit(join, out_shardings=self._shardings(self.abstract_logical()))(self._to_stored(state["stacks"]))

    def from_logical(self, tree: dict[str, dict[str, jax.Array]], *, updates: int = 0) -> State:
        """The inverse of `to_logical`, from arrays of any placement (NumPy too).

        Args:
          tree: The tables. "updated" of a tracked table may be left out: its rows then count as touched by no update.
          updates: Updates that they have behind them (Adam and LAMB count them).

        Raises:
          UserError: a table has an id map: its rows alone do not say whose they are; or a table, or one of its states,
            is missing, unknown or of another shape.
        """
        if self.mapped_tables:
            raise UserError(
                f"from_logical: table {self.mapped_tables[0].name!r} has an id map, and rows alone do not say whose "
                "they are. Restore it from what to_stored gave, which holds its map."
            )
        # Rows that come from elsewhere were touched by no update of this collection.
        untouched = {t.name: {UPDATED: np.zeros(t.rows, np.int32)} for t in self.tables if t.track == "updates"}
        given: dict[str, Any] = {name: untouched.get(name, {}) | leaves for name, leaves in tree.items()}
        _check_logical(given, self.abstract_logical())

        def split(tree: dict[str, dict[str, jax.Array]]) -> logical.Tree:
            return {
                name: {
                    f"{leaf}_{part}": array[: logical.body_rows(len(array))]
                    if part == "body"
                    else array[logical.body_rows(len(array)) :]
                    for leaf, array in leaves.items()
                    for part in logical.parts(len(array))
                }
                for name, leaves in tree.items()
            }

        placed = jax.device_put(given, self._shardings(self.abstract_logical()))
        tables = jax.jit(split, out_shardings=self._shardings(self._abstract_stored_tables()))(placed)
        counts = {"updates": np.asarray(updates, np.int32), "faults": np.zeros(2, np.int32)}
        return self.from_stored({**tables, COUNTS: jax.device_put(counts, NamedSharding(self.mesh, P()))})

    def abstract_logical(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of `to_logical` on this mesh."""
        return {
            table.name: {
                leaf: jax.ShapeDtypeStruct(
                    shape,
                    dtype,
                    sharding=NamedSharding(self.mesh, P() if table.rows % self.mesh.size else P(self.axes)),
                )
                for leaf, (shape, dtype) in self._logical_shapes(table).items()
            }
            for table in self.tables
        }

    def _logical_shapes(self, table: TableConfig) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        pieces = logical.slices_of(self.stacks, table)
        stack = pieces[0][0]
        shapes = {}
        for name, kind in stack.arrays.items():
            shape = (table.rows, table.dim) if kind == "element" else (table.rows,)
            if logical.joins(table, name, kind) == "stack" and len(pieces) > 1:
                shape = (table.rows, len(pieces))
            shapes[name] = (shape, stack.leaf_dtype(name))
        return shapes

    def _found(self, features: DeviceJagged) -> dict[str, tuple[Lookup, ...]]:
        return {stack.name: lookups(stack, features.layout) for stack in self.stacks}

    def _plans_ahead(self, stack: Stack) -> bool:
        """Whether occurrences are sorted by row with the exchange of ids: not where tables are updated one by one, nor
        where gradients are dense."""
        return stack.update != "psum" and not self.plans_on_host

    @property
    def plans_on_host(self) -> bool:
        """Whether tables are updated one by one, on the only device, a CPU; the host can then sort ids by row."""
        return self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"

    def with_plans(
        self, packed: PackedIds, layout: tuple[FeatureLayout, ...], room: host_plan.Room | None = None
    ) -> PackedIds:
        """The device form with row plans where the host makes them; for batches that rows will be updated by.

        `room` is one for all batches of a run; None = for whatever ids there may be.
        """
        if not self.plans_on_host or (packed.inverse is not None and self.accumulate == "exact"):
            return packed
        stacks = tuple(stack for stack in self.stacks if stack.update != "psum")
        return dataclasses.replace(packed, plans=host_plan.plans(stacks, packed, layout, room))

    def _table_specs(self) -> dict[str, P]:
        return {stack.name: self._spec(stack) for stack in self.stacks}

    def _everywhere(self, function: Any, *, in_specs: Any, out_specs: Any) -> Any:
        # Every axis is manual and gradients never pass through, so there is no replication to keep track of.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @functools.cached_property
    def _to_stored(self) -> Any:
        return self.part_to_stored(self.tables)

    def part_to_stored(self, tables: tuple[TableConfig, ...]) -> Any:
        """A compiled function: state["stacks"] -> what `to_stored` has of some tables."""
        convert = functools.partial(logical.local_to_stored, self.stacks, tables, axes=self.moves)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_state()["stacks"])
        abstract = self._abstract_stored_tables()
        return self._jit_everywhere(convert, (specs,), {table.name: abstract[table.name] for table in tables})

    @functools.cached_property
    def _from_stored(self) -> Any:
        convert = functools.partial(logical.local_from_stored, self.stacks, self.tables, axes=self.moves)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self._abstract_stored_tables())
        return self._jit_everywhere(convert, (specs,), self.abstract_state()["stacks"])

    @functools.cached_property
    def _sum_faults(self) -> Any:
        return jax.jit(lambda faults: faults.sum(axis=0, dtype=jnp.int32), out_shardings=NamedSharding(self.mesh, P()))

    @functools.cached_property
    def _spread_faults(self) -> Any:
        """All on the first device: only their sum means something."""
        sharding = self.abstract_state()["faults"].sharding
        empty = (self.mesh.size, 2)
        return jax.jit(lambda counts: jnp.zeros(empty, jnp.int32).at[0].set(counts), out_shardings=sharding)

    @functools.cached_property
    def _merge_id_counts(self) -> Any:
        return jax.jit(self.id_counts, out_shardings=NamedSharding(self.mesh, P()))

    @functools.cached_property
    def _spread_id_counts(self) -> Any:
        """Counters all on the first device, the rest of the maps as it is."""

        def spread(maps: mapped.Maps) -> mapped.Maps:
            none = jnp.zeros((self.mesh.size, len(id_map.COUNTS), 2), jnp.uint32)
            return {name: leaves | {"counts": none.at[0].set(leaves["counts"])} for name, leaves in maps.items()}

        return jax.jit(spread, out_shardings=self._shardings(self._abstract_maps()))

    def _jit_everywhere(self, function: Any, in_specs: Any, abstract: Any) -> Any:
        out_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)
        mapped = self._everywhere(function, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, out_shardings=self._shardings(abstract))

    @staticmethod
    def _shardings(abstract: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _check_logical(tree: dict[str, dict[str, Any]], wanted: dict[str, dict[str, jax.ShapeDtypeStruct]]) -> None:
    def compare(what: str, got: Any, names: Any) -> None:
        if set(got) != set(names):
            raise UserError(
                f"EmbeddingCollection.from_logical: {what} must be {', '.join(names)}; missing: "
                f"{sorted(set(names) - set(got))}, unknown: {sorted(set(got) - set(names))}. Name the tables and the "
                "optimizers that the state was made with."
            )

    compare("tables", tree, wanted)
    for name, leaves in wanted.items():
        compare(f"arrays of table {name!r}", tree[name], leaves)
        for leaf, value in leaves.items():
            if tuple(tree[name][leaf].shape) != value.shape:
                raise UserError(
                    f"EmbeddingCollection.from_logical: {leaf} of table {name!r} must have the shape {value.shape}; "
                    f"got {tuple(tree[name][leaf].shape)}. Give the table the rows, the width and, for one statistic "
                    "a slice, the number of slices that the state was made with."
                )


def _plain_layout(layout: tuple[FeatureLayout, ...], examples: int) -> tuple[FeatureLayout, ...]:
    """The layout without groups, of so many examples a shard."""
    return tuple(
        FeatureLayout(f.name, f.plain_capacity, f.length, examples, map=f.map, max_length=f.max_length) for f in layout
    )


def _shard(features: DeviceJagged) -> Shard:
    """The part of this device, inside a shard_map."""
    return Shard(features.values[0], features.lengths[0], None if features.weights is None else features.weights[0])


def _by_distinct_row(grads: dict[str, jax.Array], features: DeviceJagged) -> dict[str, jax.Array]:
    """Gradients of examples -> of the distinct rows of features in groups, added in the order of examples.

    Examples of one distinct row have the same positions without a row, whose sums nobody reads.
    """
    if features.inverse is None:
        return grads
    new, plans = dict(grads), {}
    for feature in features.layout:
        if feature.group is not None and feature.name in grads:
            if feature.group not in plans:
                rows = features.inverse[0, feature.group]
                plan = plan_rows(rows, num_rows=feature.bags, capacity=min(rows.shape[0], feature.bags))
                plans[feature.group] = plan
            plan, value = plans[feature.group], grads[feature.name]
            flat = value.reshape(value.shape[0], -1)
            sums = sum_by_row(flat.astype(jnp.promote_types(flat.dtype, jnp.float32)), plan)
            empty = jnp.zeros((feature.bags, sums.shape[1]), sums.dtype)
            sums = empty.at[plan.rows].set(sums, mode="drop", unique_indices=True)
            new[feature.name] = sums.reshape(feature.bags, *value.shape[1:])
    return new


COUNTS = "(counts)"
"""Key of the counts of updates and faults in the stored form, beside the names of tables."""

MAPS = "(id maps)"
"""Key of the id maps in the stored form."""
