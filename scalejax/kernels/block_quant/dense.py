"""Products of 8-bit integers: weights under a symmetric scale per output channel, activations under one affine scale.

    weight      w = s_w q_w,         s_w = max |column| / 127,   q_w in [-127, 127]
    activation  x = s_x (q_x - z),   s_x = range / 255,          q_x in [-128, 127], z the code of zero
    y           = s_x s_w (sum q_x q_w - z sum q_w) + bias,      sums in int32, the last line in float32

Source: Z. Deng et al., "Low-Precision Hardware Architectures Meet Recommendation Model Inference at Scale", IEEE Micro
2021 (arXiv 2105.12676), and FBGEMM's int8 products, whose requantization to int8 is left out: results are float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.errors import UserError
from scalejax.numerics import bits

MOST_INPUTS = (2**31 - 1) // (255 * 127)
"""Inputs of a product above which its sums may leave int32: 66,311."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """A quantized matrix of K inputs and N outputs.

    Attributes:
      codes: int8[K, N].
      scales: float32[N].
      sums: int32[N], of each column of `codes`.
    """

    codes: jax.Array
    scales: jax.Array
    sums: jax.Array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in (self.codes, self.scales, self.sums))


def quantize_weight(weight: jax.Array) -> Int8Weight:
    """float[K, N] -> codes under a scale for each of the N columns; a column of zeros has the scale 1.

    A column with NaN or an infinity has codes of zero and a scale of NaN, so that all of its results are NaN.

    Raises:
      UserError: no matrix of floating point, or more inputs than int32 can sum.
    """
    if weight.ndim != 2 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise UserError(
            f"quantize_weight: weight must be a matrix of floating point; got {weight.dtype}{list(weight.shape)}."
        )
    if weight.shape[0] > MOST_INPUTS:
        raise UserError(
            f"quantize_weight: sums of {weight.shape[0]:,} products may leave int32; at most {MOST_INPUTS:,} fit. Keep "
            "this operator in float16."
        )
    weight = weight.astype(jnp.float32)
    largest = bits.largest(weight, (0,))
    scales = jnp.where(largest > 0, largest / jnp.float32(127), jnp.ones_like(largest))
    broken = ~jnp.isfinite(largest)
    codes = jnp.where(broken[None, :], 0, jnp.clip(_nearest(weight / scales[None, :]), -127, 127)).astype(jnp.int8)
    scales = jnp.where(broken, jnp.nan, scales)
    return Int8Weight(codes=codes, scales=scales, sums=codes.astype(jnp.int32).sum(axis=0, dtype=jnp.int32))


def dequantize_weight(weight: Int8Weight) -> jax.Array:
    """float32[K, N]."""
    return weight.codes.astype(jnp.float32) * weight.scales[None, :]


def affine(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale and code of zero, float32[] each, of a range that is widened to hold zero; the code lies in [0, 255]."""
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    top = jnp.float32(255)
    scale = jnp.where(jnp.isfinite(high - low), (high - low) / top, high / top - low / top)
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return scale, jnp.clip(_nearest(-low / scale), 0, 255)


def dynamic_range(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the largest finite number of an array, float32[] each."""
    finite = jnp.isfinite(x)
    x = x.astype(jnp.float32)
    return jnp.where(finite, x, jnp.inf).min(initial=jnp.inf), jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf)


def fake_quantize(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """float32[...]: x as its codes say it, saturated at the ends of the range; NaN where x is not finite."""
    scale, zero = affine(low, high)
    steps = jnp.clip(_nearest(x.astype(jnp.float32) * _inverse(scale)) + zero, 0, 255) - zero
    return jnp.where(jnp.isfinite(x), scale * steps, jnp.nan)


def int8_matmul(x: jax.Array, weight: Int8Weight, *, limits: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
    """x times a quantized matrix.

    Args:
      x: float[B, K]. A row with a number that is not finite has results of NaN, and no influence on other rows.
      weight: From `quantize_weight`.
      limits: The least and the largest of the range of x, float32[] each, beyond which values saturate; None = those
        of x itself, so that a result depends on the batch that an example is in.

    Returns:
      float32[B, N].

    Raises:
      UserError: shapes that do not fit, or integers.
    """
    if x.ndim != 2 or x.shape[1] != weight.codes.shape[0] or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"int8_matmul: x must be of floating point, [B, {weight.codes.shape[0]}]; got {x.dtype}{list(x.shape)}. "
            "Cast or reshape it."
        )
    x = x.astype(jnp.float32)
    broken = ~jnp.isfinite(x).all(axis=1, keepdims=True)
    scale, zero = affine(*(dynamic_range(x) if limits is None else limits))
    steps = _nearest(jnp.where(broken, jnp.zeros_like(x), x) * _inverse(scale))
    codes = jnp.clip(steps + zero, 0, 255) - 128
    products = lax.dot_general(
        codes.astype(jnp.int8), weight.codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    sums = products - ((zero.astype(jnp.int32) - 128) * weight.sums)[None, :]
    result = sums.astype(jnp.float32) * (scale * weight.scales)[None, :]
    return jnp.where(broken, jnp.nan, result)


def _inverse(scale: jax.Array) -> jax.Array:
    """Not left to XLA, which makes a product of a division by one number in some programs: values near a tie move."""
    return jnp.float32(1) / scale


def _nearest(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
