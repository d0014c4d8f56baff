"""Metrics as sums: kept on the devices inside the train step, added up on the host, turned into numbers at the end.

Symbols (T tasks, B examples): label y in [0, 1], logit l, prediction p = sigmoid(l), weight w >= 0,
N = sum w, P = sum w y, c = P / N (the base rate *of the same examples*).

    logloss      sum w CE / N,  CE = -y ln p - (1 - y) ln(1 - p), computed from the logit (no clamping needed)
    ne           sum w CE / (-P ln c - (N - P) ln(1 - c)); the constant c scores exactly 1, lower is better
    calibration  sum w p / P; 1 is ideal
    auc_hist     Mann-Whitney with mid-ranks over a histogram of the scores; exact AUC lies within `auc_error_bound`

Sums are merged by adding, never by averaging metrics. What is undefined (no positives, no negatives, no examples) is
NaN, never a stand-in value. A loss that is not finite stays in its sum, so that the metric shows it, and is counted.

On the devices each sum is an unevaluated pair of float32 (float64 under `jax_enable_x64`): value plus the rounding
error of every addition so far (two-sum), so that a window of any length loses nothing to accumulation. The sum over one
batch is an ordinary reduction, about 1e-7 relative. On the host everything is float64.

The bins of the histogram are uniform in a transform of the logit that is a chain of single, correctly rounded, monotone
operations: rounding can merge neighbours but never swap them, hence the bound holds to the last bit on CPU.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BINS = 4096
"""Default bins of the histogram of scores: the bound is about 3e-4 on click logs and 64 kB a task on the device."""

_SOFTNESS = 4.0
"""Logit at which the transform has used half of its range: 512 bins a unit of logit at 0, 57 at +-8 (of 4,096)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An unevaluated sum `value + error`, both of one floating dtype and any shape."""

    value: jax.Array
    error: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MetricSums:
    """Sums over examples on the devices; replicated.

    Attributes:
      examples: int32[]. Examples of weight > 0 (at most 2**31 - 1 before the sums are taken to the host).
      nonfinite: int32[T]. Losses of weight > 0 that are not finite.
      weight: Pair float[T]. sum w.
      positive: Pair float[T]. sum w y.
      cross_entropy: Pair float[T]. sum w CE.
      prediction: Pair float[T]. sum w p.
      histogram: Pair float[T, 2, bins]. Weight of negatives ([:, 0]) and positives ([:, 1]) per bin of the score.
    """

    examples: jax.Array
    nonfinite: jax.Array
    weight: Pair
    positive: Pair
    cross_entropy: Pair
    prediction: Pair
    histogram: Pair


def zeros(tasks: int, *, bins: int = BINS) -> MetricSums:
    """Sums of no examples for `tasks` tasks.

    Raises:
      ValueError: `bins` is not an even number of at least 2 (bins are symmetric around a score of 0.5).
    """
    if bins < 2 or bins % 2:
        raise ValueError(f"metrics.zeros: bins must be an even number of at least 2; got {bins}.")
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    pair = functools.partial(pair_zeros, dtype)
    return MetricSums(
        examples=jnp.zeros((), jnp.int32),
        nonfinite=jnp.zeros((tasks,), jnp.int32),
        weight=pair(tasks),
        positive=pair(tasks),
        cross_entropy=pair(tasks),
        prediction=pair(tasks),
        histogram=pair(tasks, 2, bins),
    )


def update(sums: MetricSums, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> MetricSums:
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

    return MetricSums(
        examples=sums.examples + jnp.sum(counts, dtype=jnp.int32),
        nonfinite=sums.nonfinite + jnp.sum(counts & ~jnp.isfinite(loss), axis=0, dtype=jnp.int32),
        weight=add(sums.weight, total(ones)),
        positive=add(sums.positive, total(labels)),
        cross_entropy=add(sums.cross_entropy, total(loss)),
        prediction=add(sums.prediction, total(jax.nn.sigmoid(logits))),
        histogram=add(sums.histogram, _histogram(logits, labels, jnp.where(scored, w, 0), bins)),
    )


def merge(a: MetricSums, b: MetricSums) -> MetricSums:
    """Sums of the examples of both."""

    def pair(x: Pair, y: Pair) -> Pair:
        total = add(x, y.value)
        return Pair(total.value, total.error + y.error)

    return MetricSums(
        examples=a.examples + b.examples,
        nonfinite=a.nonfinite + b.nonfinite,
        weight=pair(a.weight, b.weight),
        positive=pair(a.positive, b.positive),
        cross_entropy=pair(a.cross_entropy, b.cross_entropy),
        prediction=pair(a.prediction, b.prediction),
        histogram=pair(a.histogram, b.histogram),
    )


def pair_zeros(dtype: Any, *shape: int) -> Pair:
    """A sum of nothing, in two buffers: sums are donated."""
    return Pair(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def add(total: Pair, x: jax.Array) -> Pair:
    """total + x, elementwise, by two-sum (Knuth, The Art of Computer Programming 2, 4.2.2): the error is exact."""
    s = total.value + x
    back = s - total.value
    return Pair(s, total.error + ((total.value - (s - back)) + (x - back)))


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


@dataclasses.dataclass(frozen=True)
class HostSums:
    """The same sums as float64 NumPy arrays (pairs evaluated); `+` merges.

    Attributes:
      examples: Examples of weight > 0.
      nonfinite: int64[T].
      weight, positive, cross_entropy, prediction: float64[T].
      histogram: float64[T, 2, bins].
    """

    examples: int
    nonfinite: np.ndarray
    weight: np.ndarray
    positive: np.ndarray
    cross_entropy: np.ndarray
    prediction: np.ndarray
    histogram: np.ndarray

    def __add__(self, other: "HostSums") -> "HostSums":
        if self.histogram.shape != other.histogram.shape:
            raise ValueError(
                f"HostSums: both sides must have the same tasks and bins; got histograms of shape "
                f"{self.histogram.shape} and {other.histogram.shape}."
            )
        return HostSums(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; `json` writes floats by their shortest exact form, so `from_dict` is lossless."""
        return {f.name: np.asarray(getattr(self, f.name)).tolist() for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HostSums":
        """The inverse of `to_dict`."""
        arrays = {name: np.asarray(values[name], np.float64) for name in _FLOAT_SUMS}
        return cls(examples=int(values["examples"]), nonfinite=np.asarray(values["nonfinite"], np.int64), **arrays)


_FLOAT_SUMS = ("weight", "positive", "cross_entropy", "prediction", "histogram")


def to_host(sums: MetricSums) -> HostSums:
    """Waits for the sums and evaluates them in float64."""
    host: MetricSums = jax.device_get(sums)
    floats = {}
    for name in _FLOAT_SUMS:
        pair = getattr(host, name)
        floats[name] = np.asarray(pair.value, np.float64) + np.asarray(pair.error, np.float64)
    return HostSums(examples=int(host.examples), nonfinite=np.asarray(host.nonfinite, np.int64), **floats)


def of_scores(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, *, bins: int = BINS) -> HostSums:
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
    return HostSums(
        examples=int(counts.sum()),
        nonfinite=np.sum(counts & ~np.isfinite(loss), axis=0),
        weight=np.sum(w * np.ones_like(y), axis=0),
        positive=np.sum(w * y, axis=0),
        cross_entropy=np.sum(w * loss, axis=0),
        prediction=np.sum(w * prediction, axis=0),
        histogram=np.array(histogram, np.float64),
    )


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """Everything seen since the first step: the float64 sum of all windows, saved with every checkpoint.

    Attributes:
      sums: None before the first window.
      windows: Number of windows added.
    """

    sums: HostSums | None = None
    windows: int = 0

    def add(self, window: HostSums) -> "Lifetime":
        """With one more window; the order of additions is the order of calls, so a resumed run adds the same bits."""
        return Lifetime(window if self.sums is None else self.sums + window, self.windows + 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and exact."""
        return {"windows": self.windows, "sums": None if self.sums is None else self.sums.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Lifetime":
        """The inverse of `to_dict`."""
        sums = values["sums"]
        return cls(None if sums is None else HostSums.from_dict(sums), int(values["windows"]))


def compute(sums: HostSums | MetricSums, names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of the examples in the sums.

    Args:
      sums: On the host, or on the devices (then this waits for them).
      names: Names of the tasks; needed for two or more, whose metrics are called "logloss/name". With one task the
        plain name is used.
    Returns:
      "examples", then for each task: logloss, ne, calibration, base_rate, auc_hist, auc_error_bound, nonfinite.
    Raises:
      ValueError: the number of names is not the number of tasks.
    """
    host = to_host(sums) if isinstance(sums, MetricSums) else sums
    tasks = host.weight.shape[0]
    if tasks > 1 and len(names) != tasks:
        raise ValueError(f"metrics.compute: names must name each of the {tasks} tasks; got {list(names)}.")
    result: dict[str, float] = {"examples": host.examples}
    for t in range(tasks):
        suffix = f"/{names[t]}" if tasks > 1 else ""
        values = _task_metrics(host, t)
        result |= {name + suffix: value for name, value in values.items()}
    return result


def _task_metrics(sums: HostSums, task: int) -> dict[str, float]:
    n, p = sums.weight[task], sums.positive[task]
    auc, bound = histogram_auc(sums.histogram[task, 0], sums.histogram[task, 1])
    return {
        "logloss": ratio(sums.cross_entropy[task], n),
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


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, NaN where the denominator is 0."""
    return float(numerator / denominator) if denominator else float("nan")
