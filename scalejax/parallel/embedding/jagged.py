"""The device form of jagged features, and of a batch: static shapes, so that a step compiles once."""

import dataclasses

import jax


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
