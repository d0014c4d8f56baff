"""The flat parameter of the FSDP paper (section 3.2.3 and figure 3 of arXiv 2304.11277).

The parameters of a unit are laid end to end in one vector, padded on the right to a multiple of the sharding factor F,
and cut into F equal chunks: chunk i belongs to rank i. Gather and reduce-scatter of the vector then need no copies.
`parallel.fsdp` shards parameter by parameter instead, as PyTorch's second FSDP does: flattening hides norms, dtypes and
names of single parameters from optimizers and checkpoints. The layout is here because other schemes cut vectors (the
blocks of quantised exchanges), and because what the paper says of it can be tested.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """How parameters of one dtype lie in a flat vector.

    Attributes:
      shapes: ((path, shape), ...), in the order of the vector.
      shards: F, the number of equal chunks.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    shards: int

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise UserError(f"FlatLayout: shards must be at least 1; got {self.shards}.")

    @classmethod
    def of(cls, params: Mapping[str, jax.Array], shards: int) -> "FlatLayout":
        """The layout of these parameters, in their order.

        Raises:
          UserError: their dtypes differ, or shards is not positive.
        """
        dtypes = {str(p.dtype) for p in params.values()}
        if len(dtypes) > 1:
            raise UserError(
                f"FlatLayout: the parameters of a unit must have one dtype; got {', '.join(sorted(dtypes))}. Make a "
                "unit of each dtype."
            )
        return cls(shapes=tuple((path, tuple(p.shape)) for path, p in params.items()), shards=shards)

    @property
    def size(self) -> int:
        """Elements of the parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def padding(self) -> int:
        """Zeros at the end, fewer than F."""
        return -self.size % self.shards

    @property
    def chunk(self) -> int:
        """Elements of one rank."""
        return (self.size + self.padding) // self.shards

    def flatten(self, params: Mapping[str, jax.Array]) -> jax.Array:
        """{path: array} -> the vector [F * chunk], padding included."""
        flat = jnp.concatenate([params[path].ravel() for path, _ in self.shapes])
        return jnp.pad(flat, (0, self.padding))

    def chunks(self, params: Mapping[str, jax.Array]) -> jax.Array:
        """{path: array} -> [F, chunk]: row i is what rank i holds."""
        return self.flatten(params).reshape(self.shards, self.chunk)

    def unflatten(self, flat: jax.Array) -> dict[str, jax.Array]:
        """The vector, or its chunks, back to {path: array}."""
        flat, params, start = flat.ravel(), {}, 0
        for path, shape in self.shapes:
            params[path] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return params
