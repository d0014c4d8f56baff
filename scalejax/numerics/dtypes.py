"""The dtypes of a model."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes that parameters are kept in and that products are computed in; equal where they name the same dtypes.

    Attributes:
      params: Dtype of parameters.
      compute: Dtype of activations and of the operands of products, to which parameters are cast where they are used.
    """

    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", jnp.dtype(self.params))
        object.__setattr__(self, "compute", jnp.dtype(self.compute))


FLOAT32 = Dtypes()
"""Of most blocks, where nothing else is asked for."""
