"""The definitions: scalejax.numerics, and a product of what it decodes."""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics import packing
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import QuantizeCall
from scalejax.numerics.quantize import dequantize as decode
from scalejax.numerics.quantize import quantize as encode


def quantize(x: jax.Array, key: jax.Array | None, tensor_scale: jax.Array | None, call: QuantizeCall) -> Packed:
    """`api.quantize_blocks`."""
    format, axis, rule, rounding = call
    return packing.pack(
        encode(x, format, axis=axis, scale_rule=rule, rounding=rounding, key=key, tail="pad", tensor_scale=tensor_scale)
    )


def dequantize(packed: Packed, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`api.dequantize_blocks`."""
    return decode(packing.unpack(packed), dtype)


def matmul(x: jax.Array, weights: Packed) -> jax.Array:
    """float32[M, N] of x [M, K], operands in the dtype of x."""
    return product(x, dequantize(weights, x.dtype), weights.axis)


def product(x: jax.Array, decoded: jax.Array, axis: int) -> jax.Array:
    """float32[M, N]: the sum over the last axis of x [M, K] and `axis` of a matrix in the same dtype."""
    return lax.dot_general(
        x,
        decoded,
        (((1,), (axis % 2,)), ((), ())),
        # Of float32, as exact as the platform has them.
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
