"""The benchmark of compressors: what it times comes back as NumPy says, and results that differ stop it."""

import types

import jax
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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["int4:128", "blocks-int4:128", "onebit", "topk"])
def test_both_sides_are_compared_and_run(monkeypatch, case):
    monkeypatch.setattr(gradient_compressors.peers, "load", lambda name: types.SimpleNamespace(RoundTrip=_Other))
    right = gradient_compressors.contest(case, "torch", SHAPE)
    right.check()
    right.ours(2)
    right.peer(2)
    assert right.examples == 2 * 2048
    with pytest.raises(harness.OutputsDiffer, match=case):
        gradient_compressors.contest(case, "torch-compile", SHAPE).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "payload"),
    [
        ("int4:128", (0.5 + 4 / 128)),
        ("blocks-int4:128", (0.5 + 4 / 128)),
        ("onebit", (2048 / 8 + 4) / 2048),
        ("topk", 2 * 8 / 2048),
        ("linear-dithering", (2048 * 6 / 8 + 4) / 2048),
        ("natural-dithering", (2048 * 4 / 8 + 4) / 2048),
    ],
)
def test_bytes_of_a_value_are_said_and_those_that_entropy_coding_leaves_of_dithered_ones(case, payload):
    found = gradient_compressors.contest(case, None, SHAPE).figures()
    assert found.pop("payload_bytes_a_value") == payload
    if "dithering" not in case:
        assert found == {}
        return
    numbers, dithering = np.random.default_rng(0).standard_t(3, SHAPE), gradient_compressors.DITHERINGS[case]
    payload = jax.jit(dithering.encode)(numbers.astype(np.float32), np.array([1, 2], np.uint32))
    rows = jax.jit(lambda payload: dithering.signed_levels(payload, 2048))(payload)
    words = 0
    for row in np.asarray(rows):
        (places,) = np.nonzero(row)
        gaps = np.diff(places, prepend=-1)
        bits = sum(delta_bits(int(gap)) + 1 + delta_bits(abs(int(row[i]))) for gap, i in zip(gaps, places, strict=True))
        words += -(-bits // 32) + 2
    assert found == {"entropy_coded_bytes_a_value": 4 * words / numbers.size}
    with pytest.raises(harness.Unsuited, match=f"--against torch: {case} has no peer"):
        gradient_compressors.contest(case, "torch", SHAPE)


def delta_bits(value):
    """Of Elias' delta code: the length of the length in unary, the length, and the value without its first bit."""
    length = value.bit_length()
    return 2 * length.bit_length() - 1 + length - 1
