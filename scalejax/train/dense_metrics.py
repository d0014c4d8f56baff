"""Metrics of runs whose loss is a mean over weights: sums on the devices, numbers on the host.

    loss         sum of losses / sum of weights, over all examples of the window
    grad_norm    mean over steps of the global norm of the gradient, before clipping; grad_norm_max the largest
    clipped      share of steps whose gradient was scaled down
    weight       sum of weights: of a language model the targets that counted
    nonfinite    steps whose loss or gradient was not finite; they are in no other number's favour: NaN stays NaN
    skipped      steps that a scaled loss skipped since their gradient overflowed; norms and clipping are of the others

Sums of losses and weights are pairs of value and rounding error, as in `metrics`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import optim
from scalejax.errors import UserError
from scalejax.train.metrics import Pair, add, pair_zeros, ratio
from scalejax.train.state import TrainState
from scalejax.train.timing import StepTimer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseSums:
    """Sums over steps on the devices; replicated.

    Attributes:
      steps: int32[].
      clipped: int32[], steps whose gradient was scaled down.
      nonfinite: int32[], steps whose loss or gradient was not finite, skipped ones left out.
      skipped: int32[], steps that were skipped because a scaled loss overflowed.
      loss: Pair float[].
      weight: Pair float[].
      grad_norm: Pair float[], sum of global norms.
      grad_norm_max: float[].
    """

    steps: jax.Array
    clipped: jax.Array
    nonfinite: jax.Array
    skipped: jax.Array
    loss: Pair
    weight: Pair
    grad_norm: Pair
    grad_norm_max: jax.Array


@dataclasses.dataclass(frozen=True)
class HostSums:
    """The same on the host, in float64."""

    steps: int
    clipped: int
    nonfinite: int
    skipped: int
    loss: float
    weight: float
    grad_norm: float
    grad_norm_max: float

    def values(self) -> dict[str, float]:
        """The metrics."""
        return {
            "loss": ratio(self.loss, self.weight),
            "weight": self.weight,
            "grad_norm": ratio(self.grad_norm, self.steps - self.skipped),
            "grad_norm_max": self.grad_norm_max,
            "clipped": ratio(self.clipped, self.steps - self.skipped),
            "nonfinite": self.nonfinite,
        }


def zeros() -> DenseSums:
    """Sums of no steps."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)

    def none() -> jax.Array:
        return jnp.zeros((), jnp.int32)  # a buffer of its own: sums are donated

    return DenseSums(
        steps=none(),
        clipped=none(),
        nonfinite=none(),
        skipped=none(),
        loss=pair_zeros(dtype),
        weight=pair_zeros(dtype),
        grad_norm=pair_zeros(dtype),
        grad_norm_max=jnp.zeros((), dtype),
    )


def update(
    sums: DenseSums,
    loss: jax.Array,
    weight: jax.Array,
    norm: jax.Array,
    clip: float | None,
    skipped: jax.Array | None = None,
) -> DenseSums:
    """Adds a step.

    Args:
      sums: So far.
      loss: float[], sum of losses of the global batch.
      weight: float[], sum of its weights.
      norm: float[], global norm of the gradient before clipping.
      clip: What it was clipped to; None = it was not.
      skipped: bool[], whether the step was skipped because a scaled loss overflowed; None = it was not.
    """
    dtype = sums.grad_norm_max.dtype
    loss, weight, norm = loss.astype(dtype), weight.astype(dtype), norm.astype(dtype)
    skipped = jnp.zeros((), bool) if skipped is None else skipped
    norm = jnp.where(skipped, 0, norm)
    clipped = jnp.zeros((), jnp.int32) if clip is None else (norm > clip).astype(jnp.int32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return DenseSums(
        steps=sums.steps + 1,
        clipped=sums.clipped + clipped,
        nonfinite=sums.nonfinite + (~finite).astype(jnp.int32),
        skipped=sums.skipped + skipped.astype(jnp.int32),
        loss=add(sums.loss, loss),
        weight=add(sums.weight, weight),
        grad_norm=add(sums.grad_norm, norm),
        grad_norm_max=jnp.maximum(sums.grad_norm_max, norm),
    )


def to_host(sums: DenseSums) -> HostSums:
    """Waits for the sums and evaluates them in float64."""
    host: DenseSums = jax.device_get(sums)

    def whole(pair: Pair) -> float:
        return float(np.float64(pair.value) + np.float64(pair.error))

    return HostSums(
        steps=int(host.steps),
        clipped=int(host.clipped),
        nonfinite=int(host.nonfinite),
        skipped=int(host.skipped),
        loss=whole(host.loss),
        weight=whole(host.weight),
        grad_norm=whole(host.grad_norm),
        grad_norm_max=float(host.grad_norm_max),
    )


def check_finite(state: TrainState, step: int, schedule: optim.Schedule, timer: StepTimer) -> None:
    """Waits for the steps so far: nothing that is not finite is ever logged or saved.

    Raises:
      UserError: of the steps since the last window one was not, or none had an example that counts.
    """
    with timer.phase("blocked"):
        nonfinite = int(np.asarray(state.metrics.nonfinite))
    if nonfinite and not np.asarray(state.metrics.weight.value):
        raise UserError(
            f"Nothing counts in the batches up to step {step}: the sum of their weights is 0. Documents of one "
            "token have no next one to learn; check data.path, data.column and data.marks."
        )
    if nonfinite:
        highest = "value" if isinstance(schedule, optim.Constant) else "peak"
        raise UserError(
            f"The loss or the gradient of {nonfinite} steps was not finite in the steps up to {step}. Nothing was "
            "saved after the last checkpoint. Lower the learning rate, "
            f"--set optimizer.learning_rate.{highest}=..., and start again from it."
        )


def close_window(program: Any, state: TrainState, timer: StepTimer) -> tuple[TrainState, HostSums]:
    """The state with zeroed sums, and what they were; waits for the device."""
    state, sums = program.take_metrics(state)
    with timer.phase("blocked"):
        return state, to_host(sums)


@dataclasses.dataclass(frozen=True)
class HostState:
    """What a run knows on the host between two steps.

    Attributes:
      examples: Global example counter: the position in the training stream.
      weight: Sum of the weights of all examples so far; of a language model the targets that it has learnt from.
    """

    examples: int = 0
    weight: float = 0.0

    def after(self, examples: int) -> "HostState":
        """One step later."""
        return dataclasses.replace(self, examples=self.examples + examples)

    def with_window(self, sums: HostSums) -> "HostState":
        """With one more window of training metrics."""
        return dataclasses.replace(self, weight=self.weight + sums.weight)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HostState":
        """The inverse of `to_dict`."""
        return cls(int(values["examples"]), float(values["weight"]))
