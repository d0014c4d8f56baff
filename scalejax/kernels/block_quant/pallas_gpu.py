"""Pooled lookups in packed rows on a GPU in Pallas Triton: rows are decoded where they are summed.

A program takes a few bags, a tile of [bags, D], and walks over the ids of each in their order, so that a sum has the
same bits every time. Of a row it reads D * bits / 8 bytes of codes, its scale and its bias; codes that share a byte are
read by neighbouring threads and shifted into place. Nothing but sums is written, where XLA writes and reads a decoded
row of 4 D bytes for every id.

It was right on an H200, where products of 8 bits and a float32 scale are rounded together with the sum that they go to,
and has not been timed there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax.kernels.block_quant import xla
from scalejax.kernels.block_quant.formats import ENCODINGS
from scalejax.kernels.block_quant.scale_bias import QuantizedRows
from scalejax.kernels.types import Ref

_ELEMENTS = 1024
"""Of the tile of a program; not tuned on a chip."""
_UNROLL = 4
"""Rows of each bag that are loaded before the first one is added."""


@functools.partial(jax.jit, static_argnames=("pooling", "interpret"))
def bag(
    rows: QuantizedRows,
    ids: jax.Array,
    lengths: jax.Array,
    weights: jax.Array | None,
    pooling: str,
    interpret: bool,
) -> jax.Array:
    """float32[B, D]; arguments as in `api.quantized_bag`."""
    codes, scales, biases, bits, dim = rows.codes, rows.scales, rows.biases, ENCODINGS[rows.format].bits, rows.dim
    (num_rows, _), count, bags = codes.shape, ids.shape[0], lengths.shape[0]
    if not (num_rows and count and bags):
        return jnp.zeros((bags, dim), jnp.float32)
    # What is no row must not wrap into one.
    ids = jnp.where((ids >= 0) & (ids < num_rows), ids, -1).astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(lengths), count).astype(jnp.int32)
    columns = pl.next_power_of_2(dim)
    group = max(1, min(_ELEMENTS // columns, pl.next_power_of_2(bags)))
    operands = {"ids": ids, "ends": ends, "codes": codes, "scales": scales, "biases": biases}
    if weights is not None:
        operands["weights"] = weights.astype(jnp.float32)

    def kernel(*refs: Ref) -> None:
        ref, out = dict(zip(operands, refs, strict=False)), refs[-1]
        bag = pl.program_id(0) * group + lax.iota(jnp.int32, group)
        column = lax.iota(jnp.int32, columns)
        end = plgpu.load(ref["ends"].at[bag], mask=bag < bags, other=0)
        start = plgpu.load(ref["ends"].at[jnp.maximum(bag - 1, 0)], mask=(bag > 0) & (bag < bags), other=0)

        def term(k: jax.Array) -> jax.Array:
            place, active = start + k, start + k < end
            row = plgpu.load(ref["ids"].at[place], mask=active, other=-1)
            wanted = row >= 0
            mask = wanted[:, None] & (column < dim)[None, :]
            byte = ref["codes"].at[row[:, None], (column * bits // 8)[None, :]]
            code = plgpu.load(byte, mask=mask, other=0).astype(jnp.int32)
            code = (code >> (column * bits % 8)[None, :]) & ((1 << bits) - 1)
            own = [plgpu.load(ref[name].at[row], mask=wanted, other=0) for name in ("scales", "biases")]
            rows = xla.decode(code, *own)
            if weights is not None:
                rows = rows * plgpu.load(ref["weights"].at[place], mask=active, other=0.0)[:, None]
            return rows

        def some(number: jax.Array, total: jax.Array) -> jax.Array:
            # All loads before the first addition that waits for one.
            for rows in [term(number * _UNROLL + u) for u in range(_UNROLL)]:
                total = total + rows
            return total

        turns = (jnp.max(end - start) + (_UNROLL - 1)) // _UNROLL
        total = lax.fori_loop(jnp.int32(0), turns, some, jnp.zeros((group, columns), jnp.float32))
        if pooling == "mean":
            total = total / jnp.maximum(end - start, 1).astype(jnp.float32)[:, None]
        where = out.at[bag[:, None], column[None, :]]
        plgpu.store(where, total, mask=(bag < bags)[:, None] & (column < dim)[None, :])

    row_bytes = codes.shape[1] + 2 * scales.dtype.itemsize
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(bags, group),),
        out_shape=jax.ShapeDtypeStruct((bags, dim), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        cost_estimate=pl.CostEstimate(
            flops=3 * count * dim, transcendentals=0, bytes_accessed=count * (row_bytes + 4) + 4 * bags * dim
        ),
        interpret=interpret,
        name="quantized_bag",
    )(*operands.values())
