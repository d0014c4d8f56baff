"""Sums of gathered rows on a TPU's core: a DMA for each picked edge, from HBM into vector memory.

Picked edges [N, S] are cut into blocks of 128 rows and 8 slots. A step of the grid sums one block for one range of
features; the steps of a block of rows follow one another, over its features and, innermost, over its slots:

                   slots 0 ... 7   slots 8 ... 15
    rows 0 ... 127       0               1          number of the step, for features that are one range
    rows 128 ... 255     2               3

Indices of a step lie in scalar memory before it begins, and so do those of the step after it: the rows of that one are
copied into one half of a buffer while the other half is summed. Rows are added in the order of slots, in float32. Slots
without an edge are neither copied nor added.

A row needs an address of its own: features are padded to a multiple of 128 words of 32 bits, a pass over h that costs
as much as 2 of the S slots. bfloat16 and int8 come packed, 2 or 4 values a word, so that the copies of a row are
shorter; below 256 or 512 features they are not, since 128 words are the least.

The kernel has been compiled for v5e, v5p, v6e and 7x and interpreted, and has not run on a TPU.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.sampled_spmm import blocks
from scalejax.kernels.sampled_spmm.balance import Balance, reduce_rows
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.features import check_kernel
from scalejax.kernels.sampled_spmm.sampling import Ell
from scalejax.kernels.types import Copy, Number, Ref

_LANES = 128
_ROWS = 128
"""Rows of a block. XLA lays an array [N, S] out with its rows along lanes: 128 of them make a block without padding."""


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike, *, interpret: Interpret) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]], in the bins of `balance`: see `api`."""
    check_kernel("pallas_tpu", h, dtype)

    def sum_runs(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        slot = jnp.arange(slots, dtype=starts.dtype)[None, :]
        edges = jnp.where(slot < counts[:, None], starts[:, None] + slot, 0)
        values = None if csr.values is None else csr.values[edges]
        return _sum(csr.indices[edges], counts, values, h, None, jnp.float32, interpret=interpret, name="spmm")

    return reduce_rows(balance, sum_runs)


def sampled_sum(
    ell: Ell, h: jax.Array, divisor: jax.Array | None, dtype: jax.typing.DTypeLike, *, interpret: Interpret
) -> jax.Array:
    """The sum over picked edges, divided: see `api`."""
    check_kernel("pallas_tpu", h, dtype)
    return _sum(ell.indices, ell.counts, ell.values, h, divisor, dtype, interpret=interpret, name="sampled_spmm")


def _sum(
    indices: jax.Array,
    counts: jax.Array,
    values: jax.Array | None,
    h: jax.Array,
    divisor: jax.Array | None,
    dtype: jax.typing.DTypeLike,
    *,
    interpret: Interpret,
    name: str,
) -> jax.Array:
    """[N, F] of picked edges [N, S]."""
    (count, width), features = indices.shape, h.shape[1]
    sizes = blocks.TPU.get(compat.device_kind(), blocks.TPU[""])
    words, tile = _words(h, sizes.words)
    columns = tile * (4 // h.dtype.itemsize if h.dtype in (jnp.bfloat16, jnp.int8) else 1)
    num_tiles, num_chunks = words.shape[1] // tile, pl.cdiv(width, sizes.slots)
    num_blocks = pl.cdiv(count, _ROWS)
    steps = num_blocks * num_tiles * num_chunks

    def by_block(array: jax.Array) -> jax.Array:
        """[N, S] -> blocks of [slots, rows], one after another."""
        padded = jnp.pad(array.T, ((0, num_chunks * sizes.slots - width), (0, num_blocks * _ROWS - count)))
        return padded.reshape(num_chunks, sizes.slots, num_blocks, _ROWS).transpose(2, 0, 1, 3).reshape(-1)

    def of_picks(step: jax.Array) -> tuple[jax.Array]:
        block, _, chunk = _place(step, num_tiles, num_chunks)
        return (block * num_chunks + chunk,)

    def of_rows(step: jax.Array) -> tuple[jax.Array]:
        return (_place(step, num_tiles, num_chunks)[0],)

    def after(step: jax.Array) -> jax.Array:
        return jnp.minimum(step + 1, steps - 1)

    picks = functools.partial(pl.BlockSpec, (sizes.slots * _ROWS,), memory_space=pltpu.SMEM)
    rows = functools.partial(pl.BlockSpec, (_ROWS,), memory_space=pltpu.SMEM)
    indices, counts = by_block(indices.astype(jnp.int32)), _pad(counts.astype(jnp.int32), 0)
    operands = [indices, indices, counts, counts]
    specs = [picks(of_picks), picks(lambda i: of_picks(after(i))), rows(of_rows), rows(lambda i: of_rows(after(i)))]
    if values is not None:
        operands.append(by_block(values.astype(jnp.float32)))
        specs.append(picks(of_picks))
    if divisor is not None:
        operands.append(_pad(divisor.astype(jnp.float32), 1))
        specs.append(rows(of_rows))
    kernel = functools.partial(
        _kernel,
        stored=jnp.dtype(h.dtype),
        weighted=values is not None,
        divided=divisor is not None,
        slots=sizes.slots,
        tile=tile,
        numbers=(num_tiles, num_chunks),
    )
    out = pl.pallas_call(
        kernel,
        grid=(steps,),
        in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((_ROWS, columns), lambda i: _place(i, num_tiles, num_chunks)[:2]),
        out_shape=jax.ShapeDtypeStruct((count, num_tiles * columns), dtype),
        scratch_shapes=[
            pltpu.VMEM((2, sizes.slots * _ROWS, tile), words.dtype),
            pltpu.VMEM((_ROWS, columns), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * width * features,
            transcendentals=0,
            bytes_accessed=4 * count * width * (words.shape[1] + len(operands)) + 4 * count * features,
        ),
        interpret=interpret,
        name=name,
    )(*operands, words)
    return out[:, :features]


def _place(step: jax.Array, num_tiles: int, num_chunks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(block of rows, tile of features, chunk of slots) of a step."""
    outer = step // num_chunks
    return outer // num_tiles, outer % num_tiles, step % num_chunks


def _kernel(
    *refs: Ref, stored: np.dtype, weighted: bool, divided: bool, slots: int, tile: int, numbers: tuple[int, int]
) -> None:
    indices, indices_after, counts, counts_after, *more, h, out, buffer, total, arrived = refs
    num_tiles, num_chunks = numbers
    step = pl.program_id(0)
    side = lax.rem(step, 2)
    chunk = _place(step, num_tiles, num_chunks)[2]

    def left(counts: Ref, row: jax.Array, chunk: jax.Array) -> jax.Array:
        return jnp.clip(counts[row] - chunk * slots, 0, slots)

    def for_each_pick(step: jax.Array, counts: Ref, do: Callable[[jax.Array, jax.Array], None]) -> None:
        part, chunk = _place(step, num_tiles, num_chunks)[1:]

        @pl.loop(0, _ROWS)
        def _(row: jax.Array) -> None:
            @pl.loop(0, left(counts, row, chunk))
            def _(slot: jax.Array) -> None:
                do(slot * _ROWS + row, part)

    def copy(node: Number, place: jax.Array, part: jax.Array, side: jax.Array) -> Copy:
        return pltpu.make_async_copy(
            h.at[pl.ds(node, 1), pl.ds(pl.multiple_of(part * tile, _LANES), tile)],
            buffer.at[side, pl.ds(place, 1)],
            arrived.at[side],
        )

    @pl.when(step == 0)
    def _() -> None:
        for_each_pick(step, counts, lambda place, part: copy(indices[place], place, part, side).start())

    @pl.when(step + 1 < pl.num_programs(0))
    def _() -> None:
        for_each_pick(
            step + 1, counts_after, lambda place, part: copy(indices_after[place], place, part, 1 - side).start()
        )

    # Copies end in any order, and all of a step count on one semaphore: none is read before the last has ended.
    for_each_pick(step, counts, lambda place, part: copy(0, place, part, side).wait())

    @pl.loop(0, _ROWS)
    def _(row: jax.Array) -> None:
        def add(slot: jax.Array, sums: jax.Array) -> jax.Array:
            place = slot * _ROWS + row
            terms = _unpack(buffer[side, pl.ds(place, 1), :], stored)
            return sums + (terms * more[0][place] if weighted else terms)

        sums = jnp.where(chunk == 0, 0.0, total[pl.ds(row, 1), :])
        sums = lax.fori_loop(0, left(counts, row, chunk), add, sums)
        if divided:
            sums = jnp.where(chunk == num_chunks - 1, sums / more[-1][row], sums)
        total[pl.ds(row, 1), :] = sums

    @pl.when(chunk == num_chunks - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _words(h: jax.Array, most: int) -> tuple[jax.Array, int]:
    """(h as words of 32 bits [M, a multiple of the tile], words of a tile, at most `most` and a multiple of 128).

    Packed values of one word are a tile's quarter or half apart: a tile comes apart into contiguous pieces.
    """
    if h.dtype == jnp.float16:
        h = h.astype(jnp.float32)
    shares = 4 // h.dtype.itemsize
    lanes = pl.cdiv(h.shape[1], shares * _LANES)
    tiles = pl.cdiv(lanes * _LANES, most)
    tile = pl.cdiv(lanes, tiles) * _LANES
    h = jnp.pad(h, ((0, 0), (0, tiles * tile * shares - h.shape[1])))
    if shares == 1:
        return h, tile
    narrow = jnp.uint16 if shares == 2 else jnp.uint8
    bits = lax.bitcast_convert_type(h, narrow).astype(jnp.uint32).reshape(-1, tiles, shares, tile)
    words = bits[:, :, 0]
    for number in range(1, shares):
        words = words | bits[:, :, number] << jnp.uint32(32 // shares * number)
    return words.reshape(h.shape[0], -1), tile


def _unpack(words: jax.Array, stored: np.dtype) -> jax.Array:
    """float32 values of a row of words."""
    if words.dtype == jnp.float32:
        return words
    if stored == jnp.bfloat16:  # the upper half of a float32
        halves = words << jnp.uint32(16), words & jnp.uint32(0xFFFF0000)
        return jnp.concatenate([lax.bitcast_convert_type(half, jnp.float32) for half in halves], axis=1)
    signed = lax.bitcast_convert_type(words, jnp.int32)
    quarters = [(signed << (24 - 8 * number)) >> 24 for number in range(4)]
    return jnp.concatenate(quarters, axis=1).astype(jnp.float32)


def _pad(array: jax.Array, value: int) -> jax.Array:
    return jnp.pad(array, (0, -array.shape[0] % _ROWS), constant_values=value)
