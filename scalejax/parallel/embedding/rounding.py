"""Intermediate results that are rounded by themselves.

A compiler may turn a * b + c into one fused multiply-add with one rounding instead of two, and whether it does depends
on what else is in the program: the same update compiled for one device and for eight then differs in its last bit. On a
CPU `optimization_barrier` does not prevent it (it is taken out before code is generated).
"""

import jax
import jax.numpy as jnp
from jax import lax


def runtime_zero(count: jax.Array) -> jax.Array:
    """int32[] 0, of which the compiler does not know that it is 0.

    Args:
      count: int32[], never negative, and an *input* of the program: of a computed value a compiler may find out.
    """
    return (count < 0).astype(jnp.int32)


def rounded(value: jax.Array, zero: jax.Array) -> jax.Array:
    """`value` with the same bits, but opaque to the operation that uses it.

    Args:
      value: float32 or float64.
      zero: From `runtime_zero`.
    """
    bits = jnp.int64 if value.dtype == jnp.float64 else jnp.int32
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, bits) ^ zero.astype(bits), value.dtype)
