"""The dedup factor of session logs against its closed form, and the bytes that clustering by session saves.

python benchmarks/recd_storage.py
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from scalejax.bench.cases.recd_data import BATCH, workload
from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.records import Ragged
from scalejax.data.sessions.generate import SessionLog, dedup_factor


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
