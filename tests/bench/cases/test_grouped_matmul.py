"""The benchmark of grouped products: equal outputs are checked, groups have the rows that are said."""

import itertools

import numpy as np
import pytest

from scalejax.bench import harness
from scalejax.bench.cases import grouped_matmul
from scalejax.bench.cases.grouped_matmul import CASES, PEERS, Size

SMALL = Size(1024, 8, 12, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "case"), [*zip(itertools.cycle(PEERS), CASES, strict=False)])
def test_both_sides_are_compared_timed_and_rated(peer, case):
    contest = grouped_matmul.contest(case, peer, SMALL)
    contest.check()
    contest.ours(2)
    contest.peer(2)
    figures = contest.figures()
    assert set(figures) == {"tflops", "tflops_peer", "largest"}
    assert all(value > 0 for value in figures.values())
    assert contest.examples == 1024


def test_results_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "_dense", lambda x, weights: 2 * (x @ weights))
    with pytest.raises(harness.OutputsDiffer, match="result 0 differs by 5"):
        grouped_matmul.contest("forward-zipf", "dense", SMALL).check()


@pytest.mark.parametrize(("zipf", "shares"), [(False, [2, 2, 2, 2]), (True, [4, 2, 1, 1])])
def test_groups_are_multiples_of_a_block_and_hold_all_rows(zipf, shares):
    sizes = grouped_matmul.group_sizes(SMALL, zipf=zipf)
    np.testing.assert_array_equal(sizes, 128 * np.array(shares))
