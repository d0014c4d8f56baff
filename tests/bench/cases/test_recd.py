"""The end-to-end benchmark of deduplication, on a small log."""

import pytest

from scalejax.bench.cases import recd
from scalejax.errors import UserError


@pytest.mark.slow
@pytest.mark.parametrize("part", ["read", "step", "train"])
def test_both_sides_give_equal_logits_and_run(part):
    contest = recd.prepare(f"{part}-s16-d0.9", "plain", None, batches=2, batch_size=1024)
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


def test_the_users_data_is_refused_where_it_would_be_ignored(tmp_path):
    with pytest.raises(UserError, match="recd makes its own log"):
        recd.prepare("read-s16-d0.9", None, tmp_path)
