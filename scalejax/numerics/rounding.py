"""Dropping the low bits of an integer: to the nearest, ties to even or away from zero; toward zero; or stochastically.

The magnitude is rounded, so that Q(-x) = -Q(x). Stochastically, a number that lies a fraction d above its lower
neighbour goes up with probability d: with 32 random bits r it does where floor(r / 2) + floor(2^31 d) >= 2^31.

And intermediate results that are rounded by themselves. A compiler may turn a * b + c into one fused multiply-add with
one rounding instead of two, and whether it does depends on what else is in the program: the same update compiled for
one device and for eight then differs in its last bit. On a CPU `optimization_barrier` does not prevent it (it is taken
out before code is generated).
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.errors import UserError

Rounding = Literal["ties_to_even", "ties_away", "toward_zero", "stochastic"]


def shift_right(significand: jax.Array, drop: jax.Array, rounding: Rounding, chance: jax.Array | None) -> jax.Array:
    """significand / 2^drop as an integer.

    Args:
      significand: int32[...] in [0, 2^24).
      drop: int32[...], at least 1.
      rounding: how.
      chance: uint32[...] for "stochastic", uniformly distributed; else None.

    Returns:
      int32[...].

    Raises:
      UserError: an unknown rounding, or one that lacks its chance.
    """
    if rounding == "stochastic":
        if chance is None:
            raise UserError("rounding: stochastic rounding needs random bits; got none. Pass key=jax.random.key(seed).")
        whole = significand >> jnp.minimum(drop, 31)
        rest = significand - (whole << jnp.minimum(drop, 24))  # beyond 24 bits nothing is whole
        distance = (rest << jnp.clip(31 - drop, 0, 31)) >> jnp.clip(drop - 31, 0, 31)
        threshold = (chance >> 1).astype(jnp.int32)
        return whole + (distance + threshold < 0).astype(jnp.int32)  # 2^31 wraps round
    drop = jnp.minimum(drop, 25)  # 2^24 is half of 2^25: nothing below it rounds up
    if rounding == "toward_zero":
        return significand >> drop
    if rounding == "ties_away":
        return (significand + (1 << (drop - 1))) >> drop
    if rounding == "ties_to_even":
        return (significand + (1 << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop
    raise UserError(f"rounding: must be one of {', '.join(get_args(Rounding))}; got {rounding!r}.")


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
