"""Several new tokens a row attend to keys and values in pages, by jax's own kernel for TPUs, `ragged_paged_attention`.

Pages are read where they lie, once for each block of queries, and are never gathered. The kernel knows no positions:
keys of a row have those of their places in its pages, and its queries are the last of its tokens. So it has the case
where tokens lie in their order and all are there, and it gives no log-sum-exp.

Compiled for v5e, v5p and v6e and interpreted in the tests; it has not run on a TPU.
"""

import jax
import jax.numpy as jnp

from scalejax import compat

_LANES = 128
_KEYS = 512
"""Of a block. Of 1,024 keys a block does not fit into the vector memory of v5p."""
_QUERIES, _HEADS = 256, 2**13
"""Of a block: queries, and their heads, at most."""
_VMEM_BYTES = 64 * 2**20


def lacks(q: jax.Array, pages: jax.Array) -> str | None:
    """Which part of a case is missing here, or None; arguments as in `attention`."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or pages.dtype != q.dtype:
        return f"computes in float32 and bfloat16 with pages of the same; got {q.dtype} and {pages.dtype}."
    if pages.ndim != 4:
        return "takes pages of [page, 2 K, D]."
    if q.shape[3] % _LANES:
        return f"takes heads that {_LANES} divides; got {q.shape[3]}."
    # Of 32 bits: a tile has 8 rows of them, and a step takes the heads of one tile where there are several.
    tiles = pages.shape[2] * pages.dtype.itemsize / 32
    if tiles not in (1 / 8, 1 / 4, 1 / 2) and tiles % 1:
        return f"takes heads of keys and values, 2 K, that fill tiles of memory; got {pages.shape[2]}."
    if tiles > 1 and q.shape[2] / tiles % 8:
        return f"takes groups of 8 heads of queries a tile of keys and values; got {q.shape[2]} for {int(tiles)} tiles."
    if pages.shape[1] > _KEYS:
        return f"takes pages of at most {_KEYS} tokens; got {pages.shape[1]}."
    return None


def suits(q: jax.Array, pages: jax.Array) -> bool:
    """Whether the kernel is the choice for what is being compiled for: a TPU of one core, and a case that it has.

    It runs on one core. Where a device is two, as on v5p, half of its multiplications would be given away, of
    which reading a prompt has more than memory has bytes.
    """
    return compat.platform() == "tpu" and compat.cores() == 1 and lacks(q, pages) is None


def attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    first: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Causal attention of tokens of rows to all tokens of their rows up to them, which their pages have already.

    Args:
      q: float[R, S, H, D].
      pages: [P, page, 2 K, D] in the dtype of q, keys and values of a head in turn.
      table: int32[R, W], pages of each row in the order of its tokens.
      positions: int32[R, S], consecutive ones, then -1 where there is no token.
      first: int32[R], the number in its row of the first page of the table; positions that are seen lie in it.
      window: Positions, or None.
      scale: Of scores.

    Returns:
      [R, S, H, D] in the dtype of q; 0 where there is no token.
    """
    rows, tokens, heads, width = q.shape
    page = pages.shape[1]
    real = positions >= 0
    # A row without tokens has one, which sees itself: the kernel does not know rows of none.
    counts = jnp.maximum(real.sum(axis=1, dtype=jnp.int32), 1)
    begin = jnp.maximum(positions[:, 0] - first * page, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts
    # Queries without gaps, and back.
    number = jnp.arange(rows * tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, number, side="right").astype(jnp.int32), rows - 1)
    packed = q.reshape(rows * tokens, heads, width)
    if rows > 1:
        packed = packed[jnp.minimum(row * tokens + number - starts[row], rows * tokens - 1)]
    out = compat.ragged_paged_attention(
        packed,
        pages,
        begin + counts,
        jnp.clip(table, 0, pages.shape[0] - 1),
        jnp.concatenate([starts[:1], ends]),
        scale=scale,
        window=window,
        pages_of_block=max(1, min(table.shape[1], _KEYS // page)),
        queries_of_block=min(_QUERIES, max(_HEADS // heads, 1), rows * tokens),
        vmem_bytes=_VMEM_BYTES,
    )
    if rows > 1:
        out = out[starts[:, None] + jnp.minimum(jnp.arange(tokens, dtype=jnp.int32)[None], counts[:, None] - 1)]
    return jnp.where(real[..., None, None], out.reshape(q.shape), 0)
