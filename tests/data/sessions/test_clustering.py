import collections
import json
import pathlib
import random
import subprocess
import sys
import time
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.sessions.clustering import cluster_by_session, cluster_partition, partition_of, session_hashes
from scalejax.data.sessions.generate import SessionLog
from scalejax.data.tables import clustered
from scalejax.data.tables.parquet_files import ParquetFiles, lists_of
from scalejax.errors import UserError

LOG = SessionLog(sessions=300, samples=5, session_length="geometric", user_groups=(2,), rows=1000, concurrent=60)


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    LOG.write(tmp_path / "log.parquet", row_group=200)
    return tmp_path / "log.parquet"


def read(folder: pathlib.Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in ParquetFiles(folder).files()])


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def multiset(table: pa.Table) -> collections.Counter:
    return collections.Counter(map(repr, table.to_pylist()))


def expected_order(table: pa.Table, seed: int) -> list[int]:
    """The definition: rows by (hash of the session, time), else as they are."""
    hashes = session_hashes(table["session_id"].to_numpy(), seed).tolist()
    keys = [(h, t, r) for r, (h, t) in enumerate(zip(hashes, table["timestamp"].to_pylist(), strict=True))]
    return [r for _, _, r in sorted(keys)]


@pytest.mark.parametrize("partitions", [1, 3, 40, pytest.param(2000, marks=pytest.mark.slow)])
def test_rows_are_those_of_the_source_in_the_order_of_the_definition(source: pathlib.Path, partitions: int) -> None:
    target = source.parent / "clustered"
    manifest = cluster_by_session(source, target, partitions=partitions, seed=4, row_group=64)
    table = pq.read_table(source)
    assert read(target).equals(table.take(expected_order(table, 4)))
    assert (manifest.rows, manifest.sessions) == (table.num_rows, LOG.sessions)
    assert clustered.verify(target) == manifest == clustered.read_manifest(target)
    assert [p.name for p in source.parent.iterdir() if p.suffix == ".partial"] == []


def test_sessions_are_shuffled_by_the_seed_and_stay_whole(source: pathlib.Path) -> None:
    orders = []
    for seed in (0, 1):
        cluster_by_session(source, source.parent / f"s{seed}", seed=seed)
        sessions = read(source.parent / f"s{seed}")["session_id"].to_numpy()
        starts = np.flatnonzero(np.concatenate([[True], sessions[1:] != sessions[:-1]]))
        assert starts.size == LOG.sessions
        orders.append(sessions[starts])
    assert sorted(orders[0]) == sorted(orders[1])
    # Two unrelated orders agree in one place on average.
    assert (orders[0] == orders[1]).sum() < 10
    assert abs(np.corrcoef(orders[0], np.arange(LOG.sessions))[0, 1]) < 0.2


def test_row_groups_end_where_sessions_end(source: pathlib.Path) -> None:
    cluster_by_session(source, source.parent / "out", partitions=2, row_group=20)
    files = ParquetFiles(source.parent / "out")
    seen: set[int] = set()
    for group in files.groups:
        sessions = files.table(group, ["session_id"])["session_id"].to_numpy()
        assert group.rows <= 20 or np.unique(sessions).size == 1
        assert not seen & set(sessions.tolist())
        seen |= set(sessions.tolist())
    assert any(group.rows > 20 for group in files.groups)
    assert len(files.groups) < 2 * LOG.sessions * 5 / 20


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(1, 9), st.integers(0, 3))
def test_partitions_follow_the_hash_which_never_collides(ids: list[int], partitions: int, seed: int) -> None:
    array = np.array(ids, np.int64)
    hashes = session_hashes(array, seed)
    assert partition_of(array, partitions, seed).tolist() == [(int(h) >> 32) * partitions >> 32 for h in hashes]
    assert len(set(hashes.tolist())) == len(set(ids))


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Columns of every kind, with missing values, and times that are often equal."""
    rows = draw(st.integers(1, 25))

    def column(values: st.SearchStrategy, type_: pa.DataType) -> pa.Array:
        return pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), type_)

    return pa.table(
        {
            "session_id": column(st.integers(-2, 2), pa.int64()),
            "timestamp": column(st.integers(0, 3), pa.timestamp("ms")),
            "ids": column(st.none() | st.lists(st.integers(0, 2), max_size=3), pa.list_(pa.int64())),
            "text": column(st.none() | st.text(max_size=2), pa.string()),
            "x": column(st.none() | st.floats(width=32), pa.float32()),
            "flag": column(st.none() | st.booleans(), pa.bool_()),
            "raw": column(st.none() | st.binary(max_size=2), pa.binary()),
        }
    )


@pytest.mark.slow
@given(tables(), st.integers(1, 4), st.integers(1, 9), st.sampled_from(["plain", "dictionary"]))
@settings(max_examples=25, deadline=None)
def test_no_row_and_no_type_changes(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, partitions: int, row_group: int, encoding
) -> None:
    folder = tmp_path_factory.mktemp("rewrite")
    pq.write_table(table, folder / "log.parquet", row_group_size=row_group)
    cluster_by_session(
        folder / "log.parquet", folder / "out", partitions=partitions, row_group=row_group, encoding=encoding
    )
    found = read(folder / "out").replace_schema_metadata(None)
    assert found.schema.equals(table.schema)
    assert multiset(found) == multiset(table)
    assert repr(found.to_pylist()) == repr(table.take(expected_order(table, 0)).to_pylist())


def test_rows_of_a_session_are_ordered_by_time_and_stay_as_they_were_at_one_time() -> None:
    frame = pl.DataFrame({"session_id": [7, 9, 7, 9, 7, 7], "timestamp": [3, 5, 1, 5, 2, 1], "row": range(6)})
    found = cluster_partition(frame).select("session_id", "row").rows()
    of_7, of_9 = [(7, 2), (7, 5), (7, 4), (7, 0)], [(9, 1), (9, 3)]
    assert found in (of_7 + of_9, of_9 + of_7)


def test_an_engine_that_shuffles_by_partition_writes_the_same_rows(source: pathlib.Path) -> None:
    frame = pl.read_parquet(source)
    parts = partition_of(frame["session_id"].to_numpy(), 5, 2)
    by_hand = pl.concat([cluster_partition(frame.filter(pl.Series(parts == p)), seed=2) for p in range(5)])
    cluster_by_session(source, source.parent / "out", partitions=3, seed=2)
    assert pl.from_arrow(read(source.parent / "out")).equals(by_hand)  # type: ignore[union-attr]


@pytest.mark.slow
def test_clustering_saves_bytes_and_says_how_many(tmp_path: pathlib.Path) -> None:
    log = SessionLog(sessions=1500, samples=16, repeat=0.9, user_groups=(2,), user_ids=60, rows=100_000, dense=1)
    for codec in ("zstd", "snappy"):
        log.write(tmp_path / f"{codec}.parquet", compression=codec)
        found = cluster_by_session(tmp_path / f"{codec}.parquet", tmp_path / codec)
        assert found.source_bytes == (tmp_path / f"{codec}.parquet").stat().st_size
        assert found.bytes == sum(f.stat().st_size for f in (tmp_path / codec).glob("*.parquet"))
        if codec == "zstd":
            assert found.saving == found.source_bytes / found.bytes
            assert found.saving > 3
        else:  # a codec against another would measure codecs
            assert found.source_codecs == ("snappy",)
            assert found.saving is None


CHILD = """
import os, signal, sys
source, target, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
from scalejax.data.sessions import clustering
seen = 0
def count(event, args):
    global seen
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(target):
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
print("ready", flush=True)
clustering.cluster_by_session(source, target, partitions=4, row_group=50)
print(seen)
"""


def start(source: pathlib.Path, target: pathlib.Path, kill_at: int) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(source), str(target), str(kill_at)]
    root = pathlib.Path(clustered.__file__).parents[3]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.slow
def test_what_a_killed_rewrite_leaves_is_never_read(source: pathlib.Path) -> None:
    whole = source.parent / "whole"
    child = start(source, whole, 0)
    output, _ = child.communicate(timeout=120)
    events = int(output.split()[-1])
    assert events > 40
    # At files it opens, renames and removes, the last three of which publish the result; and at any moment.
    rng = random.Random(0)
    moments = [*rng.sample(range(1, events - 2), 3), events - 1, events]
    for number, moment in enumerate([*moments, None]):
        target = source.parent / f"killed-{number}"
        child = start(source, target, moment or 0)
        if moment is None:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(rng.random() * 0.1)
            child.kill()
        child.communicate(timeout=120)
        partial = target.with_name(target.name + ".partial")
        if target.exists():  # only where it came too late
            assert moment in (None, events)
            assert contents(target) == contents(whole)
            continue
        if not (partial / clustered.FILE).exists():
            with pytest.raises(UserError):
                ParquetFiles(partial)
            for file in partial.glob("*.parquet"):
                with pytest.raises(UserError):
                    ParquetFiles(file)
        with pytest.raises(UserError, match="no such file or folder"):
            ParquetFiles(target)
        if partial.exists():
            with pytest.raises(UserError, match=r'an interrupted rewrite left.*pass leftovers="remove"'):
                cluster_by_session(source, target, partitions=4, row_group=50)
        cluster_by_session(source, target, partitions=4, row_group=50, leftovers="remove")
        assert contents(target) == contents(whole)
        assert not partial.exists()


def test_a_log_that_is_not_complete_is_refused(source: pathlib.Path) -> None:
    target = source.parent / "out"
    cluster_by_session(source, target, partitions=3)
    manifest, part = target / clustered.FILE, target / "part-00001.parquet"
    text, rows = manifest.read_text(), part.read_bytes()

    def refused(path: pathlib.Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            ParquetFiles(path)
        manifest.write_text(text)
        part.write_bytes(rows)
        ParquetFiles(path)

    manifest.unlink()
    refused(target, "there is no clustered.json, so this is not a complete log .* run the rewrite again")
    manifest.unlink()
    refused(part, "there is no clustered.json")
    manifest.write_text(text[:-20])
    refused(target, "clustered.json: is damaged")
    manifest.write_text(text.replace('"rows": ', '"rows": 1'))
    refused(target, "clustered.json: is damaged \\(its digest differs")
    part.unlink()
    refused(target, "part-00001.parquet: is missing from a clustered log")
    pq.write_table(pq.read_table(part).slice(1), part)
    refused(target, r"part-00001.parquet: has \d+ bytes instead of \d+")
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    refused(target, "part-00001.parquet: is not a file of the clustered log")
    pq.write_table(pq.read_table(part, columns=["label"]), target / "zzz.parquet")
    with pytest.raises(UserError, match=r"columns differ|is not a file of the clustered log"):
        ParquetFiles(target)


def test_files_of_another_rewrite_are_refused(source: pathlib.Path) -> None:
    for seed in (0, 1):
        cluster_by_session(source, source.parent / f"out-{seed}", partitions=2, seed=seed)
    alien = (source.parent / "out-1" / "part-00000.parquet").read_bytes()
    (source.parent / "out-0" / "part-00000.parquet").write_bytes(alien)
    with pytest.raises(UserError, match="is not a file of the clustered log"):
        ParquetFiles(source.parent / "out-0")


def test_verify_finds_a_flipped_byte_that_sizes_do_not_show(source: pathlib.Path) -> None:
    target = source.parent / "out"
    cluster_by_session(source, target, partitions=3)
    part = target / "part-00002.parquet"
    damaged = bytearray(part.read_bytes())
    damaged[100] ^= 1
    part.write_bytes(damaged)
    with pytest.raises(UserError, match=r"part-00002.parquet: is damaged \(its digest differs"):
        clustered.verify(target)
    part.unlink()
    with pytest.raises(UserError, match=r"part-00002\.parquet: is missing"):
        clustered.verify(target)


def test_a_manifest_of_another_format_is_refused(source: pathlib.Path) -> None:
    target = source.parent / "out"
    cluster_by_session(source, target)
    content = json.loads((target / clustered.FILE).read_text())["content"] | {"format": 9}
    record = {"sha256": clustered._digest(content), "content": content}
    (target / clustered.FILE).write_text(json.dumps(record))
    with pytest.raises(UserError, match="has another format"):
        ParquetFiles(target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session": "sesion_id"}, "there is no column 'sesion_id'. Did you mean 'session_id'"),
        ({"time": "time"}, "there is no column 'time'"),
        ({"session": "dense_0"}, "column 'dense_0' holds float; wanted integers"),
        ({"time": "item_0"}, "column 'item_0' holds list.*; wanted times or numbers"),
        ({"partitions": 0}, r"partitions must be in \[1, 2\*\*32\); got 0"),
        ({"row_group": 0}, "row_group must be at least 1 row; got 0"),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(source: pathlib.Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cluster_by_session(source, source.parent / "out", **options)
    assert [p.name for p in source.parent.iterdir()] == ["log.parquet"]


def test_a_target_that_is_there_or_cannot_be_is_refused(source: pathlib.Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        cluster_by_session(source, source)
    with pytest.raises(UserError, match="its folder does not exist"):
        cluster_by_session(source, source.parent / "a" / "b")


@pytest.mark.parametrize("column", ["session_id", "timestamp"])
def test_missing_sessions_and_times_are_refused(source: pathlib.Path, column: str) -> None:
    table = pq.read_table(source)
    values = [None, *table[column].to_pylist()[1:]]
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, pa.int64())), source, row_group_size=200)
    with pytest.raises(UserError, match=f"row group 0: column '{column}' has 1 missing values"):
        cluster_by_session(source, source.parent / "out")
    assert [p.name for p in source.parent.iterdir()] == ["log.parquet"]


def test_progress_reaches_the_end(source: pathlib.Path) -> None:
    calls = []
    cluster_by_session(source, source.parent / "out", partitions=3, progress=lambda a, b: calls.append((a, b)))
    total = len(ParquetFiles(source).groups) + 3
    assert calls == [(n, total) for n in range(1, total + 1)]


NAMES = ("user_0_0", "user_0_1", "user_1_0", "item_0")
GROUPED = SessionLog(
    sessions=200,
    samples=6,
    session_length="geometric",
    user_groups=(2, 1),
    user_ids=1.5,
    item_features=1,
    rows=20,
    concurrent=40,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ParquetFiles, ParquetFiles]:
    """A log with all its lists, and the same without the repeats of two groups."""
    folder = tmp_path_factory.mktemp("repeats")
    GROUPED.write(folder / "log.parquet", row_group=300)
    cluster_by_session(folder / "log.parquet", folder / "whole", partitions=2, row_group=100)
    cluster_by_session(folder / "log.parquet", folder / "short", partitions=2, row_group=100, groups=GROUPED.groups)
    return ParquetFiles(folder / "whole"), ParquetFiles(folder / "short")


def test_repeats_that_are_left_out_come_back(both: tuple[ParquetFiles, ParquetFiles]) -> None:
    whole, short = both
    assert len(whole.groups) == len(short.groups) > 4
    for a, b in zip(whole.groups, short.groups, strict=True):
        assert short.table(b).equals(whole.table(a))
        assert repr(short.read(b, NAMES)) == repr(whole.read(a, NAMES))


def test_a_list_is_left_out_where_its_whole_group_is_that_of_the_row_before(
    both: tuple[ParquetFiles, ParquetFiles],
) -> None:
    whole, short = both
    left_out = 0
    for a, b in zip(whole.groups, short.groups, strict=True):
        rows = whole.table(a).to_pylist()
        stored = pq.ParquetFile(b.file).read_row_group(b.number).to_pylist()
        for n, row in enumerate(stored):
            for group in GROUPED.groups:
                same = n > 0 and all(rows[n][name] == rows[n - 1][name] for name in group)
                assert [row[name] for name in group] == [None if same else rows[n][name] for name in group]
                left_out += same
    assert left_out > 500


@pytest.mark.parametrize(
    "groups",
    [
        GROUPED.groups,
        (("user_0_1", "user_0_0"),),
        (("user_1_0",), ("item_0",)),
        (("user_0_0",), ("user_0_1", "user_1_0")),
        (),
    ],
    ids=str,
)
def test_features_of_a_row_group_are_those_of_deduplicating_all_its_rows(
    both: tuple[ParquetFiles, ParquetFiles], groups: tuple
) -> None:
    whole, short = both
    for a, b in zip(whole.groups, short.groups, strict=True):
        expected = deduplicate(lists_of(whole.table(a), NAMES), groups)
        for files, group in ((whole, a), (short, b)):
            found = files.features(group, NAMES, groups)
            found.validate()
            assert (found.keys, found.groups) == (expected.keys, expected.groups)
            for x, y in zip((found.plain, *found.distinct), (expected.plain, *expected.distinct), strict=True):
                assert (x.keys, x.to_lists()) == (y.keys, y.to_lists())
                np.testing.assert_array_equal(x.lengths, y.lengths, strict=True)
            for x, y in zip(found.inverse, expected.inverse, strict=True):
                np.testing.assert_array_equal(x, y, strict=True)


def test_all_features_in_groups_leave_none_plain(both: tuple[ParquetFiles, ParquetFiles]) -> None:
    for files in both:
        found = files.features(files.groups[0], ("user_0_0", "user_0_1"), [("user_0_0", "user_0_1")])
        assert found.plain.keys == ()
        assert found.num_examples == files.groups[0].rows


def test_a_log_without_its_repeats_is_clustered_again_as_it_was(both: tuple[ParquetFiles, ParquetFiles]) -> None:
    whole, short = both
    target = short.path.parent / "again"
    cluster_by_session(short.path, target, row_group=100)
    assert read(target).equals(read(whole.path))


@pytest.mark.parametrize("encoding", ["plain", "dictionary"])
def test_leaving_repeats_out_saves_more(tmp_path: pathlib.Path, encoding: Literal["plain", "dictionary"]) -> None:
    log = SessionLog(sessions=1000, samples=16, user_groups=(4,), user_ids=30, rows=100_000, item_features=0, dense=0)
    log.write(tmp_path / "log.parquet", encoding=encoding)
    whole = cluster_by_session(tmp_path / "log.parquet", tmp_path / "whole", encoding=encoding)
    short = cluster_by_session(tmp_path / "log.parquet", tmp_path / "short", encoding=encoding, groups=log.groups)
    assert short.groups == log.groups
    assert whole.saving is not None
    assert short.saving is not None
    assert whole.saving > 1.3
    assert short.saving > whole.saving * (1.3 if encoding == "dictionary" else 1)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("user_0_9",)], "there is no column 'user_0_9'. Did you mean"),
        ([("label",)], "column 'label' holds int8; groups take lists of integers"),
        ([()], "groups must not be empty"),
        ([("item_0",), ("item_0",)], "in one of them at most"),
    ],
)
def test_wrong_groups_are_refused(source: pathlib.Path, groups: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cluster_by_session(source, source.parent / "out", groups=groups)
    assert [p.name for p in source.parent.iterdir()] == ["log.parquet"]


def test_missing_lists_are_refused_where_repeats_are_left_out(source: pathlib.Path) -> None:
    table = pq.read_table(source)
    lists = pa.array([None, *table["item_0"].to_pylist()[1:]], pa.list_(pa.int64()))
    pq.write_table(table.set_column(table.schema.get_field_index("item_0"), "item_0", lists), source)
    with pytest.raises(UserError, match="column 'item_0' has 1 missing lists"):
        cluster_by_session(source, source.parent / "out", groups=[("item_0",)])


def test_features_refuse_what_is_not_there(both: tuple[ParquetFiles, ParquetFiles]) -> None:
    files = both[1]
    with pytest.raises(UserError, match="there is no column 'user_9'"):
        files.features(files.groups[0], ("user_9",))
    with pytest.raises(UserError, match="there is no feature 'user_0_0'; there are item_0"):
        files.features(files.groups[0], ("item_0",), [("user_0_0",)])
    with pytest.raises(UserError, match="column 'label' holds int8; wanted lists of ids"):
        files.features(files.groups[0], ("label",))
