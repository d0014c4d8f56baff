"""The data pipeline benchmark without its peer."""

import numpy as np
import pytest

from scalejax import bench
from scalejax.bench import workloads
from scalejax.bench.cases import data_pipeline
from scalejax.errors import UserError


def rows(count: int = 100) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (count, 3)), rng.standard_normal((count, 2), np.float32), np.ones(count, np.float32)


def test_checksum_ignores_the_order_of_rows():
    ids, dense, labels = rows()
    order = np.random.default_rng(1).permutation(len(ids))
    assert data_pipeline.checksum(ids, dense, labels) == data_pipeline.checksum(ids[order], dense[order], labels[order])


def test_checksum_sees_a_value_that_moved_to_another_row_or_column():
    ids, dense, labels = rows()
    whole = data_pipeline.checksum(ids, dense, labels)
    moved = dense.copy()
    moved[[0, 1], 0] = moved[[1, 0], 0]
    assert data_pipeline.checksum(ids, moved, labels) != whole
    assert data_pipeline.checksum(ids, dense[:, ::-1], labels) != whole


def test_checksum_takes_both_zeros_for_the_same_number():
    ids, dense, labels = rows(1)
    zero, minus_zero = np.zeros_like(dense), -np.zeros_like(dense)
    assert data_pipeline.checksum(ids, zero, labels) == data_pipeline.checksum(ids, minus_zero, labels)


@pytest.mark.parametrize("case", data_pipeline.CASES)
def test_cases_deliver_batches(case):
    contest = data_pipeline.prepare(case, None, groups=1)
    try:
        contest.ours(2)
    finally:
        contest.close()
    assert contest.peer is None
    assert contest.examples == data_pipeline.BATCH


def test_the_users_data_is_refused_where_it_would_be_ignored(tmp_path):
    with pytest.raises(UserError, match="--data: data_pipeline makes its own data"):
        bench.run("data_pipeline", data=tmp_path)
    with pytest.raises(UserError, match="the case criteo makes its own batches"):
        workloads.for_case("criteo", tmp_path)
