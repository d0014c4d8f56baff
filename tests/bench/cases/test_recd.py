"""The end-to-end benchmark of deduplication, on a small log."""

import pytest

from scalejax.bench.cases import recd


@pytest.mark.slow
def test_both_sides_give_equal_logits_and_run():
    contest = recd.prepare("train-s16-d0.9", "plain", batches=2, batch_size=1024)
    try:
        contest.check()
        contest.ours(1)
        assert contest.peer is not None
        contest.peer(1)
        figures = contest.figures()
    finally:
        contest.close()
    # 128 sessions: the factor varies by about 3 percent for each of four groups.
    assert figures["factor"] == pytest.approx(figures["closed_form"], rel=0.1)
    assert figures["to_device_ratio"] > 3
    assert figures["temp_ratio"] > 1
