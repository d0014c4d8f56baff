"""Ranges of activations: the range of least squared quantization error on a histogram.

Two passes over some batches: the first finds the least and the largest input of every linear operator, the second
counts its inputs in bins. From the whole range, either end is moved in by a 128th of it in turn on trial, as long as
the ends stay on their sides of zero, and the range of least error on the way is taken: a few numbers far out are
saturated where that pays.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalejax.errors import UserError
from scalejax.inference.recommendation import operators
from scalejax.inference.recommendation.click_model import Inputs, ServedModel, logits

Limits = dict[str, tuple[float, float]]
"""Path of a linear operator -> least and largest number of the range of its inputs."""

BINS = 2048
STEPS = 128


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Numbers counted in bins of equal width.

    Attributes:
      low, high: Ends of the first and the last bin.
      counts: int64[bins].
    """

    low: float
    high: float
    counts: np.ndarray


def limits(model: ServedModel, batches: Sequence[Inputs]) -> Limits:
    """A range for the inputs of every linear operator.

    Raises:
      UserError: no batches, or activations that are not finite.
    """
    if not batches:
        raise UserError("calibration.limits: batches must not be empty. Give some of the traffic.")
    return {path: least_error(histogram) for path, histogram in histograms(model, batches).items()}


def histograms(model: ServedModel, batches: Sequence[Inputs]) -> dict[str, Histogram]:
    """The inputs of every linear operator, counted."""
    ends: Limits = {}
    for batch in batches:
        for path, x in _inputs(model, batch).items():
            if not np.isfinite(x).all():
                raise UserError(
                    f"calibration: operator {path} has inputs that are not finite. Look for the rows or numbers that "
                    "are not finite first."
                )
            low, high = ends.get(path, (np.inf, -np.inf))
            ends[path] = min(low, float(x.min())), max(high, float(x.max()))
    counts = {path: np.zeros(BINS, np.int64) for path in ends}
    for batch in batches:
        for path, x in _inputs(model, batch).items():
            counts[path] += np.histogram(x, BINS, range=ends[path])[0]
    return {path: Histogram(*ends[path], counts[path]) for path in ends}


def least_error(histogram: Histogram) -> tuple[float, float]:
    """The range of least squared error on the way inwards; ends are widened to zero first."""
    low, high = min(histogram.low, 0.0), max(histogram.high, 0.0)
    edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
    full = histogram.counts > 0
    numbers, weights = ((edges[1:] + edges[:-1]) / 2)[full], histogram.counts[full].astype(np.float64)

    def error(a: float, b: float) -> float:
        if b <= a:
            return np.inf
        scale = (b - a) / 255
        zero = np.rint(-a / scale)
        decoded = scale * (np.clip(np.rint(numbers / scale) + zero, 0, 255) - zero)
        return float(weights @ np.square(decoded - numbers))

    step = (high - low) / STEPS
    best, least = (low, high), error(low, high)
    for _ in range(STEPS - 1):
        trials = [(low + step, high)] if low + step <= 0 else []
        trials += [(low, high - step)] if high - step >= 0 else []
        if not trials or step == 0:
            break
        errors = [error(*trial) for trial in trials]
        low, high = trials[int(np.argmin(errors))]
        if min(errors) < least:
            best, least = (low, high), min(errors)
    return best


def _inputs(model: ServedModel, batch: Inputs) -> dict[str, np.ndarray]:
    tables, params = model.arrays
    module = model.shape.merge(params)
    linear = {path: o for path, o in operators.find(model.shape).items() if o.kind == "linear"}
    recorders = operators.record(module, linear)
    logits(model, tables, module, batch)
    return {path: np.concatenate([np.asarray(a[0]).ravel() for a, _, _ in r.calls]) for path, r in recorders.items()}
