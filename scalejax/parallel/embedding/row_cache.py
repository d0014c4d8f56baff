"""Tables that are larger than the memory of the devices, at work: these cache rows of a store on the host.

    thread that prepares batches   ids of batch i -> slots of the cache; what must be swapped   `RowCache.prepare`
    before step i                  rows that leave are read, rows that arrive are written       `RowCache.advance`
    before they are read again     rows that left are written to their store                    `Tiers.finish`

On the devices a table has `Tier.slots` rows, sharded and updated like those of any other table, and a row has its
optimizer state beside it wherever it is. A row leaves only after the update of the step before, so that a run has the
bits of one whose table lies on the devices, whatever the number of slots, while every id has room in the exchanges.
Scoring reads through a cache of its own and changes nothing. A checkpoint holds the whole table, as if there were no
cache.

Source: MTrainS (arXiv 2305.01515), whose further tiers are stores. Its locks have no counterpart: what a row is given
by step i is in it when it leaves before step i + 1, by the order of the program.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.data.examples.dedup import DedupKeyedJagged
from scalejax.data.examples.jagged import KeyedJagged, check_ids
from scalejax.errors import UserError
from scalejax.parallel import offload
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.ids.occurrences import locate
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.embedding.stored import initial
from scalejax.parallel.embedding.stored import logical as stored
from scalejax.parallel.embedding.tiers import Leaves, Store, Tier, tier_of
from scalejax.parallel.mesh import MeshShape, make_mesh, steps_in_flight

_BLOCK = 1 << 16
"""Rows that are drawn, or moved between a store and a checkpoint, at a time."""


@dataclasses.dataclass(frozen=True)
class Swap:
    """What changes in the cache of a table before a step.

    Attributes:
      slots: int32[n], which slots.
      arriving: int64[n], the row that each is to hold.
      leaving: int64[n], the row that it held; -1 = none.
    """

    slots: np.ndarray
    arriving: np.ndarray
    leaving: np.ndarray


class Directory:
    """Which rows are in which slots, on the host. Rows that were not asked for longest make room.

    Args:
      table: The whole table.
      resident: int64[slots], the row of each slot; -1 = none.
    """

    def __init__(self, table: TableConfig, resident: np.ndarray) -> None:
        self._table, self._resident = table, resident.copy()
        self._slot_of = np.full(table.rows, -1, np.int32)
        held = np.flatnonzero(resident >= 0)
        self._slot_of[resident[held]] = held
        self._asked = np.where(resident >= 0, 0, -1)  # number of the batch that asked last
        self._batches = 0

    def prepare(self, rows: np.ndarray) -> Swap:
        """Gives every row that a batch asks for a slot.

        Args:
          rows: int[n], any number of times each.

        Raises:
          UserError: they are more than there are slots.
        """
        self._batches += 1
        slots = self._slot_of[rows]
        # Marked before any slot is taken: no row of a batch may make room for another of it.
        self._asked[slots[slots >= 0]] = self._batches
        arriving = np.unique(rows[slots < 0]).astype(np.int64)
        free = np.flatnonzero(self._asked < self._batches)
        if len(arriving) > len(free):
            distinct = len(self._asked) - len(free) + len(arriving)
            raise UserError(
                f"tables.tiers: table {self._table.name!r} has {len(self._asked)} slots, and a batch has {distinct} "
                f"distinct ids for them. Set slots to {distinct} or more, or take a smaller data.batch_size."
            )
        taken = free[np.argsort(self._asked[free], kind="stable")[: len(arriving)]]
        leaving = self._resident[taken]
        self._slot_of[leaving[leaving >= 0]] = -1
        self._slot_of[arriving] = taken
        self._resident[taken], self._asked[taken] = arriving, self._batches
        return Swap(taken.astype(np.int32), arriving, leaving)

    def slots(self, rows: np.ndarray) -> np.ndarray:
        """int[n] -> the slots of rows that have one."""
        return self._slot_of[rows].astype(rows.dtype)


class Tiers:
    """The tables of one run, some of which rest in stores: what `EmbeddingCollection` is to a run without tiers.

    The stores hold what is current but for rows in the cache of the newest state; older states mean nothing here.

    Attributes:
      tables: All tables, whole.
      collection: The tables as the devices have them, made of what `cached` gave.

    Args:
      tables: See above.
      tiers: Those of the run.
      collection: See above.

    Raises:
      UserError: a table with a tier is cut into columns, or there are several processes.
    """

    def __init__(
        self, tables: tuple[TableConfig, ...], tiers: tuple[Tier, ...], collection: EmbeddingCollection
    ) -> None:
        if jax.process_count() > 1:
            raise UserError(
                "tables.tiers: every process would need the ids of all others to agree on the slots. Train on one "
                "process, or with tables on the devices (tables.tiers=())."
            )
        self.tables, self.collection = tables, collection
        found = [(table, tier_of(table, tiers)) for table in tables]
        self._tiers = {table.name: tier for table, tier in found if tier is not None}
        self._whole = {table.name: table for table in tables if table.name in self._tiers}
        self._places = {name: _only_slice(collection, name) for name in self._whole}
        self._resident = {name: np.full(member.config.rows, -1, np.int64) for name, (_, member) in self._places.items()}
        self._left: dict[str, collections.deque[tuple[np.ndarray, dict[str, jax.Array]]]] = {
            name: collections.deque() for name in self._whole
        }
        self._swappers: dict[tuple[str, bool], Any] = {}

    @functools.cached_property
    def _stores(self) -> dict[str, Store]:
        return {name: tier.store.build(name, self._shapes(name)) for name, tier in self._tiers.items()}

    @functools.cached_property
    def _read_caches(self) -> Any:
        return self.collection.stored.tables_to_stored(tuple(member.config for _, member in self._places.values()))

    def _shapes(self, name: str) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a whole table."""
        table, (stack, _) = self._whole[name], self._places[name]
        return {
            leaf: jax.ShapeDtypeStruct((table.rows, *stack.leaf_shape(kind, 1)[1:]), stack.leaf_dtype(leaf))
            for leaf, kind in stack.arrays.items()
        }

    # What `EmbeddingCollection` has, too.

    def init(self, key: jax.Array) -> State:
        """A fresh state, whose rows are those that `EmbeddingCollection.init` would draw for the whole tables."""
        for name, table in self._whole.items():
            # On one device: a row is a function of key, table and number, whatever mesh it is drawn on.
            alone = EmbeddingCollection(tables=(table,), mesh=make_mesh(MeshShape(), jax.devices()[:1]))
            draw = jax.jit(functools.partial(initial.fresh_rows, alone.stacks[0], key, device=0))
            for rows in _blocks(table.rows):
                self._stores[name].write(rows, {leaf: np.asarray(x) for leaf, x in draw(rows.astype(np.int32)).items()})
        self._forget()
        return self.collection.init(key)

    def to_stored(self, state: State) -> stored.Tree:
        """As `EmbeddingCollection.to_stored`, whole tables in host memory where the devices have such."""
        tree = self.collection.to_stored(state)
        self._write_cached(state)
        abstract = self.abstract_stored()
        for name, table in self._whole.items():
            start, leaves = 0, {}
            for part, count in stored.parts(table.rows).items():
                arrays = {leaf: np.empty((count, *x.shape[1:]), x.dtype) for leaf, x in self._shapes(name).items()}
                for rows in _blocks(count):
                    for leaf, values in self._stores[name].read(start + rows).items():
                        arrays[leaf][rows] = values
                for leaf, array in arrays.items():
                    sharding = abstract[name][f"{leaf}_{part}"].sharding
                    leaves[f"{leaf}_{part}"] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
                start += count
            tree[name] = leaves
        return tree

    def from_stored(self, tree: stored.Tree) -> State:
        """The inverse of `to_stored`; no row is in a cache."""
        empty = self.collection.abstract_stored()
        cached = dict(tree)
        for name, table in self._whole.items():
            start = 0
            for part, count in stored.parts(table.rows).items():
                arrays = {leaf: np.asarray(tree[name][f"{leaf}_{part}"]) for leaf in self._shapes(name)}
                for rows in _blocks(count):
                    self._stores[name].write(rows + start, {leaf: x[rows] for leaf, x in arrays.items()})
                start += count
            cached[name] = {leaf: _zeros(x) for leaf, x in empty[name].items()}
        self._forget()
        return self.collection.from_stored(cached)

    def abstract_stored(self) -> stored.Tree:
        """Shapes, dtypes and shardings of `to_stored`."""
        tree = self.collection.abstract_stored()
        specs, mesh = {"body": stored.body_spec(self.collection.sharded), "tail": P()}, self.collection.mesh
        for name, table in self._whole.items():
            tree[name] = {
                f"{leaf}_{part}": jax.ShapeDtypeStruct(
                    (count, *x.shape[1:]), x.dtype, sharding=_in_host_memory(NamedSharding(mesh, specs[part]), mesh)
                )
                for leaf, x in self._shapes(name).items()
                for part, count in stored.parts(table.rows).items()
            }
        return tree

    def to_logical(self, state: State) -> dict[str, dict[str, jax.Array]]:
        """As `EmbeddingCollection.to_logical`, without the tables in stores: see `read`."""
        self._write_cached(state)
        logical = self.collection.to_logical(state)
        return {name: leaves for name, leaves in logical.items() if name not in self._whole}

    @property
    def in_stores(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The rows of the tables in stores."""
        return {name: self._shapes(name)["rows"] for name in self._whole}

    def read(self, name: str, index: Any) -> np.ndarray:
        """rows[index] of a table in a store, as of the state that `to_logical` was given."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        numbers = np.arange(self._whole[name].rows)[rows]
        found = self._stores[name].read(numbers.reshape(-1))["rows"].reshape(*numbers.shape, -1)
        return found[(..., *columns)] if columns else found

    def close(self) -> None:
        """Lets go of the stores; `init` or `from_stored` builds new ones."""
        self.__dict__.pop("_stores", None)
        self._forget()

    # Caches.

    def training(self) -> "RowCache":
        """The cache of a run's batches, from the newest state on."""
        return RowCache(self, self._resident, writes=True)

    def scoring(self, state: State) -> "RowCache":
        """An empty cache, to score the newest state through."""
        self._write_cached(state)
        return RowCache(self, {name: np.full_like(slots, -1) for name, slots in self._resident.items()}, writes=False)

    def _write_cached(self, state: State) -> None:
        """Brings the stores up to date with the newest state."""
        for name in self._whole:
            self.finish(name)
        if all((resident < 0).all() for resident in self._resident.values()):
            return
        tree = self._read_caches(state["stacks"])
        for name, resident in self._resident.items():
            held, parts = np.flatnonzero(resident >= 0), stored.parts(len(resident))
            if len(held):
                values = {
                    leaf: np.concatenate([np.asarray(tree[name][f"{leaf}_{part}"]) for part in parts])[held]
                    for leaf in self._shapes(name)
                }
                self._stores[name].write(resident[held], values)

    def stack_of(self, name: str) -> str:
        """The stack that a table is in on the devices."""
        return self._places[name][0].name

    def finish(self, name: str, keep: int = 0) -> None:
        """Writes rows that left the cache of a table to its store, but for those of the last `keep` swaps."""
        left = self._left[name]
        while len(left) > keep:
            rows, leaves = left.popleft()
            self._stores[name].write(rows, {leaf: np.asarray(x)[: len(rows)] for leaf, x in leaves.items()})

    def arrive(self, name: str, rows: np.ndarray) -> Leaves:
        """Rows of a table that are in no cache."""
        # What left before the last step has been computed; only what leaves with it would have to be waited for.
        self.finish(name, keep=1)
        left = self._left[name]
        if left and np.isin(rows, left[0][0]).any():
            self.finish(name)
        return self._stores[name].read(rows)

    def swap(self, name: str, swap: Swap, tables: State, *, writes: bool, donates: bool) -> State:
        """The state with rows swapped.

        Args:
          name: Of the table.
          swap: What changes.
          tables: The state.
          writes: Whether rows that leave go to the store.
          donates: Whether the arrays of the state may be given away.
        """
        stack, member = self._places[name]
        room = max(64, 1 << (len(swap.slots) - 1).bit_length())  # few shapes are ever compiled

        def padded(values: np.ndarray, fill: int = 0) -> np.ndarray:
            new = np.full((room, *values.shape[1:]), fill, values.dtype)
            new[: len(values)] = values
            return new

        # Slots that held a row come first: what leaves is at the beginning of what was read.
        order = np.argsort(swap.leaving < 0, kind="stable")
        slots, leaving = swap.slots[order], swap.leaving[order]
        arriving = {leaf: padded(x) for leaf, x in self.arrive(name, swap.arriving[order]).items()}
        old, new = self._swapper(name, donates)(
            tables["stacks"][stack.name], padded(slots, fill=member.config.rows), arriving
        )
        if steps_in_flight(self.collection.mesh) == 1:  # virtual devices must not queue programs
            jax.block_until_ready(new)
        if writes:
            self._resident[name][swap.slots] = swap.arriving
            self._left[name].append((leaving[leaving >= 0], old))
        return {**tables, "stacks": {**tables["stacks"], stack.name: new}}

    def _swapper(self, name: str, donates: bool) -> Any:
        """(arrays of a stack, int32[n] slots, their rows) -> (what they held, the arrays)."""
        if (name, donates) in self._swappers:
            return self._swappers[name, donates]
        (stack, member), collection = self._places[name], self.collection
        axes = collection.sharded.group if stack.devices > 1 else ()

        def local(leaves: dict[str, jax.Array], slots: jax.Array, arriving: dict[str, jax.Array]) -> Any:
            device, place = locate(member, slots)
            mine = slots < member.config.rows
            if axes:
                mine &= device == lax.axis_index(axes)
            place = jnp.where(mine, place, stack.local_rows)
            old = {leaf: _sum_of_bits(x.at[place].get(mode="fill", fill_value=0), axes) for leaf, x in leaves.items()}
            new = {leaf: x.at[place].set(arriving[leaf], mode="drop") for leaf, x in leaves.items()}
            return old, new

        specs = jax.tree.map(lambda x: x.sharding.spec, collection.abstract_state()["stacks"][stack.name])
        mapped = jax.shard_map(
            local, mesh=collection.mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs), check_vma=False
        )
        self._swappers[name, donates] = jax.jit(mapped, donate_argnums=(0,) if donates else ())
        return self._swappers[name, donates]

    def _forget(self) -> None:
        """The caches are empty."""
        for name in self._whole:
            self._resident[name][:] = -1
            self._left[name].clear()


class RowCache:
    """The cached rows of batches, in their order.

    Args:
      tiers: The tables.
      resident: By table int64[slots], the rows that are in the cache.
      writes: Whether rows that leave are written back: not where they are only read.
    """

    def __init__(self, tiers: Tiers, resident: Mapping[str, np.ndarray], *, writes: bool) -> None:
        self._tiers, self._writes = tiers, writes
        self._tables = [table for table in tiers.tables if table.name in resident]
        self._directories = {table.name: Directory(table, resident[table.name]) for table in self._tables}
        self._swaps: collections.deque[dict[str, Swap]] = collections.deque()
        self._copied: set[str] = set()  # stacks of the state that were copied to be scored through

    def prepare(self, batch: Any) -> Any:
        """A host batch with slots in the place of ids; a thread may be some batches ahead of `advance`.

        Raises:
          UserError: an id is out of range, or a batch has more ids than there are slots.
        """
        features, swaps = getattr(batch, "features", None), {}
        if features is None:  # which packing refuses
            return batch
        for table in self._tables:
            ids = [x for name in table.features for x in _ids_of(features, name, table.rows)]
            directory = self._directories[table.name]
            swaps[table.name] = directory.prepare(np.concatenate([np.zeros(0, np.int32), *ids]))
            features = _with_slots(features, table.features, directory)
        self._swaps.append(swaps)
        return dataclasses.replace(batch, features=features)

    def advance(self, state: State) -> State:
        """The state of the tables with the rows of the next batch in their caches."""
        for name, swap in self._swaps.popleft().items():
            if len(swap.slots):
                # The first batch that is scored copies what training goes on with.
                stack = self._tiers.stack_of(name)
                own = self._writes or stack in self._copied
                state = self._tiers.swap(name, swap, state, writes=self._writes, donates=own)
                self._copied.add(stack)
        return state


def _only_slice(collection: EmbeddingCollection, name: str) -> tuple[Stack, Member]:
    table = next(table for table in collection.tables if table.name == name)
    slices = stored.slices_of(collection.stacks, table)
    if len(slices) > 1:
        raise UserError(
            f"tables.tiers: table {name!r} is cut into {len(slices)} ranges of columns by tables.sharding, and a row "
            "of a cache is whole. Plan it by rows, or leave it out of tables.tiers."
        )
    return slices[0]


def _blocks(rows: int) -> Iterator[np.ndarray]:
    """int64 numbers of rows, some at a time."""
    for start in range(0, rows, _BLOCK):
        yield np.arange(start, min(start + _BLOCK, rows))


def _sum_of_bits(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Over devices of which all but one have zeros; as integers, so that -0.0 stays what it is."""
    if not axes:
        return x
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.psum(bits, axes), x.dtype)


def _in_host_memory(sharding: NamedSharding, mesh: Mesh) -> Any:
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    return sharding.with_memory_kind(offload.HOST) if offload.HOST in kinds else sharding


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=like.sharding)()


def _parts(features: KeyedJagged | DedupKeyedJagged) -> tuple[KeyedJagged, ...]:
    return (features,) if isinstance(features, KeyedJagged) else (features.plain, *features.distinct)


def _ids_of(features: KeyedJagged | DedupKeyedJagged, name: str, rows: int) -> Iterator[np.ndarray]:
    for part in _parts(features):
        if name in part.keys and np.issubdtype(part.values.dtype, np.integer):  # packing refuses others
            one = part[name]
            check_ids(one.values, name, rows, lengths=one.lengths[0])
            yield one.values


def _with_slots(features: Any, names: tuple[str, ...], directory: Directory) -> Any:
    if isinstance(features, DedupKeyedJagged):
        plain, *distinct = (_with_slots(part, names, directory) for part in _parts(features))
        return dataclasses.replace(features, plain=plain, distinct=tuple(distinct))
    values, bounds = features.values.copy(), features.feature_offsets()
    for name in names:
        if name in features.keys and np.issubdtype(values.dtype, np.integer):
            at = features.keys.index(name)
            own = slice(bounds[at], bounds[at + 1])
            values[own] = directory.slots(values[own])
    return dataclasses.replace(features, values=values)
