"""Host batches to the device form: where each feature lies, and its ids, checked, in static shapes.

layout = packing.layout(sharded, schema, batch_size)
packed = packing.pack(sharded, features, shards, layout)        # NumPy arrays
jagged.to_device(packed, mesh)                                  # what is looked up
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from scalejax.data.examples import dedup
from scalejax.data.examples.dedup import DedupKeyedJagged
from scalejax.data.examples.jagged import KeyedJagged, check_lengths, lengths_to_offsets
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange import host_check, through_maps
from scalejax.parallel.embedding.exchange.routed import exchange_may_lack_room
from scalejax.parallel.embedding.ids.id_map import split_ids
from scalejax.parallel.embedding.ids.jagged import DedupGroup, DeviceJagged, FeatureLayout, side_by_side
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.sharded_tables import ShardedTables
from scalejax.parallel.mesh import check_batch


def layout(
    sharded: ShardedTables, schema: Schema, batch_size: int, groups: tuple[DedupGroup, ...] = ()
) -> tuple[FeatureLayout, ...]:
    """Where each feature lies in the device form of a global batch: see `EmbeddingCollection.layout`."""
    check_batch(batch_size, sharded.mesh)
    examples = batch_size // sharded.mesh.size
    group_of = _groups(sharded.tables, groups)
    found = {}
    for table in sharded.tables:
        for name in table.features:
            if name not in schema.keys:
                raise UserError(
                    f"EmbeddingCollection: table {table.name!r} looks up the feature {name!r}, which the data does not "
                    f"have; it has {', '.join(schema.keys)}. Rename it in TableConfig.features, or read the column."
                )
            feature, group = schema[name], group_of.get(name)
            _check_feature(table, feature)
            plain = feature.capacity_for(examples)
            bags = examples if group is None else groups[group].bags(examples)
            capacity = plain if group is None else feature.capacity_for(bags)
            by_map = None if table.id_map is None else table.name
            found[name] = FeatureLayout(
                name, capacity, feature.length, bags, group, plain, by_map, max_length=feature.max_length
            )
    return side_by_side(found[name] for name in schema.keys if name in found)


def plain_layout(layout: tuple[FeatureLayout, ...], examples: int) -> tuple[FeatureLayout, ...]:
    """The layout without groups, of so many examples a shard."""
    return side_by_side(
        FeatureLayout(f.name, f.plain_capacity, f.length, examples, map=f.map, max_length=f.max_length) for f in layout
    )


def _check_feature(table: TableConfig, feature: Categorical) -> None:
    name = feature.name
    if feature.rows is None and table.id_map is None:
        raise UserError(
            f"EmbeddingCollection: feature {name!r} has ids of any 64 bits (rows=None), but table "
            f"{table.name!r} has no id map. Give it one: TableConfig(id_map=IdMapConfig(...)), or "
            f"Tables(id_maps=(MappedFeatures(features=({name!r},), id_map=IdMapConfig(...)),)) in an "
            "experiment; or give the feature a number of rows."
        )
    if table.id_map is None and feature.rows is not None and feature.rows > table.rows:
        raise ValueError(
            f"EmbeddingCollection: feature {name!r} has ids below {feature.rows}, but table {table.name!r} "
            f"has {table.rows} rows."
        )
    if feature.length is None and feature.max_length is None and table.pooling == "none":
        raise UserError(
            f"EmbeddingCollection: table {table.name!r} has pooling 'none', and feature {name!r} has any "
            "number of ids (length=None, max_length=None); its rows need a number of positions. Give it "
            f"the largest number of ids of an example: Categorical(name={name!r}, length=None, "
            "max_length=...)."
        )


def _groups(tables: tuple[TableConfig, ...], groups: tuple[DedupGroup, ...]) -> dict[str, int]:
    looked_up = [name for table in tables for name in table.features]
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in group.features:
            if name not in looked_up:
                raise UserError(f"DedupGroup: no table looks {name!r} up; the features are {', '.join(looked_up)}.")
            if name in group_of:
                raise UserError(f"DedupGroup: feature {name!r} is in two groups; name it in one.")
            group_of[name] = number
    return group_of


def pack(sharded: ShardedTables, features: KeyedJagged, shards: int, layout: tuple[FeatureLayout, ...]) -> DeviceJagged:
    """The device form of one process's examples, as NumPy, checked exactly: see `EmbeddingCollection.pack`."""
    host_check.check_ids(sharded.stacks, features, layout)
    packed = arrange(features, layout, shards)
    _check_room(sharded, packed)
    return packed


def pack_deduplicated(
    sharded: ShardedTables,
    features: DedupKeyedJagged,
    shards: int,
    layout: tuple[FeatureLayout, ...],
    groups: tuple[DedupGroup, ...],
) -> DeviceJagged | None:
    """As `pack`, of deduplicated features: see `EmbeddingCollection.pack_deduplicated`."""
    host_check.check_ids(sharded.stacks, features.plain, layout)
    for part in features.distinct:
        host_check.check_ids(sharded.stacks, part, layout, bag="distinct row")
    packed = arrange_deduplicated(features, layout, groups, shards)
    if packed is None:
        return None
    _check_room(sharded, packed)
    if sharded.accumulate == "exact":  # all occurrences travel for the update: the device expands what lies here
        if not _expanded_fits(features, layout, shards):
            return None
        whole = plain_layout(layout, features.num_examples // shards)
        if any(exchange_may_lack_room(stack, lookups(stack, whole), sharded.exchange) for stack in sharded.stacks):
            _check_room(sharded, arrange(dedup.expand(features), whole, shards))
    return packed


def _check_room(sharded: ShardedTables, packed: DeviceJagged) -> None:
    host_check.check_room(sharded.stacks, packed, sharded.exchange)
    through_maps.check_room(sharded, packed)


def arrange(features: KeyedJagged, layout: tuple[FeatureLayout, ...], shards: int) -> DeviceJagged:
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
    host_check.check_sizes(features)
    for feature in layout:
        if feature.max_length is not None:
            own = features.lengths[feature_index(features, feature.name)]
            check_lengths(own, feature.name, feature.max_length, where="batch")
    arrays = _empty(layout, shards, weighted=features.weights is not None)
    _fill(arrays, features, layout, np.full(shards, examples // shards))
    return DeviceJagged(**arrays, layout=layout)


def arrange_deduplicated(
    features: DedupKeyedJagged, layout: tuple[FeatureLayout, ...], groups: tuple[DedupGroup, ...], shards: int
) -> DeviceJagged | None:
    """The device form of deduplicated features; None if a shard has more distinct rows, or ids, than there is room for.

    Args:
      features: Host form, deduplicated over all B examples; each shard gets the distinct rows that its examples have.
      layout: The features that are looked up.
      groups: The groups that the layout speaks of, in its order.
      shards: S.

    Raises:
      UserError: as `arrange`, or the groups of the host form are others.
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
    arrays = _empty(layout, shards, weighted=weighted)
    per_shard = examples // shards
    inverse = np.empty((shards, len(groups), per_shard), np.int32)
    _fill(arrays, features.plain, [f for f in layout if f.group is None], np.full(shards, per_shard))
    for number, (group, distinct) in enumerate(zip(groups, features.distinct, strict=True)):
        rows, counts, inverse[:, number] = _rows_of_shards(features.inverse[number], distinct.num_examples, shards)
        if counts.max(initial=0) > group.bags(per_shard):
            return None
        grouped = [f for f in layout if f.group == number]
        part = distinct if shards == 1 and rows.size == distinct.num_examples else distinct.take(rows)
        if any(_overflows(part, feature, counts) for feature in grouped):
            return None
        _fill(arrays, part, grouped, counts)
    return DeviceJagged(**arrays, layout=layout, inverse=inverse)  # pyright: ignore[reportArgumentType] (NumPy)


def _expanded_fits(features: DedupKeyedJagged, layout: tuple[FeatureLayout, ...], shards: int) -> bool:
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


def _empty(layout: tuple[FeatureLayout, ...], shards: int, *, weighted: bool) -> dict[str, Any]:
    """The arrays of `DeviceJagged` without ids, as NumPy."""
    slots, bags = sum(f.capacity for f in layout), sum(f.bags for f in layout)
    wide = sum(f.capacity for f in layout if f.map is not None)
    return {
        "values": np.zeros((shards, slots), np.int32),
        "lengths": np.zeros((shards, bags), np.int32),
        "weights": np.zeros((shards, slots), np.float32) if weighted else None,
        "high": np.zeros((shards, wide), np.uint32) if wide else None,
    }


def _fill(arrays: dict[str, Any], features: KeyedJagged, layout: Iterable[FeatureLayout], counts: np.ndarray) -> None:
    """Writes some features; `counts` are the bags of each shard."""
    ends = np.cumsum(features.lengths.sum(axis=1, dtype=np.int64))
    shards = counts.size
    for feature in layout:
        which = feature_index(features, feature.name)
        own = features.lengths[which]
        span = slice(ends[which] - own.sum(dtype=np.int64), ends[which])
        full = bool((counts == feature.bags).all())
        lengths = arrays["lengths"][:, feature.bag_slots]
        if full:
            lengths[:] = own.reshape(shards, -1)
        else:
            lengths[np.arange(feature.bags) < counts[:, None]] = own
        if feature.length is not None:
            _check_length(feature, own)
        ids, slots = features.values[span], feature.slots
        if feature.map is None:
            parts = [(arrays["values"][:, slots], ids)]
        else:
            high, low = split_ids(ids)
            parts = [(arrays["values"][:, slots], low.view(np.int32)), (arrays["high"][:, feature.high_slots], high)]
        if arrays["weights"] is not None and features.weights is not None:
            parts.append((arrays["weights"][:, slots], features.weights[span]))
        if feature.length is not None and full:
            for part, words in parts:
                part[:] = words.reshape(shards, -1)
            continue
        sizes = _ids_of_shards(own, counts)
        if feature.group is None:
            _check_capacity(feature, sizes)
        filled = np.arange(feature.capacity) < sizes[:, None]
        for part, words in parts:
            part[filled] = words


def _ids_of_shards(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64[S]: ids in consecutive runs of `counts` bags."""
    offsets, ends = lengths_to_offsets(lengths), np.cumsum(counts)
    return offsets[ends] - offsets[ends - counts]


def _overflows(features: KeyedJagged, feature: FeatureLayout, counts: np.ndarray) -> bool:
    ids = _ids_of_shards(features.lengths[feature_index(features, feature.name)], counts)
    return bool(ids.max(initial=0) > feature.capacity)


def feature_index(features: KeyedJagged, name: str) -> int:
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
