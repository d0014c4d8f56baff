"""Tables with an id map: any 64-bit ids become rows of the table before they are looked up.

    features (hi, lo)  --sort, distinct ids-->  all_to_all  -->  the device of their bucket: `id_map.apply`
    features (rows)    <--------------------    all_to_all  <--  rows;  evicted rows are made fresh wherever they are

The buckets of every map are cut over all devices, whatever the plan does with the rows of its table. A device sends
each of its distinct ids once, with the number of its occurrences, so that a popular id takes one slot and hashed
buckets spread ids evenly. All maps share two exchanges. From then on the ids are rows, and every kind of sharding is
as it is.

Rows that were taken from an id are given their fresh values, those that `initial` makes for them at the start, before
anything is looked up. Their numbers go to every device in rounds of a fixed size, as many as the fullest needs (none
where nothing was evicted), and each device resets what it holds: shards, copies and slices alike.

Runs inside a shard_map over all axes, but for what the host checks.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.errors import UserError
from scalejax.kernels import embedding_bag as ops
from scalejax.parallel.embedding.config import UPDATED, IdMapConfig, TableConfig
from scalejax.parallel.embedding.exchange.routed import SLACK
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, FeatureLayout, PackedIds, slot_positions
from scalejax.parallel.embedding.ids.occurrences import LOST, locate
from scalejax.parallel.embedding.plan.placement import Exchange
from scalejax.parallel.embedding.plan.stacks import Stack
from scalejax.parallel.embedding.stored import initial

Maps = dict[str, id_map.State]
"""The id maps, by table."""

RESET_ROWS = 256
"""Evicted rows per table and device in one round of resets."""

_WORDS = 3
"""What travels of an id: high word, low word, occurrences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a batch does to the id maps.

    Attributes:
      maps: The maps after it.
      evicted: Per table int32[M * A], rows that lost their ids; its number of rows where there is none.
      faults: int32[M, 2], per device 0 and the ids that found no room on their way to their map.
    """

    maps: Maps
    evicted: dict[str, jax.Array]
    faults: jax.Array


@dataclasses.dataclass(frozen=True)
class MappedFeature:
    """One feature of a mapped table: its place in `values`, in `high` and in `lengths`."""

    feature: FeatureLayout
    start: int
    high: int
    first_bag: int


@dataclasses.dataclass(frozen=True)
class Request:
    """What one table asks of its map.

    Attributes:
      table: The table.
      parts: Its features.
    """

    table: TableConfig
    parts: tuple[MappedFeature, ...]

    @property
    def config(self) -> IdMapConfig:
        assert self.table.id_map is not None
        return self.table.id_map

    @property
    def slots(self) -> int:
        """Slots per shard of all its features."""
        return sum(part.feature.capacity for part in self.parts)


def requests(tables: Sequence[TableConfig], layout: tuple[FeatureLayout, ...]) -> tuple[Request, ...]:
    """The tables with a map that a batch looks up, in order."""
    of: dict[str, list[MappedFeature]] = {}
    start = high = first_bag = 0
    for feature in layout:
        if feature.map is not None:
            of.setdefault(feature.map, []).append(MappedFeature(feature, start, high, first_bag))
            high += feature.capacity
        start, first_bag = start + feature.capacity, first_bag + feature.bags
    return tuple(Request(table, tuple(of[table.name])) for table in tables if table.name in of)


def rooms(asked: Sequence[Request], exchange: Exchange, devices: int) -> tuple[int, ...]:
    """Slots per destination of each table: by the rules of the exchange of rows."""
    total = sum(request.slots for request in asked)
    if 4 * _WORDS * devices * total <= exchange.roomy_below_bytes:
        return tuple(request.slots for request in asked)
    return tuple(
        min(request.slots, int(-(-exchange.capacity_factor * request.slots // devices)) + SLACK) for request in asked
    )


def check_room(
    tables: Sequence[TableConfig],
    packed: PackedIds,
    layout: tuple[FeatureLayout, ...],
    exchange: Exchange,
    devices: int,
) -> None:
    """Counts, on the host, the distinct ids from each shard to each device.

    Raises:
      UserError: more than the exchange has room for.
    """
    asked = requests(tables, layout)
    if exchange.overflow == "count" or devices == 1:
        return
    for request, room in zip(asked, rooms(asked, exchange, devices), strict=True):
        if room == request.slots:
            continue
        for shard in range(packed.values.shape[0]):
            most = int(_loads(request, packed, shard, devices).max())
            if most > room:
                raise UserError(
                    f"One device has {most} distinct ids of table {request.table.name!r} for one other device, but the "
                    f"exchange with its id map has room for {room} (capacity_factor {exchange.capacity_factor:g}). Use "
                    "--set tables.exchange.capacity_factor="
                    f"{np.ceil(10 * (most - SLACK) * devices / request.slots) / 10:g} or more."
                )


def _loads(request: Request, packed: PackedIds, shard: int, devices: int) -> np.ndarray:
    assert packed.high is not None
    found = []
    for part in request.parts:
        feature = part.feature
        used = int(packed.lengths[shard, part.first_bag : part.first_bag + feature.bags].sum())
        high = packed.high[shard, part.high : part.high + used].astype(np.uint64)
        low = packed.values[shard, part.start : part.start + used].view(np.uint32)
        found.append((high << np.uint64(32)) | low)
    hi, lo = id_map.split_ids(np.unique(np.concatenate(found)))
    owner = id_map.owner_of(request.config, hi, lo, devices)  # pyright: ignore[reportArgumentType]  # NumPy stays NumPy
    return np.bincount(owner, minlength=devices)


def assign(
    asked: Sequence[Request],
    maps: Maps,
    features: DeviceJagged,
    step: jax.Array,
    *,
    exchange: Exchange,
    devices: int,
    axes: tuple[str, ...],
) -> tuple[jax.Array, Assignment]:
    """One device's ids -> the rows that their maps give them, admitting and evicting.

    Args:
      asked: The tables.
      maps: This device's part of each map.
      features: This device's examples, S = 1.
      step: int32[], never smaller than at the call before.
      exchange: Room.
      devices: M, over which the maps are cut.
      axes: Mesh axes of these devices.

    Returns:
      int32[1, C], `values` with rows in the place of ids; what became of the maps, A entries per table.
    """
    after: Maps = {}
    evicted: dict[str, jax.Array] = {}

    def serve(request: Request, hi: jax.Array, lo: jax.Array, times: jax.Array, first: jax.Array | int) -> jax.Array:
        name = request.table.name
        rows, after[name], gone = id_map.apply(
            request.config, maps[name], hi, lo, times > 0, step, first, times=jnp.maximum(times, 1)
        )
        evicted[name] = gone.rows
        return rows

    values, lost = _through_maps(asked, features, serve, exchange=exchange, devices=devices, axes=axes)
    return values, Assignment(maps | after, evicted, _faults(lost))


def find(
    asked: Sequence[Request],
    maps: Maps,
    features: DeviceJagged,
    *,
    exchange: Exchange,
    devices: int,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `assign`, but the maps stay as they are: ids without a row get row 0. (int32[1, C], faults int32[1, 2])."""

    def serve(request: Request, hi: jax.Array, lo: jax.Array, times: jax.Array, first: jax.Array | int) -> jax.Array:
        return id_map.find(request.config, maps[request.table.name], hi, lo, times > 0, first)

    values, lost = _through_maps(asked, features, serve, exchange=exchange, devices=devices, axes=axes)
    return values, _faults(lost)


def expire(
    tables: Sequence[TableConfig], maps: Maps, step: jax.Array, *, devices: int, axes: tuple[str, ...]
) -> tuple[Maps, dict[str, jax.Array]]:
    """This device's maps of policy "ttl" without the ids that may go at a step, and the rows that these had.

    Args:
      tables: Some with an id map of that policy.
      maps: This device's part of each map.
      step: int32[].
      devices: M, over which the maps are cut.
      axes: Mesh axes of these devices.

    Returns:
      All maps; per table int32[A] rows as in `Assignment`.
    """
    after, evicted = dict(maps), {}
    for table in tables:
        if table.id_map is not None and table.id_map.policy == "ttl":
            first = lax.axis_index(axes) * id_map.buckets_per_shard(table.id_map, devices)
            after[table.name], evicted[table.name] = id_map.expire(table.id_map, maps[table.name], step, first)
    return after, evicted


def reset(
    stacks: tuple[Stack, ...],
    leaves: dict[str, dict[str, jax.Array]],
    evicted: dict[str, jax.Array],
    key: jax.Array,
    update: jax.Array,
    *,
    devices: int,
    axes: tuple[str, ...],
    group: tuple[str, ...],
) -> dict[str, dict[str, jax.Array]]:
    """Gives evicted rows and their optimizer states the values that they began with; tracked ones count as touched.

    Args:
      stacks: All stacks.
      leaves: This device's part of them.
      evicted: Per table int32[A], the rows that were taken in this device's part of its map.
      key: That the tables were made with.
      update: int32[], number of the update that touches them.
      devices: All devices.
      axes: Their mesh axes.
      group: Mesh axes of the devices that stacks are striped over.
    """
    rows_of = {member.config.name: member.config.rows for stack in stacks for member in stack.members}
    lists, rounds = {}, jnp.zeros((), jnp.int32)
    for name, gone in evicted.items():
        size = min(RESET_ROWS, gone.shape[0])
        lists[name], count = _front(gone, rows_of[name], size)
        rounds = jnp.maximum(rounds, -(-count // size))
    if devices > 1:
        rounds = lax.pmax(rounds, axes)
    touched = [stack for stack in stacks if any(member.config.name in lists for member in stack.members)]

    def one(
        carry: tuple[jax.Array, dict[str, dict[str, jax.Array]]],
    ) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
        number, leaves = carry
        rows = {}
        for name, gone in lists.items():
            size = min(RESET_ROWS, gone.shape[0])
            mine = lax.dynamic_slice_in_dim(gone, number * size, size)
            rows[name] = lax.all_gather(mine, axes, tiled=True) if devices > 1 else mine
        new = dict(leaves)
        for stack in touched:
            new[stack.name] = _reset_stack(stack, leaves[stack.name], rows, key, update, group)
        return number + 1, new

    start = (jnp.zeros((), jnp.int32), {stack.name: leaves[stack.name] for stack in touched})
    _, new = lax.while_loop(lambda carry: carry[0] < rounds, one, start)
    return leaves | new


def _reset_stack(
    stack: Stack,
    leaves: dict[str, jax.Array],
    rows: dict[str, jax.Array],
    key: jax.Array,
    update: jax.Array,
    group: tuple[str, ...],
) -> dict[str, jax.Array]:
    here = lax.axis_index(group) if stack.devices > 1 else 0
    places = []
    for member in stack.members:
        if member.config.name in rows:
            gone = rows[member.config.name]
            device, local = locate(member, gone)
            mine = gone < member.config.rows
            if stack.devices > 1:
                mine = mine & (device == here)
            places.append(jnp.where(mine, local, stack.local_rows))
    local = jnp.concatenate(places)
    fresh = initial.fresh_rows(stack, key, local, here) | {UPDATED: update}
    return {name: leaf.at[local].set(fresh[name], mode="drop") for name, leaf in leaves.items()}


def _front(gone: jax.Array, rows: int, size: int) -> tuple[jax.Array, jax.Array]:
    """The taken rows from the front on, filled up to a multiple of `size`, and their number."""
    taken = gone < rows
    place = jnp.where(taken, jnp.cumsum(taken.astype(jnp.int32)) - 1, gone.shape[0])
    front = jnp.full(-(-gone.shape[0] // size) * size, rows, jnp.int32)
    # The others lie beyond the end even where it was filled up.
    place = jnp.where(taken, place, front.shape[0])
    return front.at[place].set(gone, mode="drop"), taken.sum(dtype=jnp.int32)


Serve = Callable[[Request, jax.Array, jax.Array, jax.Array, jax.Array | int], jax.Array]
"""(table, high words, low words, occurrences: 0 = no id, first bucket of this device) -> rows."""


def _through_maps(
    asked: Sequence[Request],
    features: DeviceJagged,
    serve: Serve,
    *,
    exchange: Exchange,
    devices: int,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """(int32[1, C] values, number of ids that found no room)."""
    words = [_words(features, request) for request in asked]
    lost = jnp.zeros((), jnp.int32)
    if devices == 1:
        rows = [serve(request, *own, 0) for request, own in zip(asked, words, strict=True)]
    else:
        widths = rooms(asked, exchange, devices)
        slots, sent = [], []
        for request, own, room in zip(asked, words, widths, strict=True):
            slot, blocks = _by_owner(request.config, *own, devices=devices, room=room)
            lost = lost + ((own[2] > 0) & (slot == devices * room)).sum(dtype=jnp.int32)
            slots.append(slot)
            sent.append(blocks)
        arrived = lax.all_to_all(jnp.concatenate(sent, axis=1), axes, 0, 0, tiled=True)  # M rooms 3
        replies, at = [], 0
        for request, room in zip(asked, widths, strict=True):
            hi, lo, times = arrived[:, at : at + room].reshape(-1, _WORDS).T
            first = lax.axis_index(axes) * id_map.buckets_per_shard(request.config, devices)
            replies.append(serve(request, hi, lo, times, first).reshape(devices, room))
            at += room
        back = lax.all_to_all(jnp.concatenate(replies, axis=1), axes, 0, 0, tiled=True)
        rows, at = [], 0
        for slot, room in zip(slots, widths, strict=True):
            rows.append(back[:, at : at + room].reshape(-1).at[slot].get(mode="fill", fill_value=LOST))
            at += room
    values = features.values[0]
    for request, own, found in zip(asked, words, rows, strict=True):
        found, begin = jnp.where(own[2] > 0, found, 0), 0
        for part in request.parts:
            capacity = part.feature.capacity
            values = lax.dynamic_update_slice_in_dim(values, found[begin : begin + capacity], part.start, 0)
            begin += capacity
    return values[None], lost


def _words(features: DeviceJagged, request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
    """High words, low words and occurrences of all slots of a table, uint32 each; unused slots occur 0 times."""
    assert features.high is not None
    hi, lo, times = [], [], []
    for part in request.parts:
        feature = part.feature
        hi.append(features.high[0, part.high : part.high + feature.capacity])
        low = features.values[0, part.start : part.start + feature.capacity]
        lo.append(lax.bitcast_convert_type(low, jnp.uint32))
        times.append(_occurrences(features, part))
    return jnp.concatenate(hi), jnp.concatenate(lo), jnp.concatenate(times)


def _occurrences(features: DeviceJagged, part: MappedFeature) -> jax.Array:
    """How often each slot occurs among the examples: once, or as often as examples have its distinct row.

    Ids beyond the positions of their bag occur 0 times: they will not be looked up, and are counted there.
    """
    feature = part.feature
    if feature.group is None and feature.length is not None:
        return jnp.ones(feature.capacity, jnp.uint32)
    counts = features.lengths[0, part.first_bag : part.first_bag + feature.bags]
    bags = ops.slot_bags(counts, feature.capacity)
    if feature.max_length is not None:
        bags = jnp.where(slot_positions(counts, bags) < feature.max_length, bags, feature.bags)
    if feature.group is None:
        return (bags < feature.bags).astype(jnp.uint32)
    assert features.inverse is not None
    examples = jnp.zeros(feature.bags, jnp.uint32).at[features.inverse[0, feature.group]].add(1)
    return examples.at[bags].get(mode="fill", fill_value=0)


def _by_owner(
    config: IdMapConfig, hi: jax.Array, lo: jax.Array, times: jax.Array, *, devices: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Which slot every id travels in, int32[n] (`devices * room` = none), and what does: uint32[devices, room, 3]."""
    count = hi.shape[0]
    owner = jnp.where(times > 0, id_map.owner_of(config, hi, lo, devices), devices)
    owner, hi, lo, order = lax.sort((owner, hi, lo, lax.iota(jnp.int32, count)), num_keys=3, is_stable=False)
    new_owner = id_map.changes(owner)
    first = new_owner | id_map.changes(hi) | id_map.changes(lo)
    number = jnp.cumsum(first.astype(jnp.int32)) - 1  # of the distinct id, among all
    place = number - lax.cummax(jnp.where(new_owner, number, 0))
    slot = jnp.where((owner < devices) & (place < room), owner * room + place, devices * room)
    heads = jnp.where(first, slot, devices * room)

    def put(words: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros(devices * room, jnp.uint32).at[at].add(words, mode="drop")

    blocks = jnp.stack([put(hi, heads), put(lo, heads), put(times[order], slot)], axis=-1)
    slots = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
    return slots, blocks.reshape(devices, room, _WORDS)


def _faults(lost: jax.Array) -> jax.Array:
    return jnp.stack([jnp.zeros((), jnp.int32), lost])[None]
