"""Fidelity of formats: ratio of signal to quantization noise, its guaranteed bound, and studies over vectors.

    QSNR = -10 log10( sum ||Q(X) - X||^2 / sum ||X||^2 )  dB

Source: Rouhani et al., ISCA 2023, theorem 1 (pp. 6, 11) and the study on p. 7.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantize import cast
from scalejax.numerics.scales import ScaleRule


def qsnr(exact: np.ndarray, quantized: np.ndarray) -> float:
    """dB of one array against another, in float64; infinite where they are equal, NaN where one has NaN."""
    exact = np.asarray(exact, np.float64)
    return decibel(((np.asarray(quantized, np.float64) - exact) ** 2).sum(), (exact**2).sum())


def theorem1_bound(format: str | BlockFormat, length: int) -> float:
    """dB below which no vector of `length` values falls, whatever they are (ties either way, floor rule).

    6.02 m + 10 log10( 2^(2 beta) / (min(length, k1) + (2^(2 beta) - 1) k2) ),  beta = 2^d2 - 1

    Holds as long as no scale leaves the range of its d1 bits.

    Raises:
      UserError: the format is not one of exponents and magnitudes, for which the theorem is.
    """
    format = formats.find(format)
    if format.scale != "exponent" or format.element.max_exponent != 0 or format.element.min_exponent != 0:
        raise UserError(
            f"theorem1_bound: it is for magnitudes under shared exponents, such as bdr_mx9; got {format.name}."
        )
    m = format.element.mantissa_bits + 1
    power = 4.0**format.max_microexponent
    shared = format.k2 if format.sub_scale == "exponent" else format.k1
    return 20 * m * math.log10(2) + 10 * math.log10(power / (min(length, format.k1) + (power - 1) * shared))


def _variable_gaussian(rng: np.random.Generator, vectors: int, length: int) -> np.ndarray:
    spread = np.abs(rng.standard_normal((vectors, 1)))
    return rng.standard_normal((vectors, length)) * spread


# What studies draw from: (rng, vectors, length) -> float64[vectors, length].
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    # The paper's: N(0, sigma^2) with sigma ~ |N(0, 1)| for each vector.
    "variable_gaussian": _variable_gaussian,
    "gaussian": lambda rng, vectors, length: rng.standard_normal((vectors, length)),
    "laplace": lambda rng, vectors, length: rng.laplace(size=(vectors, length)),
    "uniform": lambda rng, vectors, length: rng.uniform(-1, 1, (vectors, length)),
    "student_t3": lambda rng, vectors, length: rng.standard_t(3, (vectors, length)),
    "lognormal": lambda rng, vectors, length: (
        rng.lognormal(size=(vectors, length)) * rng.choice([-1.0, 1.0], (vectors, length))
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QsnrStudy:
    """QSNR of a format over many vectors.

    Attributes:
      overall: dB, of sums over all vectors.
      lowest: dB, of the worst vector.
    """

    overall: float
    lowest: float


def study(
    format: str | BlockFormat, vectors: np.ndarray, *, scale_rule: ScaleRule | None = None, chunk: int = 1000
) -> QsnrStudy:
    """Measures a format, ties to even, blocks along the last axis.

    Args:
      format: to measure.
      vectors: float32[vectors, length], as from DISTRIBUTIONS.
      scale_rule: as in `quantize`.
      chunk: vectors at a time; the scale of a whole tensor (NVFP4) is that of all vectors all the same.
    """
    format = formats.find(format)
    tensor_scale = None
    if format.scale == "e4m3":
        largest = np.abs(vectors).max().astype(np.float32)
        tensor_scale = blocks.tensor_scale_of(float32.float_bits(jnp.full((1, 1), largest)), format, axis=0)
    noise, signal = [], []
    for start in range(0, len(vectors), chunk):
        part = np.asarray(vectors[start : start + chunk], np.float32)
        # Squares of small and of large float32 values have no float32.
        quantized = np.asarray(_cast(jnp.asarray(part), format, scale_rule, tensor_scale), np.float64)
        exact = part.astype(np.float64)
        noise.append(((quantized - exact) ** 2).sum(axis=-1))
        signal.append((exact**2).sum(axis=-1))
    noise, signal = np.concatenate(noise), np.concatenate(signal)
    lowest = min(decibel(n, s) for n, s in zip(noise, signal, strict=True))
    return QsnrStudy(overall=decibel(noise.sum(), signal.sum()), lowest=lowest)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(x: jax.Array, format: BlockFormat, scale_rule: ScaleRule | None, tensor_scale: jax.Array | None) -> jax.Array:
    return cast(x, format, axis=-1, scale_rule=scale_rule, tensor_scale=tensor_scale)


def decibel(noise: float, signal: float) -> float:
    """10 log10 of signal over noise: an infinity without noise, minus that without a signal or in boundless noise."""
    if noise == 0:
        return math.inf
    ratio = float(signal) / float(noise)
    return -math.inf if ratio == 0 else 10 * math.log10(ratio)
