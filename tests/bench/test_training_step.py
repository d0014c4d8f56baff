"""When a step and that of a peer count as the same."""

import types

import numpy as np
import pytest

from scalejax.bench import training_step
from scalejax.bench.harness import OutputsDiffer

LOGITS = np.linspace(-2, 3, 64, dtype=np.float32)
BATCH = types.SimpleNamespace(labels=(np.arange(64) % 4 == 0).astype(np.float32)[:, None])


def check(ours, peer, size=np.max, tolerance=1e-3):
    training_step.check_equal(ours, peer, BATCH, "here", tolerance, size)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [np.max, np.mean])
def test_logits_that_differ_are_found_whichever_side_has_the_larger_ones(sign, size):
    near = LOGITS * np.float32(1 + sign * 3e-6)
    check(near, LOGITS, size, 1e-5)
    with pytest.raises(OutputsDiffer, match="logits here differ by"):
        check(near, LOGITS, size, 1e-6)
    apart = LOGITS.copy()
    apart[:3] += sign * np.float32(0.1)
    with pytest.raises(OutputsDiffer, match="logits here differ by"):
        check(apart, LOGITS, size)


def test_losses_that_differ_are_found_though_no_logit_is_far_off():
    with pytest.raises(OutputsDiffer, match="mean losses here differ"):
        check(LOGITS + np.float32(0.02), LOGITS, tolerance=0.1)
    with pytest.raises(OutputsDiffer, match="mean losses here differ"):
        check(LOGITS - np.float32(0.02), LOGITS, tolerance=0.1)


def test_logits_that_are_not_finite_are_not_equal():
    broken = LOGITS.copy()
    broken[5] = np.nan
    with pytest.raises(OutputsDiffer, match="not finite"):
        check(broken, broken)
