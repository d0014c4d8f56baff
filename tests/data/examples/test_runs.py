"""Sessions that stay together, from the order itself to batches of a clustered log."""

import itertools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import Deduplicate
from scalejax.data.examples.runs import RunOrder, SessionRuns, check_whole
from scalejax.data.examples.schema import Categorical
from scalejax.data.permutation import Permutation
from scalejax.data.sessions.clustering import cluster_by_session
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.data.splits import ByTime, Fractions
from scalejax.data.tables.parquet import ParquetData
from scalejax.data.tables.parquet_files import ParquetFiles
from scalejax.errors import UserError

ALL = Fractions(train=1.0, validation=0.0)
LOG = SessionLog(
    sessions=120, samples=6, session_length="geometric", user_groups=(2,), user_ids=3, rows=50, ids="ranks", dense=0
)


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 3))
def test_run_order_is_the_concatenation_of_permuted_runs(lengths: list[int], seed: int) -> None:
    bounds = np.cumsum([0, *lengths]).tolist()
    order = Permutation(len(lengths), seed, 7)(np.arange(len(lengths)))
    expected = [n for run in order for n in range(bounds[run], bounds[run + 1])]
    found = RunOrder(np.array(lengths, np.int64), seed, 7)(np.arange(sum(lengths)))
    assert found.tolist() == expected


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_runs_equal_grouping_by_hand(column: list[int], data: st.DataObject) -> None:
    by_hand = [(key, [row for row, _ in rows]) for key, rows in itertools.groupby(enumerate(column), lambda x: x[1])]
    runs = SessionRuns.of(np.array(column, np.int64), "s", "here")
    assert runs.sessions.tolist() == [key for key, _ in by_hand]
    assert runs.lengths.tolist() == [len(rows) for _, rows in by_hand]
    chosen = data.draw(st.lists(st.integers(0, max(0, len(by_hand) - 1)), max_size=5 if by_hand else 0, unique=True))
    assert runs.rows(np.array(chosen, np.int64)).tolist() == [row for run in chosen for row in by_hand[run][1]]
    kept = sorted(data.draw(st.lists(st.sampled_from(range(max(1, len(column)))), unique=True))) if column else []
    counts = [len(set(rows) & set(kept)) for _, rows in by_hand]
    assert runs.lengths_among(np.array(kept, np.int64)).tolist() == [count for count in counts if count]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A clustered log; column `row` has the place of each row in time order."""
    folder = tmp_path_factory.mktemp("sessions")
    table = LOG.table()
    table = table.append_column("row", pa.array(np.arange(table.num_rows), pa.int64()))
    pq.write_table(table, folder / "log.parquet")
    cluster_by_session(folder / "log.parquet", folder / "clustered", partitions=3, row_group=40)
    return folder / "clustered"


def data(path: pathlib.Path, **options: object) -> ParquetData:
    features = (
        Categorical(name="row", rows=10_000),
        Categorical(name="user_0_0", rows=50, length=None, capacity=6.0),
        Categorical(name="user_0_1", rows=50, length=None, capacity=6.0),
    )
    defaults: dict = {"session": "session_id", "access": "windows", "window": 3, "batch_size": 32, "split": ALL}
    return ParquetData(path=str(path), categorical=features, **(defaults | options))


def column(path: pathlib.Path, name: str) -> np.ndarray:
    files = ParquetFiles(path)
    return np.concatenate([files.table(group, [name])[name].to_numpy() for group in files.groups])


def session_of_row(path: pathlib.Path) -> np.ndarray:
    out = np.zeros(10_000, np.int64)
    out[column(path, "row")] = column(path, "session_id")
    return out


def rows_of(batch: ClickBatch) -> list[int]:
    return batch.features["row"].values[: int(batch.weights.sum())].tolist()


def stream(config: ParquetData, batches: int, **where: int) -> list[int]:
    found = config.build().train_batches(**where)
    return [row for batch in itertools.islice(found, batches) for row in rows_of(batch)]


@pytest.mark.parametrize("access", ["windows", "memory"])
def test_an_epoch_has_every_row_once_and_cuts_no_session(folder: pathlib.Path, access: str) -> None:
    session = session_of_row(folder)
    total = column(folder, "row").size
    found = stream(data(folder, access=access), -(-3 * total // 32))
    epochs = [found[e * total : (e + 1) * total] for e in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(total))
        # As many runs as sessions: each lies in one piece; rows of a session are in time order.
        assert 1 + np.count_nonzero(np.diff(session[rows])) == LOG.sessions
        assert all(b > a for a, b in itertools.pairwise(rows) if session[a] == session[b])
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream(data(folder, access=access, seed=1), 5) != found[:160]


def test_sessions_are_ordered_as_defined(folder: pathlib.Path) -> None:
    files = ParquetFiles(folder)
    groups = [files.table(group, ["row", "session_id"]).to_pydict() for group in files.groups]
    expected = []
    for epoch in range(2):
        order = Permutation(len(groups), 5, epoch)(np.arange(len(groups)))
        for w in range(-(-len(groups) // 3)):
            sessions: dict[int, list[int]] = {}
            for g in order[3 * w : 3 * w + 3]:
                for row, session in zip(groups[g]["row"], groups[g]["session_id"], strict=True):
                    sessions.setdefault(session, []).append(row)
            runs = list(sessions.values())
            expected += [
                row for run in Permutation(len(runs), 5, epoch, w + 1)(np.arange(len(runs))) for row in runs[run]
            ]
    assert stream(data(folder, seed=5), len(expected) // 32) == expected[: len(expected) // 32 * 32]


def test_sessions_in_memory_are_ordered_as_defined(folder: pathlib.Path) -> None:
    rows, session = column(folder, "row"), column(folder, "session_id")
    runs = [[row for row, _ in part] for _, part in itertools.groupby(zip(rows, session, strict=True), lambda x: x[1])]
    order = Permutation(len(runs), 2, 0)(np.arange(len(runs)))
    expected = [row for run in order for row in runs[run]]
    assert stream(data(folder, access="memory", seed=2), 10) == expected[:320]


@pytest.mark.slow
@pytest.mark.parametrize("access", ["windows", "memory"])
def test_processes_and_resumed_runs_see_slices_of_the_same_batches(folder: pathlib.Path, access: str) -> None:
    config = data(folder, access=access)
    whole = stream(config, 60)
    for start in (0, 32, 640):
        parts = [stream(config, 5, start_example=start, process_index=p, process_count=4) for p in range(4)]
        merged = [row for b in range(5) for part in parts for row in part[8 * b : 8 * b + 8]]
        assert merged == whole[start : start + 160]


@pytest.mark.parametrize("access", ["windows", "memory"])
@pytest.mark.parametrize("by", ["random", "position"])
def test_fractions_never_divide_a_session(folder: pathlib.Path, access: str, by: str) -> None:
    session = session_of_row(folder)
    built = data(folder, access=access, split=Fractions(train=0.6, validation=0.2, by=by)).build()
    found = {s: [r for b in built.eval_batches(s) for r in rows_of(b)] for s in ("train", "validation", "test")}
    assert sorted(itertools.chain(*found.values())) == list(range(session[session != 0].size))
    sets = [set(session[rows].tolist()) for rows in found.values()]
    assert sum(map(len, sets)) == LOG.sessions
    assert min(map(len, sets)) >= LOG.sessions // 10
    train = [row for batch in itertools.islice(built.train_batches(), 8) for row in rows_of(batch)]
    assert set(train) <= set(found["train"])
    assert {s: len(rows) for s, rows in found.items()} == {s: built.num_examples(s) for s in found}


@pytest.mark.parametrize("access", ["windows", "memory"])
def test_a_split_by_time_keeps_the_parts_of_a_session_together(folder: pathlib.Path, access: str) -> None:
    session = session_of_row(folder)
    time = column(folder, "timestamp")
    split = ByTime(column="timestamp", validation_from=float(np.quantile(time, 0.7)), test_from=float(time.max()))
    built = data(folder, access=access, split=split, batch_size=1).build()
    rows = [r for b in itertools.islice(built.train_batches(), built.num_examples("train")) for r in rows_of(b)]
    assert len(set(rows)) == built.num_examples("train")
    assert 1 + np.count_nonzero(np.diff(session[rows])) == np.unique(session[rows]).size


def test_batches_of_a_clustered_log_have_the_dedup_factor_of_the_closed_form(tmp_path: pathlib.Path) -> None:
    log = SessionLog(
        sessions=1500, samples=16, repeat=0.9, user_groups=(2,), user_ids=8, ids="ranks", rows=10_000, dense=0
    )
    log.write(tmp_path / "log.parquet")
    cluster_by_session(tmp_path / "log.parquet", tmp_path / "clustered", partitions=2, row_group=4000)
    features = tuple(Categorical(name=name, rows=10_000, length=None, capacity=16.0) for name in log.groups[0])
    config = ParquetData(
        path=str(tmp_path / "clustered"), categorical=features, session="session_id", access="windows", split=ALL,
        batch_size=2000,
    )  # fmt: skip
    batches = list(map(Deduplicate(groups=log.groups), itertools.islice(config.build().train_batches(), 12)))
    distinct = sum(batch.features.distinct[0].num_examples for batch in batches)
    # 1500 sessions: the factor varies by about 1.5 percent; a boundary in 2000 rows adds at most one distinct row.
    assert 24_000 / distinct == pytest.approx(dedup_factor(16, 0.9), rel=0.05)
    shuffled = ParquetData(path=str(tmp_path / "log.parquet"), categorical=features, split=ALL, batch_size=2000)
    first = Deduplicate(groups=log.groups)(next(shuffled.build().train_batches()))
    assert first.features.factors[0] < 1.7


@pytest.mark.parametrize("access", ["windows", "memory"])
def test_a_log_that_is_not_clustered_is_refused(folder: pathlib.Path, access: str) -> None:
    config = data(folder.parent / "log.parquet", access=access)
    with pytest.raises(UserError, match=r"of column 'session_id' has rows in more than one place .*cluster_by_session"):
        config.build()


def test_a_session_that_continues_in_another_row_group_is_refused_in_windows(tmp_path: pathlib.Path) -> None:
    table = pa.table({"session_id": [1, 1, 2, 2, 2, 3], "label": [0] * 6, "row": list(range(6))})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    features = (Categorical(name="row", rows=6),)
    config = {"path": str(tmp_path / "x.parquet"), "categorical": features, "session": "session_id", "split": ALL}
    with pytest.raises(UserError, match=r"row group 0: session 2 .*again in .*row group 1"):
        ParquetData(**config, access="windows").build()
    assert ParquetData(**config, access="memory").build().num_examples("train") == 6


@pytest.mark.parametrize("access", ["windows", "memory"])
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None, 2]), "session column 'session_id' must hold an integer in every row; got float64"),
        (pa.array([1.0, 1.0, 2.0]), "session column 'session_id' must hold an integer in every row"),
        (pa.array(["a", "a", "b"]), "column 'session_id' holds string; wanted numbers"),
        (pa.array([[1], [1], [2]]), "column 'session_id' holds list"),
    ],
)
def test_a_session_column_of_another_kind_is_refused(
    tmp_path: pathlib.Path, access: str, column: pa.Array, message: str
) -> None:
    pq.write_table(pa.table({"session_id": column, "label": [0, 1, 0], "row": [0, 1, 2]}), tmp_path / "x.parquet")
    config = ParquetData(
        path=str(tmp_path / "x.parquet"), categorical=(Categorical(name="row", rows=3),), session="session_id",
        access=access, split=ALL,
    )  # fmt: skip
    with pytest.raises(UserError, match=message):
        config.build()


def test_a_session_column_that_is_not_there_is_named(folder: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"there is no column 'sesion_id'\. Did you mean 'session_id'"):
        data(folder, session="sesion_id").build()


def test_the_session_column_is_part_of_the_fingerprint(folder: pathlib.Path) -> None:
    for access in ("windows", "memory"):
        prints = {data(folder, access=access, session=name).build().fingerprint() for name in ("session_id", None)}
        assert len(prints) == 2


def test_check_whole_names_both_places() -> None:
    parts = [SessionRuns.of(np.array(ids), "s", "") for ids in ([1, 1, 2], [3], [4, 2])]
    with pytest.raises(UserError, match=r"first: session 2 .*again in third"):
        check_whole(parts, "s", ["first", "second", "third"])
    check_whole(parts[:2], "s", ["first", "second"])
