import datetime
import gzip
import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic_logs

from scalejax.data.click_logs import avazu
from scalejax.data.click_logs.avazu import COLUMNS, FEATURES, HASHED, AvazuData
from scalejax.data.examples.coding import Counted, Hashed
from scalejax.data.splits import SPLITS, ByTime, Fractions
from scalejax.errors import UserError

ROWS = 500
ALL = Fractions(train=1.0, validation=0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("avazu") / "train.gz"
    synthetic_logs.write_avazu(path, rows=ROWS, exponent=1.5)
    return path


def lines(text: pathlib.Path) -> list[dict[str, str]]:
    header, *rows = gzip.decompress(text.read_bytes()).decode().splitlines()
    assert header == ",".join(COLUMNS)
    return [dict(zip(COLUMNS, row.split(","), strict=True)) for row in rows]


def columns(data: AvazuData, split: str = "train") -> dict[str, list[int]]:
    built = data.build()
    batches = list(built.eval_batches(split))
    real = np.concatenate([b.weights for b in batches]) > 0
    found = {name: np.concatenate([b.features[name].values for b in batches])[real] for name in built.schema.keys}
    found["click"] = np.concatenate([b.labels[:, 0] for b in batches])[real]
    return {name: column.astype(int).tolist() for name, column in found.items()}


def test_the_schema_is_published_columns_and_two_of_the_calendar() -> None:
    schema = AvazuData(path="not/here", coding=Hashed(rows=9)).schema()
    assert (len(COLUMNS), len(FEATURES), len(HASHED)) == (24, 21, 9)
    assert schema.keys == ("hour_of_day", "weekday", *FEATURES)
    assert [f.rows for f in schema.categorical] == [24, 7] + 21 * [9]
    assert (schema.dense, schema.labels) == ((), ("click",))


def test_labels_and_calendar_follow_the_text(text: pathlib.Path) -> None:
    found = columns(AvazuData(path=str(text), split=ALL, coding=Hashed(rows=50), batch_size=64))
    rows = lines(text)
    assert found["click"] == [int(row["click"]) for row in rows]
    times = [datetime.datetime.strptime(row["hour"], "%y%m%d%H") for row in rows]
    assert found["hour_of_day"] == [time.hour for time in times]
    assert found["weekday"] == [time.weekday() for time in times]
    for name in FEATURES:
        assert min(found[name]) > 0
        assert max(found[name]) < 50


@pytest.mark.parametrize("form", ["text", "memory", "windows"])
def test_counted_ids_are_ordered_by_frequency_in_text_and_parquet(text, tmp_path: pathlib.Path, form: str) -> None:
    coding = Counted(min_count=3)
    data = AvazuData(path=str(text), split=ALL, coding=coding)
    if form != "text":
        avazu.to_parquet(text, tmp_path / "a.parquet", coding=coding, row_group=70)
        assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 8
        data = AvazuData(path=str(tmp_path / "a.parquet"), split=ALL, access=form)  # pyright: ignore
    found = columns(data)
    for name in FEATURES:
        values = [int(row[name], 16 if name in HASHED else 10) for row in lines(text)]
        counts = {v: values.count(v) for v in set(values)}
        kept = sorted((v for v in counts if counts[v] >= 3), key=lambda v: (-counts[v], v))
        of = dict.fromkeys(counts, 1) | {v: 2 + i for i, v in enumerate(kept)}
        assert found[name] == [of[v] for v in values]
        assert data.schema()[name].rows == 2 + len(kept)
    assert data.schema() == data.build().schema


@pytest.mark.parametrize("form", ["text", "memory", "windows"])
def test_the_split_is_by_hour(text: pathlib.Path, tmp_path: pathlib.Path, form: str) -> None:
    by_hour = ByTime(column="hour", validation_from=14_10_21_05, test_from=14_10_30_22)
    hours = [int(row["hour"]) for row in lines(text)]
    path = text
    if form != "text":
        path = tmp_path / "a.parquet"
        avazu.to_parquet(text, path, row_group=70)
    access = "windows" if form == "windows" else "memory"
    for split, (validation_from, test_from) in (
        (by_hour, (14_10_21_05, 14_10_30_22)),
        (avazu.BY_DAY, (14_10_29_00, 14_10_30_00)),
    ):
        data = AvazuData(path=str(path), split=split, access=access).build()
        of_hour = [(h >= validation_from) + (h >= test_from) for h in hours]
        assert [data.num_examples(name) for name in SPLITS] == [of_hour.count(s) for s in range(3)]
        assert all(of_hour.count(s) for s in range(3))


def test_days_are_known_in_time_order(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    days = AvazuData(path=str(text), order="time").build().days()
    assert [name for name, _, _ in days] == [f"201410{day}" for day in range(21, 29)]
    assert days[-1][2] == sum(int(row["hour"]) < 14_10_29_00 for row in lines(text))
    avazu.to_parquet(text, tmp_path / "a.parquet", row_group=70)
    streamed = AvazuData(path=str(tmp_path / "a.parquet"), order="time", access="windows").build().days()
    assert streamed == days


def test_missing_and_negative_values_have_ids_of_their_own(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = lines(text)
    rows[3] |= {"site_id": "", "C20": "", "device_ip": "FFFFFFFF"}
    rows[4] |= {"C20": "-1"}
    path = write(tmp_path / "a.csv", rows)
    found = columns(AvazuData(path=str(path), split=ALL, coding=Counted(min_count=1)))
    assert found["site_id"][3] == found["C20"][3] == 0
    assert found["device_ip"][3] >= 2
    same = [i for i, row in enumerate(rows) if row["C20"] == "-1"]
    assert {found["C20"][i] for i in same} == {found["C20"][4]}
    assert found["C20"][4] >= 2


def write(path: pathlib.Path, rows: list[dict[str, str]], header: tuple[str, ...] = COLUMNS) -> pathlib.Path:
    path.write_text("".join(",".join(line) + "\n" for line in [header, *([*row.values()] for row in rows)]))
    return path


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("click", "2", "label 'click' is 2 in row 7"),
        ("click", "", "a line has no click"),
        ("click", "yes", "is not in the Avazu schema after line 1 "),
        ("hour", "", "a line has no hour"),
        ("hour", "14103124", r"line 2 and following: hour is 14103124 7 lines further; wanted YYMMDDHH"),
        ("hour", "14133100", "hour is 14133100 7 lines further"),
        ("hour", "-5", "hour is -5 7 lines further"),
        ("site_id", "xyzw1234", "column site_id holds b'xyzw1234' 7 lines further; wanted 8 hex digits"),
        ("device_ip", "123", "column device_ip holds b'123' 7 lines further"),
        ("C14", "a1", "is not in the Avazu schema .*'a1'"),
        ("C20", "1,2", "Expected 24 columns, got 25"),
    ],
)
def test_bad_fields_are_refused(
    text: pathlib.Path, tmp_path: pathlib.Path, name: str, value: str, message: str
) -> None:
    rows = lines(text)
    rows[7][name] = value
    path = write(tmp_path / "bad.csv", rows)
    with pytest.raises(UserError, match=message):
        AvazuData(path=str(path)).build()


def test_another_header_is_refused(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = lines(text)
    renamed = tuple("device_modle" if name == "device_model" else name for name in COLUMNS)
    with pytest.raises(UserError, match=r"line 1: there is no column 'device_model'. Did you mean 'device_modle'"):
        AvazuData(path=str(write(tmp_path / "a.csv", rows, renamed))).build()
    with pytest.raises(UserError, match=r"line 1: columns must be id, click, .*in this order; got click, id"):
        AvazuData(path=str(write(tmp_path / "a.csv", rows, ("click", "id", *COLUMNS[2:])))).build()


def test_a_truncated_file_is_refused(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.gz").write_bytes(text.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"train\.gz: cannot be read after line \d+ \(Truncated"):
        AvazuData(path=str(tmp_path / "train.gz")).build()
    with pytest.raises(UserError, match="Truncated"):
        avazu.to_parquet(tmp_path / "train.gz", tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()


def test_wrong_paths_and_fields_are_refused(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        AvazuData(path=str(tmp_path / "none.csv")).build()
    with pytest.raises(UserError, match=r"holds no \*\.csv or \*\.gz"):
        AvazuData(path=str(tmp_path)).build()
    with pytest.raises(UserError, match=r"run avazu\.to_parquet"):
        AvazuData(path=str(text), access="windows").build()
    with pytest.raises(UserError, match="the column 'hour'; got 'day'"):
        AvazuData(path=str(text), split=ByTime(column="day", validation_from=1, test_from=2)).build()
