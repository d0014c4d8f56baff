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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax.data.examples.dedup import DedupKeyedJagged
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError, check_one_of
from scalejax.parallel.embedding import lookup, lookup_kernels, mapped, packing
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange import ragged
from scalejax.parallel.embedding.exchange.through_maps import Assignment
from scalejax.parallel.embedding.half_way import HalfWay
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import DedupGroup, DeviceJagged, FeatureLayout, to_device
from scalejax.parallel.embedding.lookup import Routing
from scalejax.parallel.embedding.lookup_kernels import Implementation
from scalejax.parallel.embedding.plan import memory
from scalejax.parallel.embedding.plan.sharding_plan import Accumulate, Exchange, ShardingPlan
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.sharded_tables import ShardedTables, StackLeaves, State, shardings
from scalejax.parallel.embedding.stored import initial, logical
from scalejax.parallel.embedding.stored.conversion import StoredForm
from scalejax.parallel.embedding.update import host_row_plans
from scalejax.parallel.mesh import device_memory_bytes
from scalejax.parallel.towers import HostTowers


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
      implementation: What looks rows up, see `lookup_kernels`; None = the kernel on GPUs, XLA elsewhere.
    """

    tables: tuple[TableConfig, ...]
    mesh: Mesh
    plan: ShardingPlan | None = None
    exchange: Exchange = dataclasses.field(default_factory=Exchange)
    accumulate: Accumulate = "ordered"
    implementation: Implementation | None = None

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
        check_one_of("EmbeddingCollection: accumulate", self.accumulate, ("ordered", "exact"))
        double = [table.name for table in self.tables if table.dtype == "float64"]
        if self.accumulate == "exact" and double:
            raise UserError(
                f"EmbeddingCollection: accumulate='exact' adds up gradients in float32 as fixed point, and table "
                f"{double[0]!r} is of float64. Use accumulate='ordered' (--set tables.accumulate=ordered), or tables "
                "of float32 (--set tables.dtype=float32)."
            )
        if self.exchange.route != "flat" and self.plan is not None and self.plan.replicas == "copy":
            raise UserError(
                f"EmbeddingCollection: exchange.route={self.exchange.route!r} crosses between hosts, and with the "
                "plan's replicas='copy' every host has all tables: no vector crosses. Use tables.exchange.route=flat, "
                "or a plan with replicas='shard'."
            )
        if self.exchange.all_to_all == "ragged":
            ragged.check_platform(self.mesh)
        # The stacks themselves refuse a plan that cannot be built.
        lookup_kernels.check(self.implementation, self.stacks, self.mesh)

    @functools.cached_property
    def sharded(self) -> ShardedTables:
        """The tables on the mesh, which every function behind a method here takes."""
        return ShardedTables(
            tables=self.tables,
            mesh=self.mesh,
            plan=self.plan or ShardingPlan(),
            exchange=self.exchange,
            accumulate=self.accumulate,
            implementation=self.implementation,
        )

    @functools.cached_property
    def stored(self) -> StoredForm:
        """Conversions of states to forms that know no mesh."""
        return StoredForm(self.sharded)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Tables, or slices of them, of equal width, dtype and optimizer, stacked."""
        return self.sharded.stacks

    @property
    def mapped_tables(self) -> tuple[TableConfig, ...]:
        """The tables with an id map."""
        return self.sharded.mapped_tables

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
        return packing.layout(self.sharded, schema, batch_size, groups)

    def to_device(self, features: KeyedJagged, layout: tuple[FeatureLayout, ...]) -> DeviceJagged:
        """This process's slice of a global batch, checked and on its devices: what `lookup` takes.

        Args:
          features: The slice: global batch size / number of processes examples.
          layout: From `layout`, without groups.

        Raises:
          UserError: as `pack`.
        """
        processes = len({device.process_index for device in self.mesh.devices.flat})
        return to_device(self.pack(features, self.mesh.size // processes, layout), self.mesh)

    def pack(self, features: KeyedJagged, shards: int, layout: tuple[FeatureLayout, ...]) -> DeviceJagged:
        """The device form of this process's examples, as NumPy, checked exactly before it travels.

        Args:
          features: This process's slice of a global batch.
          shards: Devices that the slice goes to.
          layout: From `layout`, without groups.

        Raises:
          UserError: an id out of range, a weight that is not a number, more ids in an example than max_length, or more
            for one device than its buckets have room for; says which feature, what was met and what to set.
        """
        return packing.pack(self.sharded, features, shards, layout)

    def pack_deduplicated(
        self,
        features: DedupKeyedJagged,
        shards: int,
        layout: tuple[FeatureLayout, ...],
        groups: tuple[DedupGroup, ...],
    ) -> DeviceJagged | None:
        """As `pack`, of deduplicated features; None if they have more distinct rows, or ids, than there is room for.

        Args:
          features: This process's slice of a global batch.
          shards: Devices that the slice goes to.
          layout: From `layout`, with groups.
          groups: The groups.
        """
        return packing.pack_deduplicated(self.sharded, features, shards, layout, groups)

    def with_plans(self, packed: DeviceJagged, room: host_row_plans.Room | None = None) -> DeviceJagged:
        """The device form with row plans where the host makes them; for batches that rows will be updated by.

        `room` is one for all batches of a run; None = for whatever ids there may be.
        """
        if not lookup.plans_on_host(self.sharded) or (packed.inverse is not None and self.accumulate == "exact"):
            return packed
        stacks = tuple(stack for stack in self.stacks if stack.update != "psum")
        return dataclasses.replace(packed, plans=host_row_plans.plans(stacks, packed, room))

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings."""
        return self.sharded.abstract_state()

    def check_fits(self) -> None:
        """Refuses tables that take more than the memory of a device.

        Raises:
          UserError: names the largest tables, what lacks, and what helps.
        """
        room = device_memory_bytes(self.mesh)
        if room is not None:
            copies, platform = self.mesh.size // self.sharded.group_devices, self.mesh.devices.flat[0].platform
            memory.check_fits(self.stacks, room, self.mesh.size, copies=copies, platform=platform)

    def init(self, key: jax.Array) -> State:
        """A fresh state: a row depends on the key, the name of its table and its number, and on no mesh.

        Raises:
          UserError: the tables do not fit the devices; names the largest.
          ValueError: tables have id maps, which keep the key, and it is not of jax's default kind.
        """
        self.check_fits()
        sharded, shapes = self.sharded, self.abstract_state()
        if sharded.mapped_tables and key.dtype != jax.eval_shape(lambda: jax.random.key(0)).dtype:
            raise ValueError(f"EmbeddingCollection.init: key must be what jax.random.key makes; got {key.dtype}.")

        def fill(key: jax.Array) -> StackLeaves:
            return {
                stack.name: initial.local_leaves(
                    stack, key, jax.lax.axis_index(sharded.group) if stack.devices > 1 else 0
                )
                for stack in self.stacks
            }

        def create(key: jax.Array) -> State:
            return {
                "stacks": sharded.everywhere(fill, in_specs=P(), out_specs=sharded.stack_specs)(key),
                "updates": jnp.zeros((), jnp.int32),
                "faults": jnp.zeros((self.mesh.size, 2), jnp.int32),
                **({"maps": sharded.empty_maps(), "key": jax.random.key_data(key)} if sharded.mapped_tables else {}),
            }

        return jax.jit(create, out_shardings=shardings(shapes))(key)

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
        return mapped.map_ids(self.sharded, state, features, steps_ahead)

    def admit(self, state: State, assignment: Assignment) -> State:
        """The state with the maps of an assignment, and the rows that it took from other ids as fresh as at `init`."""
        return mapped.admit(self.sharded, state, assignment)

    def expire(self, state: State) -> State:
        """The state without the ids that policy "ttl" lets go at the next step, whether or not others want their rows.

        Their rows and row states are as fresh as at `init`; tracked ones count as touched by the next update. Jittable.
        Training does not need it: rows that are wanted are taken by `map_ids`.

        Raises:
          ValueError: no table has an id map of that policy.
        """
        return mapped.expire(self.sharded, state)

    def find_ids(self, state: State, features: DeviceJagged) -> tuple[DeviceJagged, jax.Array]:
        """As `map_ids`, for evaluation: changes nothing, and ids without a row get row 0.

        Returns:
          The features, and int32[M, 2]: per device 0 and the ids that found no room on their way to their map.
        """
        return mapped.find_ids(self.sharded, state, features)

    def exchange_ids(self, features: DeviceJagged) -> Routing:
        """Sends ids to the devices that own their rows, and sorts what arrives by row. Reads no state.

        Bad ids and ids without room are counted in the result; they will embed as zeros. Of deduplicated features only
        distinct rows travel; with `accumulate="exact"` all of them for the update too.

        Raises:
          ValueError: ids of tables with an id map are not rows yet.
        """
        return lookup.exchange_ids(self.sharded, features)

    def fetch(self, state: State, routing: Routing) -> dict[str, jax.Array]:
        """Rows of all features, from where their ids went.

        Returns:
          {feature: float[B, dim], or [B, length, dim] for pooling "none"}, sharded over all mesh axes along B, in
          float32 or wider. Unpooled jagged features come as [B, max_length, dim]: the rows of an example in the order
          of its ids, then zeros; `lengths` says where they end.
        """
        return lookup.fetch(self.sharded, state, routing)

    def fetch_half_way(self, state: State, routing: Routing, towers: HostTowers) -> HalfWay:
        """As `fetch`, but stops between the hops: every host gets the features of its towers, for all examples.

        What then leaves the towers takes the hop between hosts by `HalfWay.to_examples`. With a route in two levels, on
        a mesh with `replica`.

        Args:
          state: The state.
          routing: Where ids went, not deduplicated.
          towers: From `Partition.on_hosts`; together they have all features.

        Raises:
          PlanRefused: rows of a table are not on the host of its tower.
          ValueError: an exchange of one hop, towers of other features, tables that are not pooled or of several widths,
            or deduplicated features.
        """
        return lookup.fetch_half_way(self.sharded, state, routing, towers)

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
        return lookup.lengths(self.sharded, features)

    def update(
        self,
        state: State,
        routing: Routing,
        grads: dict[str, jax.Array] | HalfWay,
        learning_rate_scale: jax.typing.ArrayLike = 1.0,
        when: jax.Array | None = None,
    ) -> State:
        """One optimizer step on the rows that were looked up; everything else keeps its bits.

        Args:
          state: The state that was looked up.
          routing: From that lookup.
          grads: Gradients of the loss, shaped like what `fetch` or `fetch_half_way` returned. Those of positions
            without a row are not read.
          learning_rate_scale: Factor on the learning rate of every table.
          when: bool[], whether the step is taken; where not, no row is written and nothing is counted but faults. None
            = it is.

        Raises:
          ValueError: `grads` has other features than were looked up, or other shapes.
        """
        return lookup.update(self.sharded, state, routing, grads, learning_rate_scale, when)

    def faults(self, state: State) -> jax.Array:
        """int32[2]: bad ids and ids without room since the state was made; see `check_faults`."""
        return state["faults"].sum(axis=0, dtype=jnp.int32)

    def id_counts(self, state: State) -> dict[str, jax.Array]:
        """{table: uint32[len(COUNTS), 2]}: the counters of each id map since it was made; see `id_totals`."""
        return id_map.summed_counts(state.get("maps", {}))

    def id_totals(self, counts: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
        """The counts of `id_counts`, on the host -> {table: {counter: number}}, see `id_map.COUNTS`.

        Raises:
          UserError: ids came to a device that does not own their buckets.
        """
        return mapped.id_totals(counts)

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
            if self.sharded.mapped_tables:
                rooms = (
                    "make every batch with it. Only the devices know the rows of table "
                    f"{self.sharded.mapped_tables[0].name!r}, which has an id map: give its rows more room with --set "
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
        return self.stored.to_stored(state)

    def from_stored(self, tree: logical.Tree) -> State:
        """The state of this mesh."""
        return self.stored.from_stored(tree)

    def abstract_stored(self) -> logical.Tree:
        """Shapes, dtypes and shardings of `to_stored` on this mesh."""
        return self.stored.abstract_stored()

    def untracked_to_stored(self, state: State) -> logical.Tree:
        """As `to_stored`, of the counts, the id maps and tables that are not tracked: they
        go with the rows of `tracking.touched_rows`."""
        return self.stored.untracked_to_stored(state)

    def to_logical(self, state: State) -> dict[str, dict[str, jax.Array]]:
        """{table: {"rows": [V, dim], "accumulator": ...}}: unpadded and free of the mesh.

        Tables whose rows do not divide over the devices come out whole on every device: for checkpoints of large tables
        use `to_stored`.
        """
        return self.stored.to_logical(state)

    def from_logical(self, tree: Mapping[str, Mapping[str, Any]], *, updates: int = 0) -> State:
        """The inverse of `to_logical`, from arrays of any placement (NumPy too).

        Args:
          tree: The tables. "updated" of a tracked table may be left out: its rows then count as touched by no update.
          updates: Updates that they have behind them (Adam and LAMB count them).

        Raises:
          UserError: a table has an id map: its rows alone do not say whose they are; or a table, or one of its states,
            is missing, unknown or of another shape.
        """
        return self.stored.from_logical(tree, updates)

    def abstract_logical(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of `to_logical` on this mesh."""
        return self.stored.abstract_logical()
