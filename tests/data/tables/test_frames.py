"""Files and frames of any kind become the same table, and a broken one is a message with its line."""

import contextlib
import datetime
import gzip
import io

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from scalejax.data import packed_files
from scalejax.data.tables import frames
from scalejax.errors import UserError

TEXT = """number,code,when,word,flag
1,007,2024-01-31,"x, y",true
2.5,012,2024-02-29,?,false
NA,100,,z,true
"""
TYPES = {"number": pl.Float64, "code": pl.String, "when": pl.Datetime, "word": pl.String, "flag": pl.String}


def test_the_whole_file_says_what_a_column_holds(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n" + "".join(f"{i},{i}\n" for i in range(3000)) + "3000,text\n")
    found = frames.read(str(path))
    assert found.schema == {"n": pl.Int64, "t": pl.String}
    assert found["t"][-1] == "text"


def test_missing_leading_zeros_and_dates(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(TEXT)
    found = frames.read(str(path))
    assert {name: kind.base_type() for name, kind in found.schema.items()} == TYPES
    assert found["number"].to_list() == [1.0, 2.5, None]
    assert found["code"].to_list() == ["007", "012", "100"]
    assert found["word"].to_list() == ["x, y", None, "z"]
    assert found["when"].null_count() == 1


@pytest.mark.parametrize("kind", ["csv.gz", "csv.zst", "tsv", "tsv.gz"])
def test_text_of_every_kind_is_one_table(tmp_path, kind):
    plain, other = tmp_path / "a.csv", tmp_path / f"a.{kind}"
    plain.write_text("\ufeff" + TEXT)  # with a byte order mark
    text = TEXT.replace('"x, y"', "x, y").replace(",", "\t").replace("x\t y", "x, y") if "tsv" in kind else TEXT
    if kind.endswith("zst"):
        with pa.CompressedOutputStream(str(other), "zstd") as file:
            file.write(text.encode())
    else:
        other.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    assert frames.read(str(other)).equals(frames.read(str(plain)))


def test_parquet_arrow_and_frames_are_one_table(tmp_path):
    table = pa.table({"a": [1, 2, None], "b": ["u", "NA", "v"], "c": [[1], [], [2, 3]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "a.arrow")
    found = frames.read(frames.hold(table))
    assert found["b"].to_list() == ["u", None, "v"]
    assert frames.read(str(tmp_path / "a.parquet")).equals(found)
    assert frames.read(str(tmp_path / "a.arrow")).equals(found)


def test_a_frame_is_known_by_its_content():
    columns = {"a": [1.0, None], "b": ["x", "yz"], "c": [["p"], ["q", "r"]]}
    path = frames.hold(pl.DataFrame(columns))
    assert path == frames.hold(pa.table(columns).combine_chunks())
    for changed in ({"a": [1.0, 0.0]}, {"b": ["xy", "z"]}, {"c": [["p", "q"], ["r"]]}, {"b": ["x", None]}):
        assert frames.hold(pl.DataFrame(columns | changed)) != path
    with pytest.raises(UserError, match="in the memory of another process"):
        frames.read("frame:0123")


def test_what_is_not_a_number_is_missing(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1.5\nNaN\n")
    assert frames.read(str(tmp_path / "a.csv"))["a"].to_list() == [1.5, None]
    assert frames.read(frames.hold(pl.DataFrame({"a": [1.5, float("nan")]})))["a"].to_list() == [1.5, None]


def test_columns_of_bytes_and_of_arrays_are_taken():
    columns = {"b": pl.Series([b"\xff", None]), "a": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2))}
    path = frames.hold(pl.DataFrame(columns))
    assert frames.read(path)["a"].to_list() == [[1, 2], [3, 4]]
    assert frames.hold(pl.DataFrame(columns | {"b": pl.Series([b"\xfe", None])})) != path


def test_a_map_is_a_list_of_pairs():
    column = pa.array([[("a", 1.5)], None], type=pa.map_(pa.string(), pa.float32()))
    assert frames.read(frames.hold(pa.table({"m": column})))["m"].to_list() == [[{"key": "a", "value": 1.5}], None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", r"line 3: has 1 fields; the first line names 2 columns"),
        ("a,b\n1,2\n3,4,5\n", r"line 3: has 3 fields"),
        ("a,b\n1,2\n\n3,4\n", r"line 3: has 0 fields"),
        ('a,b\n"1\n1",2\n3\n', r"line 4: has 1 fields"),
        ("a,b,a\n1,2,3\n", r"two columns are called 'a'"),
        ("a,b\n1,\xe9\n", r"cannot be read as text in UTF-8"),
        ('a,b\n1,"x\n', r"damaged, or of another kind|a quotation mark is not closed"),
        (",".join(f"c{i}" for i in range(100_000)) + "\n", r"has 100,000 columns; at most 1,000"),
    ],
)
def test_what_is_wrong_with_a_text_is_said_with_its_line(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(UserError, match=message):
        frames.read(str(path))


def test_empty_lines_at_the_end_are_none(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n\n\n")
    assert frames.read(str(path)).rows() == [(1, 2)]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv.gz", "a.csv.zst"])
def test_a_damaged_file_is_one_message(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"PAR1" + bytes(np.random.RandomState(0).randint(0, 256, 100, dtype=np.uint8)))
    with pytest.raises(UserError, match="damaged"):
        frames.read(str(path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_flipped_bits_give_the_same_table_or_one_message(tmp_path, kind):
    random, path = np.random.RandomState(0), tmp_path / f"a.{kind}"
    table = pa.table({"t": [f"text {i % 7}" for i in range(300)], "n": random.rand(300), "l": [[1, 2]] * 300})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, write_page_checksum=True)
    else:
        pyarrow.feather.write_feather(table, str(path))
    whole = path.read_bytes()
    for bit in random.randint(0, 8 * len(whole), 60):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            found = frames.read(str(path))
            # Values of Arrow carry no checksum; pages of this Parquet file do.
            assert kind == "arrow" or found.equals(pl.DataFrame(table))


def test_a_file_that_unpacks_to_far_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_files, "ALWAYS_BYTES", 2**16)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 2**20))
    with pytest.raises(UserError, match="unpacks to more than 500 times"):
        frames.read(str(path))


@pytest.mark.parametrize(
    "array", [pa.array([b"\xff"], pa.binary()).view(pa.string()), pa.array([1], pa.decimal256(70))]
)
def test_columns_that_cannot_be_taken_are_one_message(array):
    with pytest.raises(UserError, match="cannot be read"):
        frames.hold(pa.table({"a": array}))


def test_the_index_of_a_pandas_frame_is_no_column():
    table = pa.table({"a": [1, 2], "__index_level_0__": [0, 0]})  # as pandas gives an index that is no range
    assert frames.read(frames.hold(table)).columns == ["a"]


def test_times_may_have_a_zone(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t\n2024-01-01T00:00:00Z\n2024-01-01T02:30:00+02:00\n")
    utc = [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 1, 0, 30)]
    assert frames.read(str(path))["t"].to_list() == utc


def test_an_unknown_ending_is_named(tmp_path):
    path = tmp_path / "a.xlsx"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"ends in \.csv or \.tsv"):
        frames.read(str(path))


def test_a_frame_of_mixed_objects_is_one_message():
    with pytest.raises(UserError, match="from_frame: BytesIO cannot be taken as Arrow columns"):
        frames.hold(io.BytesIO())


@pytest.mark.parametrize(
    ("integers", "kind"),
    [
        ([2**53 + 1, None, -(2**63)], pl.Int64),
        ([2**63, 2**63 + 1, None, 2**64 - 1], pl.UInt64),
        ([2**64, 2**64 + 1, None], pl.String),
        ([2**63, 2**63 + 1, None, -1], pl.String),
    ],
)
def test_integers_are_kept_to_the_last_digit_or_are_text(tmp_path, integers, kind):
    path = tmp_path / "a.csv"
    path.write_text("n,m\n" + "".join(f"{'' if i is None else i},x\n" for i in integers))
    expected = [None if i is None else str(i) if kind == pl.String else i for i in integers]
    decimal = pa.table({"n": pa.array(integers, pa.decimal128(38, 0))})
    pa.parquet.write_table(decimal, tmp_path / "a.parquet")
    for found in (frames.read(str(path)), frames.read(str(tmp_path / "a.parquet")), frames.read(frames.hold(decimal))):
        assert found["n"].dtype == kind
        assert found["n"].to_list() == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("9007199254740993\n0.5\n", pl.String),
        ("9007199254740993.0\n0.5\n", pl.String),
        ("9007199254740992\n0.5\n+36893488147419103232\n", pl.Float64),
        ("1e30\n-12345678901234567.25\n", pl.Float64),
    ],
)
def test_integers_beside_fractions_are_numbers_where_float64_holds_them(tmp_path, text, kind):
    path = tmp_path / "a.csv"
    path.write_text(f"n\n{text}")
    assert frames.read(str(path))["n"].dtype == kind
