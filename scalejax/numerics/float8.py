"""Arrays of 8-bit floats under scales in float32: what GPUs since Hopper multiply.

    s = max(float32(a / max), 2^low),   codes = E(x / s), rounded to nearest, ties to even

a being the largest magnitude of all that shares a scale. The quotient is rounded to float32 first, so that a number
within a float32 rounding of a tie may come out next to what `numerics.quantize` gives, which rounds once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from scalejax.numerics import bits, formats

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32

DTYPES = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
"""The dtype that stores the codes of each format."""


def quantize(
    x: "Float[Array, '*shape']", format: str, *, axes: Sequence[int]
) -> tuple["Float[Array, '*shape']", "Float32[Array, '...']"]:
    """An array in FP8, with the scales that its own magnitudes give.

    Args:
      x: float32, bfloat16 or float16.
      format: "fp8_e4m3" or "fp8_e5m2".
      axes: Those that share a scale.

    Returns:
      float8[...] of the shape of x, and float32 scales with 1 in place of `axes`: x is about their product. NaN or an
      infinity makes NaN of everything under its scale.

    Raises:
      UserError: another dtype.
    """
    bits.check_dtype(x.dtype)
    element = formats.find(format).element
    wide = x.astype(jnp.float32)
    largest = bits.largest(wide, tuple(axes), keepdims=True)
    # As in numerics.blocks: products of scales below this with the smallest element would be subnormal.
    lowest = 2.0 ** (-126 - element.step_exponent)
    scale = jnp.maximum(largest / element.max, lowest)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    # Casts do not saturate: E4M3 would give NaN.
    codes = jnp.clip(wide / scale, -element.max, element.max)
    return codes.astype(DTYPES[format]), scale
