"""Our training steps and their PyTorch peers compute the same: forward, gradients, Adam, row-wise AdaGrad."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; benchmarks/peers.sh installs it")

from scalejax.bench import harness, training_step, workloads
from scalejax.bench.cases import dhen_step, dlrm_step, gcn_step, wukong_step
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.wukong import WukongConfig

pytestmark = pytest.mark.peers

SCHEMA = Schema(
    categorical=(Categorical(name="a", rows=50), Categorical(name="b", rows=3), Categorical(name="c", rows=400)),
    dense=("x", "y"),
)
BATCHES = workloads.batches(SCHEMA, batch_size=64, count=3)
MODELS = {
    # Both residual cases: 4 input vectors are not n_F + n_L, 5 are.
    "wukong": (
        wukong_step,
        WukongConfig(
            dim=8,
            layers=2,
            fm_outputs=3,
            lcb_outputs=2,
            rank=3,
            fmb_hidden=(16,),
            head_hidden=(16,),
            bottom_hidden=(16,),
        ),
    ),
    "dhen": (dhen_step, dhen_step.stack(8, 4, None, 3, (16,), (16,))),
    "dhen of low rank": (dhen_step, dhen_step.stack(8, 4, 5, 3, (16,), (16,))),
    "dlrm": (dlrm_step, DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16, 8))),
}


class Spied:
    """A contest whose two sides can be looked at."""

    def __init__(self, name, monkeypatch, *, compiled=False, change=lambda peer: None):
        module, model = MODELS[name]

        def make(parameters, tables):
            self.peer = training_step.torch_step(module.torch_module(model, SCHEMA), parameters, tables, compiled)
            change(self.peer)
            return self.peer

        class Ours(training_step._Ours):
            def __init__(inner, *arguments):
                super().__init__(*arguments)
                self.ours = inner

        monkeypatch.setattr(training_step, "_Ours", Ours)
        self.contest = training_step.contest(model, SCHEMA, BATCHES, make)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_rows_stay_equal_over_several_steps(name, monkeypatch):
    from scalejax.bench.peers import torch_training

    spied = Spied(name, monkeypatch)
    for _ in range(5):  # every batch once and two of them again: each optimizer meets state that it made
        spied.contest.ours(1)
        spied.contest.peer(1)
    ours = torch_training.from_jax(spied.ours.parameters())
    theirs = dict(spied.peer.named_parameters())
    assert set(ours) == set(theirs)
    for path, value in ours.items():
        # Five Adam steps of 1e-3: 2e-6 is 0.04 % of the way gone. (A ReLU that rounding opens would take more; at 64
        # examples none lies that close to 0.)
        np.testing.assert_allclose(value, theirs[path], rtol=1e-5, atol=2e-6, err_msg=path)
    np.testing.assert_allclose(np.concatenate(spied.ours.tables()), spied.peer.tables(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_check_before_timing_passes(name, monkeypatch):
    Spied(name, monkeypatch).contest.check()


def _other_rate(peer):
    peer.adam.param_groups[0]["lr"] *= 2


def _other_weight(peer):
    next(iter(peer.named_parameters()))[1][...] += 0.1


@pytest.mark.parametrize("change", [_other_rate, _other_weight])
def test_the_check_before_timing_finds_a_peer_that_computes_something_else(change, monkeypatch):
    with pytest.raises(harness.OutputsDiffer):
        Spied("dlrm", monkeypatch, change=change).contest.check()


def test_rows_that_no_batch_touched_stay_as_they_were(monkeypatch):
    spied = Spied("dlrm", monkeypatch)
    before = np.concatenate(spied.ours.tables())
    spied.contest.ours(3)
    spied.contest.peer(3)
    firsts = np.cumsum([0, *(feature.rows for feature in SCHEMA.categorical[:-1])])
    touched = np.unique(np.concatenate([workloads.one_hot_ids(batch) + firsts for batch in BATCHES]))
    untouched = np.setdiff1d(np.arange(len(before)), touched)
    assert untouched.size > 50
    for after in (np.concatenate(spied.ours.tables()), spied.peer.tables()):
        np.testing.assert_array_equal(after[untouched], before[untouched])
        assert (after[touched] != before[touched]).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_the_compiled_peer_computes_the_same(monkeypatch):
    Spied("dlrm", monkeypatch, compiled=True).contest.check()


def test_peers_are_refused_away_from_the_cpu(monkeypatch):
    from scalejax.errors import UserError

    @dataclasses.dataclass
    class Gpu:
        platform: str = "gpu"
        device_kind: str = "NVIDIA Test"

    monkeypatch.setattr(training_step.jax, "devices", lambda: [Gpu()])
    with pytest.raises(UserError, match="first device is NVIDIA Test"):
        training_step.contest(MODELS["dlrm"][1], SCHEMA, BATCHES, lambda *_: None)


@pytest.mark.parametrize("case", gcn_step.CASES)
def test_a_graph_network_has_the_losses_of_its_peer(case):
    gcn_step.prepare(case, "torch").check()


def test_a_peer_with_another_graph_is_noticed(monkeypatch):
    from scalejax.bench.peers import torch_gcn

    def scaled(matrix, shape, threads):
        starts, columns, values = matrix
        return torch_sparse.csr((starts, columns, values * np.float32(1.1)), shape, threads)

    from scalejax.bench.peers import torch_sparse

    monkeypatch.setattr(torch_gcn, "csr", scaled)
    with pytest.raises(harness.OutputsDiffer, match="losses of step 1 differ"):
        gcn_step.prepare("cora16", "torch").check()
