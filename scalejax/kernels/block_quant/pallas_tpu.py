"""Pooled lookups in packed rows on a TPU's core: lane rows are copied by DMA, rows are decoded where they are summed.

A table lies in lane rows of 512 bytes (`lanes`). For every id the lane row of its row is copied into vector memory,
some ahead of the one that is added: the lookup of `embedding_bag.pallas_tpu`, of which this is the part that makes
values of a lane row. A permutation of the 128 lanes brings the word of each column into the column's lane, wherever the
row begins:

    lane c <- word (first + c bits / 32) of the lane row, shifted right by c bits mod 32         128 columns at a time

Then it is code * scale + bias, with scales and biases in scalar memory, which XLA has gathered: 4 to 8 bytes an id. A
codebook is part of the lane row, and a second permutation looks the codes up. Rows are added in the order of ids in
float32; nothing but sums is written. An id costs a copy of 512 bytes however short its row is: what a lookup of float32
rows of 128 values costs, from a table of a quarter of the size and less.

The kernel has been compiled for v5e, v5p, v6e and 7x and interpreted, and has not run on a TPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.block_quant import xla
from scalejax.kernels.block_quant.formats import ENCODINGS
from scalejax.kernels.block_quant.lanes import LANES, LaneRows
from scalejax.kernels.embedding_bag import pallas_tpu as copies
from scalejax.kernels.interpretation import Interpret
from scalejax.numerics import bits as floats


def most_bags(dim: int) -> int:
    """The most bags that `bag` takes at once."""
    return copies.most_bags(_columns(dim))


@functools.partial(jax.jit, static_argnames=("pooling", "interpret"))
def bag(
    table: LaneRows,
    ids: jax.Array,
    lengths: jax.Array,
    weights: jax.Array | None,
    pooling: str,
    interpret: Interpret,
) -> jax.Array:
    """float32[B, D]; arguments as in `api.quantized_bag`."""
    where, bits, dim = table.layout, ENCODINGS[table.format].bits, table.dim
    lane_rows, scales, biases = table.lane_rows, table.scales, table.biases
    if not table.num_rows:
        return jnp.zeros((lengths.shape[0], dim), jnp.float32)
    rows = copies.no_row_as_minus_one(ids, table.num_rows)
    lane_row, first = where.place(rows)  # of -1 it is lane row -1, which is none
    of_ids = {"first": first}
    if scales is not None and biases is not None:
        found = [array.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds") for array in (scales, biases)]
        of_ids |= {f"scale {k}": part for k, part in enumerate(xla.scale_parts(found[0]))}
        of_ids["bias"] = found[1].astype(jnp.float32)
    if weights is not None:
        of_ids["weight"] = weights.astype(jnp.float32)

    def value(words: jax.Array, *scalars: jax.Array) -> jax.Array:
        own = dict(zip(of_ids, scalars, strict=True))
        column = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

        def look_up(place: int, index: jax.Array) -> jax.Array:
            """Words `place + index` of the row; of what is no column of it, any."""
            return _permute(words[:, place // LANES * LANES :][:, :LANES], own["first"] + place % LANES + index)

        def decoded(number: int) -> jax.Array:
            """128 columns, which 4 * bits words hold."""
            word = look_up(number * 4 * bits, column * bits >> 5)
            code = word >> (column * bits & 31) & ((1 << bits) - 1)
            if where.book is None:
                return xla.scaled(code, [own[name] for name in own if name.startswith("scale")], own["bias"])
            halves = look_up(where.book, code >> 1) >> ((code & 1) << 4) & 0xFFFF
            return lax.bitcast_convert_type(floats.from_float16(halves), jnp.float32)

        row = jnp.concatenate([decoded(number) for number in range(_columns(dim) // LANES)], axis=1)
        return row * own["weight"] if weights is not None else row

    pooled = copies.pool_copied_rows(
        lane_rows,
        lane_row,
        lengths,
        list(of_ids.values()),
        value,
        _columns(dim),
        pooling,
        flops=4 * ids.shape[0] * dim,
        interpret=interpret,
        name="quantized_bag",
    )
    return pooled[:, :dim]


def _permute(words: jax.Array, index: jax.Array) -> jax.Array:
    """words[0, index[0, c] mod 128] in lane c, int32[1, 128]."""
    # jnp.take_along_axis gathers along both axes where one of them is 1, which Mosaic does not have.
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    index = (index & (LANES - 1))[..., None]
    return lax.gather(words, index, numbers, (1, 1), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _columns(dim: int) -> int:
    return -(-dim // LANES) * LANES
