"""Embedding tables over all devices of a mesh: a dataclass of plain values and pure functions.

    embedded, routing = collection.lookup(state, batch.features)
    grads = jax.grad(loss)(embedded)
    state = collection.update(state, routing, grads, learning_rate_scale)

Lookup and update are shard_maps over all mesh axes. An update is exact and deterministic: the gradients of a row are
summed in the order of examples, features, positions, then its optimizer runs once. Given identical gradients per
occurrence the result is the same to the bit on any number of devices.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.data.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.schema import Schema
from scalejax.errors import UserError
from scalejax.parallel.embedding import host_check, initial, optimizers, stored
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange import Route, bucket_capacity, fetch_rows, route
from scalejax.parallel.embedding.jagged import FeatureLayout, KeyedJagged
from scalejax.parallel.embedding.occurrences import Shard, lookups, pool, unpool
from scalejax.parallel.embedding.plan import Exchange, ShardingPlan
from scalejax.parallel.embedding.rounding import runtime_zero
from scalejax.parallel.embedding.stacks import Stack, stack_tables
from scalejax.parallel.embedding.update import update_stack, update_stack_one_by_one
from scalejax.parallel.mesh import check_batch

State = dict[str, Any]
"""{"stacks": {stack: {"rows": [N * L, dim], "accumulator": ...}}, "faults": int32[N, 2]}: sharded over all mesh axes on
dimension 0. Faults count, per device, bad ids and ids that an exchange had no room for, since the state was made."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What `update` needs to know of a `lookup`.

    Attributes:
      features: The ids that were looked up.
      routes: Per stack, where its occurrences went.
      faults: int32[N, 2], bad ids and ids without room of this lookup, per device.
    """

    features: KeyedJagged
    routes: dict[str, Route]
    faults: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingCollection:
    """Tables on a mesh.

    Attributes:
      tables: The tables; every feature belongs to one table.
      mesh: All its axes together shard the rows.
      plan: How each table is sharded; None = all row-wise.
      exchange: Room in the exchange.
    """

    tables: tuple[TableConfig, ...]
    mesh: Mesh
    plan: ShardingPlan | None = None
    exchange: Exchange = dataclasses.field(default_factory=Exchange)

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
        (self.plan or ShardingPlan()).check(tuple(names))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that rows are sharded over: all."""
        return tuple(self.mesh.axis_names)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Tables of equal width, dtype and optimizer, stacked."""
        return stack_tables(self.tables, self.mesh.size)

    def layout(self, schema: Schema, batch_size: int) -> tuple[FeatureLayout, ...]:
        """Where each feature lies in the device form of a global batch.

        Raises:
          UserError: the batch does not divide over the devices.
          ValueError: tables and schema do not fit.
        """
        check_batch(batch_size, self.mesh)
        found = {}
        for table in self.tables:
            for name in table.features:
                feature = schema[name]
                if feature.rows > table.rows:
                    raise ValueError(
                        f"EmbeddingCollection: feature {name!r} has ids below {feature.rows}, but table {table.name!r} "
                        f"has {table.rows} rows."
                    )
                if feature.length is None and table.pooling == "none":
                    raise ValueError(
                        f"EmbeddingCollection: table {table.name!r} has pooling 'none', which needs features of fixed "
                        f"length; {name!r} is jagged."
                    )
                found[name] = FeatureLayout(name, feature.capacity_for(batch_size // self.mesh.size), feature.length)
        return tuple(found[name] for name in schema.keys if name in found)

    def check_on_host(self, features: HostKeyedJagged, shards: int, layout: tuple[FeatureLayout, ...]) -> None:
        """Checks this process's examples exactly, before they travel.

        Args:
          features: This process's slice of a global batch.
          shards: Devices that the slice goes to.
          layout: From `layout`.

        Raises:
          UserError: an id out of range, a weight that is not a number, or more ids for one device than its buckets have
            room for; says which feature, what was met and what to set.
        """
        host_check.check(self.stacks, features, shards, layout, self.exchange, self.mesh.size)

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings."""
        everywhere, devices = NamedSharding(self.mesh, P(self.axes)), self.mesh.size
        stacks = {}
        for stack in self.stacks:
            rows = devices * stack.local_rows
            leaves = {"rows": jax.ShapeDtypeStruct((rows, stack.dim), stack.dtype, sharding=everywhere)}
            for name, shape in optimizers.state_shapes(stack.optimizer, rows, stack.dim).items():
                leaves[name] = jax.ShapeDtypeStruct(shape, stack.wide_dtype, sharding=everywhere)
            stacks[stack.name] = leaves
        return {"stacks": stacks, "faults": jax.ShapeDtypeStruct((devices, 2), jnp.int32, sharding=everywhere)}

    def init(self, key: jax.Array) -> State:
        """A fresh state: a row depends on the key, the name of its table and its number, and on no mesh."""
        fill = functools.partial(initial.local_state, self.stacks, axes=self.axes, devices=self.mesh.size)

        def create(key: jax.Array) -> State:
            stacks = self._everywhere(fill, in_specs=P(), out_specs=P(self.axes))(key)
            return {"stacks": stacks, "faults": jnp.zeros((self.mesh.size, 2), jnp.int32)}

        return jax.jit(create, out_shardings=self._shardings(self.abstract_state()))(key)

    def lookup(self, state: State, features: KeyedJagged) -> tuple[dict[str, jax.Array], Routing]:
        """Rows of all features.

        Returns:
          {feature: float[B, dim], or [B, length, dim] for pooling "none"}, sharded over all mesh axes along B, in
          float32 or wider; and what `update` needs. Bad ids and ids without room embed as zeros and are counted in the
          routing.
        """
        found = {stack.name: lookups(stack, features.layout) for stack in self.stacks}

        def local(tables: dict[str, jax.Array], values: Any, lengths: Any, weights: Any) -> Any:
            shard = Shard(values[0], lengths, None if weights is None else weights[0])
            embedded, routes, faults = {}, {}, jnp.zeros(2, jnp.int32)
            for stack in self.stacks:
                way, counts = route(
                    shard,
                    stack,
                    found[stack.name],
                    axes=self.axes,
                    devices=self.mesh.size,
                    capacity=self._capacity(stack, features.layout),
                )
                parts = fetch_rows(tables[stack.name], way, found[stack.name], axes=self.axes, devices=self.mesh.size)
                for look, rows in zip(found[stack.name], parts, strict=True):
                    embedded[look.feature.name] = pool(shard, look, rows.astype(stack.wide_dtype))
                routes[stack.name], faults = way, faults + counts
            return embedded, routes, faults[None]

        tables = {name: leaves["rows"] for name, leaves in state["stacks"].items()}
        all_axes = P(self.axes)
        embedded, routes, faults = self._everywhere(
            local, in_specs=(all_axes, all_axes, P(None, self.axes), all_axes), out_specs=all_axes
        )(tables, features.values, features.lengths, features.weights)
        # The order of the configuration, whatever a pytree made of it.
        embedded = {name: embedded[name] for table in self.tables for name in table.features}
        return embedded, Routing(features, routes, faults)

    def update(
        self,
        state: State,
        routing: Routing,
        grads: dict[str, jax.Array],
        learning_rate_scale: jax.typing.ArrayLike = 1.0,
    ) -> State:
        """One optimizer step on the rows that were looked up; everything else keeps its bits.

        Args:
          state: The state that was looked up.
          routing: From that lookup.
          grads: Gradients of the loss, shaped like what the lookup returned.
          learning_rate_scale: Factor on the learning rate of every table.
        """
        features = routing.features
        found = {stack.name: lookups(stack, features.layout) for stack in self.stacks}
        one_by_one = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"

        def local(stacks: Any, routes: Any, values: Any, lengths: Any, weights: Any, grads: Any, scale: Any) -> Any:
            shard = Shard(values[0], lengths, None if weights is None else weights[0])
            new, zero = {}, runtime_zero(lengths[0, 0])
            for stack in self.stacks:
                slots = [
                    unpool(shard, look, grads[look.feature.name].astype(stack.wide_dtype), zero)
                    for look in found[stack.name]
                ]
                update = update_stack_one_by_one if one_by_one else update_stack
                new[stack.name] = update(
                    stack,
                    found[stack.name],
                    stacks[stack.name],
                    routes[stack.name],
                    slots,
                    optimizers.step(stack.optimizer, scale.astype(stack.wide_dtype), zero),
                    axes=self.axes,
                    devices=self.mesh.size,
                )
            return new

        all_axes = P(self.axes)
        stacks = self._everywhere(
            local,
            in_specs=(all_axes, all_axes, all_axes, P(None, self.axes), all_axes, all_axes, P()),
            out_specs=all_axes,
        )(
            state["stacks"],
            routing.routes,
            features.values,
            features.lengths,
            features.weights,
            grads,
            jnp.asarray(learning_rate_scale),
        )
        return {"stacks": stacks, "faults": state["faults"] + routing.faults}

    def faults(self, state: State) -> jax.Array:
        """int32[2]: bad ids and ids without room since the state was made; anything but zeros is fatal."""
        return state["faults"].sum(axis=0)

    def check_faults(self, counts: np.ndarray) -> None:
        """Raises if the counts of `faults` are not zero.

        Raises:
          UserError: some are not.
        """
        bad, lost = (int(c) for c in counts)
        if bad or lost:
            raise UserError(
                f"Embedding lookups met {bad} ids out of range and {lost} ids for which an exchange had no room; they "
                "were embedded as zeros. Batches that pass check_on_host never do this: pass every batch through it, "
                "and see --set exchange.capacity_factor."
            )

    def to_stored(self, state: State) -> stored.Tree:
        """{table: {"rows_body", "rows_tail", "accumulator_body", ...}}: shapes free of the mesh (see `stored`)."""
        return self._to_stored(state["stacks"])

    def from_stored(self, tree: stored.Tree) -> State:
        """The state of this mesh; faults begin at zero."""
        return {"stacks": self._from_stored(tree), "faults": self._no_faults()}

    def abstract_stored(self) -> stored.Tree:
        """Shapes, dtypes and shardings of `to_stored` on this mesh."""
        specs = {"body": stored.body_spec(self.axes, self.mesh.size), "tail": P()}
        return {
            table.name: {
                f"{leaf}_{part}": jax.ShapeDtypeStruct(
                    (rows, *shape[1:]), dtype, sharding=NamedSharding(self.mesh, specs[part])
                )
                for leaf, (shape, dtype) in self._logical_shapes(table).items()
                for part, rows in stored.parts(table.rows).items()
            }
            for table in self.tables
        }

    def to_logical(self, state: State) -> dict[str, dict[str, jax.Array]]:
        """{table: {"rows": [V, dim], "accumulator": ...}}: unpadded and free of the mesh.

        Tables whose rows do not divide over the devices come out whole on every device: for checkpoints of large tables
        use `to_stored`.
        """

        def join(tree: stored.Tree) -> dict[str, dict[str, jax.Array]]:
            return {
                table.name: {
                    leaf: jnp.concatenate([tree[table.name][f"{leaf}_{part}"] for part in stored.parts(table.rows)])
                    for leaf in self._logical_shapes(table)
                }
                for table in self.tables
            }

        return jax.jit(join, out_shardings=self._shardings(self.abstract_logical()))(self.to_stored(state))

    def from_logical(self, tree: dict[str, dict[str, jax.Array]]) -> State:
        """The inverse of `to_logical`, from arrays of any placement (NumPy too)."""

        def split(tree: dict[str, dict[str, jax.Array]]) -> stored.Tree:
            return {
                name: {
                    f"{leaf}_{part}": array[: stored.body_rows(len(array))]
                    if part == "body"
                    else array[stored.body_rows(len(array)) :]
                    for leaf, array in leaves.items()
                    for part in stored.parts(len(array))
                }
                for name, leaves in tree.items()
            }

        placed = jax.device_put(tree, self._shardings(self.abstract_logical()))
        return self.from_stored(jax.jit(split, out_shardings=self._shardings(self.abstract_stored()))(placed))

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
        dtype = jnp.dtype(table.dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        states = optimizers.state_shapes(table.optimizer, table.rows, table.dim)
        return {"rows": ((table.rows, table.dim), dtype), **{name: (shape, wide) for name, shape in states.items()}}

    def _capacity(self, stack: Stack, layout: tuple[FeatureLayout, ...]) -> int:
        return bucket_capacity(stack, lookups(stack, layout), self.exchange, self.mesh.size)

    def _everywhere(self, function: Any, *, in_specs: Any, out_specs: Any) -> Any:
        # Every axis is manual and gradients never pass through, so there is no replication to keep track of.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @functools.cached_property
    def _to_stored(self) -> Any:
        convert = functools.partial(stored.local_to_stored, self.stacks, axes=self.axes, devices=self.mesh.size)
        return self._jit_everywhere(convert, P(self.axes), self.abstract_stored())

    @functools.cached_property
    def _from_stored(self) -> Any:
        convert = functools.partial(stored.local_from_stored, self.stacks, axes=self.axes, devices=self.mesh.size)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract_stored())
        return self._jit_everywhere(convert, (specs,), self.abstract_state()["stacks"])

    @functools.cached_property
    def _no_faults(self) -> Any:
        sharding = self.abstract_state()["faults"].sharding
        return jax.jit(lambda: jnp.zeros((self.mesh.size, 2), jnp.int32), out_shardings=sharding)

    def _jit_everywhere(self, function: Any, in_specs: Any, abstract: Any) -> Any:
        out_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)
        mapped = self._everywhere(function, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, out_shardings=self._shardings(abstract))

    @staticmethod
    def _shardings(abstract: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, abstract)
