"""Activations under scales that were found beforehand ("static"): one float32 for all that a product is given.

    fp8_e4m3  x ~ s E4M3(x / s)                  s = a / 448
    int8      x ~ s round(x / s), -128 to 127    s = a / 127
    nvfp4     x ~ s (blocks of 16 E2M1 under an E4M3 that is found anew each time)    s = a / 2688

a being the largest magnitude that was seen, or a smaller one; what is beyond it saturates. A scale that does not depend
on the batch leaves the sum, and a product is that of the codes, times s.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.errors import UserError
from scalejax.numerics import bits, quantize

Format = Literal["fp8_e4m3", "int8", "nvfp4"]
FORMATS: tuple[Format, ...] = get_args(Format)

_LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0, "nvfp4": 6.0 * 448.0}
_LOWEST = 2.0**-116
"""Of scales: the smallest number of any format is normal under it (of NVFP4, 2^-9 times 2^-1)."""


def find(name: str, what: str) -> Format:
    """The format of a name.

    Raises:
      UserError: there is none; begins with `what`.
    """
    for format in FORMATS:
        if name == format:
            return format
    raise UserError(f"{what} must be one of {', '.join(FORMATS)}; got {name!r}.")


def scale_of(largest: float, format: Format) -> np.float32:
    """The scale under which a magnitude is the largest number of the format; 1 for zero, of which nothing is known.

    Args:
      largest: At least 0 and finite.
      format: The format.
    """
    if not largest:
        return np.float32(1)
    return np.float32(max(np.float32(largest) / np.float32(_LARGEST[format]), _LOWEST))


def encode(x: jax.Array, scale: jax.Array, format: Format) -> jax.Array:
    """Activations in units of their scale, as values of the dtype of x, which holds them exactly.

    Args:
      x: float32, bfloat16 or float16 [..., n]; NVFP4 has its blocks along n, a multiple of 16.
      scale: float32[], above 0; or with the axes of x, sizes of 1 where several share one.
      format: The format.

    Returns:
      The array that times `scale` is about x. What is beyond the format saturates; NaN stays.

    Raises:
      UserError: another dtype, or blocks that n is no multiple of.
    """
    bits.check_dtype(x.dtype)
    if format == "nvfp4":
        if scale.ndim:
            x, scale = (x.astype(jnp.float32) / scale).astype(x.dtype), jnp.float32(1)
        found = quantize.quantize(x, "nvfp4", axis=-1, tensor_scale=scale)
        return quantize.dequantize(dataclasses.replace(found, tensor_scale=jnp.float32(1)), x.dtype)
    units = x.astype(jnp.float32) / scale
    if format == "int8":
        return jnp.clip(jnp.round(units), -128, 127).astype(x.dtype)
    units = jnp.clip(units, -448, 448)
    # Not a cast there and back, which XLA may drop ("excess precision"). The step of 3 mantissa bits, by the exponent.
    binade = lax.bitcast_convert_type(lax.bitcast_convert_type(units, jnp.int32) & bits.INFINITY, jnp.float32)
    step = jnp.maximum(binade, 2.0**-6) * 2.0**-3
    return (jnp.round(units / step) * step).astype(x.dtype)
