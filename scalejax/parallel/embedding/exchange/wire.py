"""Formats of vectors on the wire: fewer bits, one collective each.

    bfloat16, float16       rounded to nearest; float16 after clamping to its range, +-65504
    float8_*, int8          vector / scale, rounded to nearest, with scale = largest magnitude / largest code, or the
                            least that keeps scale and products normal numbers; the four bytes of the scale travel
                            behind the codes of its vector
    bdr_mx9, mxfp6_e2m3 ... the block formats of `parallel.compression.codec`, blocks along the vector

What is not a number stays visible: a NaN or an infinity in a vector makes all of it NaN (int8, float8), all of its
block (block formats), or stays where it is (bfloat16; float16 clamps infinities, as its range says).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics import bits, float8
from scalejax.parallel.compression import codec
from scalejax.parallel.compression.wire_formats import WIRE_FORMATS
from scalejax.parallel.embedding.exchange.coroutines import ExchangeCoroutine
from scalejax.parallel.embedding.plan.sharding_plan import Wire

_HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
_FLOAT8 = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def carry(
    vectors: jax.Array,
    wire: Wire,
    move: Callable[[jax.Array], ExchangeCoroutine[jax.Array]],
    *,
    loss_scale: float = 1.0,
) -> ExchangeCoroutine[jax.Array]:
    """float[..., D] -> what `move` makes of them, moved as `wire`; in the dtype they came in.

    Args:
      vectors: What this device sends.
      wire: What it travels as.
      move: Moves vectors [..., D'] of any dtype to other devices.
      loss_scale: Multiplied by before and divided by after; not with "full", where nothing would change.
    """
    if wire == "full":
        return (yield from move(vectors))
    scaled = vectors if loss_scale == 1.0 else vectors * loss_scale
    arrived = yield from move(encode(scaled, wire))
    decoded = decode(arrived, wire, vectors.dtype, dim=vectors.shape[-1])
    return decoded if loss_scale == 1.0 else decoded / loss_scale


def encode(vectors: jax.Array, wire: Wire) -> jax.Array:
    """float[..., D] -> what travels: [..., D], int8[..., D + 4] with a scale, or the bytes of a block format."""
    if wire in WIRE_FORMATS:
        return codec.encode(vectors.astype(jnp.float32) if vectors.dtype == jnp.float64 else vectors, wire)
    if wire in _HALF:
        if wire == "float16":
            limit = float(jnp.finfo(jnp.float16).max)
            vectors = jnp.clip(vectors, -limit, limit)
        return vectors.astype(_HALF[wire])
    vectors = vectors.astype(jnp.float32)
    if wire in _FLOAT8:
        codes, scale = float8.quantize(vectors, _FLOAT8[wire], axes=(vectors.ndim - 1,))
    else:
        # A subnormal scale would be zero where hardware flushes it, and what it divides no number.
        most = bits.largest(vectors, (-1,), keepdims=True)
        scale = jnp.maximum(most / 127.0, float(jnp.finfo(jnp.float32).tiny))
        codes = jnp.rint(vectors / scale).astype(jnp.int8)
    tail = lax.bitcast_convert_type(scale[..., 0], jnp.int8)  # ... 4
    return jnp.concatenate([lax.bitcast_convert_type(codes, jnp.int8), tail], axis=-1)


def decode(sent: jax.Array, wire: Wire, dtype: jnp.dtype, *, dim: int) -> jax.Array:
    """The inverse of `encode`, up to its rounding: float[..., dim] in `dtype`."""
    if wire in WIRE_FORMATS:
        decoded = codec.decode(sent, wire, length=dim, dtype=jnp.float32 if dtype == jnp.float64 else dtype)
        return decoded.astype(dtype)
    if wire in _HALF:
        return sent.astype(dtype)
    codes, scale = sent[..., :-4], lax.bitcast_convert_type(sent[..., -4:], jnp.float32)
    codes = lax.bitcast_convert_type(codes, float8.DTYPES[_FLOAT8[wire]] if wire in _FLOAT8 else jnp.int8)
    return (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)
