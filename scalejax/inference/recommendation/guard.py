"""A guard-rail: the float model scores a sample of what the lowered one serves, and an alarm is raised on a gap.

For each sampled example d = CE(y, p_low) - CE(y, p_float); the mean of d over the entropy of the base rate is
NE_low - NE_float, and the gap that over NE_float. Without labels, which come late or never, y is the float model's
prediction: then d is a divergence and never negative, and the gap that of a model that is right. The alarm is raised
where the lower end of a 95 % interval of the gap is above the budget, and at once for a score that is not finite.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from scalejax.errors import UserError
from scalejax.inference.recommendation.click_model import ClickModel, Inputs
from scalejax.inference.recommendation.lowering import Lowered
from scalejax.train import exact

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

    def __init__(self, model: ClickModel, lowered: Lowered, *, budget: float, share: float = 0.01, seed: int = 0):
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
        """
        served = np.asarray(self.lowered.score(self.lowered.arrays, inputs))
        if self._random.random() < self.share:
            self.compare(np.asarray(self.model.score(*self.model.arrays, inputs)), served, labels, weights)
        return served

    def compare(
        self, wanted: np.ndarray, served: np.ndarray, labels: Any = None, weights: np.ndarray | None = None
    ) -> None:
        """Takes logits of both models, float32[B, T] each."""
        w = np.ones(len(served)) if weights is None else np.asarray(weights, np.float64)
        kept = w > 0
        finite = np.isfinite(served).all(axis=1) & np.isfinite(wanted).all(axis=1)
        self._nonfinite += int((kept & ~finite).sum())
        kept &= finite
        a, b, w = wanted[kept].astype(np.float64), served[kept].astype(np.float64), w[kept]
        y = exact.sigmoid(a) if labels is None else np.asarray(labels, np.float64)[kept]
        ours, theirs = (np.logaddexp(0, l) - l * y for l in (b, a))
        self._largest = max(self._largest, float(np.abs(a - b).max(initial=0)))
        d = (ours - theirs).mean(axis=1)
        self._count += len(d)
        self._sums += np.array([w.sum(), w @ theirs.mean(axis=1), w @ d, (w * w) @ (d * d), (w * w) @ d, (w * w).sum()])
        self._positive = self._positive + w @ y

    def state(self) -> State:
        """Of the window so far; NaN where there is nothing yet."""
        weight, theirs, d, square, cross, squares = self._sums
        alarm: Literal["none", "gap", "nonfinite"] = "nonfinite" if self._nonfinite else "none"
        if not weight:
            nan = float("nan")
            return State(0, nan, nan, nan, nan, self._largest, self._nonfinite, alarm)
        rate = np.atleast_1d(self._positive / weight).clip(1e-12, 1 - 1e-12)
        entropy = float((-rate * np.log(rate) - (1 - rate) * np.log(1 - rate)).mean())
        mean, ne = d / weight, theirs / weight / entropy
        spread = np.sqrt(max(square - 2 * mean * cross + mean * mean * squares, 0.0)) / weight  # of a weighted mean
        gap, half = mean / entropy / ne, _SIGMAS * spread / entropy / ne
        if alarm == "none" and gap - half > self.budget:
            alarm = "gap"
        low, high = float(gap - half), float(gap + half)
        return State(self._count, float(ne), float(gap), low, high, self._largest, self._nonfinite, alarm)

    def close_window(self) -> State:
        """Ends a window, keeps its state in `windows`, whose gaps are the trend, and begins another."""
        state = self.state()
        self.windows.append(state)
        self._begin()
        return state

    def _begin(self) -> None:
        self._count, self._nonfinite, self._largest = 0, 0, 0.0
        self._sums, self._positive = np.zeros(6), np.zeros(())
