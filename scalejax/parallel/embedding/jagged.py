"""The device form of jagged features, and of a batch: static shapes, so that a step compiles once."""

import dataclasses

import jax
import numpy as np

from scalejax.data.jagged import KeyedJagged as HostKeyedJagged
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """Where one feature lies in the device form (static).

    Attributes:
      name: Feature.
      capacity: Slots per shard.
      length: Ids per example if every example has the same number, else None.
    """

    name: str
    capacity: int
    length: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyedJagged:
    """Ids of F features over B examples, cut into S shards of B / S consecutive examples.

    Within a shard each feature owns `capacity` consecutive slots (in the order of `layout`), filled from the front in
    example order; slots past the last id hold 0 and are ignored.

    Attributes:
      values: int32[S, C], C = sum of capacities; sharded over all mesh axes along S (S = number of devices).
      lengths: int32[F, B], sharded over all mesh axes along B.
      weights: float32[S, C], one per id, or None.
      layout: Per feature, static.
    """

    values: jax.Array
    lengths: jax.Array
    weights: jax.Array | None
    layout: tuple[FeatureLayout, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """One global batch on the devices.

    Attributes:
      features: Ids.
      dense: float32[B, D], sharded over the batch axes.
      labels: float32[B, T], sharded over the batch axes.
      weights: float32[B], sharded over the batch axes; 0 marks padding.
    """

    features: KeyedJagged
    dense: jax.Array
    labels: jax.Array
    weights: jax.Array


def pack(
    features: HostKeyedJagged, layout: tuple[FeatureLayout, ...], shards: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The device form of B examples in `shards` shards, as NumPy.

    Args:
      features: Host form; may hold more features than the layout, in any order.
      layout: The features that are looked up.
      shards: S, the number of devices that these examples go to.

    Returns:
      values int32[S, C], lengths int32[F, B], weights float32[S, C] or None.

    Raises:
      UserError: a feature is missing, the examples do not divide over the shards, a feature of fixed length varies, or
        a jagged feature has more ids than its capacity.
    """
    examples = features.lengths.shape[1]
    if examples % shards:
        raise UserError(f"A batch of {examples} examples does not divide over {shards} devices. Change batch_size.")
    slots = sum(f.capacity for f in layout)
    values = np.zeros((shards, slots), np.int32)
    weights = None if features.weights is None else np.zeros((shards, slots), np.float32)
    lengths = np.empty((len(layout), examples), np.int32)
    ends = np.cumsum(features.lengths.sum(axis=1, dtype=np.int64))
    if ends.size and ends[-1] != features.values.shape[0]:
        raise UserError(f"The lengths of a batch sum to {ends[-1]}, but it has {features.values.shape[0]} ids.")
    offset = 0
    for row, feature in enumerate(layout):
        which = feature_index(features, feature.name)
        lengths[row] = features.lengths[which]
        span = slice(ends[which] - lengths[row].sum(dtype=np.int64), ends[which])
        target = slice(offset, offset + feature.capacity)
        offset += feature.capacity
        if feature.length is not None:
            _check_length(feature, lengths[row])
            values[:, target] = features.values[span].reshape(shards, -1)
            if weights is not None and features.weights is not None:
                weights[:, target] = features.weights[span].reshape(shards, -1)
            continue
        counts = lengths[row].reshape(shards, -1).sum(axis=1)
        _check_capacity(feature, counts, examples // shards)
        filled = np.arange(feature.capacity) < counts[:, None]
        values[:, target][filled] = features.values[span]
        if weights is not None and features.weights is not None:
            weights[:, target][filled] = features.weights[span]
    return values, lengths, weights


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


def _check_capacity(feature: FeatureLayout, counts: np.ndarray, examples: int) -> None:
    if counts.max(initial=0) > feature.capacity:
        raise UserError(
            f"Feature {feature.name!r} has {counts.max()} ids in the {examples} examples of one device, but room for "
            f"{feature.capacity}. Declare it with a capacity of at least {counts.max() / examples:.2f} ids per example."
        )
