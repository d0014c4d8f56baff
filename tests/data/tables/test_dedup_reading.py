"""Clustered logs read into deduplicated batches: the lists that the file has, nothing expanded or hashed."""

import dataclasses
import itertools
import pathlib
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.data.examples import dedup
from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import DedupBatch, expand_batch
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.records import ExampleRecords, Ragged, RecordLayout, Shared
from scalejax.data.examples.row_transforms import FirstIds, HashIds
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.sessions.clustering import cluster_by_session
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.data.splits import Fractions
from scalejax.data.tables import arrow, parquet_files
from scalejax.data.tables.parquet import ParquetData
from scalejax.data.tables.parquet_files import ParquetFiles
from scalejax.errors import UserError

Access = Literal["memory", "windows"]

LOG = SessionLog(
    sessions=120, samples=8, session_length="geometric", repeat=0.8, user_groups=(2, 1, 1), user_ids=3.0,
    item_features=1, rows=500, dense=2, concurrent=30,
)  # fmt: skip
FEATURES = tuple(Categorical(name=name, rows=97, length=None, capacity=20.0) for name in LOG.names)
HASHED = tuple((name, HashIds(rows=97, seed=f)) for f, name in enumerate(LOG.names))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("log")
    LOG.write(path / "log.parquet")
    cluster_by_session(path / "log.parquet", path / "short", partitions=2, row_group=130, groups=LOG.groups)
    cluster_by_session(path / "log.parquet", path / "whole", partitions=2, row_group=130)
    return path


def data(folder: pathlib.Path, name: str = "short", groups: dedup.Groups = (), **options) -> ParquetData:
    fields = {"session": "session_id", "batch_size": 64, "window": 2, "transforms": HASHED, **options}
    return ParquetData(path=str(folder / name), categorical=FEATURES, dense=LOG.dense_names, dedup=groups, **fields)


def assert_same(one: ClickBatch, other: ClickBatch) -> None:
    """To the bit, types included."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("dense", "labels", "weights")]
    pairs += [(one.features.values, other.features.values), (one.features.lengths, other.features.lengths)]
    for a, b in pairs:
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    assert one.features.keys == other.features.keys


@pytest.mark.default_cases
@pytest.mark.parametrize("groups", [LOG.groups, (("user_2_0", "user_0_1"), ("item_0",)), (LOG.names,)])
@pytest.mark.parametrize("name", ["short", "whole"])
@pytest.mark.parametrize("access", ["memory", "windows"])
def test_batches_expand_to_those_of_plain_reading(
    folder: pathlib.Path, access: Access, name: str, groups: dedup.Groups
) -> None:
    ours = data(folder, name, groups, access=access).build()
    plain = data(folder, "whole", access=access).build()
    for split in ("train", "validation", "test"):
        assert ours.num_examples(split) == plain.num_examples(split)
    for pairs in (
        itertools.islice(zip(ours.train_batches(), plain.train_batches(), strict=True), 25),
        zip(ours.eval_batches("test"), plain.eval_batches("test"), strict=True),
        zip(ours.range_batches(5, 300), plain.range_batches(5, 300), strict=True),
        zip(
            ours.eval_batches("validation", process_index=1, process_count=2),
            plain.eval_batches("validation", process_index=1, process_count=2),
            strict=True,
        ),
    ):  # fmt: skip
        count = 0
        for a, b in pairs:
            assert isinstance(a, DedupBatch)
            a.features.validate()
            assert a.features.groups == groups
            assert_same(expand_batch(a), expand_batch(b))
            count += 1
        assert count


@pytest.mark.parametrize("access", ["memory", "windows"])
def test_distinct_rows_are_those_of_the_file_and_nothing_is_hashed(
    folder: pathlib.Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("rows are deduplicated again")

    for module in (dedup, parquet_files):
        monkeypatch.setattr(module, "deduplicate", refuse)
    monkeypatch.setattr(dedup, "hash_rows", refuse)
    monkeypatch.setattr(ParquetFiles, "_filled", lambda _, table, group: table)
    built = data(folder, groups=LOG.groups, access=access, split=Fractions(train=1.0, validation=0.0)).build()
    files = ParquetFiles(folder / "short")
    written = sum(files._stored(group, ["user_0_0"])["user_0_0"].drop_null().length() for group in files.groups)
    # Every row of lists of an epoch is in one batch, or in two where the end of a batch cuts its session.
    size = built.num_examples("train")
    batches = list(built.range_batches(0, size))
    met = sum(int(np.unique(b.features.inverse[0][b.weights > 0]).size) for b in batches)
    assert written <= met <= written + len(batches) - 1


def test_a_transform_sees_the_lists_that_the_file_has_once(folder: pathlib.Path) -> None:
    seen: dict[str, int] = {}

    class Counting(HashIds):
        def __call__(self, features: KeyedJagged) -> KeyedJagged:
            seen[features.keys[0]] = seen.get(features.keys[0], 0) + features.num_examples
            return super().__call__(features)

    counting = tuple((name, Counting(rows=97)) for name in LOG.names)
    data(folder, groups=LOG.groups, access="memory", transforms=counting).build()
    files = ParquetFiles(folder / "short")
    for name in LOG.names:
        lists = [files._stored(group, [name])[name].drop_null().length() for group in files.groups]
        assert seen[name] == sum(lists)
    assert 2.5 * seen["user_0_0"] < seen["item_0"] == files.num_rows


@pytest.mark.parametrize("access", ["memory", "windows"])
def test_plain_batches_are_transformed_too(folder: pathlib.Path, access: Access) -> None:
    cut = tuple((name, FirstIds(count=1)) for name in LOG.names)
    built = data(folder, "whole", access=access, transforms=(*HASHED, *cut)).build()
    batch = expand_batch(next(built.train_batches()))
    assert batch.features.lengths.max() == 1
    assert batch.features.values.max() < 97
    other = data(folder, "whole", access=access, transforms=HASHED).build()
    assert built.fingerprint() != other.fingerprint()
    firsts = [ids[:1] for ids in expand_batch(next(other.train_batches())).features.to_lists()["user_1_0"]]
    assert batch.features.to_lists()["user_1_0"] == firsts


def test_one_id_a_row_is_transformed_too(tmp_path: pathlib.Path) -> None:
    ids = np.array([2**62, -5, 7, 2**62])
    table = {"a": ids, "label": np.array([0, 1, 0, 1], np.int8), "b": pa.array([[1, 2], [1, 2], [3], [3]])}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    features = (Categorical(name="a", rows=10), Categorical(name="b", rows=10, length=None, capacity=2.0))
    config = ParquetData(
        path=str(tmp_path / "log.parquet"), categorical=features, transforms=(("a", HashIds(rows=10, seed=3)),),
        dedup=(("b",),), order="time", batch_size=4, split=Fractions(train=1.0, validation=0.0),
    )  # fmt: skip
    batch = next(config.build().train_batches())
    assert isinstance(batch, DedupBatch)
    assert batch.features.inverse[0].tolist() == [0, 0, 1, 1]
    found = batch.features.plain.values
    wanted = HashIds(rows=10, seed=3)(KeyedJagged(("a",), ids, np.ones((1, 4), np.int32))).values
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_factors_at_the_end_of_the_path_follow_the_closed_form(tmp_path: pathlib.Path) -> None:
    for samples, repeat in ((16, 0.9), (4, 0.5)):
        log = SessionLog(
            sessions=48_000 // samples, samples=samples, repeat=repeat, user_groups=(1, 1, 1, 1), user_ids=4.0,
            item_features=0, dense=0,
        )  # fmt: skip
        place = tmp_path / f"{samples}"
        place.mkdir()
        log.write(place / "log.parquet")
        cluster_by_session(place / "log.parquet", place / "short", row_group=8192, groups=log.groups)
        config = ParquetData(
            path=str(place / "short"),
            categorical=tuple(Categorical(name=name, rows=999, length=None, capacity=9.0) for name in log.names),
            transforms=tuple((name, HashIds(rows=999)) for name in log.names),
            session="session_id",
            dedup=log.groups,
            access="windows",
            split=Fractions(train=1.0, validation=0.0),
            batch_size=6000,
        )
        batches = list(itertools.islice(config.build().train_batches(), 8))
        rows = sum(part.num_examples for batch in batches for part in batch.features.distinct)
        # A batch of 6,000 rows cuts at most one session at its end: far below 1 percent.
        assert 4 * 48_000 / rows == pytest.approx(dedup_factor(samples, repeat), rel=0.03)


@st.composite
def shared_rows(draw: st.DrawFn) -> Shared:
    lists = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=6))
    index = draw(st.lists(st.integers(0, len(lists) - 1), max_size=12))
    offsets = np.cumsum([0, *map(len, lists)])
    values = np.array([i for own in lists for i in own], np.int32)
    return Shared((Ragged(offsets, values), Ragged(offsets, values + 1)), np.array(index, np.int32))


def listed(shared: Shared) -> list[list[list[int]]]:
    """Per feature, the list of every example."""
    parts = [lists.take(shared.index) for lists in shared.lists]
    return [[ids.tolist() for ids in np.split(part.values, part.offsets[1:-1])] if len(part) else [] for part in parts]


@given(shared_rows(), shared_rows(), st.data())
def test_taking_and_joining_equals_doing_it_to_every_list(one: Shared, other: Shared, draws: st.DataObject) -> None:
    joined = Shared.concatenate([one, other])
    plain = [a + b for a, b in zip(listed(one), listed(other), strict=True)]
    assert listed(joined) == plain
    if not len(joined):
        return
    chosen = draws.draw(st.lists(st.integers(0, len(joined) - 1), max_size=15))
    taken = joined.take(np.array(chosen, np.int64))
    assert listed(taken) == [[lists[i] for i in chosen] for lists in plain]
    # Only the rows in use are kept, numbered by first occurrence.
    numbers: dict[int, int] = {}
    assert taken.index.tolist() == [numbers.setdefault(row, len(numbers)) for row in joined.index[chosen].tolist()]
    assert len(taken.lists[0]) == len(numbers)
    assert taken.index.dtype == np.int32


def test_a_batch_that_is_filled_up_has_empty_lists_there() -> None:
    schema = Schema(categorical=(Categorical(name="a", rows=9, length=None, capacity=2.0),))
    layout = RecordLayout(schema, (("a",),))
    shared = Shared((Ragged(np.array([0, 2]), np.array([4, 5], np.int32)),), np.zeros(2, np.int32))
    batch = layout.batch(ExampleRecords(np.zeros((2, layout.width), np.int32), (), (shared,)), 4)
    assert expand_batch(batch).features.to_lists() == {"a": [[4, 5], [4, 5], [], []]}
    assert batch.weights.tolist() == [1, 1, 0, 0]


def test_a_bad_id_of_a_shared_list_is_said_of_its_example(tmp_path: pathlib.Path) -> None:
    lists = pa.array([[1], [1], [1], [400]])
    table = pa.table({"a": lists, "label": np.zeros(4, np.int8), "session": [1, 1, 1, 1], "time": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "log.parquet")
    cluster_by_session(
        tmp_path / "log.parquet", tmp_path / "short", session="session", time="time", groups=[("a",)]
    )  # fmt: skip
    config = ParquetData(
        path=str(tmp_path / "short"),
        categorical=(Categorical(name="a", rows=9, length=None, capacity=1.0),),
        session="session",
        dedup=(("a",),),
        split=Fractions(train=1.0, validation=0.0),
    )
    with pytest.raises(UserError, match=r"row group 0: feature 'a': id 400 of example 3"):
        next(dataclasses.replace(config, access="windows").build().eval_batches("train"))
    fixed = dataclasses.replace(config, categorical=(Categorical(name="a", rows=999, length=2),))
    with pytest.raises(UserError, match="'a' has 1 ids in row 0; the schema says exactly 2"):
        fixed.build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": (("user_0_0", "absent"),)}, "there is no feature 'absent'"),
        ({"groups": (("user_0_0",), ("user_0_0",))}, "user_0_0 appear more than once"),
        ({"transforms": (("absent", FirstIds(count=1)),)}, "there is no feature 'absent'"),
    ],
)
def test_wrong_names_are_refused(folder: pathlib.Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data(folder, **options).build()


def test_a_group_of_no_lists_is_refused(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "label": np.zeros(2, np.int8)}), tmp_path / "log.parquet")
    config = ParquetData(
        path=str(tmp_path / "log.parquet"), categorical=(Categorical(name="a", rows=9),), dedup=(("a",),)
    )
    with pytest.raises(UserError, match=r"column 'a' holds int64; wanted lists of integers. Leave it out of dedup"):
        config.build()


def test_a_deduplicated_data_set_is_not_converted(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"convert: .*dedup="):
        arrow.convert(data(folder, groups=LOG.groups).build(), tmp_path / "out.arrow")
