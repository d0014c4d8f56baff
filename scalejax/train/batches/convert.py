"""Host batches to device batches: checked, arranged, packed into static shapes, and placed."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from scalejax.data.examples.dedup import DedupKeyedJagged, deduplicate, expand
from scalejax.errors import UserError
from scalejax.parallel import context
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.ids import jagged
from scalejax.parallel.embedding.row_cache import RowCache
from scalejax.parallel.embedding.update.host_row_plans import Room
from scalejax.train.batches.prefetch import Prefetch
from scalejax.train.step import Program, is_field
from scalejax.train.task import Field, Placed, host_fields

Batch = TypeVar("Batch")


def to_device(
    batch: object,
    program: Program,
    purpose: Literal["training", "scoring"] = "training",
    room: Room | None = None,
    step: int = 0,
) -> Placed:
    """Places this process's slice of a global batch on its devices.

    Args:
      batch: The slice: global batch size / number of processes examples.
      program: Gives mesh, fields and layout.
      purpose: For training the host sorts ids by row where that pays.
      room: For what it sorts; one for all batches of a run, None = for whatever ids there may be.
      step: Number of the step, from 1, for what the task draws; 0 in evaluations.

    Raises:
      UserError: a field is missing or is not as the task says, an id is out of range, or there are more ids than a
        capacity has room for.
    """
    processes = len({device.process_index for device in program.mesh.devices.flat})
    features = None
    if program.collection is not None:
        packed = _packed(batch, program, program.collection, program.mesh.size // processes)
        if purpose == "training":
            packed = program.collection.with_plans(packed, room)
        features = jagged.to_device(packed, program.mesh)
    return Placed(place_fields(program, batch, processes, step), features, program.constants)


def place_fields(program: Program, batch: object, processes: int, step: int) -> dict[str, Any]:
    """The fields of a host batch on the devices, see `task.Field`."""
    host = host_fields(program.task, batch, program.experiment.seed, step)
    there = {name: field for name, field in program.fields.items() if host[name] is not None}
    arrays, shardings = {}, {}
    for name, field in there.items():
        one = functools.partial(_arranged, name, program=program)
        arrays[name] = jax.tree.map(one, field, host[name], is_leaf=is_field)
        shardings[name] = program.field_shardings[name]
    if processes == 1:
        placed = jax.device_put(arrays, shardings)  # one call: each costs as much as a small batch
    else:
        place = functools.partial(_of_process, processes=processes)
        placed = jax.tree.map(place, there, arrays, shardings, is_leaf=is_field)
    return {name: placed.get(name) for name in program.fields}


def _arranged(name: str, field: Field, array: ArrayLike, *, program: Program) -> np.ndarray:
    """A host array that is as the field says, in the order in which it is cut."""
    host = np.asarray(array)
    field.check(name, host)
    if field.arrange == "zigzag":
        # All fields are arranged alike, so that each token keeps its target, weight, segment and position, and a loss
        # that is a sum over tokens stays what it was. What fills rows up to a length that divides is padding as the
        # data has it: of weight 0 and in a segment of its own.
        host = context.zigzag(host, program.mesh.shape["context"], fill=field.fill)
    return host


def _of_process(field: Field, array: np.ndarray, sharding: NamedSharding, *, processes: int) -> jax.Array:
    """The global array of which this process has a slice, or all of it."""
    if field.scope == "step":
        return meshes.put(array, sharding)
    shape = (array.shape[0] * processes, *array.shape[1:])
    return jax.make_array_from_process_local_data(sharding, array, shape)


def _packed(batch: object, program: Program, collection: EmbeddingCollection, shards: int) -> jagged.DeviceJagged:
    held, groups = getattr(batch, "features", None), program.experiment.tables.dedup
    if held is None:
        raise UserError(
            f"The batch, a {type(batch).__name__}, has no `features`, whose ids the tables of "
            f"{type(program.experiment.model).__name__} look up. Use data with categorical features."
        )
    if groups:
        wanted = tuple(group.features for group in groups)
        features = held if isinstance(held, DedupKeyedJagged) else deduplicate(held, wanted)
        packed = collection.pack_deduplicated(features, shards, program.layout, groups)
        if packed is not None:
            return packed
    plain = expand(held) if isinstance(held, DedupKeyedJagged) else held
    return collection.pack(plain, shards, program.plain_layout)


def prefetch(
    batches: Iterator[Batch],
    program: Program,
    *,
    depth: int = 2,
    purpose: Literal["training", "scoring"] = "training",
    first_step: int = 1,
    cache: RowCache | None = None,
    room: Room | None = None,
) -> Prefetch[Batch, Placed]:
    """(Host batch, its device form) pairs that a thread prepares ahead; a context manager.

    `room` is for what the host sorts for training, None = for these batches alone. Where tables have tiers,
    `cache.advance` comes before each batch is used.
    """
    steps = itertools.count(first_step) if purpose == "training" else itertools.repeat(0)
    place = functools.partial(to_device, program=program, purpose=purpose, room=room or Room())
    batches = batches if cache is None else map(cache.prepare, batches)
    return Prefetch(batches, lambda batch: place(batch, step=next(steps)), depth=depth)
