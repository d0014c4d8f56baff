"""States of a mesh to and from forms that know none: for checkpoints (stored) and as whole tables (logical).

form = StoredForm(sharded)
tree = form.to_stored(state)            # shapes as `stored.logical` says, sharded over the devices
state = form.from_stored(tree)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import UPDATED, TableConfig
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.sharded_tables import Result, ShardedTables, StackLeaves, State, shardings
from scalejax.parallel.embedding.stored import logical

if TYPE_CHECKING:
    from jaxtyping import PyTree

COUNTS = "(counts)"
"""Key of the counts of updates and faults in the stored form, beside the names of tables."""

MAPS = "(id maps)"
"""Key of the id maps in the stored form."""

Tables = Mapping[str, Mapping[str, Any]]
"""{table: {"rows": ..., "accumulator": ...}}."""


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """Converts the states of some tables on a mesh; keeps the programs that it has compiled for it."""

    sharded: ShardedTables

    def to_stored(self, state: State) -> logical.Tree:
        """See `EmbeddingCollection.to_stored`."""
        return {**self._all_to_stored(state["stacks"]), **self.counts_to_stored(state)}

    def counts_to_stored(self, state: State) -> logical.Tree:
        """The stored form without the tables."""
        counts = {"updates": state["updates"], "faults": self._sum_faults(state["faults"])}
        if not self.sharded.mapped_tables:
            return {COUNTS: counts}
        sums = self._merge_id_counts(state["maps"])
        maps = {name: leaves | {"counts": sums[name]} for name, leaves in state["maps"].items()}
        return {COUNTS: counts | {"key": state["key"]}, MAPS: maps}

    def untracked_to_stored(self, state: State) -> logical.Tree:
        """See `EmbeddingCollection.untracked_to_stored`."""
        rest = tuple(table for table in self.sharded.tables if table.track == "nothing")
        return (self.tables_to_stored(rest)(state["stacks"]) if rest else {}) | self.counts_to_stored(state)

    def from_stored(self, tree: logical.Tree) -> State:
        """The state of this mesh."""
        counts = tree[COUNTS]
        state = {
            "stacks": self._from_stored({table.name: tree[table.name] for table in self.sharded.tables}),
            "updates": counts["updates"],
            "faults": self._spread_faults(counts["faults"]),
        }
        if self.sharded.mapped_tables:
            state |= {"maps": self._spread_id_counts(tree[MAPS]), "key": counts["key"]}
        return state

    def abstract_stored(self) -> logical.Tree:
        """Shapes, dtypes and shardings of `to_stored` on this mesh."""
        whole, state = NamedSharding(self.sharded.mesh, P()), self.sharded.abstract_state()
        counts = {"updates": state["updates"], "faults": jax.ShapeDtypeStruct((2,), jnp.int32, sharding=whole)}
        tree = {**self._abstract_tables(), COUNTS: counts}
        if self.sharded.mapped_tables:
            counts["key"] = state["key"]
            totals = jax.ShapeDtypeStruct((len(id_map.COUNTS), 2), jnp.uint32, sharding=whole)
            tree[MAPS] = {name: leaves | {"counts": totals} for name, leaves in state["maps"].items()}
        return tree

    def _abstract_tables(self) -> logical.Tree:
        specs = {"body": logical.body_spec(self.sharded), "tail": P()}
        return {
            table.name: {
                f"{leaf}_{part}": jax.ShapeDtypeStruct(
                    (rows, *shape[1:]), dtype, sharding=NamedSharding(self.sharded.mesh, specs[part])
                )
                for leaf, (shape, dtype) in self._logical_shapes(table).items()
                for part, rows in logical.parts(table.rows).items()
            }
            for table in self.sharded.tables
        }

    def to_logical(self, state: State) -> dict[str, dict[str, jax.Array]]:
        """See `EmbeddingCollection.to_logical`."""

        def join(tree: logical.Tree) -> dict[str, dict[str, jax.Array]]:
            return {
                table.name: {
                    leaf: jnp.concatenate([tree[table.name][f"{leaf}_{part}"] for part in logical.parts(table.rows)])
                    for leaf in self._logical_shapes(table)
                }
                for table in self.sharded.tables
            }

        return jax.jit(join, out_shardings=shardings(self.abstract_logical()))(self._all_to_stored(state["stacks"]))

    def from_logical(self, tree: Tables, updates: int) -> State:
        """See `EmbeddingCollection.from_logical`."""
        if self.sharded.mapped_tables:
            raise UserError(
                f"from_logical: table {self.sharded.mapped_tables[0].name!r} has an id map, and rows alone do not say "
                "whose they are. Restore it from what to_stored gave, which holds its map."
            )
        # Rows that come from elsewhere were touched by no update of this collection.
        untouched = {t.name: {UPDATED: np.zeros(t.rows, np.int32)} for t in self.sharded.tables if t.track == "updates"}
        given: Tables = {name: untouched.get(name, {}) | dict(leaves) for name, leaves in tree.items()}
        _check_logical(given, self.abstract_logical())

        def split(tree: Tables) -> logical.Tree:
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

        placed = jax.device_put(given, shardings(self.abstract_logical()))
        tables = jax.jit(split, out_shardings=shardings(self._abstract_tables()))(placed)
        counts = {"updates": np.asarray(updates, np.int32), "faults": np.zeros(2, np.int32)}
        return self.from_stored({**tables, COUNTS: jax.device_put(counts, NamedSharding(self.sharded.mesh, P()))})

    def abstract_logical(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes, dtypes and shardings of `to_logical` on this mesh."""
        mesh, axes = self.sharded.mesh, self.sharded.axes
        found = {}
        for table in self.sharded.tables:
            sharding = NamedSharding(mesh, P() if table.rows % mesh.size else P(axes))
            found[table.name] = {
                leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for leaf, (shape, dtype) in self._logical_shapes(table).items()
            }
        return found

    def _logical_shapes(self, table: TableConfig) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        pieces = logical.slices_of(self.sharded.stacks, table)
        stack = pieces[0][0]
        shapes = {}
        for name, kind in stack.arrays.items():
            shape = (table.rows, table.dim) if kind == "element" else (table.rows,)
            if logical.joins(table, name, kind) == "stack" and len(pieces) > 1:
                shape = (table.rows, len(pieces))
            shapes[name] = (shape, stack.leaf_dtype(name))
        return shapes

    @functools.cached_property
    def _all_to_stored(self) -> Callable[[StackLeaves], logical.Tree]:
        return self.tables_to_stored(self.sharded.tables)

    def tables_to_stored(self, tables: tuple[TableConfig, ...]) -> Callable[[StackLeaves], logical.Tree]:
        """A compiled function: state["stacks"] -> what `to_stored` has of some tables."""
        convert, abstract = functools.partial(logical.local_to_stored, self.sharded, tables), self._abstract_tables()
        specs = self.sharded.stack_specs
        return self._jit_everywhere(convert, specs, {table.name: abstract[table.name] for table in tables})

    @functools.cached_property
    def _from_stored(self) -> Callable[[logical.Tree], StackLeaves]:
        convert = functools.partial(logical.local_from_stored, self.sharded)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self._abstract_tables())
        return self._jit_everywhere(convert, specs, self.sharded.abstract_state()["stacks"])

    def _jit_everywhere(
        self, function: Callable[..., Result], specs: "PyTree[P]", abstract: object
    ) -> Callable[..., Result]:
        out_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract)
        everywhere = self.sharded.everywhere(function, in_specs=(specs,), out_specs=out_specs)
        return jax.jit(everywhere, out_shardings=shardings(abstract))

    @functools.cached_property
    def _sum_faults(self) -> Callable[[jax.Array], jax.Array]:
        whole = NamedSharding(self.sharded.mesh, P())
        return jax.jit(lambda faults: faults.sum(axis=0, dtype=jnp.int32), out_shardings=whole)

    @functools.cached_property
    def _spread_faults(self) -> Callable[[jax.typing.ArrayLike], jax.Array]:
        """All on the first device: only their sum means something."""
        faults = self.sharded.abstract_state()["faults"]
        return jax.jit(lambda n: jnp.zeros(faults.shape, jnp.int32).at[0].set(n), out_shardings=faults.sharding)

    @functools.cached_property
    def _merge_id_counts(self) -> Callable[[dict[str, id_map.State]], dict[str, jax.Array]]:
        return jax.jit(id_map.summed_counts, out_shardings=NamedSharding(self.sharded.mesh, P()))

    @functools.cached_property
    def _spread_id_counts(self) -> Callable[[dict[str, id_map.State]], dict[str, id_map.State]]:
        """Counters all on the first device, the rest of the maps as it is."""

        def spread(maps: dict[str, id_map.State]) -> dict[str, id_map.State]:
            none = jnp.zeros((self.sharded.mesh.size, len(id_map.COUNTS), 2), jnp.uint32)
            return {name: leaves | {"counts": none.at[0].set(leaves["counts"])} for name, leaves in maps.items()}

        return jax.jit(spread, out_shardings=shardings(self.sharded.abstract_state()["maps"]))


def _check_logical(tree: Tables, wanted: dict[str, dict[str, jax.ShapeDtypeStruct]]) -> None:
    def compare(what: str, got: Mapping[str, object], names: Mapping[str, object]) -> None:
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
