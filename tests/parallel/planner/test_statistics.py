"""Pooling factors and distinct rows: counted, and modelled by Zipf's law."""

import numpy as np
import pytest

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import IdMapConfig, TableConfig
from scalejax.parallel.planner import Reuse, TableStatistics, Zipf, assumed, from_batches
from scalejax.parallel.planner.statistics import expected_distinct, fit_zipf


def zipf_probabilities(rows: int, exponent: float) -> np.ndarray:
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return weight / weight.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2, 3.0])
@pytest.mark.parametrize(("rows", "occurrences"), [(2, 5), (1000, 3000), (200_000, 50_000), (200_000, 3_000_000)])
def test_expected_distinct_equals_the_sum_over_every_row(rows, occurrences, exponent):
    p = zipf_probabilities(rows, exponent)
    by_hand = (1 - (1 - p) ** occurrences).sum()
    # Groups of ranks are summed at their mean.
    assert expected_distinct(occurrences, rows, exponent) == pytest.approx(by_hand, rel=2e-3)


def test_distinct_rows_are_what_draws_have():
    rng = np.random.default_rng(0)
    drawn = rng.choice(5000, size=20_000, p=zipf_probabilities(5000, 1.1))
    # The count is a sum of weakly dependent indicators: its standard deviation is below the root of its mean.
    found = len(np.unique(drawn))
    assert abs(expected_distinct(20_000, 5000, 1.1) - found) < 5 * np.sqrt(found)


@pytest.mark.parametrize("exponent", [0.3, 0.9, 1.0, 1.5])
def test_fit_finds_the_exponent_again(exponent):
    distinct = expected_distinct(1e5, 1_000_000, exponent)
    assert fit_zipf(1e5, distinct, 1_000_000) == pytest.approx(exponent, abs=1e-3)


def test_fit_stays_in_its_range():
    assert fit_zipf(1000, 1000, 1000) == 0  # more distinct rows than chance has
    assert fit_zipf(1e6, 1, 10**6) == 8  # a single row
    assert fit_zipf(0, 0, 10) == 0


def test_reuse_says_distinct_rows_of_a_batch_and_never_more_than_all():
    assert Reuse(factor=4.0).distinct_rows(1000, 10**6) == 250
    assert Reuse(factor=4.0).distinct_rows(1000, 100) == 100


def test_batches_are_counted_by_feature():
    tables = (
        TableConfig(name="item", rows=100, dim=4, features=("seen", "bought")),
        TableConfig(name="user", rows=10, dim=4, features=("user",)),
    )
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(3):
        seen = [rng.integers(0, 100, rng.integers(0, 5)).tolist() for _ in range(50)]
        batches.append(
            KeyedJagged.from_lists(
                {"user": [[3]] * 50, "seen": seen, "bought": [[1, 2]] + [[]] * 49, "other": [[]] * 50}
            )
        )
    item, user = from_batches(tables, batches)
    lengths = [batch["seen"].lengths.sum() for batch in batches]
    assert item.pooling_factors == pytest.approx((sum(lengths) / 150, 2 / 50))
    assert user.pooling_factors == (1.0,)
    # The fitted law gives the mean of the distinct rows that were counted (here between chance and a single row).
    counted = [len(set(b["seen"].values) | set(b["bought"].values)) for b in batches]
    occurrences = sum(lengths) / 3 + 2
    assert item.popularity.distinct_rows(occurrences, 100) == pytest.approx(
        min(np.mean(counted), expected_distinct(occurrences, 100, 0.0)), rel=1e-3
    )
    assert user.popularity == Zipf(exponent=8.0)


def test_ids_of_a_map_may_be_any_and_take_no_more_rows_than_it_has():
    id_map = IdMapConfig(rows=1 + 4 * 2, ways=2)
    tables = (TableConfig(name="t", rows=id_map.rows, dim=4, features=("f",), id_map=id_map),)

    def distinct_rows(*batches):
        given = [KeyedJagged.from_lists({"f": [[i] for i in ids]}, dtype=np.int64) for ids in batches]
        (found,) = from_batches(tables, given)
        assert found.pooling_factors == (1.0,)
        return found.popularity.distinct_rows(20, id_map.rows)

    all_different = [-(2**63), 2**63 - 1, *(2**40 * i for i in range(18))]
    assert distinct_rows(all_different) == pytest.approx(expected_distinct(20, 9, 0.0))
    assert distinct_rows([2**40, -7, 0, 3] * 5) == pytest.approx(4, rel=1e-3)
    # Nine rows in one batch, one in the other.
    assert distinct_rows(all_different, [-7] * 20) == pytest.approx(5, rel=1e-3)


def test_bad_batches_are_refused():
    tables = (TableConfig(name="t", rows=4, dim=4, features=("f",)),)
    with pytest.raises(UserError, match="needs at least one example; got 0 batches"):
        from_batches(tables, [])
    with pytest.raises(UserError, match="feature 'f', which batch 0 lacks; it has g"):
        from_batches(tables, [KeyedJagged.from_lists({"g": [[1]]})])
    with pytest.raises(UserError, match=r"feature 'f' has an id outside \[0, 4\) in batch 1"):
        from_batches(tables, [KeyedJagged.from_lists({"f": [[1]]}), KeyedJagged.from_lists({"f": [[4]]})])


def test_bad_statistics_are_refused():
    with pytest.raises(UserError, match="pooling_factors must be finite"):
        TableStatistics(table="t", pooling_factors=(float("nan"),), popularity=Zipf(exponent=1.0))
    with pytest.raises(UserError, match="factor must be at least 1"):
        Reuse(factor=0.5)
    with pytest.raises(UserError, match="exponent must lie in"):
        Zipf(exponent=9.0)


def test_assumed_statistics_have_one_factor_for_each_feature():
    (found,) = assumed((TableConfig(name="t", rows=4, dim=4, features=("f", "g")),), pooling_factor=3.0)
    assert found.pooling_factors == (3.0, 3.0)
    assert found.ids_per_example == 6.0
