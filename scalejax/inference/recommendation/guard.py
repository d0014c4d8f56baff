"""A guard-rail: the float model scores a sample of what the lowered one serves, and an alarm is raised on a gap.

For each sampled example d = CE(y, p_low) - CE(y, p_float); the mean of d over the entropy of the base rate is
NE_low - NE_float (its mean over tasks, where there are several), and the gap that over NE_float. Without labels, which
come late or never, y is the float model's prediction: then d is a divergence and never negative, and the gap that of a
model that is right. The alarm is raised where the lower end of a 95 % interval of the gap is above the budget, and at
once for a score that is not finite.
"""

import dataclasses
from typing import Literal

import numpy as np

from scalejax.errors import UserError
from scalejax.inference.recommendation.click_model import Inputs, ServedModel
from scalejax.inference.recommendation.lowering import Lowered
from scalejax.train.metrics import exact

_SIGMAS = 1.96


@dataclasses.dataclass(frozen=True)
class State:
    """What a guard has seen since its window began.

    Attributes:
      examples: Sampled examples.
      ne: Of the float model on them.
      gap: (NE of the lowered model - that) / that.
      low, high: 95 % interval of `gap`.
      largest: Largest difference of two logits.
      nonfinite: Examples whose scores were not finite.
      alarm: "none", "gap" or "nonfinite".
    """

    examples: int
    ne: float
    gap: float
    low: float
    high: float
    largest: float
    nonfinite: int
    alarm: Literal["none", "gap", "nonfinite"]


class Guard:
    """Compares a lowered model with its float model on sampled traffic, window after window."""

    def __init__(self, model: ServedModel, lowered: Lowered, *, budget: float, share: float = 0.01, seed: int = 0):
        """Begins a window.

        Args:
          model: The float model.
          lowered: What is served; requantized from another snapshot, it gets a guard of its own.
          budget: Gap above which the alarm is raised, relative: 5e-4 is 0.05 % of NE.
          share: Of the batches that are scored twice, in (0, 1].
          seed: Of the choice of batches.

        Raises:
          UserError: a budget that is not positive, or a share outside (0, 1].
        """
        if not budget > 0:
            raise UserError(f"Guard: budget must be above 0, a share of NE such as 5e-4; got {budget}.")
        if not 0 < share <= 1:
            raise UserError(f"Guard: share must lie in (0, 1]; got {share}.")
        self.model, self.lowered, self.budget, self.share = model, lowered, budget, share
        self._random = np.random.default_rng(seed)
        self.windows: list[State] = []
        self._begin()

    def serve(self, inputs: Inputs, labels: np.ndarray | None = None, weights: np.ndarray | None = None) -> np.ndarray:
        """Logits of the lowered model, float32[B, T]; of a share of all calls, compared with the float model.

        Args:
          inputs: B examples.
          labels: float32[B, T] in [0, 1], or None.
          weights: float32[B], or None = 1 each; 0 marks padding.

        Raises:
          UserError: see `compare`.
        """
        served = np.asarray(self.lowered.score(self.lowered.arrays, inputs))
        if self._random.random() < self.share:
            self.compare(np.asarray(self.model.score(*self.model.arrays, inputs)), served, labels, weights)
        return served

    def compare(
        self,
        wanted: np.ndarray,
        served: np.ndarray,
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        """Takes logits of both models, float32[B, T] each.

        Raises:
          UserError: labels or weights of another shape, weights that are negative, or labels outside [0, 1].
        """
        w = np.ones(len(served)) if weights is None else np.asarray(weights, np.float64)
        y = exact.sigmoid(wanted.astype(np.float64)) if labels is None else np.asarray(labels, np.float64)
        kept = w > 0
        if w.shape != (len(served),) or not (np.isfinite(w) & (w >= 0)).all():
            raise UserError(
                f"Guard: weights must be finite and at least 0, one for each of {len(served)} examples; got {w.shape}."
            )
        if y.shape != served.shape:
            raise UserError(f"Guard: labels must have the shape of scores, {served.shape}; got {y.shape}.")
        if labels is not None and not ((y[kept] >= 0) & (y[kept] <= 1)).all():
            raise UserError("Guard: labels must lie in [0, 1]. Pass None for batches whose labels are not known yet.")
        finite = np.isfinite(served).all(axis=1) & np.isfinite(wanted).all(axis=1)
        self._nonfinite += int((kept & ~finite).sum())
        kept &= finite
        a, b, y, w = wanted[kept].astype(np.float64), served[kept].astype(np.float64), y[kept], w[kept]
        ours, theirs = (np.logaddexp(0, l) - l * y for l in (b, a))
        self._largest = max(self._largest, float(np.abs(a - b).max(initial=0)))
        d = ours - theirs
        self._sums = self._sums + _Sums(
            examples=len(d),
            weight=w.sum(),
            squares=w @ w,
            positive=w @ y,
            loss=w @ theirs,
            gap=w @ d,
            cross=(w * w) @ d,
            products=(d * (w * w)[:, None]).T @ d,
        )

    def state(self) -> State:
        """Figures of the window so far; NaN where there is nothing yet."""
        sums, nan = self._sums, float("nan")
        alarm: Literal["none", "gap", "nonfinite"] = "nonfinite" if self._nonfinite else "none"
        if not sums.examples:
            return State(0, nan, nan, nan, nan, self._largest, self._nonfinite, alarm)
        # NE is the mean over tasks of loss / entropy: each task has a factor, and so has its part of the gap.
        rate = (sums.positive / sums.weight).clip(1e-12, 1 - 1e-12)
        factors = 1 / (-rate * np.log(rate) - (1 - rate) * np.log(1 - rate)) / len(rate)
        mean, ne = sums.gap / sums.weight, float(factors @ sums.loss / sums.weight)
        spread = sums.products - np.outer(sums.cross, mean) - np.outer(mean, sums.cross)
        spread = factors @ (spread + np.outer(mean, mean) * sums.squares) @ factors / sums.weight**2
        # Of a sample: as many examples as weights are worth, less one. One alone says nothing of how sure it is.
        share = sums.squares / sums.weight**2
        half = _SIGMAS * np.sqrt(max(float(spread), 0.0) / (1 - share)) if share < 1 - 1e-9 else np.inf
        moved = float(factors @ mean)
        if alarm == "none" and moved - half > self.budget * ne:  # also where ne is 0
            alarm = "gap"
        with np.errstate(divide="ignore", invalid="ignore"):
            gap, low, high = (float(np.float64(x) / ne) for x in (moved, moved - half, moved + half))
        return State(sums.examples, ne, gap, low, high, self._largest, self._nonfinite, alarm)

    def close_window(self) -> State:
        """Ends a window, keeps its state in `windows`, whose gaps are the trend, and begins another."""
        state = self.state()
        self.windows.append(state)
        self._begin()
        return state

    def _begin(self) -> None:
        self._nonfinite, self._largest, self._sums = 0, 0.0, _Sums()


_ZERO = np.float64(0)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Over examples of weight w, d the difference of the losses of T tasks.

    Attributes:
      examples: How many.
      weight: Sum of w.
      squares: Of w^2.
      positive, loss, gap: float64[T], of w y, w times the float model's loss, w d.
      cross: float64[T], of w^2 d.
      products: float64[T, T], of w^2 d d^T.
    """

    examples: int = 0
    weight: np.ndarray | np.float64 = _ZERO
    squares: np.ndarray | np.float64 = _ZERO
    positive: np.ndarray | np.float64 = _ZERO
    loss: np.ndarray | np.float64 = _ZERO
    gap: np.ndarray | np.float64 = _ZERO
    cross: np.ndarray | np.float64 = _ZERO
    products: np.ndarray | np.float64 = _ZERO

    def __add__(self, other: "_Sums") -> "_Sums":
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        return _Sums(**added)
