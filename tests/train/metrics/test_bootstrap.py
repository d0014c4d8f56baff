"""Bootstrap intervals: against resampling written out, against theory, and what may be said of two models."""

import math

import numpy as np
import pytest

from scalejax.train.metrics import bootstrap, exact


def examples(seed=0, size=400):
    rng = np.random.default_rng(seed)
    truth = rng.normal(-0.5, 1.2, size)
    labels = (rng.random(size) < exact.sigmoid(truth)).astype(np.float64)
    return labels, np.round(truth, 2), rng.choice([0.0, 1.0, 2.0], size)


def intervals(labels, logits, weights=None, **options):
    return bootstrap.intervals(labels, exact.sigmoid(logits), weights, **options)


def compare(labels, a, b, weights=None, **options):
    return bootstrap.compare(labels, exact.sigmoid(a), exact.sigmoid(b), weights, **options)


def test_equals_resampling_the_examples_themselves():
    labels, logits, weights = examples(size=80)
    got = intervals(labels, logits, weights, resamples=50, seed=3)
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(50):
        drawn = rng.integers(0, 80, 80)
        y, s, w = labels[drawn], logits[drawn], weights[drawn]
        p = exact.sigmoid(s)
        ne = exact.normalized_entropy(y, p, w)
        rows.append((exact.logloss(y, p, w), ne, exact.auc(y, s, w)))
    for metric, values in zip(("logloss", "ne", "auc"), np.transpose(rows), strict=True):
        want = np.quantile(values, (0.025, 0.975))
        assert (got[metric].low, got[metric].high) == pytest.approx(tuple(want), rel=1e-12)
    assert got["ne"].value == pytest.approx(exact.normalized_entropy(labels, exact.sigmoid(logits), weights), rel=1e-12)
    assert got["auc"].value == pytest.approx(exact.auc(labels, logits, weights), rel=1e-12)


def test_the_width_for_logloss_is_that_of_a_mean():
    labels, logits, _ = examples(size=2000)
    loss = exact.cross_entropy(labels, exact.sigmoid(logits))
    got = intervals(labels, logits, resamples=400)["logloss"]
    want = 2 * 1.96 * loss.std() / math.sqrt(2000)
    assert got.high - got.low == pytest.approx(want, rel=0.12)  # an end of 400 resamples is known to about 6 %


def test_equal_seeds_give_equal_intervals():
    labels, logits, weights = examples()
    one, two, other = (intervals(labels, logits, weights, resamples=20, seed=s) for s in (1, 1, 2))
    assert one == two
    assert one != other


def test_a_clearly_better_model_is_called_better_in_every_metric():
    labels, logits, _ = examples(size=2000)
    noise = logits + np.random.default_rng(9).normal(0, 1.5, 2000)
    for metric, c in compare(labels, noise, logits, resamples=100).items():
        assert c.verdict == "better", metric
        assert c.difference.value == pytest.approx(c.b - c.a)
    back = compare(labels, logits, noise, resamples=100)
    assert {c.verdict for c in back.values()} == {"worse"}
    assert "worse" in str(back["auc"])
    assert back["ne"].percent == pytest.approx(100 * (back["ne"].b / back["ne"].a - 1))


def test_equal_models_show_no_difference():
    labels, logits, weights = examples()
    for c in compare(labels, logits, logits.copy(), weights, resamples=50).values():
        assert c.verdict == "no difference shown"
        assert c.difference.low == c.difference.high == 0


def test_models_that_differ_by_noise_alone_are_rarely_told_apart():
    # Two models of equal quality: both add noise of the same size to the truth. At a level of 95 % about one verdict
    # in twenty is wrong; over 20 sets 6 or more would be wrong with a chance of 0.03 %.
    wrong = 0
    for seed in range(20):
        labels, logits, _ = examples(seed, 300)
        rng = np.random.default_rng(100 + seed)
        a, b = (logits + rng.normal(0, 0.5, 300) for _ in range(2))
        wrong += compare(labels, a, b, resamples=100)["auc"].verdict != "no difference shown"
    assert wrong < 6


def test_pairing_narrows_the_interval_of_a_difference():
    labels, logits, _ = examples(size=1000)
    b = logits + np.random.default_rng(1).normal(0, 0.1, 1000)
    alone = intervals(labels, b, resamples=100)["auc"]
    paired = compare(labels, logits, b, resamples=100)["auc"].difference
    assert paired.high - paired.low < 0.3 * (alone.high - alone.low)


def test_resamples_without_a_class_are_left_out_and_counted():
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    got = intervals(labels, np.array([2.0, 1.0, 0.0, -1.0]), resamples=200)
    assert got["logloss"].resamples == 200
    # The positive is missing from (3/4)^4 = 32 % of the resamples, the negatives from 0.4 %.
    assert 110 < got["auc"].resamples < 160
    all_negative = intervals(np.zeros(4), np.zeros(4), resamples=10)["auc"]
    assert all_negative.resamples == 0
    assert math.isnan(all_negative.low)


def test_refuses_what_it_cannot_judge():
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        intervals([0, 1], [0.1, np.nan])
    with pytest.raises(ValueError, match="N > 0"):
        intervals([], [])
    with pytest.raises(ValueError, match="resamples"):
        intervals([0, 1], [0, 1], resamples=1)


def of_seeds(labels, logits, noise, offset, seeds=5, seed=0):
    """Predictions of several seeds: the true logits with noise, and an offset of their scale that differs by seed."""
    rng = np.random.default_rng(seed)
    scales = 1 + offset * rng.normal(size=(seeds, 1))
    return exact.sigmoid(logits * scales + noise * rng.normal(size=(seeds, len(labels))))


def test_with_seeds_it_equals_resampling_seeds_and_examples_themselves():
    labels, logits, weights = examples(size=60)
    a, b = of_seeds(labels, logits, 0.5, 0.2, seeds=3), of_seeds(labels, logits, 0.2, 0.2, seeds=3, seed=1)
    got = bootstrap.compare(labels, a, b, weights, resamples=40, seed=3)["ne"]
    drawn_seeds = np.random.default_rng((3, 1)).integers(0, 3, (40, 3))
    rng, rows = np.random.default_rng(3), []
    for chosen in drawn_seeds:
        drawn = rng.integers(0, 60, 60)
        ne = lambda p: exact.normalized_entropy(labels[drawn], p[drawn], weights[drawn])  # noqa: B023, E731
        rows.append(np.mean([ne(b[s]) - ne(a[s]) for s in chosen]))
    assert (got.difference.low, got.difference.high) == pytest.approx(
        tuple(np.quantile(rows, (0.025, 0.975))), rel=1e-9
    )
    assert got.b == pytest.approx(np.mean([exact.normalized_entropy(labels, p, weights) for p in b]))


def test_one_seed_is_compared_as_before_and_seeds_widen_the_interval():
    labels, logits, _ = examples(size=500)
    a, b = of_seeds(labels, logits, 0.5, 0.5), of_seeds(labels, logits, 0.4, 0.5, seed=1)
    alone = bootstrap.compare(labels, a[0], b[0], resamples=200)
    assert alone == bootstrap.compare(labels, a[:1], b[:1], resamples=200)
    # Equal predictions of every seed: only the examples vary, as with one run.
    same = bootstrap.compare(labels, np.repeat(a[:1], 5, 0), np.repeat(b[:1], 5, 0), resamples=200)
    assert same["auc"].difference.low == pytest.approx(alone["auc"].difference.low)
    width = lambda found: found["logloss"].difference.high - found["logloss"].difference.low  # noqa: E731
    assert width(bootstrap.compare(labels, a, b, resamples=200)) > 1.2 * width(same)


def test_several_models_are_judged_on_the_same_resamples():
    labels, logits, _ = examples(size=300)
    a, b, c = (of_seeds(labels, logits, noise, 0.1) for noise in (0.6, 0.3, 0.9))
    together = bootstrap.compare_all(labels, a, {"b": b, "a": c}, resamples=50)
    assert together["b"] == bootstrap.compare(labels, a, b, resamples=50)
    assert together["a"] == bootstrap.compare(labels, a, c, resamples=50)


def test_models_of_other_seeds_are_not_compared():
    labels, logits, _ = examples(size=30)
    with pytest.raises(ValueError, match="equally many seeds and examples"):
        bootstrap.compare(labels, of_seeds(labels, logits, 1, 1, seeds=2), of_seeds(labels, logits, 1, 1, seeds=3))


def test_resampled_metrics_are_compared_without_the_predictions():
    labels, logits, weights = examples(size=200)
    a, b = of_seeds(labels, logits, 0.6, 0.1), of_seeds(labels, logits, 0.3, 0.1, seed=1)
    one, other = (bootstrap.resample(labels, p, weights, resamples=30, seed=2) for p in (a, b))
    assert one.samples.shape == (30, 3)
    assert bootstrap.compare_resampled(one, other) == bootstrap.compare(labels, a, b, weights, resamples=30, seed=2)
    with pytest.raises(ValueError, match="same resamples"):
        bootstrap.compare_resampled(one, bootstrap.resample(labels, b, weights, resamples=30, seed=3))


def test_runs_of_single_seeds_are_pooled_to_what_all_of_them_are():
    labels, logits, weights = examples(size=150)
    a = of_seeds(labels, logits, 0.6, 0.1, seeds=3)
    whole = bootstrap.resample(labels, a, weights, resamples=30, seed=2)
    single = [bootstrap.resample(labels, one, weights, resamples=30, seed=2) for one in a]
    together = bootstrap.pooled(single)
    np.testing.assert_array_equal(together.samples, whole.samples)
    np.testing.assert_array_equal(together.values, whole.values)
    with pytest.raises(ValueError, match="can be pooled"):
        bootstrap.pooled([whole, single[0]])
