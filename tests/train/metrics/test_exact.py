"""Exact metrics against loops over pairs, identities and scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.train.metrics import exact as ev

EXACT = 1e-12  # everything here is float64 on few examples


def examples(seed=0, size=60):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-0.5, 1.5, size), 1)  # rounded: ties
    labels = (rng.random(size) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], size)
    return labels, logits, weights


def literal_auc(labels, scores, weights):
    won = total = 0.0
    for yi, si, wi in zip(labels, scores, weights, strict=True):
        for yj, sj, wj in zip(labels, scores, weights, strict=True):
            pair = wi * yi * wj * (1 - yj)
            total += pair
            won += pair * (1.0 if si > sj else 0.5 if si == sj else 0.0)
    return won / total if total else math.nan


def test_sigmoid_is_stable_at_both_ends():
    assert ev.sigmoid([0.0, 800.0, -800.0]) == pytest.approx([0.5, 1.0, 0.0], abs=1e-300)
    assert ev.sigmoid(np.float32(-30)) == pytest.approx(math.exp(-30), rel=EXACT)


def test_logloss_by_hand():
    want = -(1 * math.log(0.8) + 3 * math.log(1 - 0.3)) / 4
    assert ev.logloss([1, 0], [0.8, 0.3], [1, 3]) == pytest.approx(want, rel=EXACT)


def test_a_certain_and_wrong_prediction_costs_the_clamp():
    assert ev.logloss([1.0], [0.0]) == pytest.approx(-math.log(1e-12), rel=EXACT)
    assert ev.logloss([0.0], [1.0]) == pytest.approx(-math.log(1e-12), rel=1e-4)  # 1 - 1e-12 is not a float64


def test_predicting_the_base_rate_has_a_normalized_entropy_of_one():
    labels, _, weights = examples()
    constant = np.full_like(labels, ev.base_rate(labels, weights))
    assert ev.normalized_entropy(labels, constant, weights) == pytest.approx(1, rel=EXACT)
    assert ev.calibration(labels, constant, weights) == pytest.approx(1, rel=EXACT)
    assert ev.auc(labels, constant, weights) == 0.5


def test_normalized_entropy_knows_neither_the_base_of_the_logarithm_nor_the_scale_of_weights():
    labels, logits, weights = examples()
    p = ev.sigmoid(logits)
    want = ev.normalized_entropy(labels, p, weights)
    assert ev.normalized_entropy(labels, p, weights * 7) == pytest.approx(want, rel=EXACT)
    c = ev.base_rate(labels, weights)
    base2 = -(weights @ (labels * np.log2(p) + (1 - labels) * np.log2(1 - p)))
    entropy2 = -weights.sum() * (c * np.log2(c) + (1 - c) * np.log2(1 - c))
    assert base2 / entropy2 == pytest.approx(want, rel=EXACT)


def test_dividing_by_the_calibration_calibrates():
    labels, logits, weights = examples()
    p = ev.sigmoid(logits) * 0.5
    assert ev.calibration(labels, p / ev.calibration(labels, p, weights), weights) == pytest.approx(1, rel=EXACT)


def test_relative_percent():
    assert ev.relative_percent(0.99, 1.0) == pytest.approx(-1)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.25]), st.integers(-3, 3), st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        min_size=1,
        max_size=12,
    )
)
def test_auc_counts_every_pair(rows):
    labels, scores, weights = np.array(rows).T
    assert ev.auc(labels, scores, weights) == pytest.approx(literal_auc(labels, scores, weights), nan_ok=True)


def test_auc_of_the_extremes():
    assert ev.auc([0, 0, 1, 1], [1, 2, 3, 4]) == 1
    assert ev.auc([0, 0, 1, 1], [4, 3, 2, 1]) == 0
    assert math.isnan(ev.auc([1, 1], [0.2, 0.3]))
    assert math.isnan(ev.auc([], []))


def test_auc_is_the_same_for_every_increasing_function_of_the_score():
    labels, logits, weights = examples()
    want = ev.auc(labels, logits, weights)
    assert ev.auc(labels, ev.sigmoid(logits), weights) == want
    assert ev.auc(labels, logits**3, weights) == want


def test_auc_is_symmetric_in_the_classes():
    labels, logits, weights = examples()
    swapped = ev.auc(1 - labels, 1 - ev.sigmoid(logits), weights)
    assert swapped == pytest.approx(ev.auc(labels, ev.sigmoid(logits), weights), rel=EXACT)


def test_the_influence_of_an_example_is_the_derivative_of_auc_by_its_weight():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 40).astype(float), rng.integers(0, 12, 40) / 4  # ties
    labels[:4], weights = (0.25, 0.5, 0.75, 1), rng.uniform(0.5, 2, 40)
    found = ev.auc_influence(labels, scores, weights)
    moved = np.exp(1e-6 * np.eye(40)) * weights
    wanted = [(ev.auc(labels, scores, more) - ev.auc(labels, scores, weights)) / 1e-6 for more in moved]
    np.testing.assert_allclose(found, wanted, atol=1e-7)
    assert found.sum() == pytest.approx(0, abs=1e-12)  # scaling all weights changes nothing
    assert np.isnan(ev.auc_influence(np.ones(3), np.arange(3.0))).all()


def test_the_spread_of_auc_is_that_of_resampling():
    rng = np.random.default_rng(1)
    labels = (rng.random(600) < 0.3).astype(float)
    scores = rng.normal(size=600) + labels
    samples = rng.integers(0, 600, (400, 600))
    wanted = np.std([ev.auc(labels[i], scores[i]) for i in samples])
    # A standard deviation of 400 samples is known to 1 / sqrt(800), 3.5 %.
    assert np.sqrt(np.square(ev.auc_influence(labels, scores)).sum()) == pytest.approx(wanted, rel=0.12)


def test_whole_weights_equal_repeated_examples():
    labels, logits, _ = examples()
    times = np.random.default_rng(1).integers(0, 4, len(labels))
    again = [np.repeat(a, times) for a in (labels, logits)]
    assert ev.auc(labels, logits, times) == pytest.approx(ev.auc(*again), rel=EXACT)
    assert ev.logloss(labels, ev.sigmoid(logits), times) == pytest.approx(
        ev.logloss(again[0], ev.sigmoid(again[1])), rel=EXACT
    )


def test_scores_that_are_not_numbers_show():
    assert math.isnan(ev.auc([0, 1, 1], [0.1, np.nan, 0.3]))
    assert math.isnan(ev.logloss([0, 1], [0.1, np.nan]))
    assert math.isnan(ev.grouped_auc([0, 1], [0.1, np.nan], [0, 0]).value)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("constant_groups", ["half", "drop"])
def test_grouped_auc_averages_the_groups_that_have_both_classes(weighting, constant_groups):
    labels, logits, weights = examples(3, 200)
    groups = np.random.default_rng(4).integers(-5, 40, 200)
    logits[groups == 7] = 0.5
    each, sizes = [], []
    for g in np.unique(groups):
        inside = (groups == g) & (weights > 0)
        y, s, w = labels[inside], logits[inside], weights[inside]
        if len(set(y)) < 2 or (constant_groups == "drop" and len(set(s)) < 2):
            continue
        each.append(literal_auc(y, s, w))
        sizes.append(w.sum())
    want = np.mean(each) if weighting == "uniform" else np.dot(each, sizes) / sum(sizes)
    got = ev.grouped_auc(labels, logits, groups, weights, weighting=weighting, constant_groups=constant_groups)
    assert got.value == pytest.approx(want, rel=EXACT)
    assert got.groups == len(each)
    assert got.share == pytest.approx(sum(sizes) / weights.sum(), rel=EXACT)
    assert 0 < got.groups < len(np.unique(groups))


def test_grouped_auc_of_one_group_is_the_auc():
    labels, logits, weights = examples()
    got = ev.grouped_auc(labels, logits, np.zeros(len(labels), int), weights)
    assert got.value == pytest.approx(ev.auc(labels, logits, weights), rel=EXACT)
    assert math.isnan(ev.grouped_auc([1, 0], [0.3, 0.4], [0, 1]).value)
    assert ev.grouped_auc([], [], []).groups == 0


@pytest.mark.parametrize("label", [0, 1])
def test_reliability_interval_holds_the_observed_rate_when_all_labels_are_equal(label):
    for n in range(1, 60):  # rounding passed the rate at some sizes, and no error bar can be negative
        bins = ev.reliability(np.full(n, label), np.full(n, 0.3))
        assert bins.low[0] <= bins.observed[0] <= bins.high[0]


def test_reliability_bins_hold_every_example_once():
    labels, logits, weights = examples(5, 400)
    p = ev.sigmoid(logits)
    bins = ev.reliability(labels, p, weights, bins=10)
    assert bins.weight.sum() == pytest.approx(weights.sum(), rel=EXACT)
    assert bins.weight @ bins.predicted == pytest.approx(weights @ p, rel=EXACT)
    assert bins.weight @ bins.observed == pytest.approx(weights @ labels, rel=EXACT)
    assert (np.diff(bins.predicted) > 0).all()
    assert ((bins.low <= bins.observed) & (bins.observed <= bins.high)).all()
    assert 8 <= len(bins.weight) <= 10
    assert bins.weight.max() < 0.2 * weights.sum()
    constant = ev.reliability(labels, np.full(400, 0.5), weights)
    assert len(constant.weight) == 1


def test_wilson_interval_by_hand():
    # 5 of 10 at z = 1.96: 0.2366 to 0.7634 (Wilson 1927, as tabulated for 50 % of 10).
    bins = ev.reliability([0, 1] * 5, [0.5] * 10)
    assert (bins.low[0], bins.high[0]) == pytest.approx((0.2366, 0.7634), abs=5e-5)


def test_score_histogram_counts_both_classes():
    counts = ev.score_histogram([0, 1, 1, 0], [0.1, 0.1, 0.9, 1.0], [1, 2, 3, 4], bins=2)
    np.testing.assert_array_equal(counts, [[1, 4], [2, 3]])


def test_refuses_several_tasks_at_once():
    with pytest.raises(ValueError, match="one task at a time"):
        ev.logloss(np.zeros((4, 2)), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="groups"):
        ev.grouped_auc([0, 1], [0, 1], [0])


def of_tasks(size=40):
    """Labels and scores of five tasks: all known, some not known, nothing known, only positives, only negatives."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (size, 5))
    labels[rng.random(size) < 0.4, 1] = -1
    labels[:, 2], labels[:, 3], labels[::2, 4] = -1, 1, -1
    labels[1::2, 4] = 0
    return labels, np.round(rng.normal(size=(size, 5)) + labels, 1)


def test_mean_auc_is_that_of_the_tasks_that_have_one():
    labels, scores = of_tasks()
    each = []
    for t in (0, 1):
        known = labels[:, t] >= 0
        each.append(literal_auc(labels[known, t], scores[known, t], np.ones(known.sum())))
    assert ev.mean_auc(labels, scores) == pytest.approx(sum(each) / 2, rel=EXACT)
    np.testing.assert_array_equal(ev.both_known(labels), [True, True, False, False, False])
    assert math.isnan(ev.mean_auc(labels[:, 2:], scores[:, 2:]))
    scores[0, 0] = math.nan
    assert math.isnan(ev.mean_auc(labels, scores))


@pytest.mark.peers
def test_agrees_with_scikit_learn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    several, scores = of_tasks()
    known = several[:, 1] >= 0
    want = np.mean(
        [
            sklearn_metrics.roc_auc_score(several[:, 0], scores[:, 0]),
            sklearn_metrics.roc_auc_score(several[known, 1], scores[known, 1]),
        ]
    )
    assert ev.mean_auc(several, scores) == pytest.approx(want, rel=EXACT)
    labels, logits, weights = examples(6, 5000)
    p = ev.sigmoid(logits)
    want = sklearn_metrics.roc_auc_score(labels, logits, sample_weight=weights)
    assert ev.auc(labels, logits, weights) == pytest.approx(want, rel=EXACT)
    want = sklearn_metrics.log_loss(labels, p, sample_weight=weights)
    assert ev.logloss(labels, p, weights) == pytest.approx(want, rel=EXACT)
