"""Host batches to device batches: checked, packed into static shapes, and placed."""

import functools
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np

from scalejax.data.dedup import AnyBatch, DedupKeyedJagged, deduplicate, expand
from scalejax.parallel.embedding import jagged
from scalejax.parallel.embedding.host_plan import Room
from scalejax.parallel.embedding.jagged import DeviceBatch
from scalejax.train.prefetch import Prefetch
from scalejax.train.program import Program


def to_device(
    batch: AnyBatch,
    program: Program,
    purpose: Literal["training", "scoring"] = "training",
    room: Room | None = None,
) -> DeviceBatch:
    """Places this process's slice of a global batch on its devices.

    Args:
      batch: The slice: global batch size / number of processes examples.
      program: Gives mesh and layout.
      purpose: For training the host sorts ids by row where that pays.
      room: For what it sorts; one for all batches of a run, None = for whatever ids there may be.

    Raises:
      UserError: an id out of range, or more ids than a capacity has room for.
    """
    mesh = program.mesh
    processes = len({device.process_index for device in mesh.devices.flat})
    shards = mesh.size // processes
    packed, layout = _packed(batch, program, shards)
    if purpose == "training":
        packed = program.collection.with_plans(packed, layout, room)
    rows = program.batch_sharding()
    size = len(batch) * processes

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(rows, array, (size, *array.shape[1:]))

    return DeviceBatch(
        features=jagged.to_device(packed, layout, mesh),
        dense=place(batch.dense),
        labels=place(batch.labels),
        weights=place(batch.weights),
    )


def _packed(batch: AnyBatch, program: Program, shards: int) -> tuple[jagged.Packed, tuple[jagged.FeatureLayout, ...]]:
    collection, groups = program.collection, program.experiment.dedup
    if groups:
        wanted = tuple(group.features for group in groups)
        features = batch.features
        if not isinstance(features, DedupKeyedJagged):
            features = deduplicate(features, wanted)
        packed = collection.pack_deduplicated(features, shards, program.layout, groups)
        if packed is not None:
            return packed, program.layout
    features = batch.features
    plain = expand(features) if isinstance(features, DedupKeyedJagged) else features
    return collection.pack(plain, shards, program.plain_layout), program.plain_layout


def prefetch(
    batches: Iterator[AnyBatch],
    program: Program,
    *,
    depth: int = 2,
    purpose: Literal["training", "scoring"] = "training",
) -> Prefetch:
    """(Batch, its device form) pairs that a thread prepares ahead; a context manager."""
    place = functools.partial(to_device, program=program, purpose=purpose, room=Room())
    return Prefetch(batches, place, depth=depth)
