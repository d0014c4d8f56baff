"""Running averages of parameters, which a run keeps beside them."""

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
    """An exponential moving average: a <- decay a + (1 - decay) p after every step.

    Attributes:
      name: By which `evaluation.average` and `open_run` know it.
      decay: In (0, 1).
      from_step: Before this step the average is the parameter itself.
    """

    name: str = "ema"
    decay: float = 0.999
    from_step: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise UserError(f"Average: name must be of letters, digits, - and _; got {self.name!r}.")
        if not 0 < self.decay < 1:
            raise UserError(f"Average: decay must lie between 0 and 1; got {self.decay}.")

    def update(
        self, averages: Mapping[str, jax.Array], params: Mapping[str, jax.Array], step: jax.Array
    ) -> dict[str, jax.Array]:
        """The averages after a step, of the dtypes and shardings of the parameters.

        Args:
          averages: {path: average}.
          params: {path: parameter} after the step.
          step: int32[], steps done before this one.
        """
        keep = jnp.where(step < self.from_step, 0.0, self.decay)

        def moved(average: jax.Array, p: jax.Array) -> jax.Array:
            return p + keep.astype(p.dtype) * (average - p)

        return {path: moved(averages[path], p) for path, p in params.items()}
