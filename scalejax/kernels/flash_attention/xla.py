"""Attention in chunks, by XLA's own matrix products: memory grows with S and with T, never with their product.

    heads   one key/value head of one row with its G query heads is a unit; several units are taken at once
    rows    a chunk of queries, G * cq rows of a matrix, passes over the chunks of keys that it may see

    for a group of units
      for a chunk of queries                  forward: running maximum m, sum l and output o of its rows
        for a chunk of keys that it may see     s = q k^T;  o, l <- o e^(m - m'), l e^(m - m');  o += e^(s - m') v

The backward pass turns the loops around (keys outside), recomputes e^(s - lse) and adds up dq where it lies. Loops over
visible chunks have dynamic bounds, so what causality, windows, offsets and documents hide is not computed; that is why
the derivative is written out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.flash_attention import blocks, reference
from scalejax.kernels.flash_attention.visibility import HIDDEN, BackwardInputs, Visibility, first_and_last, pad_row
from scalejax.kernels.types import AnyArray


def lacks(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, *, d_lse: bool) -> str | None:
    """Which part of a case is missing here; none is."""
    return None


_Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Carried over chunks: highest score, sum of weights and output, or three gradients."""


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float
) -> tuple[jax.Array, jax.Array]:
    """out [B, S, H, D] in the dtype of q, lse float32[B, H, S]; arguments as in `api.flash_attention`."""
    cut = _Cut.of(q, k)
    masks = _Masks.of(visibility, cut)
    first, last = cut.bounds(visibility, by="query")
    dtype = reference.sum_dtype(q.dtype)
    queries, keys, values = cut.queries(q), cut.keys(k), cut.keys(v)

    def group(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        some_keys, some_values = keys[at], values[at]

        def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = queries[at, i]

            def add(j: jax.Array, carry: _Sums) -> _Sums:
                highest, total, out = carry
                scores = masks.apply(_dot(rows, some_keys[j], "urd,ukd->urk", dtype) * scale, at, i, j)
                new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
                # A query that has seen no key yet would have -inf - -inf, which is NaN, where its weights are 0.
                shift = jnp.where(new == -jnp.inf, 0, new)
                weights = jnp.exp(scores - shift)
                decay = jnp.exp(highest - shift)
                total = total * decay + weights.sum(axis=-1, keepdims=True)
                out = out * decay + _dot(weights.astype(v.dtype), some_values[j], "urk,ukd->urd", dtype)
                return new, total, out

            if cut.key_chunks == 1:  # no loop, and nothing to decay: what short sequences spend their time on
                scores = masks.apply(_dot(rows, some_keys[0], "urd,ukd->urk", dtype) * scale, at, i, jnp.int32(0))
                highest = scores.max(axis=-1, keepdims=True)
                weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
                total = weights.sum(axis=-1, keepdims=True)
                out = _dot(weights.astype(v.dtype), some_values[0], "urk,ukd->urd", dtype)
            else:
                column = (*rows.shape[:2], 1)
                start = (jnp.full(column, -jnp.inf, dtype), jnp.zeros(column, dtype), jnp.zeros(rows.shape, dtype))
                low, high = cut.of_group(first, at)[i], cut.of_group(last, at)[i]
                highest, total, out = lax.fori_loop(low, high, add, start)
            sees_any = total > 0
            total = jnp.where(sees_any, total, 1)
            lse = jnp.where(sees_any, highest + jnp.log(total), -jnp.inf)
            return (out / total).astype(q.dtype), lse[..., 0]

        return lax.map(chunk, jnp.arange(cut.query_chunks))

    out, lse = lax.map(group, jnp.arange(cut.groups))
    return cut.from_queries(out), cut.from_query_rows(lse)


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, scale: float, inputs: BackwardInputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, in their dtypes.

    Args:
      q: As in `forward`; so are k, v, visibility and scale.
      inputs: Its `out` is not needed.
    """
    cut = _Cut.of(q, k)
    masks = _Masks.of(visibility, cut)
    first, last = cut.bounds(visibility, by="key")
    dtype = reference.sum_dtype(q.dtype)
    queries, keys, values = cut.queries(q), cut.keys(k), cut.keys(v)
    d_outs, lses, corrections = (
        cut.queries(inputs.d_out),
        # e^(s - inf) = 0: queries that fill up the last chunk add nothing to the gradients of keys.
        cut.query_rows(inputs.lse, jnp.inf),
        cut.query_rows(inputs.correction, 0),
    )

    def group(at: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def chunk(d_q: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            some_keys, some_values = keys[at, j], values[at, j]

            def add(i: jax.Array, carry: _Sums) -> _Sums:
                d_q, d_k, d_v = carry
                rows, d_rows = queries[at, i], d_outs[at, i]
                scores = masks.apply(_dot(rows, some_keys, "urd,ukd->urk", dtype) * scale, at, i, j)
                weights = jnp.exp(scores - lses[at, i][..., None])
                d_weights = _dot(d_rows, some_values, "urd,ukd->urk", dtype)
                d_scores = (weights * (d_weights - corrections[at, i][..., None]) * scale).astype(q.dtype)
                d_v = d_v + _dot(weights.astype(v.dtype), d_rows, "urk,urd->ukd", dtype)
                d_k = d_k + _dot(d_scores, rows, "urk,urd->ukd", dtype)
                d_q = d_q.at[i].add(_dot(d_scores, some_keys, "urk,ukd->urd", dtype))
                return d_q, d_k, d_v

            zero = jnp.zeros(some_keys.shape, dtype)
            if cut.query_chunks == 1:
                d_q, d_k, d_v = add(jnp.int32(0), (d_q, zero, zero))
            else:
                low, high = cut.of_group(first, at)[j], cut.of_group(last, at)[j]
                d_q, d_k, d_v = lax.fori_loop(low, high, add, (d_q, zero, zero))
            return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

        d_q, (d_k, d_v) = lax.scan(chunk, jnp.zeros(queries.shape[1:], dtype), jnp.arange(cut.key_chunks))
        return d_q.astype(q.dtype), d_k, d_v

    d_q, d_k, d_v = lax.map(group, jnp.arange(cut.groups))
    return cut.from_queries(d_q), cut.from_keys(d_k), cut.from_keys(d_v)


def _dot(a: jax.Array, b: jax.Array, formula: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """How a batch is cut: units u = (row, key/value head), in groups; queries and keys in chunks.

    Attributes:
      batch: B.
      kv_heads: K.
      share: G, query heads of a key/value head.
      length: S.
      key_length: T.
      units: Units in a group; divides B * K.
      query_chunk: Queries of a chunk.
      key_chunk: Keys of a chunk.
    """

    batch: int
    kv_heads: int
    share: int
    length: int
    key_length: int
    units: int
    query_chunk: int
    key_chunk: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array) -> "_Cut":
        batch, length, heads, _ = q.shape
        key_length, kv_heads = k.shape[1:3]
        share = heads // kv_heads
        sizes = blocks.XLA
        query_chunk = _even(length, sizes.queries)
        key_chunk = _even(key_length, max(sizes.keys, sizes.scores // (share * query_chunk * 4)))
        most = max(1, sizes.scores // (share * query_chunk * key_chunk))
        units = max(u for u in range(1, min(most, batch * kv_heads) + 1) if batch * kv_heads % u == 0)
        return cls(
            batch=batch, kv_heads=kv_heads, share=share, length=length, key_length=key_length,
            units=units, query_chunk=query_chunk, key_chunk=key_chunk,
        )  # fmt: skip

    @property
    def groups(self) -> int:
        return self.batch * self.kv_heads // self.units

    @property
    def query_chunks(self) -> int:
        return -(-self.length // self.query_chunk)

    @property
    def key_chunks(self) -> int:
        return -(-self.key_length // self.key_chunk)

    def queries(self, x: jax.Array) -> jax.Array:
        """[B, S, H, D] -> [groups, chunks, units, G * cq, D]."""
        x = jnp.pad(x, ((0, 0), (0, self.query_chunks * self.query_chunk - self.length), (0, 0), (0, 0)))
        x = x.reshape(self.batch, self.query_chunks, self.query_chunk, self.kv_heads, self.share, -1)
        x = x.transpose(0, 3, 1, 4, 2, 5)  # B K chunks G cq D
        x = x.reshape(self.groups, self.units, self.query_chunks, self.share * self.query_chunk, -1)
        return x.swapaxes(1, 2)

    def from_queries(self, x: jax.Array) -> jax.Array:
        """The inverse of `queries`."""
        x = x.swapaxes(1, 2)
        x = x.reshape(self.batch, self.kv_heads, self.query_chunks, self.share, self.query_chunk, -1)
        x = x.transpose(0, 2, 4, 1, 3, 5)
        x = x.reshape(self.batch, -1, self.kv_heads * self.share, x.shape[-1])
        return x[:, : self.length]

    def query_rows(self, x: jax.Array, fill: float) -> jax.Array:
        """[B, H, S] -> [groups, chunks, units, G * cq]."""
        pad = self.query_chunks * self.query_chunk - self.length
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad)), constant_values=fill)
        return self.queries_by_head(x)

    def queries_by_head(self, x: jax.Array) -> jax.Array:
        x = x.reshape(self.batch, self.kv_heads, self.share, self.query_chunks, self.query_chunk)
        x = x.swapaxes(2, 3).reshape(self.groups, self.units, self.query_chunks, -1)
        return x.swapaxes(1, 2)

    def from_query_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `query_rows`."""
        x = x.swapaxes(1, 2).reshape(self.batch, self.kv_heads, self.query_chunks, self.share, self.query_chunk)
        return x.swapaxes(2, 3).reshape(self.batch, self.kv_heads * self.share, -1)[:, :, : self.length]

    def keys(self, x: jax.Array) -> jax.Array:
        """[B, T, K, D] -> [groups, chunks, units, ck, D]."""
        x = jnp.pad(x, ((0, 0), (0, self.key_chunks * self.key_chunk - self.key_length), (0, 0), (0, 0)))
        x = x.reshape(self.batch, self.key_chunks, self.key_chunk, self.kv_heads, -1).transpose(0, 3, 1, 2, 4)
        return x.reshape(self.groups, self.units, *x.shape[2:]).swapaxes(1, 2)

    def from_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of `keys`."""
        x = x.swapaxes(1, 2).reshape(self.batch, self.kv_heads, self.key_chunks, self.key_chunk, -1)
        x = x.transpose(0, 2, 3, 1, 4)
        return x.reshape(self.batch, -1, *x.shape[3:])[:, : self.key_length]

    def of_row(self, x: AnyArray, chunk: int) -> jax.Array:
        """[B or 1, N] -> [groups or 1, chunks, units or 1, chunk], the values of each unit's row."""
        x = jnp.asarray(pad_row(x, chunk))
        x = x.reshape(x.shape[0], -1, chunk)
        if x.shape[0] == 1:
            return x[:, :, None]
        x = jnp.repeat(x, self.kv_heads, axis=0)
        return x.reshape(self.groups, self.units, *x.shape[1:]).swapaxes(1, 2)

    def of_group(self, x: jax.Array, group: jax.Array) -> jax.Array:
        """What `of_row` has for a group."""
        return x[0] if x.shape[0] == 1 else x[group]

    def bounds(self, visibility: Visibility, *, by: str) -> tuple[jax.Array, jax.Array]:
        """[groups or 1, chunks]: first chunk that a chunk sees ("query"), or by which it is seen ("key"), and the one
        after the last."""
        seen = visibility.pairs(self.length, self.key_length, self.query_chunk, self.key_chunk) != HIDDEN
        if seen.shape[0] > 1:
            seen = seen.repeat(self.kv_heads, axis=0)
            seen = seen.reshape(self.groups, self.units, *seen.shape[1:]).any(axis=1)
        if by == "key":
            seen = seen.swapaxes(1, 2)
        first, last = first_and_last(seen)
        return jnp.asarray(first), jnp.asarray(last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Masks:
    """Positions and segments, cut like the scores that they hide."""

    visibility: Visibility
    cut: _Cut
    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None
    key_segments: jax.Array | None

    @classmethod
    def of(cls, visibility: Visibility, cut: _Cut) -> "_Masks":
        query, key = visibility.positions(cut.length, cut.key_length)
        segments = visibility.query_segments, visibility.key_segments
        query_segments, key_segments = (
            None if x is None else cut.of_row(x, chunk)
            for x, chunk in zip(segments, (cut.query_chunk, cut.key_chunk), strict=True)
        )
        return cls(
            visibility=visibility,
            cut=cut,
            query_positions=cut.of_row(query, cut.query_chunk),
            key_positions=cut.of_row(key, cut.key_chunk),
            query_segments=query_segments,
            key_segments=key_segments,
        )

    def apply(self, scores: jax.Array, group: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """[units, G * cq, ck] scores of chunk i of queries and chunk j of keys, -inf where hidden."""

        def columns(x: jax.Array) -> jax.Array:
            return self.cut.of_group(x, group)[i][:, None, :, None]  # units 1 cq 1

        def rows(x: jax.Array) -> jax.Array:
            return self.cut.of_group(x, group)[j][:, None, None, :]

        visible = self.visibility.compare(
            columns(self.query_positions),
            rows(self.key_positions),
            None if self.query_segments is None else columns(self.query_segments),
            None if self.key_segments is None else rows(self.key_segments),
        )
        cut = self.cut
        if cut.key_length % cut.key_chunk:
            place = j * cut.key_chunk + jnp.arange(cut.key_chunk)[None, None, None, :]
            is_key = place < cut.key_length
            visible = is_key if visible is None else visible & is_key
        if visible is None:
            return scores
        by_head = scores.reshape(scores.shape[0], cut.share, cut.query_chunk, cut.key_chunk)
        return jnp.where(visible, by_head, -jnp.inf).reshape(scores.shape)


def _even(length: int, most: int) -> int:
    """The size of the fewest equal chunks, none longer than `most`; a multiple of 8 where there are several."""
    if length <= most:
        return max(1, length)
    return math.ceil(math.ceil(length / math.ceil(length / most)) / 8) * 8
