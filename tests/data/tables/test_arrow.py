import itertools
import pathlib

import numpy as np
import pyarrow as pa
import pytest

from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.tables import arrow
from scalejax.data.tables.arrow import ArrowData
from scalejax.errors import UserError

N = 333
SCHEMA = Schema(
    categorical=(
        Categorical(name="user", rows=50),
        Categorical(name="genre", rows=7, length=None, capacity=3.0),
        Categorical(name="word", rows=9, length=None, capacity=3.0),
    ),
    dense=("x",),
    group="user",
)


@pytest.fixture(scope="module")
def memory() -> BatchedDataSet:
    rng = np.random.default_rng(0)

    def lists(rows: int) -> Ragged:
        lengths = rng.integers(0, 4, N)
        return Ragged(np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, rows, lengths.sum(), dtype=np.int32))

    columns = {
        "user": rng.integers(0, 50, N),
        "genre": lists(7),
        "word": lists(9),
        "x": rng.normal(size=N),
        "label": rng.integers(0, 2, N),
    }
    return from_columns(columns, SCHEMA, batch_size=32, seed=3)


@pytest.fixture
def path(memory: BatchedDataSet, tmp_path: pathlib.Path) -> pathlib.Path:
    arrow.convert(memory, tmp_path / "rows.arrow", chunk_rows=50)
    return tmp_path / "rows.arrow"


def assert_equal(found, expected, batches: int) -> None:
    pairs = list(zip(itertools.islice(found, batches), itertools.islice(expected, batches), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.features.to_lists() == b.features.to_lists()
        for name in ("dense", "labels", "weights", "groups"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_converted_file_holds_the_same_examples(memory: BatchedDataSet, path: pathlib.Path, split: str) -> None:
    mapped = ArrowData(path=str(path), batch_size=32).build()
    assert mapped.schema == memory.schema == ArrowData(path=str(path)).schema()
    assert mapped.num_examples(split) == memory.num_examples(split)
    assert_equal(mapped.eval_batches(split), memory.eval_batches(split), 100)


def test_training_order_is_that_of_memory(memory: BatchedDataSet, path: pathlib.Path) -> None:
    mapped = ArrowData(path=str(path), batch_size=32, seed=3).build()
    assert_equal(mapped.train_batches(start_example=250), memory.train_batches(start_example=250), 10)


def test_the_file_is_plain_arrow(path: pathlib.Path) -> None:
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.names == ["record", "genre", "word"]
    assert table.num_rows == N


def test_progress_reaches_the_end_and_no_partial_file_stays(memory: BatchedDataSet, tmp_path: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    arrow.convert(memory, tmp_path / "a.arrow", chunk_rows=100, progress=lambda *state: seen.append(state))
    assert seen[-1] == (N, N)
    assert [p.name for p in tmp_path.iterdir()] == ["a.arrow"]


def test_truncated_foreign_and_missing_files_are_refused(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rows\.arrow: is not a complete Arrow file"):
        ArrowData(path=str(path)).build()
    with pytest.raises(UserError, match="no such file"):
        ArrowData(path=str(tmp_path / "none.arrow")).build()
    foreign = tmp_path / "foreign.arrow"
    table = pa.table({"a": [1]})
    with pa.OSFile(str(foreign), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="was not written by"):
        ArrowData(path=str(foreign)).build()


def test_a_folder_holds_one_file(memory: BatchedDataSet, path: pathlib.Path) -> None:
    assert ArrowData(path=str(path.parent)).build().schema == memory.schema
    arrow.convert(memory, path.with_name("more.arrow"))
    with pytest.raises(UserError, match=r"holds 2 \*\.arrow files; wanted one\. Point data\.path at .*more\.arrow"):
        ArrowData(path=str(path.parent)).build()


def test_a_flipped_byte_names_the_record_batch(path: pathlib.Path) -> None:
    table = arrow.MappedTable(path)
    needle = np.ascontiguousarray(table.take_batch(2).records[7]).tobytes()
    del table
    whole = bytearray(path.read_bytes())
    at = whole.index(needle)
    whole[at + 4] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"rows\.arrow, record batch 2 is damaged"):
        ArrowData(path=str(path)).build()


def test_an_id_damaged_after_opening_is_refused(path: pathlib.Path) -> None:
    data = ArrowData(path=str(path), verify="nothing", batch_size=32)
    needle = np.ascontiguousarray(arrow.MappedTable(path).take_batch(0).records[0]).tobytes()
    whole = bytearray(path.read_bytes())
    whole[whole.index(needle) + 3] ^= 0x40  # the first word of a record is its first id
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"\(damaged\): feature 'user'"):
        list(data.build().eval_batches("train"))


def test_bytes_that_are_no_records_are_checked_before_arrow_reads_them(path: pathlib.Path) -> None:
    whole = path.read_bytes()
    for place in (whole.index(b"fingerprint"), whole.rindex(b"fingerprint"), whole.index(b"SCALEJX2") - 60):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rows\.arrow: .*(digest of its description differs|places of its record)"):
            schema_of(path)
    path.write_bytes(whole.replace(b"SCALEJX2", b"SCALEJX3"))
    with pytest.raises(UserError, match="the digest of its description is missing"):
        schema_of(path)


def schema_of(path: pathlib.Path) -> Schema:
    return ArrowData(path=str(path), verify="nothing").schema()


def test_a_file_of_format_1_is_read(memory: BatchedDataSet, tmp_path: pathlib.Path) -> None:
    from fuzz.readers import as_format_1

    arrow.convert(memory, tmp_path / "rows.arrow", chunk_rows=50)
    as_format_1(tmp_path / "rows.arrow")
    assert b"SCALEJX2" not in (tmp_path / "rows.arrow").read_bytes()
    mapped = ArrowData(path=str(tmp_path / "rows.arrow"), batch_size=32, seed=3).build()
    assert_equal(mapped.train_batches(start_example=0), memory.train_batches(start_example=0), 10)
