"""Counts of steps, which every run keeps.

grad_norm    mean over steps of the global norm of the gradient, before clipping; grad_norm_max the largest
clipped      share of steps whose gradient was scaled down
nonfinite    steps whose loss or gradient was not finite; they are in no other number's favour: NaN stays NaN
skipped      steps that a scaled loss skipped since their gradient overflowed; norms and clipping are of the others
"""

import dataclasses
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.train.metrics.sums import Pair, Total, add, pair_zeros, ratio


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepSums(Generic[Total]):
    """Sums over steps; replicated on the devices, NumPy arrays on the host.

    Attributes:
      steps: int32[].
      clipped: int32[], steps whose gradient was scaled down.
      nonfinite: int32[], steps whose loss or gradient was not finite, skipped ones left out.
      skipped: int32[], steps that were skipped because a scaled loss overflowed.
      weight: Pair float[], sum of the weights of the loss.
      grad_norm: Pair float[], sum of global norms.
      grad_norm_max: float[].
    """

    steps: jax.Array
    clipped: jax.Array
    nonfinite: jax.Array
    skipped: jax.Array
    weight: Total
    grad_norm: Total
    grad_norm_max: jax.Array


def zeros() -> StepSums[Pair]:
    """Sums of no steps."""

    def none() -> jax.Array:
        return jnp.zeros((), jnp.int32)  # a buffer of its own: sums are donated

    pair = pair_zeros()
    return StepSums(none(), none(), none(), none(), pair, pair_zeros(), jnp.zeros((), pair.value.dtype))


def update(
    sums: StepSums[Pair],
    loss: jax.Array,
    weight: jax.Array,
    norm: jax.Array,
    clip: float | None,
    skipped: jax.Array | None = None,
) -> StepSums[Pair]:
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
    loss, norm = loss.astype(dtype), norm.astype(dtype)
    skipped = jnp.zeros((), bool) if skipped is None else skipped
    norm = jnp.where(skipped, 0, norm)
    clipped = jnp.zeros((), jnp.int32) if clip is None else (norm > clip).astype(jnp.int32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return StepSums(
        steps=sums.steps + 1,
        clipped=sums.clipped + clipped,
        nonfinite=sums.nonfinite + (~finite).astype(jnp.int32),
        skipped=sums.skipped + skipped.astype(jnp.int32),
        weight=add(sums.weight, weight),
        grad_norm=add(sums.grad_norm, norm),
        grad_norm_max=jnp.maximum(sums.grad_norm_max, norm),
    )


def compute(sums: StepSums[np.ndarray]) -> dict[str, float]:
    """The values of a window, of sums on the host."""
    taken = int(sums.steps) - int(sums.skipped)
    return {
        "grad_norm": ratio(sums.grad_norm, taken),
        "grad_norm_max": float(sums.grad_norm_max),
        "clipped": ratio(float(sums.clipped), taken),
        "nonfinite": int(sums.nonfinite),
    }
