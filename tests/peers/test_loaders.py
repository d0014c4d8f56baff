"""Our data pipeline and torch's DataLoader deliver the same rows."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; benchmarks/peers.sh installs it")

from scalejax.bench import harness
from scalejax.bench.cases import data_pipeline, text_pipeline

pytestmark = pytest.mark.peers


# The peer's workers are forks, against which jax warns once it has threads; they never call it.
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
@pytest.mark.parametrize("peer", data_pipeline.PEERS)
@pytest.mark.parametrize("case", data_pipeline.CASES)
def test_an_epoch_holds_the_same_rows(case, peer):
    contest = data_pipeline.prepare(case, peer, groups=6)
    try:
        contest.check()
        contest.ours(3)
        assert contest.peer is not None
        contest.peer(3)
    finally:
        contest.close()


def test_missing_rows_are_found(monkeypatch):
    from scalejax.bench.peers import torch_loader

    whole = torch_loader.from_memory

    def without_the_last(ids, dense, labels, batch_size, workers):
        return whole(np.concatenate([ids[:-1], ids[:1]]), dense, labels, batch_size, workers)

    monkeypatch.setattr(torch_loader, "from_memory", without_the_last)
    with pytest.raises(harness.OutputsDiffer):
        data_pipeline.prepare("memory", "torch", groups=1).check()


@pytest.mark.parametrize("case", text_pipeline.CASES)
def test_rows_of_text_are_the_peer_s(case, tmp_path):
    for d in range(20):
        (tmp_path / f"{d:02}.txt").write_text(chr(65 + d) * 997 * (d + 1))
    contest = text_pipeline.prepare(case, "torch", tmp_path)
    try:
        contest.check()
        contest.ours(3)
        assert contest.peer is not None
        contest.peer(3)
    finally:
        contest.close()
