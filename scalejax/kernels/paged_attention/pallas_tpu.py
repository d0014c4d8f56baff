"""One new token a row on a TPU's core: its pages pass by, named by a table in scalar memory, and no others are read.

A page [page, 2 K, D] is taken as rows [page * 2 K, D]: keys and values of all heads in turn. One product gives the
scores of every query head with every row; of these a head keeps those with the keys of its own. The row after a key has
its value, so that the weights, moved on by one, are multiplied with the same rows:

    rows      k0 v0 k1 v1 | k0 v0 k1 v1 | ...          scores   a  .  .  .  b  .  .  .      head 0, of k0
    (K = 2)   token 0       token 1                              .  .  c  .  .  .  d  .      head 1, of k1
                                                       weights  .  a' .  .  .  b' .  .      moved on by one, of v0

That is 2 K times the multiplications that are needed, which a matrix unit has to spare: it waits for memory as long as
H is below some 100. Nothing is sliced or transposed. A step takes several pages; the entries of a row beyond those that
it uses repeat the last one, which moves nothing. Sums stay in vector memory from the first step of a split to its last.

Compiled for v5e, v5p and v6e and interpreted in the tests; it has not run on a TPU.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.paged_attention import blocks
from scalejax.kernels.paged_attention.reference import merge_splits, positions_of_rows
from scalejax.kernels.types import Number, Ref

_LANES = 128


def lacks(q: jax.Array, pages: jax.Array) -> str | None:
    """Which part of a case is missing here, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16; got {q.dtype}."
    if q.shape[2] % _LANES:
        return f"takes heads that {_LANES} divides, as memory is laid out, lest all pages be copied; got {q.shape[2]}."
    rows = pages.shape[1] * pages.shape[2]
    if rows % _LANES:
        return f"takes pages of tokens times 2 K that {_LANES} divides; got {pages.shape[1]} x {pages.shape[2]}."
    if rows > 8_192:
        return f"holds pages of at most 8,192 tokens times 2 K; got {pages.shape[1]} x {pages.shape[2]}."
    return None


def forward(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    key_positions: jax.Array,
    query_positions: jax.Array,
    used: jax.Array,
    window: int | None,
    scale: float,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, D] in the dtype of q, lse float32[B, H]); arguments as in `api.paged_attention`."""
    batch, heads, width = q.shape
    page, both = pages.shape[1:3]
    share = heads // (both // 2)
    rows = page * both
    sizes = blocks.of_device(blocks.TPU, compat.device_kind())
    together = max(1, min(table.shape[1], sizes.rows // rows))
    splits = max(1, min(sizes.splits, table.shape[1] // together))
    steps = pl.cdiv(table.shape[1], together * splits)
    entries = together * splits * steps

    # Entries that a row does not use repeat its last one.
    entry_of_step = jnp.minimum(jnp.arange(entries)[None], jnp.maximum(used, 1)[:, None] - 1)
    table = jnp.take_along_axis(table, entry_of_step, axis=1)
    # A row of a page is a key or a value: those of values are never seen.
    places = positions_of_rows(key_positions, table, used)[..., None]
    places = jnp.where(jnp.arange(both) % 2 == 0, places, jnp.iinfo(jnp.int32).max)
    places = places.reshape(batch, splits * steps, 1, together * rows)

    def kernel(table: Ref, query_positions: Ref, used: Ref, q: Ref, places: Ref, *refs: Ref) -> None:
        pages, (out, lse, highest, total, acc) = refs[:together], refs[together:]
        row, split, step = (pl.program_id(axis) for axis in range(3))

        @pl.when(step == 0)
        def _() -> None:
            highest[...] = jnp.full_like(highest[...], -jnp.inf)
            total[...] = jnp.zeros_like(total[...])
            acc[...] = jnp.zeros_like(acc[...])

        @pl.when((split * steps + step) * together < used[row])
        def _() -> None:
            queries = q[0]
            for number in range(together):
                held = pages[number][0].reshape(rows, width)
                scores = _dot(queries, held, (1, 1)) * scale  # H rows
                place = places[0, 0, :, number * rows : (number + 1) * rows]  # 1 rows
                head = lax.broadcasted_iota(jnp.int32, scores.shape, 0) // share
                of_row = lax.rem(lax.broadcasted_iota(jnp.int32, scores.shape, 1), both) // 2
                position = query_positions[row]
                seen = (place <= position) & (head == of_row)
                if window is not None:
                    seen = seen & (place > position - window)
                scores = jnp.where(seen, scores, -jnp.inf)
                old = highest[:, :1]
                new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
                shift = jnp.where(new == -jnp.inf, 0.0, new)
                weights, decay = jnp.exp(scores - shift), jnp.exp(old - shift)
                total[...] = jnp.broadcast_to(total[:, :1] * decay + weights.sum(axis=1, keepdims=True), total.shape)
                highest[...] = jnp.broadcast_to(new, highest.shape)
                moved = pltpu.roll(weights, 1, 1).astype(held.dtype)
                acc[...] = acc[...] * decay + _dot(moved, held, (1, 0))

        @pl.when(step == steps - 1)
        def _() -> None:
            sees_any = total[:, :1] > 0
            sums = jnp.where(sees_any, total[:, :1], 1.0)
            out[0, 0] = acc[...] / sums
            value = jnp.where(sees_any, highest[:, :1] + jnp.log(sums), -jnp.inf)
            lse[0, 0] = jnp.broadcast_to(value, (heads, _LANES))

    def entry(number: int) -> pl.BlockSpec:
        def index(row: Number, split: Number, step: Number, table: Ref, *_: Ref) -> tuple[Number, ...]:
            return table[row, (split * steps + step) * together + number], 0, 0, 0

        return pl.BlockSpec((1, page, both, width), index)

    by_row = pl.BlockSpec((1, heads, width), lambda row, split, step, *_: (row, 0, 0))
    by_step = pl.BlockSpec((1, 1, 1, together * rows), lambda row, split, step, *_: (row, split * steps + step, 0, 0))
    result = [
        pl.BlockSpec((1, 1, heads, size), lambda row, split, step, *_: (row, split, 0, 0)) for size in (width, _LANES)
    ]
    scores = batch * entries * rows * heads
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, splits, steps),
            in_specs=[by_row, by_step, *(entry(number) for number in range(together))],
            out_specs=result,
            scratch_shapes=[
                pltpu.VMEM((heads, _LANES), jnp.float32),
                pltpu.VMEM((heads, _LANES), jnp.float32),
                pltpu.VMEM((heads, width), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, splits, heads, size), jnp.float32) for size in (width, _LANES)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=sizes.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * width,
            transcendentals=scores,
            bytes_accessed=batch * entries * (rows * width * pages.dtype.itemsize + rows * 4),
        ),
        interpret=interpret,
        name="paged_attention",
    )(table, query_positions, used, q, places, *[pages] * together)
    out, lse = merge_splits(out, lse[..., 0])
    return out.astype(q.dtype), lse


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
