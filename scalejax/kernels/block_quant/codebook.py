"""Rows of values under codebooks of their own: the optimal ones, of 16 or 4 values for each row.

A codebook of least squared error is what k-means looks for. On a line its clusters are runs of the sorted values, and
the best cuts are found for certain, by dynamic programming over the number k of clusters and the length m of a prefix:

    best[k, m] = min over i <= m of best[k - 1, i] + cost(i, m),    cost = sum (x - mean)^2 of values i to m

D^2 2^bits steps a row. Costs are added up number by number (Welford, 1962), which cancels nothing. Means are rounded to
float16, and then every number takes the nearest of them, the lower one where two are as near.

Source: H. Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019 (arXiv 1911.02079), who run k-means
on each row; H. Wang & M. Song, "Ckmeans.1d.dp", The R Journal 3/2, 2011, for the recurrence.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.block_quant import formats, xla
from scalejax.kernels.block_quant.formats import ENCODINGS, Encoding
from scalejax.numerics import bits as floats
from scalejax.numerics.packing import unpack_bits

CodebookFormat = Literal["kmeans4", "kmeans2"]
CODEBOOK_FORMATS: tuple[CodebookFormat, ...] = ("kmeans4", "kmeans2")
_ROWS = 512
"""Rows that are looked at together: their costs stay in the caches of a CPU."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodebookRows:
    """A table of V rows of D values under a codebook each.

    Attributes:
      codes: uint8[V, ceil(D * bits / 8)].
      books: float16[V, 2^bits], ascending; what no number needs is zeros behind them.
      format: of the rows.
      dim: D.
    """

    codes: jax.Array
    books: jax.Array
    format: CodebookFormat = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.codes.shape[0] * ENCODINGS[self.format].row_bytes(self.dim)

    def dequantize(self) -> jax.Array:
        """See `api.dequantize_rows`."""
        return decode(self.codes, self.books, ENCODINGS[self.format].bits, self.dim)

    def gather(self, ids: jax.Array) -> jax.Array:
        """See `api.gather_quantized_rows`."""
        return jax.tree.map(formats.taker(ids, self.codes.shape[0])[1], self).dequantize()

    def nonfinite_rows(self) -> jax.Array:
        """See `api.nonfinite_rows`."""
        return jnp.sum(~jnp.isfinite(self.books).all(axis=1), dtype=jnp.int32)


def quantize(table: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """float32[V, D] -> (packed codes uint8[V, ceil(D bits / 8)], codebooks float16[V, 2^bits], ascending).

    Entries of a codebook that no number needs are zeros behind the others. A loop over blocks of one shape, which
    tables of all lengths share: for a table at rest, not for a jitted step.
    """
    count = table.shape[0]
    padded = jnp.pad(table, ((0, -count % _ROWS), (0, 0)))
    made = [_quantize(padded[i : i + _ROWS], bits) for i in range(0, max(count, 1), _ROWS)]
    codes, books = (jnp.concatenate(parts)[:count] for parts in zip(*made, strict=True))
    return codes, books


def decode(codes: jax.Array, books: jax.Array, bits: int, dim: int) -> jax.Array:
    """uint8[V, ceil(D bits / 8)], float16[V, 2^bits] -> float32[V, D]."""
    entries = unpack_bits(codes, bits, axis=1)[:, :dim]
    return jnp.take_along_axis(books.astype(jnp.float32), entries.astype(jnp.int32), axis=1)


for _format, _bits in zip(CODEBOOK_FORMATS, (4, 2), strict=True):
    # Two values of float16 a word.
    ENCODINGS[_format] = Encoding(bits=_bits, beside=2 << _bits, book_words=(1 << _bits) // 2, in_lanes=CodebookRows)


@functools.partial(jax.jit, static_argnames=("bits",))
def _quantize(table: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    clusters = 1 << bits
    ordered = jnp.sort(table, axis=1)
    ends = _cuts(ordered, clusters)
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    place = jnp.arange(table.shape[1], dtype=jnp.int32)[None, None, :]
    own = (place >= starts[..., None]) & (place < ends[..., None])
    count = ends - starts
    means = jnp.where(own, ordered[:, None, :], 0).sum(axis=2) / jnp.maximum(count, 1).astype(jnp.float32)
    # Used ones first, in the order that they have.
    order = jnp.argsort(count == 0, axis=1, stable=True)
    means, used = (jnp.take_along_axis(x, order, axis=1) for x in (means, count > 0))
    books = jnp.where(used, floats.to_dtype(floats.float_bits(means), jnp.float16), 0)
    broken = ~jnp.isfinite(table).all(axis=1, keepdims=True) | ~jnp.isfinite(books).all(axis=1, keepdims=True)
    books = jnp.where(broken, jnp.nan, books).astype(jnp.float16)
    apart = jnp.abs(table[:, :, None] - books.astype(jnp.float32)[:, None, :])
    nearest = jnp.argmin(jnp.where(used[:, None, :], apart, jnp.inf), axis=2)
    return xla.packed(jnp.where(broken, 0, nearest).astype(jnp.int32), bits), books


def _cuts(x: jax.Array, clusters: int) -> jax.Array:
    """Ascending float32[V, D] -> int32[V, clusters]: where each cluster ends; empty ones end where they begin."""
    count, length = x.shape
    place = jnp.arange(length, dtype=jnp.int32)[None, :]

    def add(carry: tuple[jax.Array, ...], m: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Takes number m (from 0) into the runs that begin at or before it, and into prefixes of m + 1 values."""
        mean, cost, best = carry
        number = lax.dynamic_slice_in_dim(x, m, 1, axis=1)
        size = (m - place).astype(jnp.float32)  # of the run from `place`, without the number
        inside = place <= m
        apart = number - mean
        cost = jnp.where(inside, cost + apart * apart * size / (size + 1), cost)
        mean = jnp.where(inside, mean + apart / (size + 1), mean)
        runs = jnp.where(inside, cost, jnp.inf)
        more = (best[:, :-1, :length] + runs[:, None, :]).min(axis=2)
        found = lax.cummin(jnp.concatenate([runs[:, :1], more], axis=1), axis=1)  # a cluster may be empty
        return (mean, cost, lax.dynamic_update_slice_in_dim(best, found[..., None], m + 1, axis=2)), runs

    nothing = jnp.zeros((count, length), jnp.float32)
    empty = jnp.full((count, clusters, length + 1), jnp.inf, jnp.float32).at[:, :, 0].set(0)
    (_, _, best), runs = lax.scan(add, (nothing, nothing, empty), place[0])
    runs = jnp.moveaxis(runs, 0, 1)  # V, last number of a run, its first one

    def back(end: jax.Array, cluster: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a cluster begins that ends before number `end`, which is where the one before it ends."""
        before = lax.dynamic_index_in_dim(best, cluster - 1, axis=1, keepdims=False)
        cost = jnp.take_along_axis(runs, jnp.maximum(end - 1, 0)[:, None, None], axis=1)[:, 0]
        total = before[:, :length] + cost
        start = jnp.argmin(total, axis=1).astype(jnp.int32)
        none = jnp.take_along_axis(before, end[:, None], axis=1)[:, 0] <= total.min(axis=1)
        start = jnp.where(none, end, start)
        return start, start

    last = jnp.full(count, length, jnp.int32)
    _, starts = lax.scan(back, last, jnp.arange(clusters - 1, 0, -1, dtype=jnp.int32))
    return jnp.concatenate([starts[::-1].T, last[:, None]], axis=1)
