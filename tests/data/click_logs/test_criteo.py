import gzip
import itertools
import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from scalejax.data.click_logs import criteo
from scalejax.data.click_logs.criteo import HASHES, INTEGERS, Counted, CriteoData, Hashed
from scalejax.data.splits import Fractions
from scalejax.errors import UserError

N = 300
ALL = Fractions(train=1.0, validation=0.0)


def lines() -> list[list[str]]:
    rng = np.random.default_rng(0)
    out = []
    for _ in range(N):
        integers = [str(v) if v < 90 else "" for v in rng.integers(-2, 100, 13)]
        hashes = [f"{v * 0x01234567 & 0xFFFFFFFF:08x}" if v else "" for v in rng.zipf(1.5, 26) % 40]
        out.append([str(rng.integers(0, 2)), *integers, *hashes])
    return out


def write(path: pathlib.Path, rows: list[list[str]]) -> pathlib.Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


@pytest.fixture
def text(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(tmp_path / "train.txt", lines())


def columns(data: CriteoData) -> dict[str, np.ndarray]:
    """Every example of the training split, in file order."""
    batches = list(data.build().eval_batches("train"))
    real = np.concatenate([b.weights for b in batches]) > 0
    found = {name: np.concatenate([b.features[name].values for b in batches])[real] for name in HASHES}
    found["dense"] = np.concatenate([b.dense for b in batches])[real]
    found["label"] = np.concatenate([b.labels[:, 0] for b in batches])[real]
    return found


def test_labels_and_log_integers_follow_the_text(text: pathlib.Path) -> None:
    found = columns(CriteoData(path=str(text), split=ALL, batch_size=64))
    rows = lines()
    assert found["label"].tolist() == [float(row[0]) for row in rows]
    logs = np.array([[np.log(int(v) + 3.0) if v else np.nan for v in row[1:14]] for row in rows])
    expected = np.nan_to_num((logs - np.nanmean(logs, 0)) / np.nanstd(logs, 0))
    # float32 of a float64 computation.
    np.testing.assert_allclose(found["dense"], expected, atol=5e-7)


def test_a_missing_integer_is_what_was_chosen_for_it(text: pathlib.Path) -> None:
    zero = columns(CriteoData(path=str(text), split=ALL, nan="zero"))
    logs = np.array([[np.log(int(v or 0) + 3.0) for v in row[1:14]] for row in lines()])
    np.testing.assert_allclose(zero["dense"], (logs - logs.mean(0)) / logs.std(0), atol=5e-7)
    with pytest.raises(UserError, match="is missing"):
        CriteoData(path=str(text), split=ALL, nan="error").build()


def test_hashed_ids_are_stable_and_separate_missing_values(text: pathlib.Path) -> None:
    found = columns(CriteoData(path=str(text), split=ALL, coding=Hashed(rows=1000)))
    for c, name in enumerate(HASHES):
        values = [row[14 + c] for row in lines()]
        ids = found[name].tolist()
        of = dict(zip(values, ids, strict=True))
        assert [of[v] for v in values] == ids
        assert [i == 0 for i in ids] == [v == "" for v in values]
        assert max(ids) < 1000
        # 40 values in 999 buckets: more than 8 collisions has probability below 1e-6.
        assert len(set(ids)) >= len(set(values)) - 8
    # Columns hash apart.
    assert found["C1"].tolist() != found["C2"].tolist()


def test_counted_ids_are_ordered_by_frequency(text: pathlib.Path) -> None:
    data = CriteoData(path=str(text), split=ALL, coding=Counted(min_count=5))
    found = columns(data)
    for c, name in enumerate(HASHES):
        values = [row[14 + c] for row in lines()]
        counts = {v: values.count(v) for v in values if v}
        kept = sorted((v for v in counts if counts[v] >= 5), key=lambda v: (-counts[v], int(v, 16)))
        of = {"": 0} | {v: 1 for v in counts} | {v: 2 + i for i, v in enumerate(kept)}
        assert found[name].tolist() == [of[v] for v in values]
        assert data.schema()[name].rows == 2 + len(kept)
    assert data.build().schema == data.schema()


@pytest.mark.parametrize("coding", [Hashed(rows=500), Counted(min_count=3)], ids=["hashed", "counted"])
@pytest.mark.parametrize("access", ["memory", "windows"])
def test_a_converted_file_gives_the_same_examples(
    text: pathlib.Path, tmp_path: pathlib.Path, coding: Hashed | Counted, access: str
) -> None:
    seen = []
    out = tmp_path / "criteo.parquet"
    criteo.to_parquet(text, out, coding=coding, row_group=70, progress=lambda *s: seen.append(s))
    assert pq.read_metadata(out).num_row_groups == 5
    assert seen[-1] == (text.stat().st_size, text.stat().st_size)
    direct = columns(CriteoData(path=str(text), split=ALL, coding=coding))
    data = CriteoData(path=str(out), split=ALL, access=access)  # pyright: ignore
    assert data.schema() == data.build().schema == CriteoData(path=str(text), coding=coding).schema()
    converted = columns(data)
    for name, column in direct.items():
        np.testing.assert_allclose(converted[name], column, atol=1e-6)  # sums of the statistics in another order


def test_folders_and_gzip_are_read(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    rows = lines()
    write(folder / "day_0", rows[:100])
    with gzip.open(folder / "day_1.gz", "wt") as f:
        f.writelines("\t".join(row) + "\n" for row in rows[100:])
    one, several = (columns(CriteoData(path=str(p), split=ALL)) for p in (text, folder))
    assert all((one[name] == several[name]).all() for name in HASHES)


def test_training_resumes_from_a_converted_file(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    criteo.to_parquet(text, tmp_path / "c.parquet", row_group=50)
    data = CriteoData(path=str(tmp_path / "c.parquet"), access="windows", batch_size=32).build()
    whole = [b.dense for b in itertools.islice(data.train_batches(), 20)]
    later = [b.dense for b in itertools.islice(data.train_batches(start_example=320), 10)]
    np.testing.assert_array_equal(later, whole[10:])


@pytest.mark.parametrize(
    ("line", "field", "value", "message"),
    [
        (7, 0, "2", "label 'label' is 2 in row 7"),
        (7, 0, "", "a line has no label"),
        (7, 3, "many", "is not in the Criteo schema"),
        (7, 3, "-5", r"'I3' is -5 in row 7, and log\(x \+ 3\) does not exist"),
        (7, 16, "xyzw1234", "column C3 holds b'xyzw1234' 7 lines further"),
        (7, 16, "123", "column C3 holds b'123' 7 lines further"),
    ],
)
def test_bad_fields_are_refused(tmp_path: pathlib.Path, line: int, field: int, value: str, message: str) -> None:
    rows = lines()
    rows[line][field] = value
    with pytest.raises(UserError, match=message):
        CriteoData(path=str(write(tmp_path / "bad.txt", rows))).build()


def test_a_truncated_line_is_refused(text: pathlib.Path) -> None:
    text.write_text(text.read_text()[:-30])
    with pytest.raises(UserError, match=r"train\.txt: is not in the Criteo schema .*Expected 40 columns"):
        CriteoData(path=str(text)).build()


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "Truncated compressed stream"),
        (lambda data: data[:-8], "Truncated compressed stream"),
        (lambda data: data[:5], "Truncated compressed stream"),
        (_flip, "(zlib inflate failed|Truncated compressed stream)"),
        (lambda data: gzip.decompress(data), "zlib inflate failed: incorrect header check"),
    ],
    ids=["cut", "no_checksum", "cut_header", "flipped", "not_gzip"],
)
def test_a_damaged_gzip_file_is_refused(text: pathlib.Path, tmp_path: pathlib.Path, damage, said: str) -> None:
    path = tmp_path / "train.txt.gz"
    path.write_bytes(damage(gzip.compress(text.read_bytes())))
    message = (
        rf"train\.txt\.gz: cannot be read after line \d+ \({said}.*\); .* not gzip\? Copy it again from its source"
    )
    with pytest.raises(UserError, match=message):
        CriteoData(path=str(path)).build()


def test_the_schema_of_hashed_text_needs_no_data() -> None:
    schema = CriteoData(path="not/here", coding=Hashed(rows=10)).schema()
    assert schema.keys == HASHES
    assert schema.dense == INTEGERS
    assert {feature.rows for feature in schema.categorical} == {10}
    with pytest.raises(UserError, match="no such file"):
        CriteoData(path="not/here", coding=Counted()).schema()
    with pytest.raises(UserError, match="no such file"):
        CriteoData(path="not/here.parquet").schema()


def test_missing_and_empty_files_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        CriteoData(path=str(tmp_path / "none.txt")).build()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="the file is empty"):
        CriteoData(path=str(tmp_path / "empty.txt")).build()


def test_windows_need_a_converted_file(text: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"run criteo\.to_parquet"):
        CriteoData(path=str(text), access="windows").build()


def test_a_parquet_file_of_another_origin_is_refused(tmp_path: pathlib.Path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"was not written by criteo\.to_parquet"):
        CriteoData(path=str(tmp_path / "a.parquet")).build()


def test_integers_are_the_thirteen_and_hashes_the_twenty_six() -> None:
    assert (len(INTEGERS), len(HASHES)) == (13, 26)
