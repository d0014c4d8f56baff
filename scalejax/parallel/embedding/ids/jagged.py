"""The device form of jagged features, and of a batch: static shapes, so that a step compiles once."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import embedding_bag as ops
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
      start: Its first slot in `values`.
      first_bag: Its first bag in `lengths`.
      high: With `map`, the place of its first id in `high`.
    """

    name: str
    capacity: int
    length: int | None
    bags: int
    group: int | None = None
    plain_capacity: int = 0
    map: str | None = None
    max_length: int | None = None
    start: int = 0
    first_bag: int = 0
    high: int = 0

    @property
    def positions(self) -> int | None:
        """Positions of a bag that is looked up unpooled; None = there is no such number."""
        return self.max_length if self.length is None else self.length

    @property
    def slots(self) -> slice:
        """The slots of the feature in `values` and `weights`."""
        return slice(self.start, self.start + self.capacity)

    @property
    def bag_slots(self) -> slice:
        """The bags of the feature in `lengths`."""
        return slice(self.first_bag, self.first_bag + self.bags)

    @property
    def high_slots(self) -> slice:
        """The ids of the feature in `high`."""
        return slice(self.high, self.high + self.capacity)


def side_by_side(features: Iterable[FeatureLayout]) -> tuple[FeatureLayout, ...]:
    """Features with their places in the device form, one after the other."""
    placed: list[FeatureLayout] = []
    start = first_bag = high = 0
    for feature in features:
        placed.append(dataclasses.replace(feature, start=start, first_bag=first_bag, high=high))
        start, first_bag = start + feature.capacity, first_bag + feature.bags
        high += 0 if feature.map is None else feature.capacity
    return tuple(placed)


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

    A batch has this form from the host on: `packing.pack` makes it of NumPy arrays, the shards of one process;
    `to_device` places them. Inside a shard_map `shard` drops the axis of shards, of which each device has one; the
    methods after it are for that.

    Attributes:
      values: int32[S, C], C = sum of capacities; sharded over all mesh axes along S (S = number of devices).
      lengths: int32[S, R], R = sum of bags; sharded likewise.
      weights: float32[S, C], one per id, or None.
      inverse: int32[S, G, B / S], bag of every example for each of G groups, or None.
      layout: Per feature, static.
      plans: Which occurrences belong to which row, by stack, where the host has found out; see `update.host_row_plans`.
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

    def shard(self) -> "DeviceJagged":
        """The part of this device: arrays without the axis of shards."""
        return jax.tree.map(lambda x: x[0], dataclasses.replace(self, plans=None))

    def ids(self, feature: FeatureLayout) -> jax.Array:
        """int32[slots] of a feature."""
        return self.values[feature.slots]

    def weights_of(self, feature: FeatureLayout) -> jax.Array | None:
        """float32[slots] of a feature, or None."""
        return None if self.weights is None else self.weights[feature.slots]

    def counts(self, feature: FeatureLayout) -> jax.Array:
        """Ids of each bag of a feature."""
        return self.lengths[feature.bag_slots]

    def bags(self, feature: FeatureLayout) -> jax.Array:
        """Bag of each slot; the number of bags for unused slots. Jagged features only."""
        return ops.slot_bags(self.counts(feature), feature.capacity)

    def positions(self, feature: FeatureLayout) -> jax.Array:
        """Place of each slot in its bag; any number for unused slots. Jagged features only."""
        return slot_positions(self.counts(feature), self.bags(feature))

    def used(self, feature: FeatureLayout) -> jax.Array:
        """bool[slots]: whether a slot holds an id that has a position in its bag."""
        if feature.length is not None and feature.group is None:
            return jnp.ones(feature.capacity, bool)
        used = lax.iota(jnp.int32, feature.capacity) < self.counts(feature).sum()
        return used if feature.max_length is None else used & (self.positions(feature) < feature.max_length)

    def by_example(self, feature: FeatureLayout, of_bags: jax.Array) -> jax.Array:
        """[bags, ...] of a feature -> [examples, ...]: the rows of the bags that the examples have."""
        if feature.group is None:
            return of_bags
        assert self.inverse is not None
        return of_bags[self.inverse[feature.group]]


def to_device(packed: DeviceJagged, mesh: Mesh) -> DeviceJagged:
    """Puts the shards of this process's examples on its devices of the mesh; every process brings its own.

    Args:
      packed: NumPy arrays, one shard for each device of this process.
      mesh: Its devices; the shards go to those of this process in their order along the mesh.
    """

    def put(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(everywhere(mesh), array, (mesh.size, *array.shape[1:]))

    plans = None if packed.plans is None else jax.device_put(packed.plans, NamedSharding(mesh, P()))
    return dataclasses.replace(jax.tree.map(put, dataclasses.replace(packed, plans=None)), plans=plans)


def expand(features: DeviceJagged, plain: tuple[FeatureLayout, ...]) -> DeviceJagged:
    """The same features without groups, on the device: bags of every example, gathered by the inverse.

    Runs on one shard (S = 1), inside a shard_map.

    Args:
      features: Some features in groups.
      plain: The layout without groups.
    """
    own, values, lengths, weights = features.shard(), [], [], []
    for feature, target in zip(features.layout, plain, strict=True):
        ids, counts, slots = own.ids(feature), own.counts(feature), own.weights_of(feature)
        if feature.group is not None:
            assert own.inverse is not None
            bags = own.inverse[feature.group]  # b
            begins = jnp.cumsum(counts) - counts
            counts = counts[bags]
            of = ops.slot_bags(counts, target.capacity)
            source = begins.at[bags.at[of].get(mode="clip")].get(mode="clip") + slot_positions(counts, of)
            source = jnp.where(of < target.bags, source, feature.capacity)
            ids = ids.at[source].get(mode="fill", fill_value=0)
            slots = None if slots is None else slots.at[source].get(mode="fill", fill_value=0)
        values.append(ids)
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
