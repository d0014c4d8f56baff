"""Shuffled batches of 9 categoricals and 7 numbers, from memory and from Parquet, against torch's DataLoader.

The unit of work is one batch. Both sides shuffle alike: all rows from memory; windows of row groups from Parquet. What
they hand over differs in layout only (ours feature after feature, the peer's example after example).
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from scalejax.bench import machine, peers, workloads
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data import BatchedDataSet, FlightsData, Fractions, Schema, from_columns
from scalejax.data.examples.dedup import AnyBatch, expand_batch
from scalejax.data.tables.parquet import ParquetData

Batch = TypeVar("Batch")

CASES = ("memory", "parquet")
PEERS = ("torch", "torch-workers")
ON_CPU = True

_WORKERS = {"torch": 0, "torch-workers": 2}
BATCH = 8192
GROUP = 8 * BATCH
"""Rows of a row group: whole batches, so that every loader can deliver an epoch to the last row."""
WINDOW = 4
"""Row groups that are shuffled together."""


class _Tensor(Protocol):
    def numpy(self) -> np.ndarray: ...


def prepare(case: str, against: str | None, groups: int = 76) -> Contest:
    """The contest of a case over `groups` row groups (76: 5 million rows)."""
    schema = FlightsData().schema()
    ids, dense, labels = workloads.columns(schema, groups * GROUP, seed=0)
    with contextlib.ExitStack() as held:
        if case == "memory":
            ours = _from_memory(schema, ids, dense, labels)
            path = None
        else:
            path = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="scalejax-bench-"))) / "x.parquet"
            write_parquet(path, schema, ids, dense, labels)
            ours = _from_parquet(path, schema)
        loader = None if against is None else _torch(schema, path, ids, dense, labels, _WORKERS[against])
        keep = held.pop_all()
    batches = ours.train_batches()
    alone = Contest(
        ours=repeated(lambda: next(batches)), examples=BATCH, device=machine.device_name(None), close=keep.close
    )
    if loader is None:
        return alone
    peer = repeated(functools.partial(next, _forever(loader)))
    check = functools.partial(_check, ours, loader, groups * GROUP // BATCH)
    return dataclasses.replace(alone, peer=peer, check=check)


def write_parquet(path: pathlib.Path, schema: Schema, ids: np.ndarray, dense: np.ndarray, labels: np.ndarray) -> None:
    """A file with the columns of `schema`: ids int32[F, N], dense float32[N, D], labels float32[N]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict(zip(schema.keys, ids, strict=True)) | dict(zip(schema.dense, dense.T, strict=True))
    pq.write_table(pa.table(columns | {schema.labels[0]: labels}), path, row_group_size=GROUP)


def checksum(ids: np.ndarray, dense: np.ndarray, labels: np.ndarray) -> int:
    """A number that any order of the same rows gives, and hardly any other rows.

    Args:
      ids: int[B, F].
      dense: float32[B, D].
      labels: float32[B].
    """
    dense = dense + np.float32(0)  # -0.0 becomes 0.0: they are the same number
    words = [*ids.T.astype(np.uint64)]
    words += [column.view(np.uint32).astype(np.uint64) for column in (*np.ascontiguousarray(dense.T), labels)]
    rows = np.zeros(len(ids), np.uint64)
    for word in words:  # FNV-1a on 32-bit words: which column a value stands in matters
        rows = (rows ^ (word + np.uint64(0x9E3779B9))) * np.uint64(0x100000001B3)
    return int((rows ^ (rows >> np.uint64(29))).sum(dtype=np.uint64))


def _from_memory(schema: Schema, ids: np.ndarray, dense: np.ndarray, labels: np.ndarray) -> BatchedDataSet:
    columns = dict(zip(schema.keys, ids, strict=True)) | dict(zip(schema.dense, dense.T, strict=True))
    return from_columns(
        columns | {schema.labels[0]: labels},
        schema,
        batch_size=BATCH,
        split=Fractions(train=1.0, validation=0.0),
        nan="error",
        scaling="none",
    )


def _from_parquet(path: pathlib.Path, schema: Schema) -> BatchedDataSet:
    return ParquetData(
        path=str(path),
        categorical=schema.categorical,
        dense=schema.dense,
        labels=schema.labels,
        split=Fractions(train=1.0, validation=0.0),
        access="windows",
        window=WINDOW,
        scaling="none",
        nan="error",
        batch_size=BATCH,
    ).build()


def _torch(
    schema: Schema,
    path: pathlib.Path | None,
    ids: np.ndarray,
    dense: np.ndarray,
    labels: np.ndarray,
    workers: int,
) -> Iterable[tuple[_Tensor, _Tensor, _Tensor]]:
    peer = peers.load("torch_loader")
    if path is None:
        return peer.from_memory(np.ascontiguousarray(ids.T), dense, labels, BATCH, workers)
    return peer.from_parquet(path, schema.keys, schema.dense, schema.labels[0], BATCH, WINDOW, workers)


def _forever(loader: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


def _check(ours: BatchedDataSet, loader: Iterable[tuple[_Tensor, _Tensor, _Tensor]], batches: int) -> None:
    """Raises OutputsDiffer unless one epoch of both sides holds the same rows."""
    sums = [0, 0]
    for batch in itertools.islice(ours.train_batches(), batches):
        sums[0] += checksum(*_rows(batch))
    for ids, dense, labels in loader:
        sums[1] += checksum(ids.numpy(), dense.numpy(), labels.numpy())
    if (sums[0] - sums[1]) % 2**64:
        raise OutputsDiffer("an epoch of the peer does not hold the rows that an epoch of ours holds")


def _rows(batch: AnyBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return workloads.one_hot_ids(expand_batch(batch)), batch.dense, batch.labels[:, 0]
