import gzip
import pathlib
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic_logs

from scalejax.data.click_logs import criteo_terabyte
from scalejax.data.click_logs.criteo import HASHES
from scalejax.data.click_logs.criteo_terabyte import TABLE_ROWS, CriteoTerabyteData, day_files, last_day_split
from scalejax.data.examples.coding import Counted, Hashed
from scalejax.errors import UserError

DAYS, ROWS = 3, 41
SMALL = Hashed(rows=tuple(min(rows, 50) for rows in TABLE_ROWS))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("days")
    synthetic_logs.write_criteo_days(folder, days=DAYS, rows_per_day=ROWS, exponent=1.5)
    return folder


def fields(folder: pathlib.Path) -> list[list[str]]:
    """All lines, in the order of days."""
    return [
        line.split("\t")
        for day in range(DAYS)
        for line in gzip.decompress((folder / f"day_{day}.gz").read_bytes()).decode().splitlines()
    ]


def examples(data: CriteoTerabyteData, split: str) -> dict[str, np.ndarray]:
    batches = list(data.build().eval_batches(split))
    real = np.concatenate([b.weights for b in batches]) > 0
    found = {name: np.concatenate([b.features[name].values for b in batches])[real] for name in HASHES}
    found["dense"] = np.concatenate([b.dense for b in batches])[real]
    found["label"] = np.concatenate([b.labels[:, 0] for b in batches])[real]
    return found


def test_published_rows() -> None:
    assert len(TABLE_ROWS) == 26
    # The Criteo tables of published DLRM sizes: 204,184,588 rows, none above 40 million.
    assert (sum(TABLE_ROWS), max(TABLE_ROWS)) == (204_184_588, 40_000_000)
    schema = CriteoTerabyteData(path="not/here").schema()
    assert tuple(feature.rows for feature in schema.categorical) == TABLE_ROWS


@pytest.mark.parametrize("form", ["text", "memory", "windows"])
def test_all_days_but_the_last_train_and_the_last_is_halved(text: pathlib.Path, tmp_path: pathlib.Path, form) -> None:
    data = CriteoTerabyteData(path=str(text), days=DAYS, coding=SMALL, access="memory", batch_size=16)
    if form != "text":
        criteo_terabyte.to_parquet(text, tmp_path / "p", coding=SMALL, days=DAYS, row_group=15)
        data = CriteoTerabyteData(path=str(tmp_path / "p"), days=DAYS, access=form, batch_size=16)
        assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [f"day_{d}.parquet" for d in range(DAYS)]
    lines = fields(text)
    of_split = {"train": lines[: 2 * ROWS], "validation": lines[2 * ROWS :][:21], "test": lines[2 * ROWS :][21:]}
    for split, expected in of_split.items():
        found = examples(data, split)
        assert found["label"].tolist() == [float(line[0]) for line in expected]
        # log(x + 3), a missing integer counts as 0; float32 of float64.
        numbers = np.log(np.array([[int(v or 0) + 3 for v in line[1:14]] for line in expected], np.float64))
        np.testing.assert_allclose(found["dense"], numbers, rtol=1e-6)
        for c, name in enumerate(HASHES):
            missing = np.array([line[14 + c] == "" for line in expected])
            np.testing.assert_array_equal(found[name] == 0, missing)
            assert found[name].max() < TABLE_ROWS[c]
    assert data.schema() == data.build().schema


def test_days_are_known_in_time_order(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = (("0", 0, ROWS), ("1", ROWS, 2 * ROWS))
    data = CriteoTerabyteData(path=str(text), days=DAYS, coding=SMALL, access="memory", order="time")
    assert data.build().days() == expected
    criteo_terabyte.to_parquet(text, tmp_path, coding=SMALL, days=DAYS)
    data = CriteoTerabyteData(path=str(tmp_path), days=DAYS, order="time")
    assert data.build().days() == expected


def test_days_are_counted_as_numbers(tmp_path: pathlib.Path) -> None:
    for day in range(12):
        (tmp_path / f"day_{day}").write_text("x")
    assert [file.name for file in day_files(tmp_path, 12, ("",))] == [f"day_{day}" for day in range(12)]
    assert last_day_split([10, 20, 7]) == last_day_split([30, 7])
    assert last_day_split([30, 7]).bounds(37) == {"train": (0, 30), "validation": (30, 34), "test": (34, 37)}


def test_standardised_numbers_have_mean_0_and_variance_1_on_the_training_days(text: pathlib.Path) -> None:
    data = CriteoTerabyteData(path=str(text), days=DAYS, coding=SMALL, access="memory", numbers="standard")
    dense = examples(data, "train")["dense"]
    known = np.array([[v != "" for v in line[1:14]] for line in fields(text)[: 2 * ROWS]])
    for d in range(13):
        # A missing number is the mean, 0; the others have the moments.
        assert (dense[~known[:, d], d] == 0).all()
        np.testing.assert_allclose(dense[known[:, d], d].mean(), 0, atol=1e-6)
        np.testing.assert_allclose(dense[known[:, d], d].std(), 1, rtol=1e-5)


def test_a_counted_coding_is_the_same_with_hardly_any_memory(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    small = Counted(min_count=2, memory_bytes=26 * 1024, spill_folder=str(tmp_path))
    large = Counted(min_count=2)
    one, other = (
        examples(CriteoTerabyteData(path=str(text), days=DAYS, coding=coding, access="memory"), "train")
        for coding in (small, large)
    )
    for name in HASHES:
        np.testing.assert_array_equal(one[name], other[name])
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_can_be_capped(text: pathlib.Path) -> None:
    coding = Counted(min_count=1, max_values=5)
    schema = CriteoTerabyteData(path=str(text), days=DAYS, coding=coding).schema()
    assert {feature.rows for feature in schema.categorical} == {2 + 5}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "day_1.gz").unlink(), r"day_1 is missing of day_0 to day_2"),
        (lambda f: shutil.copy(f / "day_1.gz", f / "day_3.gz"), r"holds day 3, but data\.days=3\. Set data\.days=4"),
        (lambda f: (f / "day_1").write_text("x"), r"day 1 is there twice, as day_1 and day_1\.gz"),
        (lambda f: (f / "day_2.gz").write_bytes(b""), r"day_2\.gz: the file is empty"),
        (
            lambda f: (f / "day_2.gz").write_bytes((f / "day_2.gz").read_bytes()[:-30]),
            r"day_2\.gz: cannot be read after line \d+ \(Truncated",
        ),
        (
            lambda f: (f / "day_1.gz").write_bytes(gzip.compress(b"0\t1\n")),
            r"day_1\.gz: is not in the Criteo schema after line 0 .*Expected 40 columns, got 2",
        ),
    ],
    ids=["missing", "one more", "twice", "empty", "truncated", "columns"],
)
def test_folders_that_are_not_the_log_are_refused(text: pathlib.Path, tmp_path: pathlib.Path, spoil, message) -> None:
    folder = shutil.copytree(text, tmp_path / "days")
    spoil(folder)
    data = CriteoTerabyteData(path=str(folder), days=DAYS, coding=SMALL, access="memory")
    with pytest.raises(UserError, match=message):
        data.build()


def test_a_conversion_that_fails_leaves_no_file_that_could_be_read(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(text, tmp_path / "days")
    (folder / "day_1.gz").write_bytes((folder / "day_1.gz").read_bytes()[:-30])
    with pytest.raises(UserError, match="Truncated"):
        criteo_terabyte.to_parquet(folder, tmp_path / "p", coding=SMALL, days=DAYS)
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["day_0.parquet", "day_1.parquet.partial"]
    with pytest.raises(UserError, match="day_1, day_2 are missing"):
        CriteoTerabyteData(path=str(tmp_path / "p"), days=DAYS).build()


def test_days_converted_with_different_codings_are_refused(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    criteo_terabyte.to_parquet(text, tmp_path / "a", coding=SMALL, days=DAYS)
    criteo_terabyte.to_parquet(text, tmp_path / "b", coding=Counted(min_count=2), days=DAYS)
    shutil.copy(tmp_path / "b" / "day_1.parquet", tmp_path / "a" / "day_1.parquet")
    with pytest.raises(UserError, match=r"day_1\.parquet: was converted with another coding than .*day_0\.parquet"):
        CriteoTerabyteData(path=str(tmp_path / "a"), days=DAYS).build()


def test_wrong_fields_are_refused(text: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r'access="windows" needs converted files; run criteo_terabyte\.to_parquet'):
        CriteoTerabyteData(path=str(text), days=DAYS).build()
    with pytest.raises(UserError, match=r"is not a folder; wanted the folder of day_0 to day_23"):
        CriteoTerabyteData(path=str(text / "day_0.gz")).build()
    with pytest.raises(UserError, match=r"data\.days must be at least 2"):
        CriteoTerabyteData(path=str(text), days=1).build()
    with pytest.raises(UserError, match="one for each of the 26 features C1 to C26; got 2"):
        CriteoTerabyteData(path="not/here", coding=Hashed(rows=(4, 5))).schema()
    with pytest.raises(UserError, match=r"at least 2 .*below 2\*\*31; got 1 for C1"):
        CriteoTerabyteData(path="not/here", coding=Hashed(rows=1)).schema()
    with pytest.raises(UserError, match="memory_bytes must be at least 1024 for each of 26 features; got 5000"):
        CriteoTerabyteData(path=str(text), days=DAYS, coding=Counted(memory_bytes=5000)).schema()


def test_row_groups_have_the_size_asked_for(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    seen = []
    criteo_terabyte.to_parquet(
        text, tmp_path, coding=SMALL, days=DAYS, row_group=15, progress=lambda *s: seen.append(s)
    )
    metadata = pq.read_metadata(tmp_path / "day_1.parquet")
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [15, 15, 11]
    total = sum((text / f"day_{day}.gz").stat().st_size for day in range(DAYS))
    assert seen[-1] == (total, total)


def test_generated_logs_are_equal_for_equal_seeds_and_clicks_follow_the_features(tmp_path: pathlib.Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthetic_logs.write_criteo(tmp_path / name, rows=2000, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    lines = [line.split("\t") for line in a.decode().splitlines()]
    assert {len(line) for line in lines} == {40}
    clicks = np.array([int(line[0]) for line in lines])
    first = np.array([line[14] for line in lines])
    values, counts = np.unique(first[first != ""], return_counts=True)
    rates = [clicks[first == value].mean() for value in values[np.argsort(-counts)[:5]]]
    # Five values of at least a hundred examples each: standard error 0.05, effects of up to 1.5 in the log-odds.
    assert counts[np.argsort(-counts)[4]] >= 50
    assert max(rates) - min(rates) > 0.1
