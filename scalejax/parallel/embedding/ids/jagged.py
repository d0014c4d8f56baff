"""The device form of jagged features, and of a batch: static shapes, so that a step compiles once."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.data.examples.dedup import DedupKeyedJagged
from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.examples.jagged import check_lengths, lengths_to_offsets
from scalejax.errors import UserError
from scalejax.kernels import embedding_bag as ops
from scalejax.parallel.embedding.ids.id_map import split_ids
from scalejax.parallel.mesh import everywhere


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """Where one feature lies in the device form (static).

    Attributes:
      name: Feature.
      capacity: Slots per shard.
      length: Ids per bag if every bag has the same number, else None.
      bags: Bags per shard: its examples, or room for the distinct rows of its group.
      group: Number of its group of deduplicated features, else None.
      plain_capacity: Slots per shard without deduplication.
      map: Name of the table whose id map gives its ids their rows; None = ids are rows.
      max_length: Most ids of a bag of a jagged feature; those beyond have no position. None = any number.
    """

    name: str
    capacity: int
    length: int | None
    bags: int
    group: int | None = None
    plain_capacity: int = 0
    map: str | None = None
    max_length: int | None = None

    @property
    def positions(self) -> int | None:
        """Positions of a bag that is looked up unpooled; None = there is no such number."""
        return self.max_length if self.length is None else self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedupGroup:
    """Features that are looked up once per distinct row: those that change together, see `data.examples.dedup`.

    Attributes:
      features: Their names.
      rows_per_example: Room for distinct rows on a device, as a share of its examples; 1 / the expected factor, and
        some more. A batch that has more distinct rows than room goes undeduplicated, through a program of its own.
    """

    features: tuple[str, ...]
    rows_per_example: float

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("DedupGroup: features must name at least one feature; got none.")
        if not 0 < self.rows_per_example <= 1:
            raise ValueError(
                f"DedupGroup of {', '.join(self.features)}: rows_per_example must lie in (0, 1]; got "
                f"{self.rows_per_example}."
            )

    def bags(self, examples: int) -> int:
        """Room for distinct rows among this many examples."""
        return max(1, math.ceil(self.rows_per_example * examples))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceJagged:
    """Ids of F features over B examples, cut into S shards of B / S consecutive examples.

    Within a shard each feature owns `capacity` consecutive slots and `bags` consecutive lengths (in the order of
    `layout`), both filled from the front; slots past the last id hold 0 and are ignored, lengths past the last bag are
    0.

    The bags of a feature are the examples of its shard, or, for the features of a group, distinct rows: example e of
    the shard has bag inverse[group, e].

    Attributes:
      values: int32[S, C], C = sum of capacities; sharded over all mesh axes along S (S = number of devices).
      lengths: int32[S, R], R = sum of bags; sharded likewise.
      weights: float32[S, C], one per id, or None.
      inverse: int32[S, G, B / S], bag of every example for each of G groups, or None.
      layout: Per feature, static.
      plans: Which occurrences belong to which row, by stack, where the host has found out; see `host_plan`.
      high: uint32[S, H], H = sum of capacities of the features with an id map: the high words of their ids, whose low
        words are the bits of `values`. None where there are none, or their ids have become rows.
    """

    values: jax.Array
    lengths: jax.Array
    weights: jax.Array | None
    layout: tuple[FeatureLayout, ...] = dataclasses.field(metadata={"static": True})
    inverse: jax.Array | None = None
    plans: dict[str, tuple[ops.RowPlan | None, ...]] | None = None
    high: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PackedIds:
    """The device form of the examples of one process, as NumPy; fields as in `DeviceJagged`."""

    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    inverse: np.ndarray | None = None
    plans: dict[str, tuple[ops.RowPlan | None, ...]] | None = None
    high: np.ndarray | None = None


def to_device(packed: PackedIds, layout: tuple[FeatureLayout, ...], mesh: Mesh) -> DeviceJagged:
    """Puts the shards of this process's examples on its devices of the mesh; every process brings its own.

    Args:
      packed: One shard for each device of this process.
      layout: That it was packed by.
      mesh: Its devices, those of a process one after the other.
    """

    def put(array: np.ndarray | None) -> jax.Array | None:
        if array is None:
            return None
        return jax.make_array_from_process_local_data(everywhere(mesh), array, (mesh.size, *array.shape[1:]))

    values, lengths = put(packed.values), put(packed.lengths)
    assert values is not None
    assert lengths is not None
    plans = None if packed.plans is None else jax.device_put(packed.plans, NamedSharding(mesh, P()))
    return DeviceJagged(values, lengths, put(packed.weights), layout, put(packed.inverse), plans, put(packed.high))


def pack(features: HostKeyedJagged, layout: tuple[FeatureLayout, ...], shards: int) -> PackedIds:
    """The device form of B examples in `shards` shards.

    Args:
      features: Host form; may hold more features than the layout, in any order.
      layout: The features that are looked up, none of them in a group.
      shards: S, the number of devices that these examples go to.

    Raises:
      UserError: a feature is missing, the examples do not divide over the shards, a feature of fixed length varies, or
        a jagged feature has more ids than its capacity, or than its max_length in one example.
    """
    examples = features.lengths.shape[1]
    if examples % shards:
        raise UserError(f"A batch of {examples} examples does not divide over {shards} devices. Change batch_size.")
    check_sizes(features)
    for feature in layout:
        if feature.max_length is not None:
            own = features.lengths[feature_index(features, feature.name)]
            check_lengths(own, feature.name, feature.max_length, where="batch")
    packed = _empty(layout, shards, weighted=features.weights is not None)
    counts = np.full(shards, examples // shards)
    _fill(packed, features, layout, {f.name for f in layout}, counts)
    return packed


def pack_deduplicated(
    features: DedupKeyedJagged, layout: tuple[FeatureLayout, ...], groups: tuple[DedupGroup, ...], shards: int
) -> PackedIds | None:
    """The device form of deduplicated features; None if a shard has more distinct rows, or ids, than there is room for.

    Args:
      features: Host form, deduplicated over all B examples; each shard gets the distinct rows that its examples have.
      layout: The features that are looked up.
      groups: The groups that the layout speaks of, in its order.
      shards: S.

    Raises:
      UserError: as `pack`, or the groups of the host form are others.
    """
    examples = features.num_examples
    if examples % shards:
        raise UserError(f"A batch of {examples} examples does not divide over {shards} devices. Change batch_size.")
    wanted = tuple(group.features for group in groups)
    if features.groups != wanted:
        raise UserError(f"The batch is deduplicated in the groups {features.groups}; the run wants {wanted}.")
    for feature in layout:
        if feature.max_length is not None:
            part = features.plain if feature.group is None else features.distinct[feature.group]
            own = part.lengths[feature_index(part, feature.name)]
            if feature.group is not None:
                own = own[features.inverse[feature.group]]  # of examples, which the message counts
            check_lengths(own, feature.name, feature.max_length, where="batch")
    weighted = any(part.weights is not None for part in (features.plain, *features.distinct))
    packed = _empty(layout, shards, weighted=weighted)
    per_shard = examples // shards
    inverse = np.empty((shards, len(groups), per_shard), np.int32)
    grouped = {f.name for f in layout if f.group is not None}
    _fill(packed, features.plain, layout, {f.name for f in layout} - grouped, np.full(shards, per_shard))
    for number, (group, distinct) in enumerate(zip(groups, features.distinct, strict=True)):
        rows, counts, inverse[:, number] = _rows_of_shards(features.inverse[number], distinct.num_examples, shards)
        if counts.max(initial=0) > group.bags(per_shard):
            return None
        names = set(group.features) & grouped
        part = distinct if shards == 1 and rows.size == distinct.num_examples else distinct.take(rows)
        if any(_overflows(part, f, counts) for f in layout if f.name in names):
            return None
        _fill(packed, part, layout, names, counts)
    return dataclasses.replace(packed, inverse=inverse)


def expanded_fits(features: DedupKeyedJagged, layout: tuple[FeatureLayout, ...], shards: int) -> bool:
    """Whether every shard has room for the ids of all its examples: `plain_capacity` slots for a feature of a group."""
    room = {feature.name: feature.plain_capacity for feature in layout if feature.group is not None}
    for distinct, inverse in zip(features.distinct, features.inverse, strict=True):
        for name, lengths in zip(distinct.keys, distinct.lengths, strict=True):
            ids = lengths[inverse].reshape(shards, -1).sum(axis=1, dtype=np.int64)
            if name in room and ids.max(initial=0) > room[name]:
                return False
    return True


def _rows_of_shards(inverse: np.ndarray, rows: int, shards: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct rows of each shard one after the other, their numbers by shard, and the inverse within each shard."""
    own = inverse.reshape(shards, -1)
    present = np.zeros((shards, rows), bool)
    np.put_along_axis(present, own, True, axis=1)
    number = np.cumsum(present, axis=1, dtype=np.int32)
    number -= 1
    return np.nonzero(present)[1], present.sum(axis=1), np.take_along_axis(number, own, axis=1)


def _empty(layout: tuple[FeatureLayout, ...], shards: int, *, weighted: bool) -> PackedIds:
    slots, bags = sum(f.capacity for f in layout), sum(f.bags for f in layout)
    weights = np.zeros((shards, slots), np.float32) if weighted else None
    wide = sum(f.capacity for f in layout if f.map is not None)
    return PackedIds(
        np.zeros((shards, slots), np.int32),
        np.zeros((shards, bags), np.int32),
        weights,
        high=np.zeros((shards, wide), np.uint32) if wide else None,
    )


def _fill(
    packed: PackedIds, features: HostKeyedJagged, layout: tuple[FeatureLayout, ...], names: set[str], counts: np.ndarray
) -> None:
    """Writes some features; `counts` are the bags of each shard."""
    ends = np.cumsum(features.lengths.sum(axis=1, dtype=np.int64))
    shards = packed.values.shape[0]
    slot, bag, wide = 0, 0, 0
    for feature in layout:
        slots, bags = slice(slot, slot + feature.capacity), slice(bag, bag + feature.bags)
        slot, bag = slots.stop, bags.stop
        parts = [packed.values[:, slots]]
        if feature.map is not None:
            assert packed.high is not None
            parts.append(packed.high[:, wide : wide + feature.capacity])
            wide += feature.capacity
        if feature.name not in names:
            continue
        which = feature_index(features, feature.name)
        own = features.lengths[which]
        span = slice(ends[which] - own.sum(dtype=np.int64), ends[which])
        full = bool((counts == feature.bags).all())
        if full:
            packed.lengths[:, bags] = own.reshape(shards, -1)
        else:
            packed.lengths[:, bags][np.arange(feature.bags) < counts[:, None]] = own
        if feature.length is not None:
            _check_length(feature, own)
        ids = [features.values[span]]
        if feature.map is not None:
            high, low = split_ids(ids[0])
            ids = [low.view(np.int32), high]
        if feature.length is not None and full:
            for part, words in zip(parts, ids, strict=True):
                part[:] = words.reshape(shards, -1)
            if packed.weights is not None and features.weights is not None:
                packed.weights[:, slots] = features.weights[span].reshape(shards, -1)
            continue
        sizes = _ids_of_shards(own, counts)
        if feature.group is None:
            _check_capacity(feature, sizes)
        filled = np.arange(feature.capacity) < sizes[:, None]
        for part, words in zip(parts, ids, strict=True):
            part[filled] = words
        if packed.weights is not None and features.weights is not None:
            packed.weights[:, slots][filled] = features.weights[span]


def _ids_of_shards(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64[S]: ids in consecutive runs of `counts` bags."""
    offsets, ends = lengths_to_offsets(lengths), np.cumsum(counts)
    return offsets[ends] - offsets[ends - counts]


def _overflows(features: HostKeyedJagged, feature: FeatureLayout, counts: np.ndarray) -> bool:
    ids = _ids_of_shards(features.lengths[feature_index(features, feature.name)], counts)
    return bool(ids.max(initial=0) > feature.capacity)


def check_sizes(features: HostKeyedJagged) -> None:
    """Refuses ids that are no integers, and lengths that are negative or do not add up.

    Raises:
      UserError: they are.
    """
    for name, array in (("values", features.values), ("lengths", features.lengths)):
        if not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"The {name} of a batch are {array.dtype}; wanted integers. Convert the column when it is read, once "
                "its missing entries have an id of their own."
            )
    if features.lengths.size and features.lengths.min() < 0:
        which, example = np.unravel_index(int(features.lengths.argmin()), features.lengths.shape)
        raise UserError(
            f"Feature {features.keys[which]!r} has {features.lengths.min()} ids in example {example} of the batch; "
            "lengths must not be negative. Were offsets passed for lengths, or differences of unsorted offsets?"
        )
    total = int(features.lengths.sum(dtype=np.int64))
    if total != features.values.shape[0]:
        raise UserError(
            f"The lengths of a batch sum to {total}, but it has {features.values.shape[0]} ids. Pass one length per "
            f"feature and example, features in the order of keys: {', '.join(features.keys)}."
        )


def expand(features: DeviceJagged, plain: tuple[FeatureLayout, ...]) -> DeviceJagged:
    """The same features without groups, on the device: bags of every example, gathered by the inverse.

    Runs on one shard (S = 1), inside a shard_map.

    Args:
      features: Some features in groups.
      plain: The layout without groups.
    """
    if features.inverse is None:
        return features
    values, lengths, weights, start, first_bag = [], [], [], 0, 0
    for feature, target in zip(features.layout, plain, strict=True):
        own = features.values[0, start : start + feature.capacity]
        counts = features.lengths[0, first_bag : first_bag + feature.bags]
        slots = None if features.weights is None else features.weights[0, start : start + feature.capacity]
        start, first_bag = start + feature.capacity, first_bag + feature.bags
        if feature.group is not None:
            bags = features.inverse[0, feature.group]  # b
            begins = jnp.cumsum(counts) - counts
            counts = counts[bags]
            of = ops.slot_bags(counts, target.capacity)
            source = begins.at[bags.at[of].get(mode="clip")].get(mode="clip") + slot_positions(counts, of)
            source = jnp.where(of < target.bags, source, feature.capacity)
            own = own.at[source].get(mode="fill", fill_value=0)
            slots = None if slots is None else slots.at[source].get(mode="fill", fill_value=0)
        values.append(own)
        lengths.append(counts)
        weights.append(slots)
    joined = None if features.weights is None else jnp.concatenate(weights)[None]
    return DeviceJagged(jnp.concatenate(values)[None], jnp.concatenate(lengths)[None], joined, plain)


def slot_positions(counts: jax.Array, bags: jax.Array) -> jax.Array:
    """int32[slots]: place of each slot in its bag; of an unused one, its own number.

    Args:
      counts: int32[b], ids of each bag.
      bags: int32[slots], bag of each slot; b for unused ones.
    """
    starts = jnp.cumsum(counts) - counts
    return lax.iota(jnp.int32, bags.shape[0]) - starts.at[bags].get(mode="fill", fill_value=0)


def feature_index(features: HostKeyedJagged, name: str) -> int:
    """Place of a feature in a host batch.

    Raises:
      UserError: it is not there.
    """
    if name not in features.keys:
        raise UserError(
            f"The batch has no feature {name!r}, which a table looks up; it has {', '.join(features.keys)}."
        )
    return features.keys.index(name)


def _check_length(feature: FeatureLayout, lengths: np.ndarray) -> None:
    wrong = np.flatnonzero(lengths != feature.length)
    if wrong.size:
        raise UserError(
            f"Feature {feature.name!r} must have {feature.length} ids in every example; example {wrong[0]} of the "
            f"batch has {lengths[wrong[0]]}. Declare it with length=None and a capacity if its length varies."
        )


def _check_capacity(feature: FeatureLayout, counts: np.ndarray) -> None:
    if counts.max(initial=0) > feature.capacity:
        raise UserError(
            f"Feature {feature.name!r} has {counts.max()} ids in the {feature.bags} examples of one device, but room "
            f"for {feature.capacity}. Declare it with a capacity of at least {counts.max() / feature.bags:.2f} ids "
            "per example."
        )
