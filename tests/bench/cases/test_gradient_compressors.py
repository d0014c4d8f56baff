"""The benchmark of compressors: what it times comes back as NumPy says, and results that differ stop it."""

import types

import numpy as np
import pytest

from scalejax.bench import harness
from scalejax.bench.cases import gradient_compressors

SHAPE = (2, 2048)


class _Other:
    """A peer in NumPy, one of whose numbers is wrong where it is "compiled"."""

    def __init__(self, numbers, kind, k, compiled, threads):
        self.sent, self.kind, self.k, self.compiled = numbers, kind, int(k * numbers.shape[1]), compiled

    def run(self):
        pass

    def result(self):
        x = self.sent
        if self.kind == "onebit":
            back = np.where(x < 0, -1, 1) * np.abs(x).mean(1, keepdims=True)
        elif self.kind == "topk":
            least = np.sort(np.abs(x), axis=1)[:, -self.k, None]
            back = np.where(np.abs(x) >= least, x, 0)
        else:
            groups = x.reshape(-1, 128)
            step = np.abs(groups).max(1, keepdims=True) / 7
            back = (np.floor(groups / step + np.random.default_rng(1).random(groups.shape)) * step).reshape(x.shape)
        back[1, 3] += 9 * self.compiled
        return back.astype(np.float32)


@pytest.mark.parametrize("case", gradient_compressors.CASES)
def test_both_sides_are_compared_and_run(monkeypatch, case):
    monkeypatch.setattr(gradient_compressors.peers, "load", lambda name: types.SimpleNamespace(RoundTrip=_Other))
    right = gradient_compressors.contest(case, "torch", SHAPE)
    right.check()
    right.ours(2)
    right.peer(2)
    assert right.examples == 2 * 2048
    with pytest.raises(harness.OutputsDiffer, match=case):
        gradient_compressors.contest(case, "torch-compile", SHAPE).check()
