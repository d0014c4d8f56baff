"""Tables as a mesh holds them: the stacks that a plan makes of them, their axes, the shapes of their state."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.lookup_kernels import Implementation
from scalejax.parallel.embedding.plan.placement import place
from scalejax.parallel.embedding.plan.sharding_plan import Accumulate, Exchange, ShardingPlan
from scalejax.parallel.embedding.plan.stacks import Stack, stack_tables

if TYPE_CHECKING:
    from jaxtyping import PyTree

Result = TypeVar("Result")

StackLeaves = dict[str, dict[str, jax.Array]]
"""{stack: {"rows": [N * L, dim], "accumulator": ...}}."""

State = dict[str, Any]
"""{"stacks": {stack: {"rows": [N * L, dim], "accumulator": ...}}, "updates": int32[], "faults": int32[M, 2]}.

Stacks are sharded on dimension 0 over the devices that they are striped over, or copied. Updates are counted since
the tables began; faults count, per device, bad ids and ids that an exchange had no room for, since the state was made.

Where tables have id maps, also {"maps": {table: see `id_map.State`}, "key": uint32[...]}: the maps, sharded on
dimension 0 over all devices, and the data of the key that the tables were made with, which evicted rows are made with
again."""


@dataclasses.dataclass(frozen=True)
class StackAxes:
    """Mesh axes, as a stack sees them.

    Attributes:
      route_axes: Devices that its rows are striped over.
      copy_axes: Devices that hold equal copies; updates are gathered over them.
    """

    route_axes: tuple[str, ...]
    copy_axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedTables:
    """The tables of an `EmbeddingCollection` on their mesh; attributes as there."""

    tables: tuple[TableConfig, ...]
    mesh: Mesh
    plan: ShardingPlan
    exchange: Exchange
    accumulate: Accumulate
    implementation: Implementation | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that examples are sharded over: all."""
        return tuple(self.mesh.axis_names)

    @property
    def group(self) -> tuple[str, ...]:
        """The mesh axes whose devices together hold one copy of the tables, the last of `axes`."""
        return tuple(axis for axis in self.axes if not (self.plan.replicas == "copy" and axis == "replica"))

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
            self.plan,
            devices=self.group_devices,
            devices_per_host=inside,
            accumulate=self.accumulate,
            mesh_devices=self.mesh.size,
        )
        hosts = self.mesh.size // inside if self.exchange.route != "flat" else 1
        return stack_tables(self.tables, slices, self.group_devices, hosts)

    @functools.cached_property
    def mapped_tables(self) -> tuple[TableConfig, ...]:
        """The tables with an id map."""
        return tuple(table for table in self.tables if table.id_map is not None)

    def axes_of(self, stack: Stack) -> StackAxes:
        """Where a stack is striped and copied."""
        if stack.spread == "copied":
            return StackAxes((), self.axes if self.mesh.size > 1 else ())
        copies = tuple(axis for axis in self.axes if axis not in self.group)
        return StackAxes(self.group, copies if self.group_devices < self.mesh.size else ())

    def spec(self, stack: Stack) -> P:
        """How the arrays of a stack lie on the mesh."""
        return P() if stack.spread == "copied" else P(self.group)

    @functools.cached_property
    def stack_specs(self) -> dict[str, dict[str, P]]:
        """`spec` of every array in state["stacks"]."""
        return {stack.name: dict.fromkeys(stack.arrays, self.spec(stack)) for stack in self.stacks}

    def everywhere(
        self, function: Callable[..., Result], *, in_specs: "PyTree[P]", out_specs: "PyTree[P]"
    ) -> Callable[..., Result]:
        """A shard_map over all axes; `function` sees the part of one device."""
        # Every axis is manual and gradients never pass through, so there is no replication to keep track of.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings."""
        everywhere, whole = NamedSharding(self.mesh, P(self.axes)), NamedSharding(self.mesh, P())
        state = {
            "stacks": {stack.name: self._abstract_stack(stack) for stack in self.stacks},
            "updates": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            "faults": jax.ShapeDtypeStruct((self.mesh.size, 2), jnp.int32, sharding=everywhere),
        }
        if self.mapped_tables:
            state["maps"] = self._abstract(self.empty_maps, everywhere)
            state["key"] = self._abstract(lambda: jax.random.key_data(jax.random.key(0)), whole)
        return state

    def _abstract_stack(self, stack: Stack) -> dict[str, jax.ShapeDtypeStruct]:
        sharding, rows = NamedSharding(self.mesh, self.spec(stack)), stack.devices * stack.local_rows
        return {
            name: jax.ShapeDtypeStruct(stack.leaf_shape(kind, rows), stack.leaf_dtype(name), sharding=sharding)
            for name, kind in stack.arrays.items()
        }

    @staticmethod
    def _abstract(make: Callable[[], object], sharding: NamedSharding) -> "PyTree[jax.ShapeDtypeStruct]":
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make))

    def empty_maps(self) -> dict[str, id_map.State]:
        """The id maps before there were ids."""
        return {t.name: id_map.init(t.id_map, self.mesh.size) for t in self.mapped_tables if t.id_map is not None}


def shardings(abstract: object) -> "PyTree[NamedSharding]":
    """Of a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
