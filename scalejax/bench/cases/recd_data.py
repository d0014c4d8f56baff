"""Reading a clustered log into deduplicated batches with one transform of every id, against the same without dedup.

The unit of work is one row group of a log of `workload()`, S = 16 samples a session and d = 0.9, in Parquet with zstd:
decode it, transform the ids of every feature, hand over a batch. The peer "plain" is this library without
deduplication, on the clustered log with all its lists: what is compared is the effect of deduplicating, not a library.
Ours reads the log that leaves repeats out (`cluster_by_session(groups=...)`), or, in the cases that end in "-written",
the same file as the peer. One thread decodes on both sides.

`benchmarks/recd_storage.py` measures what the times rest on: the dedup factor and the bytes that clustering saves.
"""

import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Mapping

import numpy as np

from scalejax.bench import machine
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data.examples.dedup import DedupKeyedJagged, Groups, expand
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.row_transforms import HashIds, RowTransform, map_distinct, map_rows
from scalejax.data.sessions.generate import SessionLog
from scalejax.data.tables.parquet_files import ParquetFiles, RowGroup

CASES = ("hash", "vocabulary", "hash-written", "vocabulary-written")
"""What is done to every id: hashed into a table's rows, or looked up in a sorted vocabulary."""
PEERS = ("plain",)
ON_CPU = True

BATCH = 8192
"""Rows of a row group, the last of which end with a session."""
_TABLE_ROWS = 1_000_000


def workload(sessions: int = 8192, user_ids: float = 30.0) -> SessionLog:
    """16 user-side features in four groups with lists of `user_ids` ids, 4 item-side features; raw 63-bit ids."""
    return SessionLog(
        sessions=sessions,
        samples=16,
        repeat=0.9,
        user_groups=(4, 4, 4, 4),
        user_ids=user_ids,
        item_features=4,
        item_ids=2.0,
        rows=_TABLE_ROWS,
        concurrent=sessions / 4,
    )


def prepare(case: str, against: str | None, sessions: int = 8192) -> Contest:
    """The contest of a case over a log of `sessions` sessions."""
    import pyarrow as pa

    from scalejax.data.sessions.clustering import cluster_by_session

    log = workload(sessions)
    held = tempfile.TemporaryDirectory(prefix="scalejax-bench-")
    threads = pa.cpu_count()
    pa.set_cpu_count(1)

    def close() -> None:
        pa.set_cpu_count(threads)
        held.cleanup()

    path = pathlib.Path(held.name)
    log.write(path / "log.parquet")
    cluster_by_session(path / "log.parquet", path / "whole", row_group=BATCH)
    cluster_by_session(path / "log.parquet", path / "short", row_group=BATCH, groups=log.groups)
    whole = ParquetFiles(path / "whole")
    files = whole if case.endswith("-written") else ParquetFiles(path / "short")
    transforms = _transforms(case.removesuffix("-written"), whole, log.names)
    ours = functools.partial(deduplicated, files, names=log.names, groups=log.groups, transforms=transforms)
    peer = functools.partial(plain, whole, names=log.names, transforms=transforms)

    def check() -> None:
        for mine, theirs in zip(files.groups, whole.groups, strict=True):
            a, b = expand(ours(mine)), peer(theirs)
            if not (np.array_equal(a.values, b.values) and np.array_equal(a.lengths, b.lengths)):
                raise OutputsDiffer(f"{mine.where}: the deduplicated batch does not expand to the plain one")

    return Contest(
        ours=_over_groups(ours, files),
        peer=None if against is None else _over_groups(peer, whole),
        check=check,
        examples=sum(group.rows for group in files.groups) // len(files.groups),
        device=machine.device_name(None),
        close=close,
    )


def deduplicated(
    files: ParquetFiles, group: RowGroup, names: tuple[str, ...], groups: Groups, transforms: Mapping[str, RowTransform]
) -> DedupKeyedJagged:
    """A row group as deduplicated features, transformed once per distinct row."""
    return map_distinct(files.features(group, names, groups), transforms)


def plain(
    files: ParquetFiles, group: RowGroup, names: tuple[str, ...], transforms: Mapping[str, RowTransform]
) -> KeyedJagged:
    """A row group as plain features, transformed row by row."""
    return map_rows(files.features(group, names).plain, transforms)


def _transforms(case: str, files: ParquetFiles, names: tuple[str, ...]) -> dict[str, RowTransform]:
    if case == "hash":
        return {name: HashIds(rows=_TABLE_ROWS, seed=f) for f, name in enumerate(names)}
    groups = [files.features(group, names).plain for group in files.groups]
    return {name: Vocabulary(np.unique(np.concatenate([group[name].values for group in groups]))) for name in names}


class Vocabulary:
    """Raw id -> 1 + its place among the known ids, 0 where it is unknown.

    Args:
      ids: int64[V], ascending.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __call__(self, features: KeyedJagged) -> KeyedJagged:
        """Ids int64[N] in [0, V]."""
        place = np.minimum(np.searchsorted(self.ids, features.values), self.ids.size - 1)
        values = np.where(self.ids[place] == features.values, place + 1, 0)
        return KeyedJagged(features.keys, values, features.lengths, features.weights)


def _over_groups(read: Callable[[RowGroup], object], files: ParquetFiles) -> Callable[[int], None]:
    groups = itertools.cycle(files.groups)
    return repeated(lambda: read(next(groups)))
