"""Places in rows: of the k largest values, and k distinct random ones."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.numerics.stochastic import hash_bits
from scalejax.parallel.compression.compressors.norms import magnitude_groups

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32, UInt32


def largest(x: "Float32[Array, 'rows n']", k: int) -> "Int32[Array, 'rows {k}']":
    """int32[rows, k], ascending: places of the k largest magnitudes, NaN and infinities first, of equal ones the first.

    Each of them lies in one of the k groups of neighbours that have the largest maxima: a group that is not among them
    has k maxima before its own. So `lax.top_k` sees only the maxima, and then the values of k groups: 2 sqrt(k n) in
    all for groups of sqrt(n / k).
    """
    rows, n = x.shape
    if n < 64 * k:  # two selections would take as long
        return jnp.sort(_top(magnitude_groups(x, 1)[:, :, 0], k), axis=1)
    size = 1 << round(math.log2(n / k) / 2)
    groups = magnitude_groups(x, size)
    chosen = jnp.sort(_top(jnp.max(groups, axis=2), k), axis=1)
    among = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(rows, k * size)
    found = jnp.sort(_top(among, k), axis=1)
    return jnp.take_along_axis(chosen, found // size, axis=1) * size + found % size


def _top(magnitudes: jax.Array, k: int) -> jax.Array:
    # As floats: of integers XLA sorts whole rows on a CPU.
    return lax.top_k(lax.bitcast_convert_type(magnitudes, jnp.float32), k)[1]


def distinct(key: "UInt32[Array, '2']", n: int, k: int) -> "Int32[Array, '{k}']":
    """int32[k], distinct places in [0, n), each k-subset about equally likely: what a permutation makes of 0 to k - 1.

    The permutation is a Feistel network on pairs (l, r) with l < a and r < b, where a b is n or a little more, applied
    again to what it sends beyond n. It takes k steps, where shuffling or sorting takes n.
    """
    b = math.isqrt(n - 1) + 1 if n > 1 else 1
    a = -(-n // b)

    def drawn(half: jax.Array, step: int, size: int) -> jax.Array:
        bits = hash_bits(half, hash_bits(key[0], key[1], jnp.uint32(step)))
        return (bits % jnp.uint32(size)).astype(jnp.int32)

    def permuted(place: jax.Array) -> jax.Array:
        left, right = place // b, place % b
        for step in range(4):
            left = (left + drawn(right, 2 * step, a)) % a
            right = (right + drawn(left, 2 * step + 1, b)) % b
        return left * b + right

    def again(place: jax.Array) -> jax.Array:
        return jnp.where(place < n, place, permuted(place))

    start = permuted(lax.iota(jnp.int32, k))
    return lax.while_loop(lambda place: jnp.any(place >= n), again, start)
