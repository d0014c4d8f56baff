import numpy as np
import pytest

from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import ByTime, Fractions
from scalejax.errors import UserError

SCHEMA = Schema(categorical=(Categorical(name="user", rows=5),), dense=("price", "age"), labels=("click",))


def columns(**changes: object) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    base = {
        "user": rng.integers(0, 5, 200),
        "price": rng.lognormal(size=200) - 0.5,
        "age": rng.normal(40, 10, 200),
        "click": rng.integers(0, 2, 200),
        "time": np.arange(200),
    }
    return {k: np.asarray(v) for k, v in (base | changes).items()}


def with_value(name: str, row: int, value: float) -> dict[str, np.ndarray]:
    found = columns()
    found[name] = found[name].astype(np.float64 if isinstance(value, float) else np.int64)
    found[name][row] = value
    return found


def all_dense(data) -> np.ndarray:
    return np.concatenate([b.dense for s in ("train", "validation", "test") for b in data.eval_batches(s)])


def test_numbers_are_standardised_by_the_training_split() -> None:
    split = ByTime(column="time", validation_from=120, test_from=160)
    found = all_dense(from_columns(columns(), SCHEMA, batch_size=40, split=split, log_shift={"price": 1.0}))
    raw = np.stack([np.log(columns()["price"] + 1.0), columns()["age"]], axis=1)
    expected = (raw - raw[:120].mean(0)) / raw[:120].std(0)
    # float32 of a float64 computation: half a unit in the last place of values up to 4.
    np.testing.assert_allclose(found, expected, atol=3e-7)


def test_missing_numbers_become_the_mean_of_the_training_split() -> None:
    split = ByTime(column="time", validation_from=120, test_from=160)
    missing = columns()
    missing["age"][[3, 150]] = np.nan
    found = all_dense(from_columns(missing, SCHEMA, batch_size=40, split=split))
    assert found[[3, 150], 1].tolist() == [0.0, 0.0]
    kept = np.delete(missing["age"][:120], 3)
    np.testing.assert_allclose(found[5, 1], (missing["age"][5] - kept.mean()) / kept.std(), rtol=1e-6)
    unscaled = all_dense(from_columns(missing, SCHEMA, batch_size=40, split=split, scaling="none"))
    np.testing.assert_allclose(unscaled[150, 1], kept.mean(), rtol=1e-6)
    np.testing.assert_array_equal(unscaled[5, 1], np.float32(missing["age"][5]))


def test_a_constant_number_becomes_zero() -> None:
    found = all_dense(from_columns(columns(age=np.full(200, 7.3)), SCHEMA, batch_size=40))
    np.testing.assert_allclose(found[:, 1], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (with_value("user", 17, 5), r"feature 'user': id 5 of example 17 is outside \[0, 5\).*at least 6"),
        (with_value("user", 17, -1), r"feature 'user': id -1 of example 17 is negative"),
        (
            with_value("user", 17, float("nan")),
            "feature 'user' must have an integer id in every row; got 1 are missing",
        ),
        (with_value("click", 9, 2), "label 'click' is 2 in row 9; wanted 0 or 1"),
        (with_value("click", 9, float("nan")), "label 'click' is nan in row 9"),
        (with_value("age", 4, float("inf")), "number 'age' is infinite in row 4"),
        (columns(age=np.zeros(3)), "columns must be equally long"),
        ({k: v[:0] for k, v in columns().items()}, "there are no rows"),
        ({k: v for k, v in columns().items() if k != "age"} | {"aged": np.zeros(200)}, "no column 'age'.*'aged'"),
    ],
)
def test_bad_columns_are_refused(changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_columns(changed, SCHEMA, batch_size=8)


def test_nan_policy_error_names_column_and_row() -> None:
    with pytest.raises(UserError, match=r"'age' is missing \(NaN\) in row 4 and 1 rows.*nan=\"mean\""):
        from_columns(with_value("age", 4, float("nan")), SCHEMA, batch_size=8, nan="error")


def test_a_logarithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"'price' is -3 in row 4.*log\(x \+ 1\)"):
        from_columns(with_value("price", 4, -3.0), SCHEMA, batch_size=8, log_shift={"price": 1.0})


def test_a_column_in_two_roles_is_refused() -> None:
    schema = Schema(categorical=(Categorical(name="user", rows=5),), dense=("click",), labels=("click",))
    with pytest.raises(UserError, match="click are listed twice"):
        from_columns(columns(), schema, batch_size=8)


def test_batch_size_and_fractions_are_checked() -> None:
    with pytest.raises(UserError, match="batch_size must be at least 1; got 0"):
        from_columns(columns(), SCHEMA, batch_size=0)
    with pytest.raises(UserError, match=r"train=0.9 and validation=0.2"):
        from_columns(columns(), SCHEMA, batch_size=8, split=Fractions(train=0.9, validation=0.2))
    with pytest.raises(UserError, match="must not lie before"):
        from_columns(columns(), SCHEMA, batch_size=8, split=ByTime(column="time", validation_from=9, test_from=1))


def test_fractions_cut_numpys_frozen_permutation() -> None:
    splits = Fractions().assign(1000)
    order = np.random.RandomState(0).permutation(1000)
    for name, rows in (("train", order[:800]), ("validation", order[800:900]), ("test", order[900:])):
        assert splits[name].tolist() == sorted(rows.tolist())


def test_fractions_by_position_keep_the_order() -> None:
    splits = Fractions(train=0.7, validation=0.1, by="position").assign(10)
    assert [splits[s].tolist() for s in splits] == [list(range(7)), [7], [8, 9]]


def test_a_number_beyond_float32_is_refused_by_row_and_column() -> None:
    schema = Schema(categorical=(Categorical(name="user", rows=9),), dense=("price",))
    columns = {"user": np.arange(9), "price": np.ones(9), "label": np.arange(9) % 2}
    columns["price"][4] = -1e39
    with pytest.raises(UserError, match=r"number 'price' becomes -1e\+39 in row 4, beyond float32"):
        from_columns(columns, schema, batch_size=4, scaling="none")
