"""The benchmark of sparse products: both sides multiply the same, and results that differ stop it."""

import types

import numpy as np
import pytest

from scalejax.bench import harness
from scalejax.bench.cases import spmm
from scalejax.bench.peers import scipy_sparse

SMALL = spmm.Size(nodes=40, most=200, features=5)
SHORT = harness.Effort(turns=3, turn_s=0.001)


@pytest.mark.parametrize("against", ["scipy", "bcsr"])
@pytest.mark.parametrize("case", ["exact", "exact-bfloat16", "backward-h", "backward-values", "sampled-8"])
def test_both_sides_compute_the_same(case, against):
    contest = spmm.contest(case, against, SMALL)
    contest.check()
    contest.ours(1)
    contest.peer(1)


def test_gradients_and_samples_are_rated():
    gradients = spmm.contest("backward-values", None, SMALL, SHORT).figures()
    assert gradients.keys() == {"of_forward", "both_of_forward"}
    sampled = spmm.contest("sampled-8", None, SMALL, SHORT)
    figures = sampled.figures()
    share = figures["of_edges"] / figures["speedup_over_bcsr"]
    edges = spmm.power_law(SMALL, np.random.default_rng(0)).nnz
    assert np.isclose(share, sampled.examples / edges)


def test_a_figure_compares_turns_of_calls_that_follow_each_other():
    calls = []
    above, below = (lambda name=name: calls.append(name) for name in ("above", "below"))
    spmm._ratio(above, below, harness.Effort(turns=2, turn_s=0.0, warm_up=1))
    # After finding out how many units make a turn: a unit that warms up and one that is timed, of each in turn.
    assert calls[-8:] == ["below", "below", "above", "above"] * 2


def test_results_that_differ_are_not_timed(monkeypatch):
    class Other(scipy_sparse.Product):
        def run(self):
            out = super().run().copy()
            out[3, 2] += 1
            return out

    monkeypatch.setitem(spmm._MODULES, "scipy", "other")
    load = spmm.peers.load
    monkeypatch.setattr(
        spmm.peers, "load", lambda name: types.SimpleNamespace(Product=Other) if name == "other" else load(name)
    )
    with pytest.raises(harness.OutputsDiffer, match="differ by"):
        spmm.contest("exact", "scipy", SMALL).check()


def test_the_graph_has_the_edges_that_it_is_said_to_have():
    csr = spmm.power_law(spmm.Size(), np.random.default_rng(0))
    assert 1.85e6 < csr.nnz < 1.98e6
    assert np.diff(csr.indptr).max() == 3000
