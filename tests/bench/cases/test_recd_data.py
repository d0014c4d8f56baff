"""The benchmark of deduplicated reading, on a small log."""

import numpy as np
import pyarrow as pa
import pytest

from scalejax.bench.cases import recd_data
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError


@pytest.mark.parametrize("case", recd_data.CASES)
def test_both_sides_read_the_same_rows(case):
    threads = pa.cpu_count()
    contest = recd_data.prepare(case, "plain", None, sessions=64)
    try:
        contest.check()
        contest.ours(2)
        assert contest.peer is not None
        contest.peer(2)
    finally:
        contest.close()
    assert contest.examples == 64 * 16
    assert pa.cpu_count() == threads


def test_measured_factors_follow_the_closed_form():
    found = list(recd_data.factors(sessions=2048))
    assert {(samples, repeat) for samples, repeat, *_ in found} == {
        (samples, repeat) for samples in (4, 16) for repeat in (0.0, 0.5, 0.8, 0.9, 0.95)
    }
    for _, _, measured, expected in found:
        assert measured == pytest.approx(expected, rel=0.03)


def test_clustering_and_leaving_repeats_out_save_bytes():
    before, whole, short = recd_data.storage(30.0, "plain", sessions=256)
    assert short < whole < before


def test_a_vocabulary_numbers_what_it_knows():
    features = KeyedJagged.from_lists({"a": [[7, 3], [8], []]}, dtype=np.int64)
    assert recd_data.Vocabulary(np.array([3, 5, 7]))(features).to_lists() == {"a": [[3, 1], [0], []]}


def test_the_users_data_is_refused_where_it_would_be_ignored(tmp_path):
    with pytest.raises(UserError, match="recd_data makes its own log"):
        recd_data.prepare("hash", None, tmp_path)
