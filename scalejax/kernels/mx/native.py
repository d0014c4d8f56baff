"""Products of two packed operands by jax.nn.scaled_matmul: MXFP8, either element on either side, and NVFP4.

On NVIDIA's Blackwell it is a cuDNN call; on other platforms, where jax has a rule at all, XLA decodes both operands.
"""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax import compat
from scalejax.numerics.packing import Packed

_ELEMENTS = {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}


def lacks(x: jax.Array | Packed, weights: Packed) -> str | None:
    """Which part of a case is missing here, or None."""
    if not isinstance(x, Packed):
        return f"multiplies two packed operands; x is {x.dtype}. Pass quantize_blocks(x, ..., axis=-1)."
    kinds = [_kind(operand) for operand in (x, weights)]
    if None in kinds or kinds[0] != kinds[1]:
        return f"has MXFP8 times MXFP8 and NVFP4 times NVFP4; got {x.format.name} times {weights.format.name}."
    platform = compat.platform()
    if not compat.has_scaled_matmul(platform):
        return f"is jax.nn.scaled_matmul, for which jax {jax.__version__} has no rule on the platform {platform!r}."
    return None


def matmul(x: Packed, weights: Packed, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`dtype`[..., N]; arguments as in `api.matmul`."""
    leading = x.codes.shape[:-1]
    lhs, rhs = (_values(operand) for operand in (x, weights))
    if weights.axis == -2:
        rhs = tuple(array.swapaxes(0, 1) for array in rhs)
    rows = [array.reshape(1, -1, array.shape[-1]) for array in lhs]
    sums = jax.nn.scaled_matmul(rows[0], rhs[0][None], rows[1], rhs[1][None], jnp.float32)[0]
    for operand in (x, weights):
        if operand.tensor_scale is not None:
            sums = sums * operand.tensor_scale
    return sums.astype(dtype).reshape(*leading, sums.shape[1])


def _kind(packed: Packed) -> str | None:
    format = packed.format
    if format.scale == "exponent" and format.d1 == 8 and format.k1 == format.k2 == 32:
        return "mxfp8" if format.element.name in _ELEMENTS else None
    is_nvfp4 = format.scale == "e4m3" and format.k1 == 16 and format.element.name == "E2M1"
    return "nvfp4" if is_nvfp4 else None


def _values(packed: Packed) -> tuple[jax.Array, jax.Array]:
    """Codes and scales as arrays of jax's own small floats, padding included."""
    if packed.tensor_scale is None:
        codes = lax.bitcast_convert_type(packed.codes, _ELEMENTS[packed.format.element.name])
        return codes, lax.bitcast_convert_type(packed.scales, jnp.float8_e8m0fnu)
    axis = packed.axis % packed.codes.ndim
    pairs = lax.bitcast_convert_type(packed.codes, jnp.float4_e2m1fn)  # the lower four bits first, in an axis behind
    pairs = jnp.moveaxis(pairs, -1, axis + 1)
    shape = packed.codes.shape
    codes = pairs.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
    return codes, lax.bitcast_convert_type(packed.scales, jnp.float8_e4m3fn)
