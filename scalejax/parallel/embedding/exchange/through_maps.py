"""Tables with an id map: any 64-bit ids become rows of the table before they are looked up.

    features (hi, lo)  --sort, distinct ids-->  all_to_all  -->  the device of their bucket: `id_map.apply`
    features (rows)    <--------------------    all_to_all  <--  rows;  evicted rows are made fresh wherever they are

The buckets of every map are cut over all devices, whatever the plan does with the rows of its table. A device sends
each of its distinct ids once, with the number of its occurrences, so that a popular id takes one slot and hashed
buckets spread ids evenly. All maps share two exchanges. From then on the ids are rows, and every kind of sharding is
as it is.

Runs inside a shard_map over all axes, but for what the host checks.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import IdMapConfig, TableConfig
from scalejax.parallel.embedding.exchange.local import SLACK
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.jagged import DeviceJagged, FeatureLayout, slot_positions
from scalejax.parallel.embedding.ids.occurrences import LOST
from scalejax.parallel.embedding.sharded_tables import ShardedTables

Maps = dict[str, id_map.State]
"""The id maps, by table."""

_WORDS = 3
"""What travels of an id: high word, low word, occurrences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """The id maps after a batch, and the rows that it took from other ids.

    Attributes:
      maps: The maps after it.
      evicted: Per table int32[M * A], rows that lost their ids; its number of rows where there is none.
      faults: int32[M, 2], per device 0 and the ids that found no room on their way to their map.
    """

    maps: Maps
    evicted: dict[str, jax.Array]
    faults: jax.Array


@dataclasses.dataclass(frozen=True)
class MapRequest:
    """A table with an id map, and its features in a batch.

    Attributes:
      table: The table.
      features: Its features that a batch has.
    """

    table: TableConfig
    features: tuple[FeatureLayout, ...]

    @property
    def config(self) -> IdMapConfig:
        assert self.table.id_map is not None
        return self.table.id_map

    @property
    def slots(self) -> int:
        """Slots per shard of all its features."""
        return sum(feature.capacity for feature in self.features)


def requests(sharded: ShardedTables, layout: tuple[FeatureLayout, ...]) -> tuple[MapRequest, ...]:
    """The tables with a map that a batch looks up, in order."""
    asked = [MapRequest(table, tuple(f for f in layout if f.map == table.name)) for table in sharded.mapped_tables]
    return tuple(request for request in asked if request.features)


def rooms(sharded: ShardedTables, asked: Sequence[MapRequest]) -> tuple[int, ...]:
    """Slots per destination of each table: by the rules of the exchange of rows."""
    total, exchange, devices = sum(request.slots for request in asked), sharded.exchange, sharded.mesh.size
    if 4 * _WORDS * devices * total <= exchange.roomy_below_bytes:
        return tuple(request.slots for request in asked)
    return tuple(
        min(request.slots, int(-(-exchange.capacity_factor * request.slots // devices)) + SLACK) for request in asked
    )


def check_room(sharded: ShardedTables, packed: DeviceJagged) -> None:
    """Counts, on the host, the distinct ids from each shard to each device.

    Raises:
      UserError: more than the exchange has room for.
    """
    asked, exchange, devices = requests(sharded, packed.layout), sharded.exchange, sharded.mesh.size
    if exchange.overflow == "count" or devices == 1:
        return
    for request, room in zip(asked, rooms(sharded, asked), strict=True):
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


def _loads(request: MapRequest, packed: DeviceJagged, shard: int, devices: int) -> np.ndarray:
    assert packed.high is not None
    found = []
    for feature in request.features:
        used = int(np.asarray(packed.lengths)[shard, feature.bag_slots].sum())
        high = np.asarray(packed.high)[shard, feature.high_slots][:used].astype(np.uint64)
        low = np.asarray(packed.values)[shard, feature.slots][:used].view(np.uint32)
        found.append((high << np.uint64(32)) | low)
    hi, lo = id_map.split_ids(np.unique(np.concatenate(found)))
    owner = id_map.owner_of(request.config, hi, lo, devices)  # pyright: ignore[reportArgumentType]  # NumPy stays NumPy
    return np.bincount(owner, minlength=devices)


def assign(sharded: ShardedTables, maps: Maps, features: DeviceJagged, step: jax.Array) -> tuple[jax.Array, Assignment]:
    """One device's ids -> the rows that their maps give them, admitting and evicting.

    Args:
      sharded: The tables.
      maps: This device's part of each map.
      features: This device's examples, S = 1.
      step: int32[], never smaller than at the call before.

    Returns:
      int32[1, C], `values` with rows in the place of ids; what became of the maps, A entries per table.
    """
    after: Maps = {}
    evicted: dict[str, jax.Array] = {}

    def serve(request: MapRequest, hi: jax.Array, lo: jax.Array, times: jax.Array, first: jax.Array | int) -> jax.Array:
        name = request.table.name
        # `apply` wants at least one occurrence, also in slots that are no id.
        rows, after[name], gone = id_map.apply(
            request.config, maps[name], hi, lo, times > 0, step, first, times=jnp.maximum(times, 1)
        )
        evicted[name] = gone.rows
        return rows

    values, lost = _through_maps(sharded, features, serve)
    return values, Assignment(maps | after, evicted, _faults(lost))


def find(sharded: ShardedTables, maps: Maps, features: DeviceJagged) -> tuple[jax.Array, jax.Array]:
    """As `assign`, but the maps stay as they are: ids without a row get row 0. (int32[1, C], faults int32[1, 2])."""

    def serve(request: MapRequest, hi: jax.Array, lo: jax.Array, times: jax.Array, first: jax.Array | int) -> jax.Array:
        return id_map.find(request.config, maps[request.table.name], hi, lo, times > 0, first)

    values, lost = _through_maps(sharded, features, serve)
    return values, _faults(lost)


def expire(sharded: ShardedTables, maps: Maps, step: jax.Array) -> tuple[Maps, dict[str, jax.Array]]:
    """This device's maps of policy "ttl" without the ids that may go at a step, and the rows that these had.

    Args:
      sharded: The tables, some with an id map of that policy.
      maps: This device's part of each map.
      step: int32[].

    Returns:
      All maps; per table int32[A] rows as in `Assignment`.
    """
    after, evicted = dict(maps), {}
    for table in sharded.mapped_tables:
        if table.id_map is not None and table.id_map.policy == "ttl":
            first = lax.axis_index(sharded.axes) * id_map.buckets_per_shard(table.id_map, sharded.mesh.size)
            after[table.name], evicted[table.name] = id_map.expire(table.id_map, maps[table.name], step, first)
    return after, evicted


Serve = Callable[[MapRequest, jax.Array, jax.Array, jax.Array, jax.Array | int], jax.Array]
"""(table, high words, low words, occurrences: 0 = no id, first bucket of this device) -> rows."""


def _through_maps(sharded: ShardedTables, features: DeviceJagged, serve: Serve) -> tuple[jax.Array, jax.Array]:
    """(int32[1, C] values, number of ids that found no room)."""
    asked, devices, axes, shard = requests(sharded, features.layout), sharded.mesh.size, sharded.axes, features.shard()
    words = [_words(shard, request) for request in asked]
    lost = jnp.zeros((), jnp.int32)
    if devices == 1:
        rows = [serve(request, *own, 0) for request, own in zip(asked, words, strict=True)]
    else:
        widths = rooms(sharded, asked)
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
    values = shard.values
    for request, own, found in zip(asked, words, rows, strict=True):
        found, begin = jnp.where(own[2] > 0, found, 0), 0
        for feature in request.features:
            capacity = feature.capacity
            values = lax.dynamic_update_slice_in_dim(values, found[begin : begin + capacity], feature.start, 0)
            begin += capacity
    return values[None], lost


def _words(shard: DeviceJagged, request: MapRequest) -> tuple[jax.Array, jax.Array, jax.Array]:
    """High words, low words and occurrences of all slots of a table, uint32 each; unused slots occur 0 times."""
    assert shard.high is not None
    hi = [shard.high[feature.high_slots] for feature in request.features]
    lo = [lax.bitcast_convert_type(shard.ids(feature), jnp.uint32) for feature in request.features]
    times = [_occurrences(shard, feature) for feature in request.features]
    return jnp.concatenate(hi), jnp.concatenate(lo), jnp.concatenate(times)


def _occurrences(shard: DeviceJagged, feature: FeatureLayout) -> jax.Array:
    """How often each slot occurs among the examples: once, or as often as examples have its distinct row.

    Ids beyond the positions of their bag occur 0 times: they will not be looked up, and are counted there.
    """
    if feature.group is None and feature.length is not None:
        return jnp.ones(feature.capacity, jnp.uint32)
    bags = shard.bags(feature)
    if feature.max_length is not None:
        bags = jnp.where(slot_positions(shard.counts(feature), bags) < feature.max_length, bags, feature.bags)
    if feature.group is None:
        return (bags < feature.bags).astype(jnp.uint32)
    assert shard.inverse is not None
    examples = jnp.zeros(feature.bags, jnp.uint32).at[shard.inverse[feature.group]].add(1)
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

    # The words of an id are put once, by its first occurrence; the counts of all of its occurrences add up.
    blocks = jnp.stack([put(hi, heads), put(lo, heads), put(times[order], slot)], axis=-1)
    slots = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
    return slots, blocks.reshape(devices, room, _WORDS)


def _faults(lost: jax.Array) -> jax.Array:
    return jnp.stack([jnp.zeros((), jnp.int32), lost])[None]
