"""Scaling fits against data made from known laws, published constants, and coverage over many repetitions."""

import math

import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.plan.arithmetic import scaling

BUDGETS = (6e18, 2e19, 6e19, 2e20, 6e20, 2e21, 1e22)


def _curves(law, *, noise=0.0, runs=7, seed=0):
    """Runs on exact parabolas in log tokens around the optima of a law, losses noisy."""
    random = np.random.default_rng(seed)
    curves = []
    for budget in BUDGETS:
        optimum = law(budget)
        amounts = optimum * np.exp(np.linspace(-1.6, 1.4, runs))
        losses = 2.0 + 400 * budget**-0.13 + 0.05 * np.log(amounts / optimum) ** 2
        curves.append(
            scaling.IsoFlops(compute=budget, amounts=amounts, losses=losses + noise * random.normal(size=runs))
        )
    return curves


def test_the_constants_of_the_figure_give_the_papers_token_count_and_the_printed_pair_does_not():
    assert scaling.LLAMA3.tokens(3.8e25) == pytest.approx(16.3e12, rel=0.005)
    rounded = scaling.PowerLaw(coefficient=0.29, exponent=0.53)
    assert rounded.tokens(3.8e25) == pytest.approx(10.5e12, rel=0.01)

    def reach(coefficient, exponent, half, exponent_half):
        """Tokens of all pairs that round to these."""
        return [
            scaling.PowerLaw(coefficient=coefficient + s * half, exponent=exponent + s * exponent_half)(3.8e25)
            for s in (-1, 1)
        ]

    low, high = reach(0.299, 0.537, 0.0005, 0.0005)
    assert low < 16.55e12 < high
    assert reach(0.29, 0.53, 0.005, 0.005)[1] < 16.55e12


def test_tokens_and_parameters_multiply_to_the_budget():
    law = scaling.LLAMA3
    assert 6 * law.tokens(3.8e25) * law.parameters(3.8e25) == pytest.approx(3.8e25)
    # The paper trains 402B (its estimate; 405B were built) on 16.55T.
    assert law.parameters(3.8e25) == pytest.approx(402e9, rel=0.05)
    sizes = scaling.PowerLaw(coefficient=0.1, exponent=0.5, amount="parameters")
    assert sizes.tokens(1e24) == pytest.approx(1e24 / (6 * 0.1 * 1e12))


def test_a_known_law_is_recovered_from_its_curves():
    fit = scaling.fit_isoflops(_curves(scaling.LLAMA3))
    assert fit.law.exponent == pytest.approx(0.537, abs=1e-9)
    assert fit.law.coefficient == pytest.approx(0.299, rel=1e-7)
    assert fit.law.tokens(3.8e25) == pytest.approx(scaling.LLAMA3(3.8e25), rel=1e-6)
    for parabola in fit.parabolas:
        assert parabola.minimum == pytest.approx(scaling.LLAMA3(parabola.compute), rel=1e-9)
        assert parabola.curvature == pytest.approx(0.05)
        assert parabola.loss == pytest.approx(2.0 + 400 * parabola.compute**-0.13)


def test_a_parabola_is_that_of_numpy_however_far_its_amounts_lie():
    random = np.random.default_rng(1)
    amounts = np.exp(random.uniform(28.0, 31.0, 9))
    losses = 0.07 * (np.log(amounts) - 29.5) ** 2 + 2.5 + 0.003 * random.normal(size=9)
    found = scaling.fit_parabola(scaling.IsoFlops(compute=1e20, amounts=amounts, losses=losses))
    a, b, c = np.polyfit(np.log(amounts), losses, 2)
    assert math.log(found.minimum) == pytest.approx(-b / (2 * a))
    assert found.loss == pytest.approx(c - b * b / (4 * a))
    np.testing.assert_allclose(found(amounts), np.polyval([a, b, c], np.log(amounts)), rtol=1e-9)


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    truth = scaling.LLAMA3(3.8e25)
    held = 0
    for seed in range(200):
        fit = scaling.fit_isoflops(_curves(scaling.LLAMA3, noise=0.004, seed=seed))
        low, high = scaling.bootstrap(fit, samples=300, seed=seed).interval(lambda law: law(3.8e25), level=0.9)
        held += low <= truth <= high
    # Binomial(200, 0.9) has a standard deviation of 4.2; residuals of 49 runs estimate the noise to 10 %.
    assert 166 <= held <= 194


def test_an_interval_leaves_out_as_many_laws_on_either_side():
    laws = tuple(scaling.PowerLaw(coefficient=1.0, exponent=float(n)) for n in range(101))
    found = scaling.Bootstrap(laws=laws, refused=0)
    assert found.interval(lambda law: law.exponent, level=0.9) == pytest.approx((5, 95))
    assert found.interval(lambda law: law.exponent) == pytest.approx((2.5, 97.5))


def test_bootstrap_narrows_with_the_noise_and_repeats_with_the_seed():
    def width(noise, seed=0):
        fit = scaling.fit_isoflops(_curves(scaling.LLAMA3, noise=noise))
        low, high = scaling.bootstrap(fit, samples=500, seed=seed).interval(lambda law: law.exponent)
        return high - low

    assert width(0.001) == width(0.001)
    assert width(0.001) != width(0.001, seed=1)
    assert width(0.004) == pytest.approx(4 * width(0.001), rel=0.2)


def test_bootstrap_counts_samples_without_a_minimum():
    fit = scaling.fit_isoflops(_curves(scaling.LLAMA3, noise=0.03, seed=3))
    found = scaling.bootstrap(fit, samples=500)
    assert found.refused > 0
    assert len(found.laws) + found.refused == 500


def test_three_runs_a_budget_have_no_noise_to_resample():
    fit = scaling.fit_isoflops(_curves(scaling.LLAMA3, runs=3))
    with pytest.raises(UserError, match="only 3 runs"):
        scaling.bootstrap(fit)


def test_a_minimum_outside_of_the_runs_is_refused_with_the_side_to_extend():
    amounts = np.array([1e10, 2e10, 4e10])
    above = scaling.IsoFlops(compute=1e20, amounts=amounts, losses=np.log(amounts / 9e10) ** 2)
    with pytest.raises(UserError, match=r"outside of the runs.*larger"):
        scaling.fit_parabola(above)
    with pytest.raises(UserError, match="do not rise on both sides"):
        scaling.fit_parabola(scaling.IsoFlops(compute=1e20, amounts=amounts, losses=[2.0, 2.1, 2.0]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"compute": 0.0}, "compute must be FLOPs above 0"),
        ({"losses": (1.0, 2.0)}, "one entry a run"),
        ({"amounts": (1.0, -2.0, 3.0)}, "amounts must be above 0"),
        ({"losses": (1.0, math.nan, 3.0)}, "losses must be finite"),
        ({"amounts": (1.0, 2.0, 2.0)}, "3 different amounts"),
    ],
)
def test_bad_runs_are_refused(change, match):
    with pytest.raises(UserError, match=match):
        scaling.IsoFlops(**{"compute": 1e20, "amounts": (1.0, 2.0, 3.0), "losses": (3.0, 2.0, 3.0), **change})


def test_one_budget_is_no_law():
    with pytest.raises(UserError, match="at least two budgets"):
        scaling.fit_isoflops(_curves(scaling.LLAMA3)[:1])


def test_downstream_accuracy_in_two_steps_recovers_its_truth():
    truth = scaling.Downstream(slope=-0.09, intercept=2.4, middle=0.42, width=0.11, chance=0.25, ceiling=1.0)
    compute = np.geomspace(6e18, 1e22, 8)
    nll = np.linspace(0.05, 0.8, 12)  # also models beyond the line, which see high accuracies
    fit = scaling.fit_downstream(
        compute=compute,
        nll_of_compute=[truth.nll(c) for c in compute],
        nll=nll,
        accuracy=[truth.accuracy_at_nll(n) for n in nll],
        chance=0.25,
    )
    for name in ("slope", "intercept", "middle", "width"):
        assert getattr(fit, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    assert fit.accuracy(3.8e25) == pytest.approx(truth.accuracy(3.8e25), rel=1e-6)
    assert fit.accuracy_at_nll(0.42) == pytest.approx(0.625)  # halfway between chance and ceiling
    assert fit.accuracy_at_nll(1e6) == 0.25


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nll": (0.5,)}, "nll and accuracy must have equal length"),
        ({"chance": 1.0}, "chance < ceiling"),
        ({"accuracy": (30.0, 60.0, 90.0)}, "shares"),
        ({"nll_of_compute": (0.5, 0.7)}, "must fall with compute"),
        ({"accuracy": (0.9, 0.6, 0.3)}, "must rise as NLL falls"),
    ],
)
def test_bad_downstream_points_are_refused(change, match):
    given = {
        "compute": (1e20, 1e21), "nll_of_compute": (0.9, 0.8), "nll": (0.9, 0.5, 0.1), "accuracy": (0.3, 0.6, 0.9),
    }  # fmt: skip
    with pytest.raises(UserError, match=match):
        scaling.fit_downstream(**{**given, **change})


def test_the_figure_shows_every_run_every_minimum_and_the_target():
    fit = scaling.fit_isoflops(_curves(scaling.LLAMA3, noise=0.002))
    drawn = scaling.figure(fit, samples=scaling.bootstrap(fit, samples=50), targets=[3.8e25])
    left, right = drawn.axes
    points = [line for line in left.lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in points) == sum(len(c.amounts) for c in fit.curves)
    (minima,) = (line for line in right.lines if line.get_marker() == "*")
    np.testing.assert_allclose(minima.get_ydata(), [p.minimum for p in fit.parabolas])
    assert f"{fit.law(3.8e25):.3g} tokens" in [text.get_text() for text in right.texts]
