"""Features of nodes in int8, a scale each."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax.errors import UnsupportedError
from scalejax.numerics import bits

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_OF_KERNELS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8)
"""Features that Pallas kernels sum, in float32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Rows:
    """Features of which row m is scales[m] * codes[m].

    Attributes:
      codes: int8[M, F], in [-127, 127].
      scales: float32[M].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(M, F)."""
        rows, features = self.codes.shape
        return rows, features

    def dequantize(self) -> jax.Array:
        """float32[M, F]."""
        return self.codes.astype(jnp.float32) * self.scales[:, None]


def quantize_rows(h: "Float[Array, 'rows features']") -> Int8Rows:
    """Rounds each row to int8, to nearest even, with the scale max |row| / 127; a row of zeros has scale 0.

    A row with a NaN or an infinity gets a NaN for its scale, so that it does not pass for a number.

    Args:
      h: float[M, F].
    """
    wide = h.astype(jnp.float32)
    most = bits.largest(wide, (1,))
    scales = jnp.where(jnp.isfinite(most), most / 127.0, jnp.nan)
    safe = jnp.where(scales > 0, scales, 1.0)
    codes = jnp.where(jnp.isfinite(wide), jnp.round(wide / safe[:, None]), 0.0)
    return Int8Rows(jnp.clip(codes, -127, 127).astype(jnp.int8), scales)


def check_kernel(implementation: str, h: jax.Array, dtype: jax.typing.DTypeLike) -> None:
    """Raises an UnsupportedError for features or sums that Pallas kernels do not have."""
    if h.dtype not in _OF_KERNELS or dtype == jnp.float64:
        raise UnsupportedError(
            f'sampled_spmm: implementation="{implementation}" takes float32, bfloat16, float16 and int8 features; got '
            f"{h.dtype}. Leave implementation out."
        )
