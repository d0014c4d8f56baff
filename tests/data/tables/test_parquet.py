import itertools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.schema import Categorical
from scalejax.data.permutation import Permutation
from scalejax.data.splits import ByTime, Fractions
from scalejax.data.tables.parquet import ParquetData
from scalejax.errors import UserError

N, GROUP = 230, 20
GENRES = [list(range(n % 4)) for n in range(N)]
CATEGORICAL = (
    Categorical(name="row", rows=N),
    Categorical(name="genre", rows=7, length=None, max_length=6, capacity=3.0),
)


def table(**changes: pa.Array) -> pa.Table:
    rows = np.arange(N)
    columns = {
        "row": pa.array(rows, pa.uint16()),
        "genre": pa.array(GENRES, pa.list_(pa.int64())),
        "x": pa.array(rows, pa.float32()),
        "label": pa.array(rows % 2 == 1),
        "day": pa.array(rows // 25, pa.int32()),
        "unused": pa.array(["text"] * N),
    }
    return pa.table(columns | changes)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=GROUP, write_page_checksum=True)
    return tmp_path / "rows.parquet"


def data(path: pathlib.Path, **options: object) -> ParquetData:
    defaults: dict = {"access": "windows", "window": 3, "batch_size": 16, "scaling": "none", "dense": ("x",)}
    return ParquetData(path=str(path), **({"categorical": CATEGORICAL} | defaults | options))


def rows_of(batch: ClickBatch) -> list[int]:
    real = int(batch.weights.sum())
    lists = batch.features.to_lists()
    rows = [ids[0] for ids in lists["row"]][:real]
    assert lists["genre"] == [GENRES[r] for r in rows] + [[]] * (len(batch) - real)
    assert batch.dense[:real, 0].tolist() == rows
    assert batch.labels[:real, 0].tolist() == [r % 2 for r in rows]
    return rows


def stream(config: ParquetData, batches: int, start: int = 0, **process: int) -> list[int]:
    found = config.build().train_batches(start_example=start, **process)
    return [row for batch in itertools.islice(found, batches) for row in rows_of(batch)]


def test_windows_shuffle_as_defined(path: pathlib.Path) -> None:
    # The definition of windows.py, row by row.
    split = Fractions(train=0.8, validation=0.1)
    expected = []
    for epoch in range(2):
        groups = Permutation(12, 5, epoch)(np.arange(12))
        for w in range(4):
            rows = []
            for g in groups[3 * w : 3 * w + 3]:
                size = min(GROUP, N - g * GROUP)
                rows += [g * GROUP + r for r in split.assign_group(g, size, "train")]
            expected += [rows[i] for i in Permutation(len(rows), 5, epoch, w + 1)(np.arange(len(rows)))]
    assert len(expected) == 2 * 184
    assert stream(data(path, seed=5), 23) == expected


def test_windows_resume_anywhere_at_any_number_of_processes(path: pathlib.Path) -> None:
    whole = stream(data(path), 30)
    for start in (0, 16, 176, 192):
        parts = [stream(data(path), 5, start=start, process_index=p, process_count=2) for p in (0, 1)]
        merged = [row for b in range(5) for part in parts for row in part[8 * b : 8 * b + 8]]
        assert merged == whole[start : start + 80]


@pytest.mark.parametrize("access", ["windows", "memory"])
@pytest.mark.parametrize(
    "split",
    [Fractions(), Fractions(by="position", train=0.5), ByTime(column="day", validation_from=6, test_from=8)],
    ids=["random", "position", "time"],
)
def test_splits_cover_every_row_once(path: pathlib.Path, access: str, split: Fractions | ByTime) -> None:
    built = data(path, access=access, split=split).build()
    found = {s: [r for b in built.eval_batches(s) for r in rows_of(b)] for s in ("train", "validation", "test")}
    assert {s: len(rows) for s, rows in found.items()} == {s: built.num_examples(s) for s in found}
    assert all(rows == sorted(rows) for rows in found.values())
    assert sorted(itertools.chain(*found.values())) == list(range(N))
    if isinstance(split, ByTime):
        assert {s: (rows[0], rows[-1]) for s, rows in found.items()} == {
            "train": (0, 149),
            "validation": (150, 199),
            "test": (200, 229),
        }
    elif split.by == "position":
        assert found["train"] == list(range(115))


def test_an_epoch_of_windows_has_every_training_row_once_where_row_groups_have_none(path: pathlib.Path) -> None:
    config = data(path, split=ByTime(column="day", validation_from=6, test_from=8), batch_size=15)
    assert sorted(stream(config, 10)) == list(range(150))


def test_time_order_in_windows_equals_time_order_in_memory(path: pathlib.Path) -> None:
    configs = [data(path, order="time", time="day", access=a) for a in ("windows", "memory")]
    windows, memory = (c.build() for c in configs)
    assert stream(configs[0], 12)[:184] == sorted(stream(configs[0], 12)[:184])
    assert [name for name, _, _ in windows.days()] == [name for name, _, _ in memory.days()]
    for day, (_, start, stop) in enumerate(windows.days()):
        assert {r // 25 for b in windows.range_batches(start, stop) for r in rows_of(b)} == {day}


def test_statistics_of_a_streamed_file_are_those_of_its_training_rows(path: pathlib.Path) -> None:
    split = ByTime(column="day", validation_from=6, test_from=8)
    for access in ("windows", "memory"):
        built = data(path, access=access, split=split, scaling="standard").build()
        found = np.concatenate([b.dense[b.weights > 0, 0] for b in built.eval_batches("test")])
        train = np.arange(150)
        # float32 of a float64 computation.
        np.testing.assert_allclose(found, (np.arange(200, 230) - train.mean()) / train.std(), rtol=1e-6)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: pathlib.Path) -> None:
    for name, rows in (("b", slice(100, N)), ("a", slice(0, 100))):
        pq.write_table(table().slice(rows.start, rows.stop - rows.start), tmp_path / f"{name}.parquet")
    found = data(tmp_path, split=Fractions(train=1.0, validation=0.0), access="memory").build()
    assert [r for b in found.eval_batches("train") for r in rows_of(b)] == list(range(N))


def test_fixed_length_lists_are_checked(tmp_path: pathlib.Path) -> None:
    pairs = pa.array([[n, n] for n in range(N)], pa.list_(pa.int32(), 2))
    pq.write_table(table(genre=pairs), tmp_path / "pairs.parquet")
    fixed = (Categorical(name="genre", rows=N, length=2),)
    batch = next(data(tmp_path / "pairs.parquet", categorical=fixed).build().train_batches())
    assert set(batch.features.lengths.ravel()) == {2}
    pq.write_table(table(), tmp_path / "jagged.parquet")
    with pytest.raises(UserError, match="'genre' has 0 ids in row 0; the schema says exactly 2"):
        data(tmp_path / "jagged.parquet", categorical=fixed, access="memory").build()


def test_fingerprint_follows_the_content_not_the_name(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    base = data(path).build().fingerprint()
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(path.read_bytes())
    assert data(copy, batch_size=32).build().fingerprint() == base
    pq.write_table(table(x=pa.array(np.arange(N) + 1.0, pa.float32())), copy, row_group_size=GROUP)
    assert data(copy).build().fingerprint() != base
    assert data(path, seed=1).build().fingerprint() != base


def test_a_missing_file_names_the_nearest(path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"row\.parquet: there is no such file or folder. Did you mean .*rows\.parquet"):
        data(path.with_name("row.parquet")).build()
    (path.parent / "empty").mkdir()
    with pytest.raises(UserError, match=r"the folder holds no \*\.parquet"):
        data(path.parent / "empty").build()


def test_an_empty_or_truncated_file_is_named(path: pathlib.Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"rows\.parquet: the file is empty \(0 bytes\)"):
        data(path).build()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"rows\.parquet: is not a complete Parquet file .*truncated or damaged"):
        data(path).build()


def test_a_file_without_rows_is_refused(path: pathlib.Path) -> None:
    pq.write_table(table().slice(0, 0), path)
    with pytest.raises(UserError, match="there are no rows"):
        data(path).build()


@pytest.mark.parametrize("access", ["windows", "memory"])
def test_a_flipped_byte_names_file_and_row_group(path: pathlib.Path, access: str) -> None:
    meta = pq.read_metadata(path)
    column = meta.row_group(4).column(0)
    damaged = bytearray(path.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"rows\.parquet, row group 4 is damaged .*Restore the file"):
        list(itertools.islice(data(path, access=access, dense=()).build().train_batches(), 30))


def test_a_file_that_vanishes_is_reported(path: pathlib.Path) -> None:
    built = data(path, dense=()).build()
    path.unlink()
    with pytest.raises(UserError, match="has gone while it was in use"):
        next(built.train_batches())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense": ("xx",)}, "there is no column 'xx'. Did you mean 'x'"),
        ({"labels": ("lable",)}, "there is no column 'lable'. Did you mean 'label'"),
        ({"dense": ("unused",)}, "column 'unused' holds string; wanted numbers"),
        ({"categorical": (Categorical(name="unused", rows=3),)}, "column 'unused' holds string; wanted integers"),
        ({"categorical": (Categorical(name="genre", rows=7),)}, "'genre' holds list.*; wanted integers"),
        (
            {"categorical": (Categorical(name="row", rows=N, length=None, capacity=1.0),)},
            "'row' holds uint16; wanted lists of integers",
        ),
        ({"labels": ("unused",)}, "column 'unused' holds string; wanted labels 0 and 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"categorical": (Categorical(name="row", rows=2**31),)}, "must be below 2\\*\\*31"),
    ],
)
def test_wrong_columns_are_refused(path: pathlib.Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data(path, **options).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": pa.array([-1, *range(1, N)])}, "row group 0: feature 'row': id -1 of example 0 is negative"),
        (
            {"row": pa.array([*range(N - 1), 500])},
            r"row group 11: feature 'row': id 500 of example 9 is outside \[0, 230",
        ),
        ({"row": pa.array([None, *range(1, N)], pa.int32())}, "row group 0: feature 'row' must have an integer id"),
        ({"genre": pa.array([None, *GENRES[1:]])}, "row group 0: column 'genre' has 1 missing lists"),
        ({"genre": pa.array([[9], *GENRES[1:]])}, "feature 'genre': id 9 of example 0 is outside"),
        ({"genre": pa.array([[1] * 7, *GENRES[1:]])}, "feature 'genre': example 0 has 7 ids; its max_length is 6"),
        ({"label": pa.array([2, *[0] * (N - 1)])}, "row group 0: label 'label' is 2 in row 0; wanted 0 or 1"),
        ({"label": pa.array([None, *[True] * (N - 1)])}, "row group 0: column 'label' has 1 missing values"),
        ({"x": pa.array([None, *[1.0] * (N - 1)])}, r"row group 0: number 'x' is missing \(NaN\) in row 0"),
        ({"x": pa.array([None, *[1] * (N - 1)])}, r"row group 0: number 'x' is missing \(NaN\) in row 0"),
        ({"day": pa.array(range(N, 0, -1))}, "rows are not sorted by 'day'"),
    ],
)
def test_wrong_values_name_row_group_and_row(path: pathlib.Path, changes: dict, message: str) -> None:
    pq.write_table(table(**changes), path, row_group_size=GROUP)
    sorted_by_day = {"order": "time", "time": "day"}
    with pytest.raises(UserError, match=message):
        stream(data(path, nan="error", split=Fractions(train=1.0, validation=0.0), **sorted_by_day), 15)


@pytest.mark.parametrize("checksums", [True, False])
def test_pages_without_checksums_are_said(checksums: bool, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"user": np.arange(20) % 5, "label": np.arange(20) % 2})
    pq.write_table(table, path, write_page_checksum=checksums)
    data = ParquetData(path=str(path), categorical=(Categorical(name="user", rows=5),)).build()
    assert [str(path) in remark and "no checksums" in remark for remark in data.remarks] == [True] * (not checksums)


def test_a_column_whose_name_is_no_text_is_damage(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": np.arange(4), "another": np.arange(4), "label": np.arange(4) % 2}), path)
    path.write_bytes(path.read_bytes().replace(b"another", b"an\xb0ther"))
    with pytest.raises(UserError, match=r"rows\.parquet: is not a complete Parquet file"):
        ParquetData(path=str(path), categorical=(Categorical(name="user", rows=5),)).build()
