import itertools
import json
import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest

import scalejax.data.bundled
from scalejax.data import ByDate, FlightsData
from scalejax.data.click_logs.flights import DAYS, FEATURES, NUMBERS
from scalejax.errors import UserError

BUNDLED = pathlib.Path(scalejax.data.bundled.__file__).parent


@pytest.fixture(scope="module")
def data():
    return FlightsData(batch_size=4096).build()


def whole(data, split: str):
    return list(data.eval_batches(split))


def test_the_file_holds_the_published_counts_and_is_small() -> None:
    meta = pq.read_metadata(BUNDLED / "flights.parquet")
    about = json.loads((BUNDLED / "flights.json").read_text())
    assert meta.num_rows == about["rows"] == 327_346
    assert about["rows_without_label_dropped"] == 336_776 - 327_346
    assert meta.num_row_groups == 12
    assert about["feature_rows"] == FEATURES | {"calendar_day": DAYS}
    assert {n: len(v) for n, v in about["vocabularies"].items()}.items() <= about["feature_rows"].items()
    assert sum(f.stat().st_size for f in BUNDLED.glob("flights.*")) < 3_500_000


def test_the_file_has_nothing_that_is_known_only_after_departure() -> None:
    known_before = {*FEATURES, *NUMBERS, "calendar_day"}
    assert set(pq.read_schema(BUNDLED / "flights.parquet").names) == known_before | {"late"}
    schema = FlightsData(calendar_day="include").schema()
    assert {*schema.keys, *schema.dense} == known_before
    assert not known_before & {"dep_delay", "arr_delay", "air_time", "dep_time", "arr_time", "late"}


def test_the_file_is_in_date_order() -> None:
    table = pq.read_table(BUNDLED / "flights.parquet", columns=["calendar_day", "month"])
    day = table["calendar_day"].to_numpy().astype(int)
    assert (np.diff(day) >= 0).all()
    assert np.unique(day).tolist() == list(range(DAYS))
    first = np.datetime64("2013-01-01") + day
    np.testing.assert_array_equal(first.astype("datetime64[M]").astype(int) % 12, table["month"].to_numpy())


def test_random_split_is_the_reference_split(data) -> None:
    # 32,735 test flights of which 7,859 are late, and log loss 0.5512 of the base rate: the figures published with
    # the reference setup (RandomState(0).permutation over the flights in the order of their source).
    assert [data.num_examples(s) for s in ("train", "validation", "test")] == [261_876, 32_735, 32_735]
    late = sum(b.labels.sum() for b in whole(data, "test"))
    rate = sum(b.labels.sum() for b in whole(data, "train")) / 261_876
    assert late == 7_859
    share = late / 32_735
    assert round(float(-share * np.log(rate) - (1 - share) * np.log(1 - rate)), 4) == 0.5512


def test_numbers_are_standardised_on_the_training_split(data) -> None:
    dense = np.concatenate([b.dense[b.weights > 0] for b in whole(data, "train")]).astype(np.float64)
    np.testing.assert_allclose(dense.mean(0), 0, atol=1e-5)
    assert np.isfinite(dense).all()
    # Missing weather sits at the mean, which lowers the variance by the share that is missing; the training split has
    # that share up to sampling: 4 * sqrt(0.11 * 0.89 * (1/0.8 - 1) / 327,346) = 0.0011.
    table = pq.read_table(BUNDLED / "flights.parquet", columns=list(NUMBERS))
    missing = np.array([table[name].null_count for name in NUMBERS]) / table.num_rows
    assert round(float(missing.max()), 3) == 0.110
    np.testing.assert_allclose(dense.var(0), 1 - missing, atol=1.1e-3)


def test_time_split_holds_out_november_and_december() -> None:
    data = FlightsData(split="time", batch_size=8192).build()
    months = {
        s: np.concatenate([b.features["month"].values[b.weights > 0] for b in whole(data, s)])
        for s in ("train", "validation", "test")
    }
    assert {s: (int(m.min()), int(m.max())) for s, m in months.items()} == {
        "train": (0, 9),
        "validation": (10, 10),
        "test": (11, 11),
    }
    assert sum(m.size for m in months.values()) == 327_346


def test_days_are_the_days_of_the_year() -> None:
    data = FlightsData(order="time", batch_size=1024, calendar_day="include").build()
    days = data.days()
    assert (days[0][0], days[-1][0], len(days)) == ("2013-01-01", "2013-12-31", DAYS)
    assert days[0][1] == 0
    assert days[-1][2] == data.num_examples("train")
    assert all(a[2] == b[1] for a, b in itertools.pairwise(days))
    (batch,) = data.range_batches(*days[40][1:])
    assert set(batch.features["calendar_day"].values[batch.weights > 0]) == {40}


def test_groups_are_the_chosen_feature() -> None:
    batch = next(FlightsData(group="dest", batch_size=64).build().eval_batches("test"))
    assert batch.groups is not None
    np.testing.assert_array_equal(batch.groups, batch.features["dest"].values)


def test_calendar_day_is_refused_under_the_time_split() -> None:
    with pytest.raises(UserError, match=r'calendar_day="include" does not go with data.split="time".*never'):
        FlightsData(split="time", calendar_day="include").build()


def test_missing_weather_is_refused_if_asked_for() -> None:
    with pytest.raises(UserError, match=r"'wx_temp' is missing \(NaN\) in row"):
        FlightsData(nan="error").build()


def test_a_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "flights.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no such file.*Did you mean .*flights\.parquet"):
        FlightsData(path=str(tmp_path / "flight.parquet")).build()


def test_bins_of_numbers_hold_equal_shares_of_the_training_split() -> None:
    data = FlightsData(number_bins=8, batch_size=8192).build()
    assert [f.rows for f in data.schema.categorical if f.name == "wx_temp_bin"] == [9]
    assert data.schema == FlightsData(number_bins=8).schema()
    batches = whole(data, "train")
    for name in ("wx_temp", "distance"):
        bins = np.concatenate([b.features[f"{name}_bin"].values[b.weights > 0] for b in batches])
        number = np.concatenate([b.dense[b.weights > 0, NUMBERS.index(name)] for b in batches])
        shares = np.bincount(bins, minlength=9)[:8] / bins.size
        assert shares.min() > 0.06, (name, shares)  # 1/8 apart from ties at the edges
        assert shares.max() < 0.2, (name, shares)
        known = bins < 8
        order = np.argsort(number[known], kind="stable")
        assert (np.diff(bins[known][order]) >= 0).all()
    pressure = np.concatenate([b.features["wx_pressure_bin"].values[b.weights > 0] for b in batches])
    assert round(float((pressure == 8).mean()), 2) == 0.11  # missing in the file


def test_bins_leave_the_other_columns_alone() -> None:
    binned = next(FlightsData(number_bins=4, batch_size=64).build().eval_batches("test"))
    plain = next(FlightsData(batch_size=64).build().eval_batches("test"))
    np.testing.assert_array_equal(binned.dense, plain.dense)
    np.testing.assert_array_equal(binned.features["flight"].values, plain.features["flight"].values)


def test_one_bin_is_refused() -> None:
    with pytest.raises(UserError, match=r"number_bins must be 0 \(off\) or at least 2; got 1"):
        FlightsData(number_bins=1).build()


JULY = ByDate(train=("2013-07-01", "2013-07-31"), validation=("2013-08-01", "2013-08-02"), numbers=ByDate().train)


def test_splits_by_date_hold_their_days() -> None:
    data = FlightsData(split=JULY, order="time", batch_size=2048).build()
    days = data.days()
    assert [days[0][0], days[-1][0], len(days)] == ["2013-07-01", "2013-07-31", 31]
    table = pq.read_table(BUNDLED / "flights.parquet", columns=["calendar_day", "late"])
    day = np.datetime64("2013-01-01") + table["calendar_day"].to_numpy().astype(int)
    for split, (first, last) in {"train": JULY.train, "validation": JULY.validation, "test": JULY.test}.items():
        inside = (day >= np.datetime64(first)) & (day <= np.datetime64(last))
        batches = whole(data, split)
        assert data.num_examples(split) == inside.sum() > 0
        assert sum(b.labels[b.weights > 0].sum() for b in batches) == table["late"].to_numpy()[inside].sum()


def test_numbers_of_a_range_of_days_are_those_of_the_days_before() -> None:
    """A model that goes on with July finds there what it has learnt of the numbers of January to June."""
    before, after = (
        next(FlightsData(split=split, order="time", number_bins=16, batch_size=512).build().train_batches())
        for split in (ByDate(train=JULY.train, validation=JULY.validation), JULY)
    )
    together = ByDate(train=("2013-01-01", "2013-06-30"), validation=("2013-07-01", "2013-07-31"))
    held = next(FlightsData(split=together, number_bins=16, batch_size=512).build().eval_batches("validation"))
    np.testing.assert_array_equal(after.dense, held.dense)
    for name in ("wx_temp_bin", "distance_bin"):
        np.testing.assert_array_equal(after.features[name].values, held.features[name].values)
        assert (after.features[name].values != before.features[name].values).any()
    assert np.abs(after.dense - before.dense).max() > 0.5


@pytest.mark.parametrize(
    ("days", "message"),
    [
        (
            {"train": ("2013-01-01", "2013-07-02")},
            r"split\.train=2013-01-01,2013-07-02 and split\.validation=.* common",
        ),
        ({"test": ("2013-12-31", "2013-12-01")}, r"split\.test must be the first and the last day .* got 2013-12-31,"),
        ({"test": ("2014-01-01", "2014-01-31")}, r"split\.test must be the first and the last day of a range in 2013"),
        ({"train": "2013-01-01"}, r"split\.train must be .* such as 2013-01-01,2013-06-30; got 2013-01-01\."),
        (
            {"numbers": ("January", "June")},
            r"split\.numbers must be .* such as 2013-01-01,2013-06-30; got January,June",
        ),
    ],
)
def test_ranges_of_days_that_cannot_be_are_refused(days: dict[str, tuple[str, str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ByDate(**days)


def test_calendar_day_is_refused_under_a_split_by_date() -> None:
    with pytest.raises(UserError, match=r'calendar_day="include" does not go with data\.split=ByDate.*never'):
        FlightsData(split=ByDate(), calendar_day="include").build()
