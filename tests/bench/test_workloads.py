"""The batches that benchmarks work on."""

import numpy as np

from scalejax.bench import workloads
from scalejax.data.click_logs.criteo_terabyte import TABLE_ROWS
from scalejax.data.examples.schema import Categorical, Schema


def test_criteo_tables_are_those_of_criteo_terabyte_up_to_the_cut():
    # MLPerf's preprocessing: the sum of the uncut cardinalities.
    assert sum(TABLE_ROWS) == 204_184_588
    schema = workloads.criteo_schema()
    assert len(schema.categorical) == 26
    assert len(schema.dense) == 13
    assert max(feature.rows for feature in schema.categorical) == workloads.CRITEO_MOST_ROWS


def test_made_ids_follow_zipfs_law_inside_their_range():
    schema = Schema(categorical=(Categorical(name="a", rows=1000), Categorical(name="b", rows=1)))
    ids, _, labels = workloads.columns(schema, 200_000, seed=0)
    assert ids.min() == 0
    assert ids[0].max() == 999
    # P(id = k) = log((k + 2) / (k + 1)) / log(1001); five standard errors of 2e5 draws.
    for k in (0, 1, 9):
        p = np.log((k + 2) / (k + 1)) / np.log(1001)
        assert abs((ids[0] == k).mean() - p) < 5 * np.sqrt(p * (1 - p) / 200_000)
    assert 0.24 < labels.mean() < 0.26


def test_flights_cases_are_real_and_of_the_size_that_they_name():
    schema, batches = workloads.for_case("b1024", None)
    assert [len(batch) for batch in batches] == [1024] * 8
    assert len(schema.categorical) == 9
    assert len(schema.dense) == 7
    ids = workloads.one_hot_ids(batches[0])
    assert ids.shape == (1024, 9)
    # Feature-major on the host, example-major here.
    assert (ids[:, 1] == batches[0].features.values[1024:2048]).all()
