"""Integers of 1 to 16 bits as bytes: the widths 8, 4, 2 and 1 that add up to theirs, each a stream of its own.

    5 bits    streams of 4 bits, code c in the low half of byte c / 2 where c is even, then of 1 bit, eight in a byte

Every stream fills whole bytes, the last one with zeros. Shifts by a constant and sums over neighbours become vector
instructions on a CPU, which streams of 3 or 5 bits do not.
"""

import jax
import jax.numpy as jnp
from jax import lax


def packed_bytes(n: int, bits: int) -> int:
    """Of n integers."""
    return sum(_stream_bytes(n, width) for _, width in _streams(bits))


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """int32[rows, n] in [0, 2^bits) -> uint8[rows, packed_bytes(n, bits)]."""
    n = codes.shape[1]
    made: list[jax.Array] = []
    for low, width in _streams(bits):
        count, size = 8 // width, _stream_bytes(n, width)
        part = (codes >> low) & ((1 << width) - 1)
        if n % count:
            part = jnp.pad(part, ((0, 0), (0, size * count - n)))
        apart = part.reshape(-1, size, count)
        word = jnp.sum(apart << width * lax.broadcasted_iota(jnp.int32, apart.shape, 2), axis=2, dtype=jnp.int32)
        made.append(word.astype(jnp.uint8))
    return made[0] if len(made) == 1 else jnp.concatenate(made, axis=1)


def unpack(data: jax.Array, bits: int, n: int) -> jax.Array:
    """uint8[rows, packed_bytes(n, bits)] -> int32[rows, n]."""
    codes, start = jnp.zeros((data.shape[0], n), jnp.int32), 0
    for low, width in _streams(bits):
        count, size = 8 // width, _stream_bytes(n, width)
        apart = jnp.repeat(data[:, start : start + size, None].astype(jnp.int32), count, axis=2)
        part = (apart >> width * lax.broadcasted_iota(jnp.int32, apart.shape, 2)) & ((1 << width) - 1)
        codes = codes | part.reshape(data.shape[0], size * count)[:, :n] << low
        start += size
    return codes


def _streams(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, width) of each stream."""
    found: list[tuple[int, int]] = []
    low = 0
    while low < bits:
        width = next(w for w in (8, 4, 2, 1) if w <= bits - low)
        found.append((low, width))
        low += width
    return found


def _stream_bytes(n: int, width: int) -> int:
    return -(-n * width // 8)
