"""Exact metrics of scored examples, in float64 on the host.

Symbols: label y in [0, 1], prediction p in (0, 1), weight w >= 0 (1 where not given), N = sum w, P = sum w y,
c = P / N.

    logloss             -(1/N) sum w (y ln p + (1 - y) ln(1 - p)), natural logarithm
    normalized_entropy  logloss / (-c ln c - (1 - c) ln(1 - c)): 1 = predicting the base rate c of the same examples
    calibration         sum w p / P
    auc                 P(s+ > s-) + P(s+ = s-) / 2 over weighted pairs (Mann-Whitney, mid-ranks)
    grouped_auc         mean over groups of the AUC inside each group
    mean_auc            mean over tasks of the AUC of each task

Predictions are clamped to [1e-12, 1 - 1e-12] inside the logarithms and nowhere else, so one certain and wrong
prediction costs 27.6 nats instead of infinity. What is undefined (no positive, no negative, no example) is NaN:
0 or 0.5 in its place would turn a broken evaluation into a plausible one. NaN scores make every metric NaN.
"""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

CLAMP = 1e-12
"""Distance from 0 and 1 to which predictions are clamped inside logarithms."""

Weighting = Literal["uniform", "examples"]
ConstantGroups = Literal["half", "drop"]


def sigmoid(logits: ArrayLike) -> np.ndarray:
    """Logits as probabilities, float64."""
    l = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(l))
    return np.where(l >= 0, 1, e) / (1 + e)


def cross_entropy(labels: ArrayLike, predictions: ArrayLike) -> np.ndarray:
    """Loss of each example, float64, predictions clamped."""
    y = np.asarray(labels, np.float64)
    p = np.clip(np.asarray(predictions, np.float64), CLAMP, 1 - CLAMP)
    return -(y * np.log(p) + (1 - y) * np.log1p(-p))


def logloss(labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Weighted mean of the losses, in nats.

    Args:
      labels: float[N]. In [0, 1].
      predictions: float[N]. In [0, 1].
      weights: float[N], or None for 1 each.
    """
    y, p, w = _columns(labels, predictions, weights)
    return _ratio(w @ cross_entropy(y, p), w.sum())


def base_logloss(labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """LogLoss of predicting the base rate of these examples: the denominator of normalized entropy."""
    y, _, w = _columns(labels, labels, weights)
    return entropy(_ratio(w @ y, w.sum()))


def entropy(rate: float) -> float:
    """-c ln c - (1 - c) ln(1 - c), the LogLoss of predicting the base rate c; NaN where c is not between 0 and 1."""
    c = rate
    return float(-c * np.log(c) - (1 - c) * np.log1p(-c)) if 0 < c < 1 else float("nan")


def normalized_entropy(labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None) -> float:
    """LogLoss divided by that of the base rate of the same examples; below 1 is better than knowing nothing."""
    return logloss(labels, predictions, weights) / base_logloss(labels, weights)


def calibration(labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Predicted positives over observed positives; 1 is ideal."""
    y, p, w = _columns(labels, predictions, weights)
    return _ratio(w @ p, w @ y)


def base_rate(labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Weighted mean of the labels."""
    y, _, w = _columns(labels, labels, weights)
    return _ratio(w @ y, w.sum())


def auc(labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Area under the ROC curve; equal scores count one half.

    Args:
      labels: float[N]. In [0, 1]; a soft label is that part of a positive and the rest of a negative.
      scores: float[N]. Any increasing function of the prediction, such as the logit.
      weights: float[N], or None for 1 each.
    """
    y, s, w = _columns(labels, scores, weights)
    if np.isnan(s).any():
        return float("nan")
    order = np.argsort(s, kind="stable")
    return ranked_auc((w * y)[order], (w * (1 - y))[order], Ties.of(s[order]))


def mean_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Mean AUC of the tasks that have one, as OGB averages: those with a known positive and a known negative.

    Args:
      labels: integers[N, T]. 0, 1, or -1 where the label of a task is not known, which leaves the example out of it.
      scores: float[N, T].
    """
    y, s = np.asarray(labels), np.asarray(scores)
    each = [auc(y[y[:, t] >= 0, t], s[y[:, t] >= 0, t]) for t in np.flatnonzero(both_known(y))]
    return float(np.mean(each)) if each else float("nan")


def both_known(labels: ArrayLike) -> np.ndarray:
    """bool[T]: the tasks of integers[N, T] with a known positive and a known negative."""
    y = np.asarray(labels)
    return (y == 1).any(0) & (y == 0).any(0)


@dataclasses.dataclass(frozen=True)
class Ties:
    """Which entries of a sorted array equal a neighbour, and where their run of equals begins and ends.

    Attributes:
      members: int64[M]. Positions that have an equal neighbour.
      first, last: int64[M]. Both ends of each member's run, inclusive.
    """

    members: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, ascending: np.ndarray) -> "Ties":
        """Finds the ties of an array in ascending order."""
        starts = tie_starts(ascending)
        sizes = np.diff(np.append(starts, len(ascending)))
        members = np.flatnonzero(np.repeat(sizes > 1, sizes))
        first = np.repeat(starts, sizes)[members]
        return cls(members, first, first + np.repeat(sizes, sizes)[members] - 1)


def tie_starts(ascending: np.ndarray) -> np.ndarray:
    """Positions at which a new value begins in a sorted array."""
    return np.flatnonzero(np.concatenate([np.ones(min(1, len(ascending)), bool), ascending[1:] != ascending[:-1]]))


def ranked_auc(positive: np.ndarray, negative: np.ndarray, ties: Ties) -> float:
    """AUC from float64[N] weights of both classes in ascending order of the score."""
    if not len(positive):
        return float("nan")
    upto = np.cumsum(negative)
    beaten = upto - negative / 2  # negatives below, and half of those that are equal
    beaten[ties.members] = (upto[ties.first] - negative[ties.first] + upto[ties.last]) / 2
    return _ratio(positive @ beaten, positive.sum() * upto[-1])


def auc_influence(labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> np.ndarray:
    """How far each example moves `auc`, float64[N]: its derivative by the logarithm of the example's weight.

    The squares add up to the variance of the AUC, and squared differences of two scorers of the same examples to that
    of the difference of their AUCs. NaN where the AUC is.

    Source: DeLong, DeLong and Clarke-Pearson, "Comparing the Areas under Two or More Correlated Receiver Operating
    Characteristic Curves", Biometrics 44/3, 1988; without their n / (n - 1).
    """
    y, s, w = _columns(labels, scores, weights)
    positive, negative = w * y, w * (1 - y)
    area, both = auc(y, s, w), (positive.sum(), negative.sum())
    if np.isnan(area):
        return np.full(len(y), np.nan)
    values, at = np.unique(s, return_inverse=True)
    won, lost = (np.bincount(at, part, len(values)) for part in (positive, negative))
    beaten = ((np.cumsum(lost) - lost / 2) / both[1])[at]
    beating = (1 - (np.cumsum(won) - won / 2) / both[0])[at]
    return positive * (beaten - area) / both[0] + negative * (beating - area) / both[1]


@dataclasses.dataclass(frozen=True)
class GroupedAuc:
    """GAUC and what it was computed from.

    Attributes:
      value: Mean AUC of the groups that count; NaN if there are none.
      groups: Groups that count.
      share: Share of the weight of all examples that lies in them.
    """

    value: float
    groups: int
    share: float


def grouped_auc(
    labels: ArrayLike,
    scores: ArrayLike,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    weighting: Weighting = "examples",
    constant_groups: ConstantGroups = "half",
) -> GroupedAuc:
    """Mean of the AUC inside each group that has both classes.

    Args:
      labels, scores, weights: As in `auc`.
      groups: integers[N]. Group of each example (a user, a query).
      weighting: "examples" weighs each group by the weight of its examples; "uniform" counts each group once.
      constant_groups: A group whose scores are all equal has an AUC of one half; "drop" leaves it out, as TorchRec does
        (models are then averaged over different groups).
    """
    y, s, w = _columns(labels, scores, weights)
    g = np.asarray(groups)
    if g.shape != y.shape:
        raise ValueError(f"grouped_auc: groups must have the shape of labels, {y.shape}; got {g.shape}.")
    if np.isnan(s).any():
        return GroupedAuc(float("nan"), 0, 0.0)
    y, s, g, total = y[w > 0], s[w > 0], g[w > 0], w.sum()
    w = w[w > 0]
    if not len(y):
        return GroupedAuc(float("nan"), 0, 0.0)
    order = np.lexsort((s, g))
    y, s, g, w = y[order], s[order], g[order], w[order]
    new_group = np.concatenate([[True], g[1:] != g[:-1]])
    ties = np.flatnonzero(new_group | np.concatenate([[True], s[1:] != s[:-1]]))
    positive, negative = np.add.reduceat(w * y, ties), np.add.reduceat(w * (1 - y), ties)
    first_tie = np.flatnonzero(new_group[ties])  # of each group
    ties_per_group = np.diff(np.append(first_tie, len(ties)))
    upto = np.cumsum(negative)
    before_group = np.repeat((upto - negative)[first_tie], ties_per_group)
    won = np.add.reduceat(positive * (upto - before_group - negative / 2), first_tie)
    p, n = np.add.reduceat(positive, first_tie), np.add.reduceat(negative, first_tie)
    counts = (p > 0) & (n > 0)
    if constant_groups == "drop":
        counts &= ties_per_group > 1
    if not counts.any():
        return GroupedAuc(float("nan"), 0, 0.0)
    each = won[counts] / (p * n)[counts]
    size = (p + n)[counts]
    value = np.average(each, weights=size if weighting == "examples" else None)
    return GroupedAuc(float(value), int(counts.sum()), _ratio(size.sum(), total))


def relative_percent(model: float, base: float) -> float:
    """(model - base) / base in percent: relative LogLoss and NE difference; negative is better."""
    return (model - base) / base * 100


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Predicted against observed rates in bins of about equal weight, by ascending prediction.

    Attributes:
      weight, predicted, observed: float64[bins]. Sum of weights, mean prediction, mean label.
      low, high: float64[bins]. 95 % Wilson interval of the observed rate, at the effective number of examples
        (sum w)^2 / sum w^2.
    """

    weight: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    low: np.ndarray
    high: np.ndarray


def reliability(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, *, bins: int = 15
) -> Reliability:
    """The points of a reliability diagram; equal predictions always share a bin, so there may be fewer than `bins`."""
    y, p, w = _columns(labels, predictions, weights)
    y, p, w = y[w > 0], p[w > 0], w[w > 0]
    order = np.argsort(p, kind="stable")
    y, p, w = y[order], p[order], w[order]
    ties = tie_starts(p)
    if not len(ties):
        empty = np.zeros(0)
        return Reliability(empty, empty, empty, empty, empty)
    place = np.cumsum(w)[ties] - w[ties] / 2  # weight up to the middle of the first example of each distinct prediction
    index = np.minimum((place / w.sum() * bins).astype(int), bins - 1)
    starts = ties[tie_starts(index)]
    weight = np.add.reduceat(w, starts)
    observed = np.add.reduceat(w * y, starts) / weight
    effective = weight**2 / np.add.reduceat(w**2, starts)
    z = 1.959964
    centre = (observed + z**2 / (2 * effective)) / (1 + z**2 / effective)
    spread = z / (1 + z**2 / effective) * np.sqrt(observed * (1 - observed) / effective + (z / (2 * effective)) ** 2)
    return Reliability(
        weight=weight,
        predicted=np.add.reduceat(w * p, starts) / weight,
        observed=observed,
        # The interval holds the observed rate; where that is 0 or 1 both ends meet it, and rounding must not pass it.
        low=np.clip(centre - spread, 0, observed),
        high=np.clip(centre + spread, observed, 1),
    )


def score_histogram(
    labels: ArrayLike, predictions: ArrayLike, weights: ArrayLike | None = None, *, bins: int = 50
) -> np.ndarray:
    """float64[2, bins]: weight of negatives and positives in bins of equal width over [0, 1]."""
    y, p, w = _columns(labels, predictions, weights)
    edges = np.linspace(0, 1, bins + 1)
    return np.stack([np.histogram(p, edges, weights=w * part)[0] for part in (1 - y, y)])


def _columns(
    labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y, s = np.asarray(labels, np.float64), np.asarray(scores, np.float64)
    w = np.ones_like(y) if weights is None else np.asarray(weights, np.float64)
    if y.ndim != 1 or not y.shape == s.shape == w.shape:
        raise ValueError(
            f"exact: labels, predictions and weights must have one equal shape [N]; got {y.shape}, {s.shape} and "
            f"{w.shape}. Score one task at a time."
        )
    return y, s, w


def _ratio(numerator: float | np.ndarray, denominator: float | np.ndarray) -> float:
    return float(numerator / denominator) if denominator else float("nan")
