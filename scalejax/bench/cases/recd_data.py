"""Reading a clustered log into deduplicated batches with one transform of every id, against the same without dedup.

The unit of work is one row group of a log of `workload()`, S = 16 samples a session and d = 0.9, in Parquet with zstd:
decode it, transform the ids of every feature, hand over a batch. The peer "plain" is this library without
deduplication, on the clustered log with all its lists: what is compared is the effect of deduplicating, not a library.
Ours reads the log that leaves repeats out (`cluster_by_session(groups=...)`), or, in the cases that end in "-written",
the same file as the peer. One thread decodes on both sides.

`factors` and `storage` measure what the times rest on: the dedup factor against its closed form, and the bytes that
clustering saves. `python -m scalejax.bench.cases.recd_data` prints both.
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np

from scalejax.bench import machine
from scalejax.bench.harness import Contest, OutputsDiffer
from scalejax.data.examples.dedup import DedupKeyedJagged, Groups, deduplicate, expand
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.row_transforms import HashIds, RowTransform, map_distinct, map_rows
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.data.tables.parquet_files import ParquetFiles, RowGroup
from scalejax.errors import UserError

CASES = ("hash", "vocabulary", "hash-written", "vocabulary-written")
"""What is done to every id: hashed into a table's rows, or looked up in a sorted vocabulary."""
PEERS = ("plain",)

BATCH = 8192
"""Rows of a row group, the last of which end with a session."""
_TABLE_ROWS = 1_000_000


def on_cpu() -> bool:
    """Whether this runs on the CPU whatever the accelerator."""
    return True


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


def prepare(case: str, against: str | None, data: pathlib.Path | None, sessions: int = 8192) -> Contest:
    """The contest of a case over a log of `sessions` sessions.

    Raises:
      UserError: `data` is given.
    """
    import pyarrow as pa

    from scalejax.data.sessions.clustering import cluster_by_session

    if data is not None:
        raise UserError(f"--data: recd_data makes its own log; got {data}. Leave --data out.")
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
        ours=_taker(ours, files),
        peer=None if against is None else _taker(peer, whole),
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


def factors(sessions: int = 8192) -> Iterator[tuple[int, float, float, float]]:
    """(S, d, measured dedup factor, closed form) over the settings that are compared; batches hold whole sessions."""
    for samples, repeat in itertools.product((4, 16), (0.0, 0.5, 0.8, 0.9, 0.95)):
        log = SessionLog(
            sessions=sessions,
            samples=samples,
            repeat=repeat,
            user_groups=(2,),
            user_ids=10.0,
            item_features=0,
            dense=0,
            concurrent=sessions / 4,
        )
        columns = log.columns()
        order = np.argsort(_ids(columns["session_id"]), kind="stable")
        rows = distinct = 0
        for start in range(0, order.size, BATCH):
            part = order[start : start + BATCH]
            lists = {name: column.take(part) for name in log.names if isinstance(column := columns[name], Ragged)}
            found = deduplicate(_join(lists), log.groups)
            rows += found.num_examples
            distinct += found.distinct[0].num_examples
        yield samples, repeat, rows / distinct, dedup_factor(samples, repeat)


def storage(
    user_ids: float,
    encoding: Literal["plain", "dictionary"],
    sessions: int = 8192,
    level: int | None = None,
    row_group: int = 65_536,
) -> tuple[int, int, int]:
    """Bytes of `workload` in time order, clustered, and also without repeats; Parquet with zstd and one encoding.

    All sessions are open at a time, so that the samples of one lie far apart, as in a log of many users. Row groups of
    all three are of one size; the encoding "dictionary" of the first is pyarrow's default.
    """
    import pyarrow.parquet as pq

    from scalejax.data.sessions.clustering import cluster_by_session

    with tempfile.TemporaryDirectory(prefix="scalejax-bench-") as folder:
        path = pathlib.Path(folder)
        options = {"compression": "zstd", "compression_level": level, "use_dictionary": encoding == "dictionary"}
        log = dataclasses.replace(workload(sessions, user_ids), concurrent=sessions)
        pq.write_table(log.table(), path / "log.parquet", row_group_size=row_group, **options)
        rewrite = functools.partial(
            cluster_by_session, path / "log.parquet", level=level, encoding=encoding, row_group=row_group
        )
        whole, short = rewrite(path / "whole"), rewrite(path / "short", groups=log.groups)
        return whole.source_bytes, whole.bytes, short.bytes


def _join(lists: Mapping[str, Ragged]) -> KeyedJagged:
    lengths = np.stack([column.lengths for column in lists.values()]).astype(np.int32)
    return KeyedJagged(tuple(lists), np.concatenate([column.values for column in lists.values()]), lengths)


def _ids(column: np.ndarray | Ragged) -> np.ndarray:
    assert isinstance(column, np.ndarray)
    return column


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


def _taker(read: Callable[[RowGroup], object], files: ParquetFiles) -> Callable[[int], None]:
    groups = itertools.cycle(files.groups)

    def take(count: int) -> None:
        for _ in range(count):
            read(next(groups))

    return take


def main() -> None:
    """Prints the measured factors and the storage."""
    print("samples repeat factor closed_form")
    for samples, repeat, measured, expected in factors():
        print(f"{samples:7} {repeat:6} {measured:6.3f} {expected:11.3f}")
    print("user_ids encoding        bytes clustered ratio without_repeats ratio")
    for user_ids, encoding in itertools.product((10.0, 30.0, 80.0), ("plain", "dictionary")):
        before, whole, short = storage(user_ids, encoding, sessions=4096)
        print(
            f"{user_ids:8} {encoding:10} {before:10} {whole:9} {before / whole:5.2f} {short:15} {before / short:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
