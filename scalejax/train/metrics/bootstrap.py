"""Percentile bootstrap intervals of a metric, of one model and of the difference between two.

A resample draws N of the N examples with replacement; a metric is computed on each resample, and its interval spans the
middle 95 % of the values. Two models are compared on the *same* resamples (paired), which removes the variation that
they share. Examples count as independent: where they come in groups, intervals are too narrow.

What an interval of one run covers is the choice of test examples alone. With the predictions of several seeds,
`compare` and `compare_all` draw seeds as well, so that it covers both: a resample is S of the S pairs of runs and N of
the N examples, and the difference is the mean over those runs.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from scalejax.train.metrics import exact

Metric = Literal["logloss", "ne", "auc"]
Verdict = Literal["better", "worse", "no difference shown"]

METRICS: tuple[Metric, ...] = ("logloss", "ne", "auc")
_HIGH_IS_GOOD = {"logloss": False, "ne": False, "auc": True}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value and the percentile interval around it.

    Attributes:
      value: On the examples as they are.
      low, high: Ends of the interval.
      level: Share of resamples inside.
      resamples: Resamples on which the metric was defined (one with a single class has no AUC and no NE).
    """

    value: float
    low: float
    high: float
    level: float
    resamples: int


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """Model b against model a in one metric.

    Attributes:
      metric: Which.
      a, b: Values of both.
      difference: b - a.
      verdict: What may be said of b: "better" or "worse" only if the interval of the difference excludes 0.
    """

    metric: Metric
    a: float
    b: float
    difference: Interval
    verdict: Verdict

    @property
    def percent(self) -> float:
        """(b - a) / a in percent: relative LogLoss, NE difference."""
        return exact.relative_percent(self.b, self.a)

    def __str__(self) -> str:
        d = self.difference
        return (
            f"{self.metric}: {self.b:.4f} against {self.a:.4f}, difference {d.value:+.4f} "
            f"({d.level:.0%} interval {d.low:+.4f} to {d.high:+.4f}): {self.verdict}"
        )


@dataclasses.dataclass(frozen=True)
class Resampled:
    """One model's metrics on resamples: all that a comparison needs of it, far smaller than its predictions.

    Attributes:
      values: float64[3], in the order of `METRICS`: on the examples as they are, the mean over seeds.
      samples: float64[resamples, 3]: on each resample.
      seeds, examples: How many of each were drawn from.
      seed: Of the draws.
    """

    values: np.ndarray
    samples: np.ndarray
    seeds: int
    examples: int
    seed: int


def intervals(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[Metric, Interval]:
    """LogLoss, NE and AUC with their intervals.

    Args:
      labels: float[N]. In [0, 1].
      predictions: float[N]. In [0, 1].
      weights: float[N], or None for 1 each; drawn along with their examples.
      resamples: More makes the ends steadier; 1,000 take 0.9 s for 33,000 examples on one core.
      level: Share of resamples inside the interval.
      seed: Equal seeds give equal intervals.
    """
    model = _Model(labels, predictions, weights)
    samples = np.stack([model.metrics(counts) for counts in _draws(len(model), resamples, seed)])
    values = model.metrics(np.ones(len(model)))
    return {m: _interval(values[i], samples[:, i], level) for i, m in enumerate(METRICS)}


def compare(
    labels: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[Metric, PairedComparison]:
    """Judges model b against model a on the same examples.

    Args:
      labels: float[N]. In [0, 1].
      a, b: float[N], or float[S, N] of as many seeds, those of one seed at one place. Predictions of both models.
      weights, resamples, level, seed: As in `intervals`.
    """
    return compare_all(labels, a, {"b": b}, weights, resamples=resamples, level=level, seed=seed)["b"]


def compare_all(
    labels: ArrayLike,
    a: ArrayLike,
    others: Mapping[str, ArrayLike],
    weights: ArrayLike | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, dict[Metric, PairedComparison]]:
    """Judges each of several models against model a, all on the same resamples.

    Args:
      labels: float[N]. In [0, 1].
      a: float[N] or float[S, N]. Predictions, as in `compare`.
      others: Name -> predictions of the same shape.
      weights, resamples, level, seed: As in `intervals`.
    Raises:
      ValueError: shapes differ.
    """
    reference = resample(labels, a, weights, resamples=resamples, seed=seed)
    return {
        name: compare_resampled(reference, resample(labels, b, weights, resamples=resamples, seed=seed), level=level)
        for name, b in others.items()
    }


def resample(
    labels: ArrayLike,
    predictions: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Resampled:
    """The metrics of one model on resamples, to be compared with those of another by `compare_resampled`.

    Args:
      labels: float[N]. In [0, 1].
      predictions: float[N] or float[S, N], as in `compare`.
      weights, resamples, seed: As in `intervals`.
    """
    given = np.atleast_2d(np.asarray(predictions, np.float64))
    models = [_Model(labels, one, weights) for one in given]
    examples = given.shape[1]
    samples = [np.empty((resamples, len(METRICS))) for _ in models]
    for i, counts in enumerate(_draws(examples, resamples, seed)):
        for model, own in zip(models, samples, strict=True):
            own[i] = model.metrics(counts)
    ones = np.ones(examples)
    runs = zip(models, samples, strict=True)
    return pooled([Resampled(model.metrics(ones), own, 1, examples, seed) for model, own in runs])


def pooled(runs: Sequence[Resampled]) -> Resampled:
    """Several runs, one of each seed, as one: a resample draws as many of them, with replacement.

    Raises:
      ValueError: they are of several seeds themselves, or of other draws.
    """
    first = runs[0]
    drawn = {(one.seeds, one.examples, len(one.samples), one.seed) for one in runs}
    if drawn != {(1, first.examples, len(first.samples), first.seed)}:
        raise ValueError(
            "bootstrap: runs of one seed each and of the same resamples can be pooled; got (seeds, examples, "
            f"resamples, seed of the draws) {sorted(drawn)}."
        )
    count = len(runs)
    chosen = np.random.default_rng((first.seed, 1)).integers(0, count, (len(first.samples), count))
    times = np.stack([(chosen == n).sum(axis=1) for n in range(count)], axis=1)
    # A run that was not drawn does not count, even where a metric of it is not defined.
    parts = np.stack([np.where(times[:, n, None], run.samples, 0) for n, run in enumerate(runs)], axis=1)
    samples = np.einsum("rs,rsm->rm", times, parts) / count
    values = np.mean([run.values for run in runs], axis=0)
    return Resampled(values, samples, count, first.examples, first.seed)


def compare_resampled(a: Resampled, b: Resampled, *, level: float = 0.95) -> dict[Metric, PairedComparison]:
    """Judges model b against model a, of equal labels and weights.

    Raises:
      ValueError: they have other numbers of seeds, examples or resamples, or other draws.
    """
    drawn = [(one.seeds, one.examples, len(one.samples), one.seed) for one in (a, b)]
    if drawn[0] != drawn[1]:
        raise ValueError(
            "bootstrap: compared models need equally many seeds and examples, and the same resamples; got "
            f"(seeds, examples, resamples, seed of the draws) {drawn[0]} and {drawn[1]}."
        )
    differences, difference = b.samples - a.samples, b.values - a.values
    found: dict[Metric, PairedComparison] = {}
    for i, metric in enumerate(METRICS):
        interval = _interval(difference[i], differences[:, i], level)
        verdict = _verdict(interval, _HIGH_IS_GOOD[metric])
        found[metric] = PairedComparison(metric, float(a.values[i]), float(b.values[i]), interval, verdict)
    return found


class _Model:
    """One model's examples in the order of its scores, so that no resample has to be sorted."""

    def __init__(self, labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None) -> None:
        y, p = np.asarray(labels, np.float64), np.asarray(predictions, np.float64)
        w = np.ones_like(y) if weights is None else np.asarray(weights, np.float64)
        if y.ndim != 1 or not y.shape == p.shape == w.shape or not len(y):
            raise ValueError(
                f"bootstrap: labels, predictions and weights must have one equal shape [N], N > 0; got {y.shape}, "
                f"{p.shape} and {w.shape}."
            )
        if not ((p >= 0) & (p <= 1)).all():
            wrong = p[~((p >= 0) & (p <= 1))]
            raise ValueError(f"bootstrap: predictions must lie in [0, 1]; {len(wrong)} do not, such as {wrong[0]}.")
        self._order = np.argsort(p, kind="stable")
        self._ties = exact.Ties.of(p[self._order])
        self._positive, self._negative = (w * y)[self._order], (w * (1 - y))[self._order]
        self._loss = (w * exact.cross_entropy(y, p))[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def metrics(self, counts: np.ndarray) -> np.ndarray:
        """float64[3] in the order of `METRICS`, with example i taken `counts[i]` times."""
        times = counts[self._order]
        positive, negative = times * self._positive, times * self._negative
        p, n = positive.sum(), negative.sum()
        loss = times @ self._loss
        undefined = not (p > 0 and n > 0)
        entropy = np.nan if undefined else -p * np.log(p / (p + n)) - n * np.log(n / (p + n))
        auc = np.nan if undefined else exact.ranked_auc(positive, negative, self._ties)
        return np.array([loss / (p + n) if p + n > 0 else np.nan, loss / entropy, auc])


def _draws(examples: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each example is drawn, once per resample: multinomial counts as float64[examples]."""
    if resamples < 2:
        raise ValueError(f"bootstrap: resamples must be at least 2; got {resamples}.")
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        drawn = rng.integers(0, examples, examples, dtype=np.int64)
        yield np.bincount(drawn, minlength=examples).astype(np.float64)


def _interval(value: float, samples: np.ndarray, level: float) -> Interval:
    defined = samples[~np.isnan(samples)]
    if not len(defined):
        return Interval(float(value), float("nan"), float("nan"), level, 0)
    low, high = np.quantile(defined, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(value), float(low), float(high), level, len(defined))


def _verdict(difference: Interval, high_is_good: bool) -> Verdict:
    if difference.low > 0:
        return "better" if high_is_good else "worse"
    if difference.high < 0:
        return "worse" if high_is_good else "better"
    return "no difference shown"
