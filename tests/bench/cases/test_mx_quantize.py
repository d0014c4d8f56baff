"""The benchmark of quantizing: what it times is what numerics computes, and results that differ stop it."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.bench import harness
from scalejax.bench.cases import mx_quantize
from scalejax.numerics import quantize
from scalejax.numerics.packing import pack


class _Other:
    """A peer with one code changed."""

    def __init__(self, numbers, name, dtype, compiled, threads):
        packed = pack(quantize.quantize(jnp.asarray(numbers, dtype), name, axis=-1))
        self.codes, self.scales = np.array(packed.codes), np.array(packed.scales)
        self.compiled = compiled

    def run(self):
        pass

    def results(self):
        changed = self.codes.copy()
        changed[3, 5] += self.compiled
        return changed, self.scales


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr(mx_quantize.peers, "load", lambda name: types.SimpleNamespace(Quantizer=_Other))


def test_both_sides_are_compared_timed_and_rated(peer):
    contest = mx_quantize.contest("mxfp4_e2m1", "torchao", (16, 64))
    contest.check()
    contest.ours(2)
    contest.peer(2)
    assert contest.examples == 16 * 64
    assert contest.figures()["floor_share"] > 0


def test_results_that_differ_are_not_timed(peer):
    with pytest.raises(harness.OutputsDiffer, match="1 of 1024 codes differ"):
        mx_quantize.contest("mxfp8_e4m3", "torchao-compile", (16, 64)).check()
