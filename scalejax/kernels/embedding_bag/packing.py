"""Rows of bfloat16 stored as words of 32 bits.

    word j of a row = column j (low half) | column j + D/2 (high half)

A DMA engine of a TPU moves words: a single row of bfloat16 has no address of its own there, since two rows share a
word. Stored as uint32[V, D/2] it has one. Halves of a row rather than neighbours share a word, so that a row comes
apart into two contiguous pieces without a shuffle. A bfloat16 is the upper half of a float32, so unpacking is exact.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Float, UInt32

_HIGH = 0xFFFF0000


def pack_rows(rows: "Float[Array, '*rows dim']") -> "UInt32[Array, '*rows words']":
    """float[..., D] -> uint32[..., D/2], rounded to bfloat16, to nearest, ties to even.

    Raises:
      ValueError: D is odd, or `rows` is not of floating point.
    """
    if not jnp.issubdtype(rows.dtype, jnp.floating) or rows.shape[-1] % 2:
        raise ValueError(
            f"pack_rows: rows must be floating point with an even last axis; got {rows.dtype}{list(rows.shape)}."
        )
    bits = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(bits, 2, axis=-1)
    return low | (high << 16)


def unpack_rows(words: "UInt32[Array, '*rows words']") -> "BFloat16[Array, '*rows dim']":
    """uint32[..., D/2] -> bfloat16[..., D].

    Raises:
      ValueError: `words` is not uint32.
    """
    if words.dtype != jnp.uint32:
        raise ValueError(f"unpack_rows: words must be uint32, from pack_rows; got {words.dtype}{list(words.shape)}.")
    return jnp.concatenate(halves(words), axis=-1).astype(jnp.bfloat16)


def halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32[..., D/2] -> float32 columns [0, D/2) and [D/2, D). Only shifts: fit for the inside of a kernel."""
    low = lax.bitcast_convert_type(words << jnp.uint32(16), jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.uint32(_HIGH), jnp.float32)
    return low, high


def join(low: jax.Array, high: jax.Array) -> jax.Array:
    """float32 halves -> uint32 words, rounded to bfloat16, to nearest, ties to even. Only integer arithmetic inside.

    NaNs stay NaNs: their payload is not rounded away.
    """
    return (_rounded_bits(low) >> jnp.uint32(16)) | (_rounded_bits(high) & jnp.uint32(_HIGH))


def _rounded_bits(values: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    # Half of the last place that stays, less one where the number that stays would be even on a tie.
    rounded = bits + jnp.uint32(0x7FFF) + ((bits >> jnp.uint32(16)) & jnp.uint32(1))
    return jnp.where(values == values, rounded, jnp.uint32(0x7FC00000))


def sum_dtype(table: jax.Array) -> jnp.dtype:
    """What the rows of a table are summed in: float32, or float64 where they are that already."""
    return jnp.dtype(jnp.float64 if table.dtype == jnp.float64 else jnp.float32)


def widen(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows or row states in the dtype of a computation; packed rows come apart."""
    return (unpack_rows(array) if array.dtype == jnp.uint32 else array).astype(dtype)


def narrow(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The way back from `widen`; `dtype` is that of the stored array."""
    return pack_rows(array) if dtype == jnp.uint32 else array.astype(dtype)
