"""Metrics as sums: kept on the devices inside the train step, added up on the host, turned into numbers at the end.

Symbols (T tasks, B examples): label y in [0, 1], logit l, prediction p = sigmoid(l), weight w >= 0,
N = sum w, P = sum w y, c = P / N (the base rate *of the same examples*).

    logloss      sum w CE / N,  CE = -y ln p - (1 - y) ln(1 - p), computed from the logit (no clamping needed)
    ne           sum w CE / (-P ln c - (N - P) ln(1 - c)); the constant c scores exactly 1, lower is better
    calibration  sum w p / P; 1 is ideal
    auc_hist     Mann-Whitney with mid-ranks over a histogram of the scores; exact AUC lies within `auc_error_bound`

Sums are merged by adding, never by averaging metrics. What is undefined (no positives, no negatives, no examples) is
NaN, never a stand-in value. A loss that is not finite stays in its sum, so that the metric shows it, and is counted.

The bins of the histogram are uniform in a transform of the logit that is a chain of single, correctly rounded, monotone
operations: rounding can merge neighbours but never swap them, hence the bound holds to the last bit on CPU.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.train.metrics import evaluation, exact
from scalejax.train.metrics.protocol import Collected, MetricBase, Value
from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio

if TYPE_CHECKING:
    from scalejax.parallel.gradients.compute import Loss
    from scalejax.train.batch import Batch

BINS = 4096
"""Default bins of the histogram of scores: the bound is about 3e-4 on click logs and 64 kB a task on the device."""

_SOFTNESS = 4.0
"""Logit at which the transform has used half of its range: 512 bins a unit of logit at 0, 57 at +-8 (of 4,096)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClickSums(Generic[Total]):
    """Sums over examples: pairs on the devices, replicated; float64 arrays on the host.

    Attributes:
      examples: int32[]. Examples of weight > 0 (at most 2**31 - 1 before the sums are taken to the host).
      nonfinite: int32[T]. Losses of weight > 0 that are not finite.
      weight: Pair float[T]. sum w.
      positive: Pair float[T]. sum w y.
      cross_entropy: Pair float[T]. sum w CE.
      prediction: Pair float[T]. sum w p.
      histogram: Pair float[T, 2, bins]. Weight of negatives ([:, 0]) and positives ([:, 1]) per bin of the score.
    """

    examples: jax.Array | np.ndarray
    nonfinite: jax.Array | np.ndarray
    weight: Total
    positive: Total
    cross_entropy: Total
    prediction: Total
    histogram: Total


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickQuality(MetricBase):
    """Quality of predicted probabilities, by sums in training windows and exactly in evaluations.

    The loss gives "logits", float[B, T]; the batch has "labels", float[B, T], and "weights", float[B]; host batches may
    have "groups", integers[B], for AUC inside groups.

    Attributes:
      tasks: Names of the tasks; with two or more every value is called "ne/NAME".
    """

    tasks: tuple[str, ...]

    @property
    def counts(self) -> tuple[str, str]:
        return ("examples", "examples")

    @property
    def collects(self) -> tuple[str, ...]:
        return ("logits", "labels", "weights", "groups")

    @property
    def endings(self) -> tuple[str, ...]:
        """Of the names of values: ("",) for one task."""
        return tuple(f"/{name}" for name in self.tasks) if len(self.tasks) > 1 else ("",)

    @property
    def lifetime(self) -> tuple[str, ...]:
        return tuple(name + end for end in self.endings for name in ("logloss", "ne", "calibration"))

    @property
    def values(self) -> tuple[Value, ...]:
        found = []
        for end in self.endings:
            found += [
                Value(
                    name=f"logloss{end}",
                    title="LogLoss",
                    unit="nats per example, lower is better",
                    better="low",
                ),
                Value(
                    name=f"ne{end}",
                    title="NE",
                    unit="LogLoss over that of the base rate of the same examples; below 1 is better",
                    better="low",
                    base=1.0,
                ),
                Value(
                    name=f"auc{end}",
                    title="AUC",
                    unit="windows by histogram with its error bound as a band, evaluations exact",
                    better="high",
                    base=0.5,
                    window=f"auc_hist{end}",
                    bound=f"auc_error_bound{end}",
                ),
                Value(name=f"gauc{end}", title="GAUC", better="high", base=0.5, shown="table"),
                Value(name=f"calibration{end}", title="calibration", base=1.0, shown="table"),
                Value(name=f"base_rate{end}", title="share of positives", shown="table"),
            ]
        return tuple(found)

    def zeros(self) -> ClickSums[Pair]:
        return zeros(len(self.tasks))

    def update(self, sums: ClickSums[Pair], loss: "Loss", batch: "Batch") -> ClickSums[Pair]:
        return update(sums, loss.outputs["logits"], batch["labels"], batch["weights"])

    def compute(self, sums: ClickSums[np.ndarray]) -> dict[str, float]:
        return compute(sums, self.tasks)

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        return evaluation.evaluate(
            exact.sigmoid(collected["logits"]),
            collected["labels"],
            collected["weights"],
            groups=collected.get("groups"),
            names=self.tasks,
            intervals=intervals,
        )

    def of_collected(self, collected: Collected) -> ClickSums[np.ndarray]:
        return of_scores(collected["logits"], collected["labels"], collected["weights"])

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: object) -> None:
        del sums
        predictions = exact.sigmoid(collected["logits"])
        labels, weights = collected["labels"], collected["weights"]
        evaluation.save_diagrams(folder, split, predictions, labels, weights, names=self.tasks)


def zeros(tasks: int, *, bins: int = BINS) -> ClickSums[Pair]:
    """Sums of no examples for `tasks` tasks.

    Raises:
      ValueError: `bins` is not an even number of at least 2 (bins are symmetric around a score of 0.5).
    """
    if bins < 2 or bins % 2:
        raise ValueError(f"metrics.zeros: bins must be an even number of at least 2; got {bins}.")
    pair = pair_zeros
    return ClickSums(
        examples=jnp.zeros((), jnp.int32),
        nonfinite=jnp.zeros((tasks,), jnp.int32),
        weight=pair(tasks),
        positive=pair(tasks),
        cross_entropy=pair(tasks),
        prediction=pair(tasks),
        histogram=pair(tasks, 2, bins),
    )


def update(sums: ClickSums[Pair], logits: jax.Array, labels: jax.Array, weights: jax.Array) -> ClickSums[Pair]:
    """Adds a batch; jit-able, one pass, no host sync.

    Args:
      sums: Sums so far.
      logits: float[B, T]. Before the sigmoid.
      labels: float[B, T]. In [0, 1]; soft labels count as the fraction of a positive.
      weights: float[B]. 0 marks padding, which counts nowhere, whatever its logits are.
    Raises:
      ValueError: shapes that do not fit.
    """
    tasks, _, bins = sums.histogram.value.shape
    if (
        logits.ndim != 2
        or logits.shape != labels.shape
        or logits.shape[1] != tasks
        or weights.shape != logits.shape[:1]
    ):
        raise ValueError(
            f"metrics.update: logits and labels must be [B, {tasks}] and weights [B]; got {logits.shape}, "
            f"{labels.shape} and {weights.shape}."
        )
    dtype = sums.weight.value.dtype
    logits, labels, w = logits.astype(dtype), labels.astype(dtype), weights.astype(dtype)[:, None]  # B T, B T, B 1
    counts = w > 0
    loss = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    scored = counts & jnp.isfinite(logits)
    ones = jnp.ones_like(logits)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counts, w * x, 0), axis=0)  # B T -> T

    return ClickSums(
        examples=sums.examples + jnp.sum(counts, dtype=jnp.int32),
        nonfinite=sums.nonfinite + jnp.sum(counts & ~jnp.isfinite(loss), axis=0, dtype=jnp.int32),
        weight=add(sums.weight, total(ones)),
        positive=add(sums.positive, total(labels)),
        cross_entropy=add(sums.cross_entropy, total(loss)),
        prediction=add(sums.prediction, total(jax.nn.sigmoid(logits))),
        histogram=add(sums.histogram, _histogram(logits, labels, jnp.where(scored, w, 0), bins)),
    )


def _histogram(logits: jax.Array, labels: jax.Array, w: jax.Array, bins: int) -> jax.Array:
    """Weight of negatives and positives per bin: float[B, T] each -> float[T, 2, bins]."""
    half = _SOFTNESS / (_SOFTNESS + jnp.abs(jnp.where(w > 0, logits, 0))) / 2  # monotone step by step; in (0, 0.5]
    place = jnp.where(logits >= 0, 1 - half, half)
    index = jnp.minimum((place * bins).astype(jnp.int32), bins - 1)  # 1 itself is reached only by rounding
    weight = jnp.stack([w * (1 - labels), w * labels], axis=-1)  # B T 2
    # On CPU a scatter of 8,192 examples takes 15 us where one-hot products take 1,000 us. On accelerators a scatter
    # with duplicates is serial or a loop of compare-and-swap, and the product is small change for a matrix unit.
    per_task = jax.vmap(
        lambda i, v: jax.lax.platform_dependent(i, v, cpu=_scatter(bins), default=_one_hot_product(bins)),
        in_axes=1,
    )
    return per_task(index, weight)


def _scatter(bins: int):
    def histogram(index: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.zeros((bins, 2), weight.dtype).at[index].add(weight).T  # B, B 2 -> 2 bins

    return histogram


def _one_hot_product(bins: int):
    low = max(d for d in (1, 2, 4, 8, 16, 32, 64) if bins % d == 0)

    def histogram(index: jax.Array, weight: jax.Array) -> jax.Array:
        high = jax.nn.one_hot(index // low, bins // low, dtype=weight.dtype)  # B H
        rest = jax.nn.one_hot(index % low, low, dtype=weight.dtype)  # B L
        product = jnp.einsum("bk,bh,bl->khl", weight, high, rest, precision=jax.lax.Precision.HIGHEST)
        return product.reshape(2, bins)

    return histogram


def of_scores(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, *, bins: int = BINS
) -> ClickSums[np.ndarray]:
    """The sums of examples that were scored already, in float64; they add to those of the devices.

    Args:
      logits: float[N, T].
      labels: float[N, T]. In [0, 1].
      weights: float[N].
    """
    l, y = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    w = np.asarray(weights, np.float64)[:, None]
    counts = w > 0
    with np.errstate(invalid="ignore"):  # what is not finite is counted below
        loss = np.where(counts, np.logaddexp(0, l) - l * y, 0)
    place = np.float32(_SOFTNESS) / (np.float32(_SOFTNESS) + np.abs(np.asarray(logits, np.float32))) / 2
    place = np.where(l >= 0, 1 - place, place)
    scored = counts & np.isfinite(l)
    index = np.minimum((np.where(scored, place, 0) * bins).astype(np.int64), bins - 1)
    sides = (np.where(scored, w * (1 - y), 0), np.where(scored, w * y, 0))
    histogram = [[np.bincount(index[:, t], side[:, t], bins) for side in sides] for t in range(l.shape[1])]
    prediction = np.where(counts, 0.5 * (1 + np.tanh(l / 2)), 0)
    return ClickSums(
        examples=counts.sum(),
        nonfinite=np.sum(counts & ~np.isfinite(loss), axis=0),
        weight=np.sum(w * np.ones_like(y), axis=0),
        positive=np.sum(w * y, axis=0),
        cross_entropy=np.sum(w * loss, axis=0),
        prediction=np.sum(w * prediction, axis=0),
        histogram=np.array(histogram, np.float64),
    )


def compute(sums: ClickSums[np.ndarray], names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of the examples in the sums.

    Args:
      sums: On the host, see `sums.to_host`.
      names: Names of the tasks; needed for two or more, whose metrics are called "logloss/name". With one task the
        plain name is used.
    Returns:
      "examples", then for each task: logloss, logloss_base (that of the base rate), ne, calibration, base_rate,
      auc_hist, auc_error_bound, nonfinite.
    Raises:
      ValueError: the number of names is not the number of tasks.
    """
    tasks = sums.weight.shape[0]
    if tasks > 1 and len(names) != tasks:
        raise ValueError(f"metrics.compute: names must name each of the {tasks} tasks; got {list(names)}.")
    result: dict[str, float] = {"examples": int(sums.examples)}
    for t in range(tasks):
        suffix = f"/{names[t]}" if tasks > 1 else ""
        values = _task_metrics(sums, t)
        result |= {name + suffix: value for name, value in values.items()}
    return result


def _task_metrics(sums: ClickSums[np.ndarray], task: int) -> dict[str, float]:
    n, p = float(sums.weight[task]), float(sums.positive[task])
    auc, bound = histogram_auc(sums.histogram[task, 0], sums.histogram[task, 1])
    return {
        "logloss": ratio(sums.cross_entropy[task], n),
        "logloss_base": exact.entropy(ratio(p, n)),
        "ne": ratio(sums.cross_entropy[task], base_entropy(n, p)),
        "calibration": ratio(sums.prediction[task], p),
        "base_rate": ratio(p, n),
        "auc_hist": auc,
        "auc_error_bound": bound,
        "nonfinite": int(sums.nonfinite[task]),
    }


def base_entropy(weight: float, positive: float) -> float:
    """-P ln c - (N - P) ln(1 - c): the loss of predicting the base rate c = P / N; 0 where a class is missing."""
    negative = weight - positive
    if positive <= 0 or negative <= 0:
        return 0.0
    return float(-positive * np.log(positive / weight) - negative * np.log(negative / weight))


def histogram_auc(negative: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """AUC where scores of one bin count as ties, and the largest possible distance from the exact AUC.

    A pair inside one bin counts 1/2 and truly counts 0, 1/2 or 1; so the distance is at most half the share of such
    pairs. NaN, NaN where a class is missing.

    Args:
      negative, positive: float64[bins]. Weight per bin in ascending order of the score.
    """
    pairs = negative.sum() * positive.sum()
    if not pairs > 0:
        return float("nan"), float("nan")
    below = np.cumsum(negative) - negative
    tied = positive @ negative / 2
    return float((positive @ below + tied) / pairs), float(tied / pairs)
