"""Rotary positions (Su et al., 2021) with the frequency scaling of Llama 3.1.

Pair i of a head of width d turns by position * f_i with f_i = theta^(-2i/d), angles in float32. Pairs are (i, i + d/2),
the layout of Hugging Face's checkpoints; those of Meta pair (2i, 2i + 1), which a permutation of the rows of the query
and key matrices undoes.

Llama 3.1 stretches long wavelengths w = 2 pi / f by a factor s: f stays where w < L / high, becomes f / s where
w > L / low, and in between (1 - m) f / s + m f with m = (L / w - low) / (high - low). L is the context length that the
model was trained with before. The report (arXiv 2407.21783) does not describe it; the constants are those of the
released code.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.nn.linear import wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches its long wavelengths.

    Attributes:
      factor: s.
      low_frequency_factor: low.
      high_frequency_factor: high.
      original_positions: L.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.original_positions < 1:
            raise ValueError(
                "RopeScaling: factor and original_positions must be at least 1; got "
                f"{self.factor} and {self.original_positions}."
            )
        if not 0 < self.low_frequency_factor < self.high_frequency_factor < math.inf:
            raise ValueError(
                "RopeScaling: 0 < low_frequency_factor < high_frequency_factor is wanted; got "
                f"{self.low_frequency_factor} and {self.high_frequency_factor}."
            )


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """f_i, float32[head_dim / 2] radians a position.

    Rounded to float32 at the same places as by the code that published checkpoints were trained and are run with: at
    position 10,000 the last bit of f is an angle of 1e-3, which shows in the logits (by 2e-3 in a small model).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    f = 1 / np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    if scaling is None:
        return f
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = np.float32(2 * math.pi) * (1 / f)
    m = (np.float32(scaling.original_positions) * (1 / wavelength) - np.float32(low)) / np.float32(high - low)
    s = np.float32(scaling.factor)
    blended = (1 - m) * f / s + m * f
    stretched = np.where(wavelength > scaling.original_positions / low, f / s, blended)
    return np.where(wavelength < scaling.original_positions / high, f, stretched)


def angles(positions: jax.Array, freqs: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[B, S, head_dim / 2] each, of positions int32[B, S]."""
    turned = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(freqs)[None, None, :]
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs of x, float[B, S, H, D], by angles float[B, S, D / 2]; computed in the wider of the dtypes."""
    half = x.shape[-1] // 2
    dtype = wide(x.dtype, cos.dtype)
    a, b = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    cos, sin = cos[:, :, None, :].astype(dtype), sin[:, :, None, :].astype(dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
