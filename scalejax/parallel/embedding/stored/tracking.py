"""Rows that updates touched, in coordinates of their tables, free of mesh and plan.

A tracked table (`TableConfig(track="updates")`) carries one more row state, "updated": the number of the update that
last touched each row. Rows touched since update u are those with a greater number, on every optimizer and plan, because
an update changes no row that it does not touch. They leave a state shard by shard and block by block, without a copy of
a table anywhere, and enter the stored form (see `stored`) in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels.embedding_bag import RowPlan
from scalejax.parallel.embedding.config import UPDATED
from scalejax.parallel.embedding.exchange.routed import Route
from scalejax.parallel.embedding.plan.stacks import Member, Stack
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.embedding.stored import logical

_BLOCK_BYTES = 8 * 2**20
"""About the most bytes of a block of rows."""

_MARKS = 1 << 20
"""Numbers of updates that are read at a time."""

Columns = tuple[int, int] | None
"""Which columns of a leaf of two dimensions, [start, stop); None for one number a row."""


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Some rows of a table, or of a range of its columns.

    Attributes:
      table: Name.
      numbers: int64[n], rows of the table, ascending.
      leaves: Name -> (columns, values [n, columns] or [n]).
    """

    table: str
    numbers: np.ndarray
    leaves: dict[str, tuple[Columns, np.ndarray]]


def mark(
    marks: jax.Array, way: Route, plan: RowPlan | tuple[RowPlan, ...] | None, number: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """Writes the number of an update to the rows that it touches. Runs inside a shard_map over all axes.

    Args:
      marks: int32[L], local numbers.
      way: Where ids went.
      plan: The distinct rows of the update, where they are known.
      number: int32[], of this update; greater than any before.
      axes: Devices whose ids all update this copy, where they were not gathered (gradients that are summed).
    """
    rows = plan.rows if isinstance(plan, RowPlan) else way.arrived
    marks = marks.at[rows].set(number, mode="drop")
    return lax.pmax(marks, axes) if axes else marks


def touched_rows(stacks: tuple[Stack, ...], state: State, since: int) -> Iterator[TableRows]:
    """Rows of tracked tables that updates after `since` touched, with all their states, in blocks of a few MiB.

    Every process gives the rows of its own devices; of equal copies one is read. Reads the state as it is when a block
    is asked for: take all blocks before it is donated.

    Args:
      stacks: Of a collection.
      state: Of the collection.
      since: A count of updates.
    """
    for stack in stacks:
        if not stack.tracked:
            continue
        arrays = state["stacks"][stack.name]
        shards = {name: {s.device: s for s in arrays[name].addressable_shards} for name in stack.arrays}
        for device, shard in shards[UPDATED].items():
            if shard.replica_id:
                continue
            number = (shard.index[0].start or 0) // stack.local_rows
            local = {name: shards[name][device].data for name in stack.arrays}
            yield from _of_device(stacks, stack, number, local, since)


def _of_device(
    stacks: tuple[Stack, ...], stack: Stack, device: int, local: dict[str, jax.Array], since: int
) -> Iterator[TableRows]:
    per_row = sum(array.nbytes // array.shape[0] for array in local.values())
    block = max(1, _BLOCK_BYTES // per_row)
    for begin in range(0, stack.local_rows, _MARKS):
        count = min(_MARKS, stack.local_rows - begin)
        marks = read_rows(local[UPDATED], np.arange(begin, begin + count), room=min(_MARKS, stack.local_rows))
        touched = np.flatnonzero(marks > since) + begin
        for member in stack.members:
            first = stack.offsets[device, member.number]
            mine = touched[np.searchsorted(touched, first) :]
            mine = mine[: np.searchsorted(mine, first + stack.widths[device, member.number])]
            for at in range(0, len(mine), block):
                yield _rows(stacks, stack, member, device, local, mine[at : at + block], block)


def _rows(
    stacks: tuple[Stack, ...],
    stack: Stack,
    member: Member,
    device: int,
    local: dict[str, jax.Array],
    places: np.ndarray,
    block: int,
) -> TableRows:
    table = member.config
    residue = (int(stack.places[device, member.number]) - member.shift) % member.parts
    numbers = (places - int(stack.offsets[device, member.number])).astype(np.int64) * member.parts + residue
    slices = [one.start for _, one in logical.slices_of(stacks, table)]
    leaves: dict[str, tuple[Columns, np.ndarray]] = {}
    for name, kind in stack.arrays.items():
        how = logical.joins(table, name, kind)
        if how == "first" and member.start:
            continue  # the first slice has it
        values = read_rows(local[name], places, room=block)
        columns = (member.start, member.stop) if how == "columns" else None
        if how == "stack" and len(slices) > 1:
            number = slices.index(member.start)
            columns, values = (number, number + 1), values[:, None]
        leaves[name] = (columns, values)
    return TableRows(table.name, numbers, leaves)


def read_rows(array: jax.Array, places: np.ndarray, *, room: int) -> np.ndarray:
    """Rows of an array of one device, on the host.

    Args:
      array: [L, ...] on one device.
      places: int[n], rows.
      room: The most rows that calls on this array ask for: bounds how many shapes are compiled.
    """
    if next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)[places]  # NumPy reads the same memory
    return gather_rows(array, places, room=room)


def gather_rows(array: jax.Array, places: np.ndarray, *, room: int) -> np.ndarray:
    """`read_rows` where the memory of the device is out of the host's reach."""
    padded = np.zeros(min(room, _power_of_two(len(places))), np.int32)
    padded[: len(places)] = places
    return np.asarray(_take(array, padded))[: len(places)]


@jax.jit
def _take(array: jax.Array, places: jax.Array) -> jax.Array:
    return array[places]


def write_stored(leaves: dict[str, jax.Array], rows: TableRows) -> dict[str, jax.Array]:
    """Rows into the stored form of their table, in place: the arrays that are written are donated.

    All processes call it with the same rows.

    Args:
      leaves: Stored leaves of the table, "rows_body", "rows_tail", ...
      rows: What to write.
    """
    count = _power_of_two(len(rows.numbers))
    new = dict(leaves)
    for part in ("body", "tail"):
        names = tuple(name for name in rows.leaves if f"{name}_{part}" in leaves)
        if not names:
            continue
        arrays = tuple(leaves[f"{name}_{part}"] for name in names)
        sharding = arrays[0].sharding
        shards = arrays[0].shape[0] // sharding.shard_shape(arrays[0].shape)[0]
        span = arrays[0].shape[0] // shards
        # A tail begins where the body ends.
        body = leaves.get(f"{names[0]}_body")
        numbers = rows.numbers - (0 if part == "body" or body is None else body.shape[0])
        inside = (numbers >= 0) & (numbers < arrays[0].shape[0])
        if not inside.any():
            continue
        owners, places = np.zeros(count, np.int32), np.full(count, span, np.int32)
        owners[: len(numbers)] = np.where(inside, numbers // span, 0)
        places[: len(numbers)] = np.where(inside, numbers % span, span)
        values = tuple(_padded(rows.leaves[name][1], count) for name in names)
        columns = tuple(rows.leaves[name][0] for name in names)
        assert isinstance(sharding, NamedSharding)
        whole = NamedSharding(sharding.mesh, P())
        given = jax.tree.map(
            lambda x, whole=whole: jax.make_array_from_callback(x.shape, whole, lambda index: x[index]),
            (owners, places, values),
        )
        written = _writer(sharding.mesh, sharding.spec, columns)(arrays, *given)
        new |= {f"{name}_{part}": array for name, array in zip(names, written, strict=True)}
    return new


@functools.cache
def _writer(mesh: Mesh, spec: P, columns: tuple[Columns, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    axes = spec[0] if len(spec) else None

    def write(
        arrays: tuple[jax.Array, ...], owners: jax.Array, places: jax.Array, values: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        new = []
        for array, value, span in zip(arrays, values, columns, strict=True):
            # Rows of other devices get a place past the end, where nothing is written.
            at = places if axes is None else jnp.where(owners == lax.axis_index(axes), places, array.shape[0])
            target = array.at[at] if span is None else array.at[at, span[0] : span[1]]
            new.append(target.set(value, mode="drop"))
        return tuple(new)

    mapped = jax.shard_map(write, mesh=mesh, in_specs=(spec, P(), P(), P()), out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    padded = np.zeros((count, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


def _power_of_two(count: int) -> int:
    """Few shapes are ever compiled."""
    return max(64, 1 << (count - 1).bit_length())
