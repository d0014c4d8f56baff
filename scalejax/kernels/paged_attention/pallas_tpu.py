"""One new token a row on a TPU's core: its pages pass by, named by a table in scalar memory, and no others are read.

A page [page, 2 K, D] is taken as rows [page * 2 K, D]: keys and values of all heads in turn. One product gives the
scores of every query head with every row; of these a head keeps those with the keys of its own. The row after a key has
its value, so that the weights, moved on by one, are multiplied with the same rows (by K * page in the order
[2, K, page, D], where nothing else differs):

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
from scalejax.kernels.paged_attention.pages import PagedKeys, PageLayout
from scalejax.kernels.paged_attention.reference import merge_splits
from scalejax.kernels.types import Number, Ref

_LANES = 128


def lacks(q: jax.Array, pages: jax.Array, layout: PageLayout) -> str | None:
    """Which part of a case is missing here, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16; got {q.dtype}."
    if q.shape[2] % _LANES:
        return f"takes heads that {_LANES} divides, as memory is laid out, lest all pages be copied; got {q.shape[2]}."
    if layout.rows % _LANES or layout.rows > 8_192:
        return (
            f"takes pages of at most 8,192 tokens times 2 K, which {_LANES} divides; got {layout.page} x "
            f"{2 * layout.kv_heads}."
        )
    return None


def forward(
    q: jax.Array,
    keys: PagedKeys,
    query_positions: jax.Array,
    window: int | None,
    scale: float,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, D] in the dtype of q, lse float32[B, H]); arguments as in `api.paged_attention`."""
    batch, heads, width = q.shape
    layout, rows = keys.layout, keys.layout.rows
    share = heads // layout.kv_heads
    sizes = blocks.of_device(blocks.TPU, compat.device_kind())
    most = keys.table.shape[1]
    together = max(1, min(most, sizes.rows // rows))
    splits = max(1, min(sizes.splits, most // together))
    steps = pl.cdiv(most, together * splits)
    entries = together * splits * steps

    # Entries that a row does not use repeat its last one.
    entry_of_step = jnp.minimum(jnp.arange(entries)[None], jnp.maximum(keys.used, 1)[:, None] - 1)
    table = jnp.take_along_axis(keys.table, entry_of_step, axis=1)
    of_rows = [layout.positions_of_rows(keys.positions_of(table))]
    if keys.scales is not None:
        of_rows.append(keys.scales[table])
    of_rows = [x.reshape(batch, splits * steps, 1, together * rows) for x in of_rows]

    def kernel(table: Ref, query_positions: Ref, used: Ref, q: Ref, places: Ref, *refs: Ref) -> None:
        scales, refs = (refs[0], refs[1:]) if keys.scales is not None else (None, refs)
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
                held = pages[number][0].reshape(rows, width).astype(queries.dtype)
                scores = _dot(queries, held, (1, 1)) * scale  # H rows
                part = (0, 0, slice(None), slice(number * rows, (number + 1) * rows))
                place = places[part]  # 1 rows
                if scales is not None:
                    scores = scores * scales[part]
                head = lax.broadcasted_iota(jnp.int32, scores.shape, 0) // share
                position = query_positions[row]
                seen = (place <= position) & (head == layout.head(lax.broadcasted_iota(jnp.int32, scores.shape, 1)))
                if window is not None:
                    seen = seen & (place > position - window)
                scores = jnp.where(seen, scores, -jnp.inf)
                old = highest[:, :1]
                new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
                shift = jnp.where(new == -jnp.inf, 0.0, new)
                weights, decay = jnp.exp(scores - shift), jnp.exp(old - shift)
                total[...] = jnp.broadcast_to(total[:, :1] * decay + weights.sum(axis=1, keepdims=True), total.shape)
                highest[...] = jnp.broadcast_to(new, highest.shape)
                moved = pltpu.roll(weights, layout.to_value, 1)
                if scales is not None:
                    moved = moved * scales[part]
                acc[...] = acc[...] * decay + _dot(moved.astype(held.dtype), held, (1, 0))

        @pl.when(step == steps - 1)
        def _() -> None:
            sees_any = total[:, :1] > 0
            sums = jnp.where(sees_any, total[:, :1], 1.0)
            out[0, 0] = acc[...] / sums
            value = jnp.where(sees_any, highest[:, :1] + jnp.log(sums), -jnp.inf)
            lse[0, 0] = jnp.broadcast_to(value, (heads, _LANES))

    def entry(number: int) -> pl.BlockSpec:
        def index(row: Number, split: Number, step: Number, table: Ref, *_: Ref) -> tuple[Number, ...]:
            return table[row, (split * steps + step) * together + number], *[0] * (keys.pages.ndim - 1)

        return pl.BlockSpec((1, *keys.pages.shape[1:]), index)

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
            in_specs=[by_row, *[by_step] * len(of_rows), *(entry(number) for number in range(together))],
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
            bytes_accessed=batch * entries * rows * (width * keys.pages.dtype.itemsize + 4 * len(of_rows)),
        ),
        interpret=interpret,
        name="paged_attention",
    )(table, query_positions, keys.used, q, *of_rows, *[keys.pages] * together)
    out, lse = merge_splits(out, lse[..., 0])
    return out.astype(q.dtype), lse


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
