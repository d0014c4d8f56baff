"""One new token a row on a GPU in Pallas Triton: a program for each row, head of keys and split of its pages.

As in Flash-Decoding (Dao et al. 2023): a row has too few queries to fill a chip, so its keys are cut into splits, each
with an output and a log-sum-exp of its own, and XLA merges them. A program walks over the pages of its split, one tile
of keys and one of values each; the H / K queries that share the head are the rows of its products, filled up to 16.
Nothing is added to what another program writes. Exponentials are taken to base 2, with the scale of the scores and
log2(e) in one factor.

Interpreted in the tests, which passed on an H200 too; it has not been timed there.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.paged_attention import blocks
from scalejax.kernels.paged_attention.pages import PagedKeys, PageLayout
from scalejax.kernels.paged_attention.reference import merge_splits
from scalejax.kernels.types import Ref

_LOG2_E = math.log2(math.e)
_FLOAT32_ON_GPU = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
_Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Highest score, sum of weights and weighted sum so far of each query."""


def lacks(q: jax.Array, pages: jax.Array, layout: PageLayout) -> str | None:
    """Which part of a case is missing here, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"computes in float32, bfloat16 and float16; got {q.dtype}."
    if q.shape[2] > 256:
        return f"holds heads of at most 256 values in registers; got {q.shape[2]}."
    page = layout.page
    if page < 16 or page > 128 or page & (page - 1):
        return f"takes pages of 16, 32, 64 or 128 tokens; got {page}."
    return None


def forward(
    q: jax.Array,
    keys: PagedKeys,
    query_positions: jax.Array,
    window: int | None,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, D] in the dtype of q, lse float32[B, H]); arguments as in `api.paged_attention`."""
    batch, heads, width = q.shape
    layout, page, kv_heads = keys.layout, keys.layout.page, keys.layout.kv_heads
    share = heads // kv_heads
    sizes = blocks.of_device(blocks.GPU, compat.device_kind())
    most = keys.table.shape[1]
    splits = max(1, min(most, sizes.programs // (batch * kv_heads)))
    steps = pl.cdiv(most, splits)
    columns = max(16, pl.next_power_of_2(width))
    queries = max(16, pl.next_power_of_2(share))

    def kernel(table: Ref, used: Ref, query_positions: Ref, places: Ref, q: Ref, pages: Ref, *results: Ref) -> None:
        scales, (out, lse) = (results[0], results[1:]) if keys.scales is not None else (None, results)
        row, head, split = (pl.program_id(axis) for axis in range(3))
        number, column, token = (lax.iota(jnp.int32, size) for size in (queries, columns, page))
        of_head = jnp.broadcast_to((number < share)[:, None] & (column < width)[None, :], (queries, columns))
        at = row * heads + head * share + number
        mine = plgpu.load(q.at[at[:, None], column[None, :]], mask=of_head, other=0)
        position = query_positions[row]
        inside = None if columns == width else jnp.broadcast_to((column < width)[None, :], (page, columns))

        def load(entry: jax.Array, is_value: int) -> tuple[jax.Array, jax.Array | None]:
            """[page, D] numbers of the head and [page] scales."""
            rows = entry * layout.rows + layout.row(token, head, is_value)
            found = plgpu.load(
                pages.at[rows[:, None], column[None, :]], mask=inside, other=None if inside is None else 0
            )
            return found.astype(mine.dtype), None if scales is None else plgpu.load(scales.at[rows])

        def add(step: jax.Array, carry: _Softmax) -> _Softmax:
            highest, total, acc = carry
            entry = table[row, step]
            (k, of_key), (v, of_value) = load(entry, 0), load(entry, 1)
            place = plgpu.load(places.at[entry % keys.positions.shape[0], token])
            seen = place <= position
            if window is not None:
                seen = seen & (place > position - window)
            scores = _dot(mine, k, (1, 1)) * (scale * _LOG2_E)
            if of_key is not None:
                scores = scores * of_key[None, :]
            scores = jnp.where(seen[None, :], scores, -jnp.inf)
            new = jnp.maximum(highest, scores.max(axis=1))
            shift = jnp.where(new == -jnp.inf, 0.0, new)
            weights, decay = jnp.exp2(scores - shift[:, None]), jnp.exp2(highest - shift)
            total = total * decay + weights.sum(axis=1)
            if of_value is not None:
                weights = weights * of_value[None, :]
            return new, total, acc * decay[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))

        start = (
            jnp.full((queries,), -jnp.inf, jnp.float32),
            jnp.zeros((queries,), jnp.float32),
            jnp.zeros((queries, columns), jnp.float32),
        )
        first = split * steps
        highest, total, acc = lax.fori_loop(first, jnp.minimum(first + steps, used[row]), add, start)
        sees_any = total > 0
        total = jnp.where(sees_any, total, 1.0)
        at = (row * splits + split) * heads + head * share + number
        plgpu.store(out.at[at[:, None], column[None, :]], acc / total[:, None], mask=of_head)
        value = jnp.where(sees_any, (highest + jnp.log2(total)) / _LOG2_E, -jnp.inf)
        plgpu.store(lse.at[at], value, mask=number < share)

    operands = [q.reshape(batch * heads, width), keys.pages.reshape(-1, width)]
    if keys.scales is not None:
        operands.append(keys.scales.reshape(-1))
    scores = batch * heads * most * page
    out, lse = pl.pallas_call(
        kernel,
        grid=(batch, kv_heads, splits),
        out_shape=[
            jax.ShapeDtypeStruct((batch * splits * heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch * splits * heads,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * width,
            transcendentals=scores,
            bytes_accessed=batch * most * (layout.rows * width * keys.pages.dtype.itemsize + 4 * page),
        ),
        interpret=interpret,
        name="paged_attention",
    )(keys.table, jnp.minimum(keys.used, most), query_positions, keys.positions, *operands)
    out, lse = merge_splits(out.reshape(batch, splits, heads, width), lse.reshape(batch, splits, heads))
    return out.astype(q.dtype), lse


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product summed in float32; of float32 operands by three products of tensor cores, which is nearly exact."""
    precision: lax.PrecisionLike = lax.Precision.DEFAULT
    if a.dtype == jnp.float32:
        precision = _FLOAT32_ON_GPU if compat.platform() == "gpu" else lax.Precision.HIGHEST
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
