"""The benchmark of attention: equal outputs are checked, and operations are counted."""

import numpy as np
import pytest

from scalejax.bench import harness
from scalejax.bench.cases import flash_attention
from scalejax.bench.cases.flash_attention import Size

SMALL = Size(2, 24, 4, 2)


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("gradients", [False, True])
def test_both_sides_are_compared_timed_and_rated(gradients):
    contest = flash_attention.contest(SMALL, 16, gradients=gradients, against="jax")
    contest.check()
    contest.ours(2)
    contest.peer(2)
    figures = contest.figures()
    assert set(figures) == {"tflops", "tflops_peer"}
    assert all(value > 0 for value in figures.values())
    assert contest.examples == 48


def test_results_that_differ_are_not_timed(monkeypatch):
    contest = flash_attention.contest(SMALL, 16, gradients=False, against="jax")
    real = flash_attention._Side.results
    monkeypatch.setattr(flash_attention._Side, "results", lambda side: [x * (1 + np.random.rand()) for x in real(side)])
    with pytest.raises(harness.OutputsDiffer, match="result 0 differs"):
        contest.check()


def test_operations_are_those_of_the_visible_half():
    """Counted one by one: 2 operations a product and sum, and each score takes D of them, there and back."""
    visible = SMALL.length**2 / 2
    each = 2 * 16 * SMALL.batch * SMALL.heads
    assert flash_attention.useful_flops(SMALL, 16, gradients=False) == 2 * each * visible
    assert flash_attention.useful_flops(SMALL, 16, gradients=True) == 6 * each * visible
