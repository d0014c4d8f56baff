"""What is made of the columns of a table, against NumPy; its parts; and one message for each thing that is wrong."""

import dataclasses
import datetime

import numpy as np
import polars as pl
import pyarrow.parquet
import pytest

from scalejax.data import TableColumn, TableData
from scalejax.data.examples.binning import value_bins
from scalejax.errors import UserError

ROWS = 1000
LABEL = {"label": "label"}


def columns(seed=0):
    random = np.random.RandomState(seed)
    words = random.choice(["red", "green", "blue", None], ROWS, p=[0.5, 0.3, 0.1, 0.1]).astype(object)
    words[:3] = ["once", "twice", "twice"]
    numbers = random.normal(size=ROWS).round(4)
    return {
        "id": np.arange(ROWS) * 7,
        "name": [f"customer {i}" for i in range(ROWS)],
        "constant": ["same"] * ROWS,
        "nothing": pl.Series([None] * ROWS, dtype=pl.Float64),
        "small": random.randint(0, 5, ROWS),
        "number": [None if i % 10 == 0 else float(x) for i, x in enumerate(numbers)],
        "word": words.tolist(),
        "day": [datetime.date(2024, 1, 1) + datetime.timedelta(days=int(d)) for d in random.randint(0, 366, ROWS)],
        "label": random.choice(["no", "yes"], ROWS),
    }


def table(**changes):
    return pl.DataFrame(columns() | changes)


def batches(data, split):
    """All examples of a split: ids by feature, numbers by name, labels, weights."""
    built = data.build()
    found = [b for b in built.eval_batches(split)]
    keep = np.concatenate([b.weights for b in found]) >= 0
    keep[built.num_examples(split) :] = False
    ids = {key: np.concatenate([_column(b, i) for b in found])[keep] for i, key in enumerate(built.schema.keys)}
    dense = dict(zip(built.schema.dense, np.concatenate([b.dense for b in found])[keep].T, strict=True))
    weights = np.concatenate([b.weights for b in found])[keep]
    return built.schema, ids, dense, np.concatenate([b.labels for b in found])[keep][:, 0], weights


def _column(batch, number):
    return batch.features.values.reshape(len(batch.features.keys), -1)[number]


def rows_of(split, rows=ROWS):
    order = np.random.RandomState(0).permutation(rows)
    a, b = int(0.76 * rows), int(0.8 * rows)
    return np.sort({"train": order[:a], "validation": order[a:b], "test": order[b:]}[split])


@pytest.mark.parametrize("name", ["a.parquet", "a.pq", "a.csv"])
@pytest.mark.parametrize("checksums", [True, False])
def test_pages_without_checksums_are_said(tmp_path, name, checksums):
    path = tmp_path / name
    if path.suffix == ".csv":
        table().write_csv(path)
    else:
        pyarrow.parquet.write_table(table().to_arrow(), path, write_page_checksum=checksums)
    remarks = TableData(path=str(path), label="label").build().remarks
    said = path.suffix != ".csv" and not checksums
    assert [f"{path}: pages have no checksums" in remark for remark in remarks] == [True] * said


def test_a_file_that_says_it_is_clustered_is_a_table_as_any(tmp_path):
    path = tmp_path / "copied.parquet"
    rows = table().to_arrow()
    pyarrow.parquet.write_table(rows.replace_schema_metadata({"scalejax.clustered": "{}"}), path)
    assert len(TableData(path=str(path), label="label").build().remarks) == 1


def test_columns_are_seen_as_what_they_hold():
    findings = TableData.from_frame(table(), **LABEL).open().findings
    seen = {one.name: one.column.kind if one.column else one.reason for one in findings}
    assert {name: kind for name, kind in seen.items() if not kind.startswith("left out")} == {
        "small": "number",
        "number": "number",
        "word": "text",
        "day": "date",
    }
    assert "an integer that no two rows share" in seen["id"]
    assert "1,000 different texts in 1,000 rows" in seen["name"]
    assert "the same value in every row" in seen["constant"]
    assert "every value is missing" in seen["nothing"]
    reasons = {one.name: one.reason for one in findings}
    assert "10 % missing" in reasons["number"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_ids_and_numbers_equal_numpy(split):
    frame = table()
    schema, ids, dense, labels, weights = batches(TableData.from_frame(frame, **LABEL), split)
    rows, train = rows_of(split), rows_of("train")
    assert schema.keys == ("small_bin", "number_bin", "word", "day_day", "day_weekday", "day_month")
    assert schema.dense == ("small", "number")
    np.testing.assert_array_equal(labels, (frame["label"].to_numpy() == "yes")[rows])
    np.testing.assert_array_equal(weights, 1)

    numbers = frame["number"].fill_null(float("nan")).to_numpy()
    bins, count = value_bins(numbers, train, 48)
    np.testing.assert_array_equal(ids["number_bin"], bins[rows])
    assert schema["number_bin"].rows == count
    scaled = (numbers - np.nanmean(numbers[train])) / np.nanstd(numbers[train])
    np.testing.assert_allclose(dense["number"], np.nan_to_num(scaled[rows]), atol=1e-6)
    np.testing.assert_array_equal(ids["small_bin"], frame["small"].to_numpy()[rows])

    # 0 missing, 1 what fewer than five training rows hold, then by frequency there.
    order = {"red": 2, "green": 3, "blue": 4, "once": 1, "twice": 1, None: 0}
    np.testing.assert_array_equal(ids["word"], [order[w] for w in np.array(frame["word"].to_list(), object)[rows]])
    assert schema["word"].rows == 5

    days = [frame["day"][int(row)] for row in rows]
    np.testing.assert_array_equal(ids["day_day"], [d.day - 1 for d in days])
    np.testing.assert_array_equal(ids["day_weekday"], [d.weekday() for d in days])
    np.testing.assert_array_equal(ids["day_month"], [d.month - 1 for d in days])


def test_dates_may_be_missing_and_have_hours():
    times = [None, *(datetime.datetime(2024, 5, 6, i % 24) for i in range(1, ROWS))]
    schema, ids, *_ = batches(TableData.from_frame(table(day=times), **LABEL), "train")
    rows = rows_of("train")
    assert [schema[f"day_{part}"].rows for part in ("day", "weekday", "month", "hour")] == [32, 8, 13, 25]
    np.testing.assert_array_equal(ids["day_hour"], np.where(rows == 0, 24, rows % 24))


def test_lists_of_any_length_and_their_weights():
    random = np.random.RandomState(3)
    lists = [random.choice(list("abc"), random.randint(0, 4)).tolist() for _ in range(ROWS)]
    pairs = [[{"id": one, "weight": float(i + 1)} for i, one in enumerate(items)] for items in lists]
    order = ["a", "b", "c"]
    for held, weighted in ((lists, False), (pairs, True)):
        frame = pl.DataFrame({"tags": pl.Series(held), "label": columns()["label"]})
        built = TableData.from_frame(frame, **LABEL).build()
        (feature,) = built.schema.categorical
        assert (feature.length, feature.max_length, feature.rows) == (None, 3, 5)
        train = [one for row in rows_of("train") for one in lists[row]]
        by_count = sorted(order, key=lambda one: (-train.count(one), one))
        expected = [2 + by_count.index(one) for row in rows_of("test") for one in lists[row]]
        found = list(built.eval_batches("test"))
        np.testing.assert_array_equal(np.concatenate([b.features.values for b in found]), expected)
        if weighted:
            wanted = [i + 1.0 for row in rows_of("test") for i in range(len(lists[row]))]
            np.testing.assert_array_equal(np.concatenate([b.features.weights for b in found]), wanted)
        else:
            assert all(b.features.weights is None for b in found)


def test_examples_have_weights_in_training_too():
    weights = np.random.RandomState(4).exponential(size=ROWS).astype(np.float32)
    data = TableData.from_frame(table(w=weights), weight="w", **LABEL)
    *_, found = batches(data, "test")
    np.testing.assert_array_equal(found, weights[rows_of("test")])
    assert "w" not in {one.name for one in data.open().findings}
    batch = next(data.build().train_batches())
    assert set(batch.weights) <= set(weights[rows_of("train")])


def test_a_split_by_time_keeps_equal_times_together_and_the_newest_for_the_test():
    frame = table(year=np.random.RandomState(5).randint(1990, 2020, ROWS))
    opened = TableData.from_frame(frame, time="year", **LABEL).open()
    years = frame["year"].to_numpy()
    held = {split: set(years[rows]) for split, rows in opened.splits.items()}
    assert max(held["train"]) < min(held["validation"])
    assert max(held["validation"]) < min(held["test"])
    bounds = opened.data.split.bounds(ROWS)
    for split in ("validation", "test"):
        assert min(held[split]) == np.sort(years)[bounds[split][0]]
    assert sum(map(len, opened.splits.values())) == ROWS
    assert "year" not in {one.name for one in opened.findings}


def test_frame_and_file_are_the_same_data(tmp_path):
    frame = table()
    frame.write_csv(tmp_path / "a.csv")
    of_file = TableData(path=str(tmp_path / "a.csv"), label="label").build()
    assert of_file.fingerprint() == TableData.from_frame(frame, **LABEL).build().fingerprint()


def test_named_columns_are_seen_as_said_and_the_others_are_not():
    data = TableData.from_frame(table(), **LABEL)
    data = dataclasses.replace(data, columns=(TableColumn(name="small", kind="text"),))
    assert data.schema().keys == ("small",)
    assert data.schema().dense == ()
    with pytest.raises(UserError, match=r"'word' holds String and cannot be of kind 'number'; wanted kind='text'"):
        dataclasses.replace(data, columns=(TableColumn(name="word", kind="number"),)).build()
    with pytest.raises(UserError, match=r"no column 'smal'. Did you mean 'small'"):
        dataclasses.replace(data, columns=(TableColumn(name="smal", kind="number"),)).build()


def test_names_of_features_are_plain_and_differ():
    frame = table(**{"a/b": np.arange(ROWS) % 3, "a b": np.arange(ROWS) % 4, "a_b_bin": np.arange(ROWS) % 5})
    keys = TableData.from_frame(frame, **LABEL).schema().keys
    assert all(key.replace("_", "").isalnum() and key.isascii() for key in keys)
    assert {"a_b_bin", "a_b_bin_2", "a_b_bin_bin"} <= set(keys)


@pytest.mark.parametrize(
    ("values", "positive", "expected"),
    [
        ([0, 1], None, "1"),
        ([0.0, 1.0], None, "1"),
        ([False, True], None, "true"),
        (["<=50K", ">50K"], None, ">50K"),
        (["bad", "good"], "bad", "bad"),
        ([3, 7], "3", "3"),
    ],
)
def test_the_greater_of_two_values_is_predicted_unless_said(values, positive, expected):
    frame = table(label=[values[i % 2] for i in range(ROWS)])
    data = TableData.from_frame(frame, positive=positive, **LABEL)
    assert data.open().positive == expected
    _, _, _, labels, _ = batches(data, "test")
    np.testing.assert_array_equal(labels, rows_of("test") % 2 == (positive is None))


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        ({}, {"label": "lable"}, r"there is no column 'lable'. Did you mean 'label'"),
        ({"label": ["a"] * ROWS}, {}, r"label 'label' has 1 different values \(a\); wanted two"),
        ({"label": [1, 2, 3, 2] * 250}, {}, r"label 'label' has 3 different values \(1, 2, 3\); wanted two"),
        ({"label": [None, "a"] + ["b"] * (ROWS - 2)}, {}, r"label 'label' is missing in 1 rows, first in row 0"),
        ({}, {"positive": "maybe"}, r"has the values 'no' and 'yes'; got positive='maybe'"),
        ({"label": ["a"] + ["b"] * (ROWS - 1)}, {}, r"is only 'b' in the \d+ rows of the (validation|test) split"),
        ({"w": [1.0, -2.0] * 500}, {"weight": "w"}, r"weight 'w' is -2.0 in row 1; wanted a finite number, at least 0"),
        ({"w": [0.0] * ROWS}, {"weight": "w"}, r"weight 'w' is 0 in every row"),
        ({}, {"weight": "word"}, r"weight 'word' holds String; wanted numbers"),
        ({}, {"weight": "label"}, r"the label 'label' cannot be the weight or the time too"),
        ({"w": [1e300] * ROWS}, {"weight": "w"}, r"number 'w' becomes 1e\+300 in row 0, beyond float32"),
        (
            {"w": [1, 0] * 500, "label": [1, 0] * 500},
            {"weight": "w"},
            r"is only '1' in the \d+ rows of the train split",
        ),
        ({"label": [[1], [2]] * 500}, {}, r"label 'label' holds List\(Int64\); wanted numbers, text, or true"),
        ({"label": [b"a", b"b"] * 500}, {}, r"label 'label' holds Binary; wanted"),
        ({"t": [0] * 900 + [1] * 100}, {"time": "t"}, r"split has no rows \(rows of one 't' stay together\)"),
        (
            {"l": [[{"v": "a", "w": 1e300}]] * ROWS},
            {},
            r"a weight in the lists of 'l' is missing, or not finite in float32",
        ),
        ({}, {"time": "word"}, r"time 'word' holds String; wanted numbers, or dates"),
        ({}, {"time": "number"}, r"time 'number' is missing in row 0"),
        ({"number": [float("inf")] * 500 + [0.5] * 500}, {}, r"number 'number' is infinite in row 0"),
    ],
)
def test_what_is_wrong_with_a_column_is_one_message(changes, data, message):
    with pytest.raises(UserError, match=message):
        TableData.from_frame(table(**changes), **(LABEL | data)).build()


def test_a_column_that_is_named_and_left_out_is_refused():
    columns = (TableColumn(name="small", kind="number"),)
    with pytest.raises(UserError, match=r"'small' is in data\.columns and in data\.leave_out"):
        dataclasses.replace(TableData.from_frame(table(), **LABEL), columns=columns, leave_out=("small",)).build()


def test_no_column_left_and_too_few_rows_are_said():
    frame = table()
    with pytest.raises(UserError, match=r"no column is left to predict 'label' from \(id: left out: like an id"):
        TableData.from_frame(frame.select("id", "constant", "label"), **LABEL).build()
    with pytest.raises(UserError, match=r"has 50 rows; at least 500 are wanted"):
        TableData.from_frame(frame[:50], **LABEL).build()


def test_another_content_of_the_file_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    table().write_csv(path)
    data = TableData(path=str(path), label="label", sha256="0" * 64)
    with pytest.raises(UserError, match=r"is not the file it was \(SHA-256 .{12}, recorded 000000000000\)"):
        data.build()


@pytest.mark.parametrize("kind", ["number", "text"])
@pytest.mark.parametrize("first", [2**60, 2**63])
def test_ids_of_64_bits_and_missing_ones_stay_apart(tmp_path, first, kind):
    rng = np.random.default_rng(0)
    ids = rng.integers(40, size=ROWS)
    written = ["" if i == 39 else str(first + int(i)) for i in ids]
    path = tmp_path / "a.csv"
    path.write_text("id,y\n" + "".join(f"{i},{y}\n" for i, y in zip(written, rng.integers(2, size=ROWS), strict=True)))
    schema, found, *_ = batches(
        TableData(path=str(path), label="y", columns=(TableColumn(name="id", kind=kind),)), "test"
    )
    (feature,) = schema.categorical
    assert feature.rows == {"number": 40, "text": 41}[kind]  # texts have an id for rare ones too
    pairs = set(zip(ids[rows_of("test")].tolist(), found[feature.name].tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) > 30
