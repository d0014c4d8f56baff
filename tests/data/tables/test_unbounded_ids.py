"""Features whose ids are any 64-bit integers: every bit arrives, signed or not, in records, lists and files."""

import itertools
import pathlib

import numpy as np
import pytest

from scalejax.data.examples.encode import check_schema
from scalejax.data.examples.jagged import KeyedJagged, check_ids
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.tables import arrow
from scalejax.data.tables.arrow import ArrowData
from scalejax.errors import UserError

N = 100
EXTREMES = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31, 2**53 + 1], np.int64)
SCHEMA = Schema(
    categorical=(
        Categorical(name="user", rows=None),
        Categorical(name="day", rows=7),
        Categorical(name="pair", rows=None, length=2),
        Categorical(name="words", rows=None, length=None, capacity=3.0),
        Categorical(name="genres", rows=9, length=None, capacity=3.0),
    ),
    dense=("x",),
    group="user",
)


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(0)

    def lists(values):
        lengths = rng.integers(0, 4, N)
        return Ragged(np.concatenate([[0], np.cumsum(lengths)]), values(lengths.sum()))

    return {
        "user": EXTREMES[np.arange(N) % EXTREMES.size],
        "day": rng.integers(0, 7, N),
        "pair": rng.integers(0, 2**64 - 1, (N, 2), np.uint64, endpoint=True),
        "words": lists(lambda n: rng.integers(-(2**63), 2**63 - 1, n)),
        "genres": lists(lambda n: rng.integers(0, 9, n)),
        "x": np.arange(N, dtype=np.float64),
        "label": rng.integers(0, 2, N),
    }


def expected(columns, example):
    words, genres = (
        columns[name].values[slice(*columns[name].offsets[example:][:2])].tolist() for name in ("words", "genres")
    )
    pair = columns["pair"][example].view(np.int64).tolist()
    return [[int(columns["user"][example])], [int(columns["day"][example])], pair, words, genres]


def assert_holds(batches, columns):
    """Every example of a pass, told by its number, has the ids of the columns."""
    seen = 0
    for batch in batches:
        lists = batch.features.to_lists()
        assert batch.features.values.dtype == np.int64
        for place, number in enumerate(batch.dense[:, 0]):
            if batch.weights[place]:
                example = int(number)
                assert [lists[key][place] for key in SCHEMA.keys] == expected(columns, example)
                assert batch.groups[place] == columns["user"][example]
                seen += 1
    assert seen == N // 10


def source(columns):
    return from_columns(columns, SCHEMA, batch_size=8, scaling="none")


def test_ids_of_64_bits_pass_through_records_and_lists(columns):
    data = source(columns)
    assert_holds(data.eval_batches("test"), columns)
    for batch in itertools.islice(data.train_batches(start_example=0), 3):
        batch.features.validate(SCHEMA)


def test_ids_of_64_bits_pass_through_a_converted_file(columns, tmp_path: pathlib.Path):
    arrow.convert(source(columns), tmp_path / "rows.arrow", chunk_rows=30)
    data = ArrowData(path=str(tmp_path / "rows.arrow"), batch_size=8).build()
    assert data.schema == SCHEMA
    assert_holds(data.eval_batches("test"), columns)


def test_records_without_such_features_stay_32_bits_wide(columns):
    narrow = Schema(categorical=(SCHEMA["day"],), dense=("x",))
    batch = next(from_columns(columns, narrow, batch_size=8).train_batches(start_example=0))
    assert batch.features.values.dtype == np.int32


def test_signed_and_unsigned_columns_side_by_side_keep_their_bits():
    unsigned = EXTREMES.view(np.uint64)
    features = KeyedJagged.from_dense({"a": unsigned, "b": EXTREMES})
    assert features["a"].values.tolist() == features["b"].values.tolist() == EXTREMES.tolist()


def test_only_integers_are_ids_of_any_64_bits():
    check_ids(EXTREMES, "a", None)
    with pytest.raises(UserError, match=r"feature 'a': ids must be integers; got float64\. Numbers above 2\*\*53"):
        check_ids(np.array([1.0]), "a", None)
    with pytest.raises(
        UserError, match=r"rows=2147483648 must be below.*declare rows=None and give its table an id map"
    ):
        check_schema(Schema(categorical=(Categorical(name="a", rows=2**31),)))
    with pytest.raises(ValueError, match="at least 1, or None for any 64-bit id; got 0"):
        Categorical(name="a", rows=0)
