"""Sums by row in fixed point: the same to the bit in any order and any grouping of the occurrences.

The largest magnitude among the gradients of a row, in each block of 16 columns, gives them a power of two; each
gradient is rounded to a multiple of 2^-22 of that power, an integer of 24 bits, and integers are added exactly, in
limbs that cannot overflow:

    q = round(g * 2^(22 - E)),  2^E <= max |g| < 2^(E + 1)         |q| <= 2^23
    q = hi * 2^12 + lo                                             up to 2^19 occurrences: two sums in int32
    q = a * 2^16 + b * 2^8 + c                                     up to 2^23: three

The sum differs from the exact one by at most 2^(E - 23) an occurrence, where E is taken as -100 if it is less; for
gradients of equal size that is one part in 2^23, like the rounding of float32 itself. Limbs are brought to one
canonical form before they become a float, so that the number of limbs does not show. Blocks of columns, so that slices
of whole blocks have the sums of the whole row.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 16
"""Columns that share a power of two."""

_LOWEST_EXPONENT = -100


def sum_by_slot_fixed(grads: jax.Array, slots: jax.Array, capacity: int) -> jax.Array:
    """out[u] = sum of grads[n] over all n with slots[n] == u, in fixed point.

    Args:
      grads: float32[N, D].
      slots: int32[N], in any order; `capacity` = none.
      capacity: U.

    Returns:
      float32[U, D]; NaN for a block of columns of a row with a gradient that is not finite.

    Raises:
      ValueError: another dtype, or more occurrences than the limbs can hold.
    """
    count = grads.shape[0]
    if grads.dtype != jnp.float32:
        raise ValueError(f"sum_by_row: summation 'fixed' takes float32 gradients; got {grads.dtype}.")
    if count > 2**23:
        raise ValueError(
            f"sum_by_row: summation 'fixed' adds at most {2**23:,} occurrences without overflow; got {count:,}. Use a "
            "smaller batch, more devices, or another summation."
        )
    columns = grads.shape[1]
    padded = jnp.pad(jnp.abs(grads), ((0, 0), (0, -columns % BLOCK)))
    each = padded.reshape(count, -1, BLOCK).max(axis=2)  # N blocks
    most = jnp.zeros((capacity, each.shape[1]), jnp.float32).at[slots].max(each, mode="drop")
    exponent = (lax.bitcast_convert_type(most, jnp.int32) >> 23) - 127
    exponent = jnp.maximum(exponent, _LOWEST_EXPONENT)

    def by_column(blocks: jax.Array) -> jax.Array:
        return jnp.repeat(blocks, BLOCK, axis=1)[:, :columns]

    scale = _power_of_two(22 - exponent).at[slots].get(mode="fill", fill_value=0)  # N blocks
    whole = jnp.rint(grads * by_column(scale)).astype(jnp.int32)

    def add(limb: jax.Array) -> jax.Array:
        return jnp.zeros((capacity, columns), jnp.int32).at[slots].add(limb, mode="drop")

    if count <= 2**19:
        low, high = add(whole & 0xFFF), add(whole >> 12)
        high = high + (low >> 12)
        low = low & 0xFFF
        top, rest = high >> 4, ((high & 0xF) << 12) | low
    else:
        low, middle, top = add(whole & 0xFF), add((whole >> 8) & 0xFF), add(whole >> 16)
        middle = middle + (low >> 8)
        top = top + (middle >> 8)
        rest = ((middle & 0xFF) << 8) | (low & 0xFF)
    total = top.astype(jnp.float32) * 65536.0 + rest.astype(jnp.float32)
    # Two exact factors: 2^(E - 22) itself may be too small for a float32.
    sums = total * by_column(_power_of_two(jnp.maximum(exponent, -60) - 22))
    sums = sums * by_column(_power_of_two(jnp.minimum(exponent + 60, 0)))
    return jnp.where(by_column(jnp.isfinite(most)), sums, jnp.nan)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """int32 in [-126, 127] -> float32."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
