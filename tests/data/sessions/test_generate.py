import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.records import Ragged
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.errors import UserError

Columns = dict[str, np.ndarray | Ragged]


def column(columns: Columns, name: str) -> np.ndarray:
    found = columns[name]
    assert isinstance(found, np.ndarray)
    return found


def lists_of(columns: Columns, name: str) -> Ragged:
    found = columns[name]
    assert isinstance(found, Ragged)
    return found


def features(columns: Columns, names: tuple[str, ...], rows: np.ndarray) -> KeyedJagged:
    lists = [lists_of(columns, name).take(rows) for name in names]
    return KeyedJagged(
        names, np.concatenate([r.values for r in lists]), np.stack([r.lengths for r in lists]).astype(np.int32)
    )


def clustered(columns: Columns) -> np.ndarray:
    """Rows session by session, in time order inside a session."""
    return np.argsort(column(columns, "session_id"), kind="stable")


@pytest.mark.slow
@pytest.mark.parametrize("samples", [4, 16])
@pytest.mark.parametrize("repeat", [0.0, 0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("length", ["fixed", "geometric"])
def test_clustered_logs_have_the_dedup_factor_of_the_closed_form(samples: int, repeat: float, length: str) -> None:
    # At least 64 000 samples: the factor varies by less than 1 percent.
    log = SessionLog(
        sessions=64_000 // samples,
        samples=samples,
        session_length=length,
        repeat=repeat,
        user_groups=(2, 1),
        user_ids=8,
        item_features=0,
        rows=10_000,
        dense=0,
    )
    columns = log.columns()
    found = deduplicate(features(columns, log.names, clustered(columns)), log.groups)
    assert found.factors == pytest.approx([dedup_factor(samples, repeat)] * 2, rel=0.03)


@pytest.mark.parametrize(("concurrent", "batch"), [(200, 1000), (2000, 1000), (50, 4000)])
@pytest.mark.parametrize("length", ["fixed", "geometric"])
def test_a_batch_in_time_order_holds_as_many_samples_of_a_session_as_computed(
    concurrent: int, batch: int, length: str
) -> None:
    log = SessionLog(
        sessions=20_000,
        samples=8,
        session_length=length,
        repeat=0.9,
        user_groups=(1,),
        rows=1000,
        item_features=0,
        dense=0,
        concurrent=concurrent,
    )
    columns = log.columns()
    session = column(columns, "session_id")
    # The middle of the log, where as many sessions begin as end.
    batches = [np.arange(a, a + batch) for a in range(session.size // 4, 3 * session.size // 4 - batch, batch)]
    met = np.mean([np.unique(session[rows]).size for rows in batches])
    gaps = batch * (8 - 1) / (concurrent * 8)
    expected = 8 * gaps / (gaps - (8 - 1) * np.expm1(-gaps))
    assert batch / met == pytest.approx(expected, rel=0.02)
    # The same mean in the closed form of the factor.
    found = [deduplicate(features(columns, log.names, rows), log.groups) for rows in batches]
    assert len(found) * batch / sum(f.distinct[0].num_examples for f in found) == pytest.approx(
        dedup_factor(expected, 0.9), rel=0.03
    )


def test_limits_of_the_closed_forms() -> None:
    assert dedup_factor(16, 1.0) == 16
    assert dedup_factor(16, 0.0) == 1
    assert dedup_factor(1, 0.7) == 1
    assert dedup_factor(16, 0.9) == pytest.approx(6.4)


def test_a_group_changes_as_a_whole_and_as_often_as_asked() -> None:
    log = SessionLog(sessions=2000, samples=10, repeat=0.7, user_groups=(3, 1), user_ids=12, rows=10_000, dense=0)
    columns = log.columns()
    rows = clustered(columns)
    inverse = deduplicate(features(columns, log.names, rows), [(name,) for name in log.names]).inverse
    by_name = dict(zip(log.names, inverse, strict=True))
    np.testing.assert_array_equal(by_name["user_0_0"], by_name["user_0_1"])
    np.testing.assert_array_equal(by_name["user_0_0"], by_name["user_0_2"])
    assert (by_name["user_0_0"] != by_name["user_1_0"]).any()
    session = column(columns, "session_id")[rows]
    inside = session[1:] == session[:-1]
    assert inside.sum() == 2000 * 9
    for name in ("user_0_0", "user_1_0"):
        # Binomial(18 000, 0.7): a standard deviation of 0.0034; five of them.
        kept = (np.diff(by_name[name]) == 0)[inside].mean()
        assert kept == pytest.approx(0.7, abs=0.017)
        # A value that is drawn anew is new: nothing is kept from session to session.
        assert not (np.diff(by_name[name]) == 0)[~inside].any()


def test_rows_are_in_time_order_and_sessions_interleave() -> None:
    log = SessionLog(sessions=500, samples=6, concurrent=50, user_groups=(1,), dense=2)
    columns = log.columns()
    time, session = column(columns, "timestamp"), column(columns, "session_id")
    assert (np.diff(time) >= 0).all()
    assert np.unique(session, return_counts=True)[1].tolist() == [6] * 500
    assert (session[1:] == session[:-1]).mean() < 0.1
    order = np.lexsort((time, session))
    gaps = np.diff(time[order])[np.diff(session[order]) == 0]
    assert gaps.mean() == pytest.approx(1e6, rel=0.1)  # microseconds; 2,500 gaps vary by 2 %
    assert column(columns, "dense_1").dtype == np.float32
    assert set(column(columns, "label").tolist()) == {0, 1}


def test_lengths_and_ids_follow_their_dials() -> None:
    log = SessionLog(
        sessions=4000, samples=3, user_groups=(1,), user_ids=5, item_ids=2, rows=50, zipf=1.0, ids="ranks", dense=0
    )
    columns = log.columns()
    item = lists_of(columns, "item_1")
    # Poisson(2) over 12 000 lists: mean within 5 standard deviations, empty lists with probability e^-2.
    assert item.lengths.mean() == pytest.approx(2, abs=5 * (2 / 12_000) ** 0.5)
    assert (item.lengths == 0).mean() == pytest.approx(np.exp(-2), abs=0.02)
    shares = np.bincount(item.values, minlength=50) / item.values.size
    expected = np.arange(1, 51) ** -1.0 / (np.arange(1, 51) ** -1.0).sum()
    # 24 000 draws: a standard deviation of at most 0.003 for each share.
    assert np.abs(shares - expected).max() < 0.013
    hashed = SessionLog(sessions=4000, samples=3, user_groups=(1,), rows=50, zipf=1.0, dense=0).columns()
    values = lists_of(hashed, "item_0").values
    assert values.min() >= 0
    assert values.max() > 2**60
    assert np.unique(values).size == 50


def test_equal_fields_give_equal_files_and_seeds_give_others(tmp_path: pathlib.Path) -> None:
    log = SessionLog(sessions=50, samples=3, user_groups=(2,), rows=100)
    log.write(tmp_path / "a.parquet", row_group=64)
    log.write(tmp_path / "b.parquet", row_group=64)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    other = SessionLog(sessions=50, samples=3, user_groups=(2,), rows=100, seed=1)
    assert not pa.Table.equals(other.table(), log.table())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


def test_the_written_columns_are_those_named(tmp_path: pathlib.Path) -> None:
    log = SessionLog(sessions=20, samples=3, user_groups=(2, 1), item_features=1, dense=1, rows=100)
    log.write(tmp_path / "log.parquet", row_group=16)
    table = pq.read_table(tmp_path / "log.parquet")
    assert table.equals(log.table())
    assert table.schema.names == ["session_id", "timestamp", "label", *log.dense_names, *log.names]
    assert log.groups == (("user_0_0", "user_0_1"), ("user_1_0",))
    assert log.names == ("user_0_0", "user_0_1", "user_1_0", "item_0")
    assert table.schema.field("session_id").type == pa.int64()
    assert table.schema.field("user_1_0").type == pa.list_(pa.int64())
    assert pq.read_metadata(tmp_path / "log.parquet").num_row_groups == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("sessions", 0), ("samples", 2.5), ("repeat", 1.1), ("user_groups", (0,)), ("rows", 0), ("concurrent", 0)],
)
def test_dials_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"SessionLog: {field} must be"):
        SessionLog(**({"sessions": 1} | {field: value}))


def test_clicks_follow_the_effects_of_ids_as_strongly_as_asked() -> None:
    dials = {"sessions": 4000, "samples": 5, "user_groups": (2, 1), "item_features": 1, "rows": 100, "dense": 0}
    none = SessionLog(**dials, concurrent=100).columns()
    some = SessionLog(**dials, concurrent=100, signal=1.5).columns()
    assert column(none, "label").mean() == pytest.approx(0.1, abs=0.007)  # 3 standard deviations of 20,000 coins
    for name in none:
        if name != "label":
            np.testing.assert_array_equal(
                getattr(none[name], "values", none[name]), getattr(some[name], "values", some[name])
            )
    # The oracle: least squares on the mean of each id's indicator finds the score that clicks follow.
    lists = [lists_of(some, name) for name in ("user_0_0", "user_1_0", "item_0")]
    shares = np.zeros((20_000, sum(np.unique(own.values).size for own in lists)))
    place = 0
    for own in lists:
        _, codes = np.unique(own.values, return_inverse=True)
        rows = np.repeat(np.arange(20_000), own.lengths)
        np.add.at(shares, (rows, place + codes), 1 / own.lengths[rows])
        place += int(codes.max()) + 1
    clicks = column(some, "label").astype(float)
    train, test = slice(0, 15_000), slice(15_000, None)
    fit = np.linalg.lstsq(
        shares[train].T @ shares[train] + 5 * np.eye(shares.shape[1]), shares[train].T @ clicks[train], rcond=None
    )[0]
    score = shares[test] @ fit
    order = np.argsort(np.argsort(score))
    hit = clicks[test] > 0
    auc = (order[hit].sum() - hit.sum() * (hit.sum() - 1) / 2) / (hit.sum() * (~hit).sum())
    assert auc > 0.65
    # log-odds log(1/9) + 1.5 z with z near normal: the mean of its sigmoid by Gauss-Hermite quadrature.
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    expected = float((weights / (1 + 9 * np.exp(-1.5 * points))).sum() / weights.sum())
    assert clicks.mean() == pytest.approx(expected, abs=0.02)
