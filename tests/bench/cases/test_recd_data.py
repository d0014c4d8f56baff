"""The benchmark of deduplicated reading, on a small log."""

import numpy as np
import pyarrow as pa
import pytest

from scalejax.bench.cases import recd_data
from scalejax.data.examples.jagged import KeyedJagged


@pytest.mark.slow
@pytest.mark.parametrize("case", recd_data.CASES)
def test_both_sides_read_the_same_rows(case):
    threads = pa.cpu_count()
    contest = recd_data.prepare(case, "plain", sessions=64)
    try:
        contest.check()
        contest.ours(2)
        assert contest.peer is not None
        contest.peer(2)
    finally:
        contest.close()
    assert contest.examples == 64 * 16
    assert pa.cpu_count() == threads


def test_a_vocabulary_numbers_what_it_knows():
    features = KeyedJagged.from_lists({"a": [[7, 3], [8], []]}, dtype=np.int64)
    assert recd_data.Vocabulary(np.array([3, 5, 7]))(features).to_lists() == {"a": [[3, 1], [0], []]}
