import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_logs

from scalejax.data.click_logs import criteo_multi_hot
from scalejax.data.click_logs.criteo import HASHES, INTEGERS
from scalejax.data.click_logs.criteo_multi_hot import MULTI_HOT_SIZES, CriteoMultiHotData
from scalejax.data.click_logs.criteo_terabyte import TABLE_ROWS
from scalejax.errors import UserError

DAYS, ROWS = 2, 30
SIZES = (3, 2, 1, *[1] * 22, 4)
TABLES = (20, 5, 3, *[7] * 22, 11)


def data(folder: pathlib.Path, **fields) -> CriteoMultiHotData:
    return CriteoMultiHotData(path=str(folder), **({"days": DAYS, "sizes": SIZES, "rows": TABLES} | fields))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    synthetic_logs.write_multi_hot_days(
        tmp_path / "days", days=DAYS, rows_per_day=ROWS, sizes=SIZES, table_rows=TABLES, row_group=8
    )
    return tmp_path / "days"


def numpy_days(folder: pathlib.Path, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    """Writes the files of MLPerf's scripts and returns what they hold."""
    rng, days = np.random.default_rng(0), []
    folder.mkdir()
    for day in range(DAYS):
        held = {"labels": rng.integers(0, 2, (rows, 1)).astype(np.int32)}
        held["dense"] = np.log(rng.integers(1, 100, (rows, 13))).astype(np.float32)
        for c, (size, n) in enumerate(zip(SIZES, TABLES, strict=True)):
            held[str(c)] = rng.integers(0, n, (rows, size)).astype(np.int32)
        np.save(folder / f"day_{day}_labels.npy", held["labels"])
        np.save(folder / f"day_{day}_dense.npy", held["dense"])
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **{str(c): held[str(c)] for c in range(26)})
        days.append(held)
    return days


def test_published_sizes() -> None:
    assert (len(MULTI_HOT_SIZES), sum(MULTI_HOT_SIZES), max(MULTI_HOT_SIZES)) == (26, 214, 100)
    schema = CriteoMultiHotData(path="not/here").schema()
    assert [(f.name, f.rows, f.length) for f in schema.categorical] == list(
        zip(HASHES, TABLE_ROWS, MULTI_HOT_SIZES, strict=True)
    )


@pytest.mark.parametrize("access", ["memory", "windows"])
def test_batches_hold_the_lists_and_numbers_of_the_files(folder: pathlib.Path, access: str) -> None:
    built = data(folder, access=access, batch_size=7).build()
    assert [built.num_examples(split) for split in ("train", "validation", "test")] == [30, 15, 15]
    of_day = [pq.read_table(folder / f"day_{day}.parquet") for day in range(DAYS)]
    expected = {"train": of_day[0], "validation": of_day[1].slice(0, 15), "test": of_day[1].slice(15)}
    for split, table in expected.items():
        at = 0
        for batch in built.eval_batches(split):
            batch.features.validate(built.schema)
            count = int(batch.weights.sum())
            rows = table.slice(at, count)
            for name, size in zip(HASHES, SIZES, strict=True):
                ids = rows[name].combine_chunks()
                ids = ids.flatten() if size > 1 else ids
                assert batch.features[name].values[: count * size].tolist() == ids.to_pylist()
            for d, name in enumerate(INTEGERS):
                np.testing.assert_array_equal(batch.dense[:count, d], rows[name].to_numpy())
            assert batch.labels[:count, 0].tolist() == rows["label"].to_pylist()
            at += count
        assert at == len(table)


def test_numpy_files_of_mlperf_are_converted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_multi_hot, "_CHUNK", 7)
    days = numpy_days(tmp_path / "numpy")
    seen = []
    criteo_multi_hot.to_parquet(
        tmp_path / "numpy",
        tmp_path / "out",
        days=DAYS,
        sizes=SIZES,
        rows=TABLES,
        row_group=11,
        progress=lambda *s: seen.append(s),
    )
    assert seen == [(1, 2), (2, 2)]
    assert pq.read_metadata(tmp_path / "out" / "day_0.parquet").row_group(0).num_rows == 11
    (batch,) = data(tmp_path / "out", batch_size=ROWS).build().eval_batches("train")
    np.testing.assert_array_equal(batch.dense, days[0]["dense"])
    np.testing.assert_array_equal(batch.labels, days[0]["labels"])
    for c, name in enumerate(HASHES):
        np.testing.assert_array_equal(batch.features[name].values, days[0][str(c)].reshape(-1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "day_1_dense.npy").unlink(), "day_1 is missing of day_0 to day_1"),
        (
            lambda f: np.save(f / "day_0_dense.npy", np.ones((ROWS, 12), np.float32)),
            r"day_0_dense\.npy: must be an array of 13 columns, row by row; got shape \(30, 12\)",
        ),
        (
            lambda f: np.save(f / "day_0_labels.npy", np.ones((ROWS - 1, 1), np.int32)),
            "arrays of a day must have equally many rows",
        ),
        (
            lambda f: (f / "day_0_dense.npy").write_bytes((f / "day_0_dense.npy").read_bytes()[:-4]),
            r"day_0_dense\.npy: is truncated",
        ),
        (lambda f: (f / "day_0_dense.npy").write_bytes(b"12345678"), r"day_0_dense\.npy: is not an \.npy array"),
        (
            lambda f: (f / "day_0_sparse_multi_hot.npz").write_bytes(
                (f / "day_0_sparse_multi_hot.npz").read_bytes()[:-40]
            ),
            r"day_0_sparse_multi_hot\.npz: is not an npz file of the arrays '0' to '25'",
        ),
        (
            lambda f: np.savez(
                f / "day_0_sparse_multi_hot.npz",
                **{str(c): np.full((ROWS, s), 3, np.int32) for c, s in enumerate(SIZES)},
            ),
            r"day_0_sparse_multi_hot\.npz: feature 'C3': id 3 of example 0 is outside \[0, 3\)",
        ),
    ],
    ids=["missing", "columns", "rows", "truncated", "no array", "cut archive", "id"],
)
def test_numpy_files_of_another_form_are_refused(tmp_path: pathlib.Path, spoil, message: str) -> None:
    numpy_days(tmp_path / "numpy")
    spoil(tmp_path / "numpy")
    with pytest.raises(UserError, match=message):
        criteo_multi_hot.to_parquet(tmp_path / "numpy", tmp_path / "out", days=DAYS, sizes=SIZES, rows=TABLES)
    assert not list((tmp_path / "out").glob("*.parquet") if (tmp_path / "out").exists() else ())


def replaced(folder: pathlib.Path, name: str, column: pa.Array) -> None:
    for day in range(DAYS):
        path = folder / f"day_{day}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("C1", pa.array([[1, 2, 20]] * ROWS), r"'C1': id 20 of example 0 is outside \[0, 20\).*at least 21"),
        ("C1", pa.array([[1, 2, -3]] * ROWS), "'C1': id -3 of example 0 is negative"),
        ("C1", pa.array([[1, 2, 2**40]] * ROWS), "'C1': id 1099511627776 .*as large as 64-bit hashes.*an id map"),
        ("C1", pa.array([[1, -(2**62), 2]] * ROWS), "'C1': id -4611686018427387904 .*as large as 64-bit hashes"),
        ("C1", pa.array([[1, 2]] * ROWS), "'C1' has 2 ids in row 0; the schema says exactly 3"),
        ("C1", pa.array([[1, None, 2]] * ROWS), "'C1' has 0 missing lists and 30 missing ids"),
        ("C1", pa.array([1] * ROWS), "'C1' holds int64; wanted lists of integers"),
        ("C1", pa.array([[0.5] * 3] * ROWS), "'C1' holds list.*double.*; wanted lists of integers"),
        ("I1", pa.array([float("nan")] * ROWS), r"number 'I1' is missing \(NaN\) in row 0"),
        ("label", pa.array([2] * ROWS), "label 'label' is 2 in row 0; wanted 0 or 1"),
    ],
)
def test_columns_that_contradict_the_schema_are_refused(folder, name: str, column: pa.Array, message: str) -> None:
    replaced(folder, name, column)
    with pytest.raises(UserError, match=message):
        data(folder, access="memory").build()


def test_lists_of_fixed_size_one_are_ids(folder: pathlib.Path) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS) % 3), 1)
    replaced(folder, "C3", column)
    (batch,) = data(folder, batch_size=ROWS).build().eval_batches("train")
    assert batch.features["C3"].values.tolist() == (np.arange(ROWS) % 3).tolist()


def test_a_missing_column_is_named_with_its_neighbours(folder: pathlib.Path) -> None:
    for day in range(DAYS):
        path = folder / f"day_{day}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.rename_columns(["C14x" if n == "C14" else n for n in table.column_names]), path)
    with pytest.raises(UserError, match=r"there is no column 'C14'. Did you mean 'C14x'"):
        data(folder).build()


def test_wrong_fields_and_folders_are_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"data\.sizes must have one number for each of 26 features; got 2"):
        data(folder, sizes=(1, 2)).schema()
    with pytest.raises(UserError, match=r"holds no \*\.parquet; wanted day_0\.parquet to day_1\.parquet"):
        data(tmp_path).build()
    shutil.move(folder / "day_1.parquet", folder / "other.parquet")
    with pytest.raises(UserError, match="day_1 is missing"):
        data(folder).build()
    shutil.copy(folder / "other.parquet", folder / "day_1.parquet")
    with pytest.raises(UserError, match=r"other\.parquet is not a day"):
        data(folder).build()
