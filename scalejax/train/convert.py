"""Host batches to device batches: checked, packed into static shapes, placed, and prefetched by a thread."""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from scalejax.data.dedup import AnyBatch, DedupKeyedJagged, deduplicate, expand
from scalejax.parallel.embedding import jagged
from scalejax.parallel.embedding.host_plan import Room
from scalejax.parallel.embedding.jagged import DeviceBatch
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


class Prefetch:
    """Iterates over device batches that a thread prepares ahead; use as a context manager.

    An exception of the thread (a bad id, a corrupt file) is raised by `__next__` at the batch where it happened.
    """

    def __init__(
        self,
        batches: Iterator[AnyBatch],
        program: Program,
        *,
        depth: int = 2,
        purpose: Literal["training", "scoring"] = "training",
    ) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches, program, purpose), name="prefetch", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():  # a blocked put must find room to see the stop
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[AnyBatch, DeviceBatch]]:
        return self

    def __next__(self) -> tuple[AnyBatch, DeviceBatch]:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _fill(self, batches: Iterator[AnyBatch], program: Program, purpose: Literal["training", "scoring"]) -> None:
        room = Room()
        try:
            for batch in batches:
                if self._stop.is_set():
                    return
                self._ready.put((batch, to_device(batch, program, purpose, room)))
            self._ready.put(StopIteration())
        except BaseException as error:  # handed over to the consumer, which raises it
            self._ready.put(error)
