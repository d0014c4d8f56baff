"""Packed blocks on a GPU in Pallas Triton.

Quantizing and decoding. An array is seen as [A, L, B] with blocks along L; a program takes blocks side by side:

    last axis (B = 1)     tile [blocks, k1 / k2, k2]      whole blocks one after another in memory
    another axis          tile [k1 / k2, k2, columns]     one block deep, columns side by side in memory

It reads each number once, and what it writes are bytes: codes that share bytes are shifted and summed in registers. The
end of an axis that is no multiple of the block is read as zeros.

Products of x [M, K] with packed weights. A program owns a tile of rows of x and columns of the weights and walks along
K. Codes that share bytes are not brought back into their order: with four 6-bit codes in three bytes, say, the four
codes of all groups are four small matrices, and the columns of x that each one meets are loaded with a stride:

    out += x[:, j::4] @ decode(code j of each group),    j = 0 ... 3

For few rows the walk is cut among programs, whose parts XLA sums: the same bits every time, no atomics.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. They have
run on an H200 (benchmarks/results/gpu_kernels.md).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.mx import blocks as sizes
from scalejax.kernels.mx import tiles, xla
from scalejax.kernels.types import Kernel, Number, Ref, Shapes
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import QuantizeCall

_FLOAT32_ON_GPU = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""No name for it on a CPU, where the kernels are interpreted."""


def lacks_blocks(format: BlockFormat) -> str | None:
    """Which part of quantizing and decoding is missing here, or None."""
    most = _sizes().elements
    fits = _is_power_of_two(format.k1) and _is_power_of_two(format.k2) and format.k1 <= most
    return tiles.lacks_blocks(format, None if fits else f"wants k1 and k2 as powers of two, at most {most}")


def lacks_products(format: BlockFormat) -> str | None:
    """Which part of a product is missing here, or None."""
    lacks = lacks_blocks(format) or tiles.lacks_products(format)
    if lacks is None and format.k1 > _sizes().depth:
        return f"wants blocks of at most {_sizes().depth}; got {format.name}."
    return lacks


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def quantize(
    x: jax.Array,
    key: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
    *,
    interpret: bool = False,
) -> Packed:
    """`api.quantize_blocks`."""
    format, axis, rule, rounding = call
    chance = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    if format.scale == "e4m3" and tensor_scale is None:
        tensor_scale = xla.tensor_scale_of(x, format, axis)
    view = _View(x.shape, axis, format)
    tile = _Tile(view, format)
    streams = tiles.streams(format)

    def kernel(*refs: Ref) -> None:
        given, made = list(refs[: len(operands)]), list(refs[len(operands) :])
        place = tile.numbers(view.length)
        bits = float32.float_bits(place.load(given.pop(0)))
        random = None if chance is None else place.load(given.pop(0))
        scale = None if tensor_scale is None else jnp.full((1, 1, 1), given.pop(0)[0])
        encoded = tiles.encode(
            bits, format, axis=tile.axis, rule=rule, rounding=rounding, chance=random, tensor_scale=scale
        )
        tile.of_blocks(1).store(made.pop(), tile.flat(encoded.scales))
        for stream, values in zip(streams, (encoded.codes, encoded.sub_scales), strict=False):
            assert values is not None
            tile.store_stream(made.pop(0), values.astype(jnp.int32), stream)

    operands = [array.reshape(view.shape) for array in (x, chance) if array is not None]
    if tensor_scale is not None:
        operands.append(tensor_scale.reshape(1))
    depths = [view.count * format.k1 // width * bits // 8 for width, bits in streams] + [view.count]
    *packed, scales = _call(
        kernel,
        tile.grid,
        operands,
        [jax.ShapeDtypeStruct((view.shape[0], depth, view.shape[2]), jnp.uint8) for depth in depths],
        name="mx_quantize",
        interpret=interpret,
    )
    packed, scales = [view.back(array) for array in packed], view.back(scales)
    return Packed(
        codes=packed[0],
        scales=scales,
        sub_scales=packed[1] if len(packed) > 1 else None,
        tensor_scale=tensor_scale,
        format=format,
        axis=axis - x.ndim,
        length=x.shape[axis],
    )


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def dequantize(packed: Packed, dtype: jax.typing.DTypeLike, *, interpret: bool = False) -> jax.Array:
    """`api.dequantize_blocks`."""
    format, axis = packed.format, packed.axis + packed.codes.ndim
    shape = list(packed.codes.shape)
    shape[axis] = packed.length
    view = _View(tuple(shape), axis, format)
    tile = _Tile(view, format)
    arrays = [packed.codes, packed.scales] + [a for a in (packed.sub_scales,) if a is not None]
    operands = [array.reshape(view.shape[0], -1, view.shape[2]) for array in arrays]
    if packed.tensor_scale is not None:
        operands.append(packed.tensor_scale.reshape(1))

    def kernel(*refs: Ref) -> None:
        given, out = list(refs[:-1]), refs[-1]
        codes = tile.load_stream(given.pop(0), format.element.bits, format.k2)
        scales = tile.of_blocks(1, keep=True).load(given.pop(0))
        subs = None if packed.sub_scales is None else tile.load_stream(given.pop(0), format.d2, 1)
        scale = None if packed.tensor_scale is None else jnp.full((1, 1, 1), given.pop(0)[0])
        subs = None if subs is None else subs.astype(jnp.uint8)
        bits = blocks.decode_blocks(blocks.EncodedBlocks(codes, scales, subs), format, scale)
        tile.numbers(view.length).store(out, float32.to_dtype(bits, dtype))

    out = _call(
        kernel,
        tile.grid,
        operands,
        jax.ShapeDtypeStruct(view.shape, dtype),
        name="mx_dequantize",
        interpret=interpret,
    )
    return out.reshape(shape)


@functools.partial(jax.jit, static_argnames=("interpret",))
def matmul(x: jax.Array, weights: Packed, *, interpret: bool = False) -> jax.Array:
    """float32[M, N] of x [M, K], float32 or bfloat16, operands in its dtype; no tensor scale is applied."""
    format, along_rows = weights.format, weights.axis == -2
    said = _sizes()
    rows, length = x.shape
    columns = weights.codes.shape[1 if along_rows else 0]
    count = weights.scales.shape[0 if along_rows else 1]  # blocks along K
    row_block = min(said.rows, max(16, pl.next_power_of_2(rows)))
    steps = pl.cdiv(count * format.k1, said.depth)
    tiles_of_out = pl.cdiv(rows, row_block) * pl.cdiv(columns, said.columns)
    parts = max(1, min(steps, pl.cdiv(said.programs, tiles_of_out)))
    per_part = pl.cdiv(steps, parts)
    parts = pl.cdiv(steps, per_part)
    group, taken = tiles.group_of(format.element.bits)
    deep, inner = said.depth // format.k1, format.k1 // group  # blocks of a step, groups of a block

    def kernel(x: Ref, codes: Ref, scales: Ref, *rest: Ref) -> None:
        *subs, out = rest
        row = pl.program_id(0) * row_block + lax.iota(jnp.int32, row_block)
        column = pl.program_id(1) * said.columns + lax.iota(jnp.int32, said.columns)
        part = pl.program_id(2)

        def weights_at(
            ref: Ref, first: jax.Array, counts: tuple[int, int], per_block: int, offset: int, stride: int
        ) -> jax.Array:
            """Bytes [blocks, n, columns] or [columns, blocks, n]: those at offset + stride i of blocks from `first`."""
            shape = (*counts, said.columns) if along_rows else (said.columns, *counts)
            at = 0 if along_rows else 1
            block = first + lax.broadcasted_iota(jnp.int32, shape, at)
            byte = block * per_block + offset + stride * lax.broadcasted_iota(jnp.int32, shape, at + 1)
            other = column.reshape((1, 1, -1) if along_rows else (-1, 1, 1))
            other = jnp.broadcast_to(other, shape)
            mask = (block < count) & (other < columns)
            where = ref.at[byte, other] if along_rows else ref.at[other, byte]
            return plgpu.load(where, mask=mask, other=0).astype(jnp.int32)

        def step(number: jax.Array, total: jax.Array) -> jax.Array:
            first = number * deep
            size = inner * taken  # bytes of codes in a block
            bytes_of = [weights_at(codes, first, (deep, inner), size, i, taken) for i in range(taken)]
            scale = weights_at(scales, first, (deep, 1), 1, 0, 0)
            taus = weights_at(subs[0], first, (deep, 1), 1, 0, 0) if subs else None
            for place in range(group):
                code = tiles.from_bytes(bytes_of, format.element.bits, place)
                tau = None
                if taus is not None:
                    within = place + group * lax.broadcasted_iota(jnp.int32, code.shape, 1 if along_rows else 2)
                    tau = (taus >> (within // format.k2 * format.d2)) & ((1 << format.d2) - 1)
                values = tiles.decode_for_product(code, scale, tau, format, x.dtype)
                flat = (deep * inner, said.columns) if along_rows else (said.columns, deep * inner)
                k = number * said.depth + place + group * lax.iota(jnp.int32, deep * inner)
                index = ref_index(row, k)
                mask = (index[0] < rows) & (index[1] < length)
                left = plgpu.load(x.at[index], mask=mask, other=0)
                total = total + _dot(left, values.reshape(flat), 0 if along_rows else 1)
            return total

        def ref_index(row: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            shape = (row_block, deep * inner)
            return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(k[None, :], shape)

        total = jnp.zeros((row_block, said.columns), jnp.float32)
        total = lax.fori_loop(part * per_part, jnp.minimum((part + 1) * per_part, steps), step, total)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        plgpu.store(out.at[part, row[:, None], column[None, :]], total, mask=mask)

    arrays = [weights.codes, weights.scales] + [a for a in (weights.sub_scales,) if a is not None]
    sums = _call(
        kernel,
        (pl.cdiv(rows, row_block), pl.cdiv(columns, said.columns), parts),
        [x, *arrays],
        jax.ShapeDtypeStruct((parts, rows, columns), jnp.float32),
        name="mx_matmul",
        interpret=interpret,
        flops=2 * rows * length * columns,
    )
    total = sums[0] if parts == 1 else jnp.sum(sums, axis=0)
    if weights.tensor_scale is not None:
        total = total * weights.tensor_scale
    return total


class _View:
    """An array as [A, L, B] with blocks along L."""

    def __init__(self, shape: tuple[int, ...], axis: int, format: BlockFormat):
        self.given, self.axis = shape, axis
        leading, self.length, trailing = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        if trailing == 1 and self.length % format.k1 == 0:
            leading, self.length = 1, leading * self.length  # blocks of all rows one after another
        self.shape = (leading, self.length, trailing)
        self.count = pl.cdiv(self.length, format.k1)  # blocks along L

    def back(self, array: jax.Array) -> jax.Array:
        """[A, n, B] in the dimensions of the array."""
        leading, trailing = self.given[: self.axis], self.given[self.axis + 1 :]
        return array.reshape(*leading, array.size // max(1, math.prod(leading) * math.prod(trailing)), *trailing)


class _Tile:
    """The blocks of one program: shape of the tile, and where its values, bytes and scales lie."""

    def __init__(self, view: _View, format: BlockFormat):
        self.view, self.format = view, format
        self.subs = format.k1 // format.k2
        self.is_last = view.shape[2] == 1
        blocks_in_all = view.shape[0] * view.count
        most = blocks_in_all if self.is_last else view.shape[2]
        self.blocks = min(max(1, _sizes().elements // format.k1), pl.next_power_of_2(most))
        if self.is_last:
            self.axis, self.grid = 1, (pl.cdiv(blocks_in_all, self.blocks),)
        else:
            self.axis, self.grid = 0, (blocks_in_all, pl.cdiv(view.shape[2], self.blocks))

    def shape(self, *inner: int) -> tuple[int, ...]:
        return (self.blocks, *inner) if self.is_last else (*inner, self.blocks)

    def flat(self, values: jax.Array) -> jax.Array:
        return values.reshape(self.blocks)

    def at(self, shape: tuple[int, ...], per_block: int, offset: Number) -> "_Place":
        """Indices of what lies `offset` behind the start of a block, where a block takes `per_block` along L."""
        lane = lax.broadcasted_iota(jnp.int32, shape, 0 if self.is_last else len(shape) - 1)
        if self.is_last:
            block = pl.program_id(0) * self.blocks + lane
            column = jnp.zeros_like(block)
            inside = block < self.view.shape[0] * self.view.count
        else:
            block = jnp.full(shape, pl.program_id(0), jnp.int32)
            column = pl.program_id(1) * self.blocks + lane
            inside = column < self.view.shape[2]
        if self.view.shape[0] == 1:
            leading, block = jnp.zeros_like(block), block
        else:
            leading, block = block // self.view.count, block % self.view.count
        return _Place((leading, block * per_block + offset, column), inside)

    def numbers(self, length: int) -> "_Place":
        """Places of the elements of the tile; none beyond the length."""
        shape = self.shape(self.subs, self.format.k2)
        first = 1 if self.is_last else 0
        sub, within = (lax.broadcasted_iota(jnp.int32, shape, first + i) for i in range(2))
        place = self.at(shape, self.format.k1, sub * self.format.k2 + within)
        return place if length % self.format.k1 == 0 else _Place(place.index, place.inside & (place.index[1] < length))

    def of_blocks(self, per_block: int, *, keep: bool = False) -> "_Place":
        """One of each block, [blocks], or with dimensions of 1 to broadcast."""
        return self.at(self.shape(1, 1) if keep else (self.blocks,), per_block, 0)

    def store_stream(self, ref: Ref, values: jax.Array, stream: tuple[int, int]) -> None:
        """int32 values of a tile, k1 / width a block, packed to bytes."""
        width, bits = stream
        group, taken = tiles.group_of(bits)
        groups = self.format.k1 // width // group
        apart = values.reshape(self.shape(groups, group))
        words = tiles.words(apart, bits, 2 if self.is_last else 1)
        number = lax.broadcasted_iota(jnp.int32, words[0].shape, 1 if self.is_last else 0)
        for i in range(taken):
            byte = (words[i // 4] >> (8 * (i % 4))) & 0xFF
            place = self.at(byte.shape, groups * taken, number * taken + i)
            place.store(ref, byte.astype(jnp.uint8))

    def load_stream(self, ref: Ref, bits: int, size: int) -> jax.Array:
        """int32 codes of a tile, [blocks, subs, size] or [subs, size, blocks]."""
        shape = self.shape(self.subs, size)
        first = 1 if self.is_last else 0
        sub, within = (lax.broadcasted_iota(jnp.int32, shape, first + i) for i in range(2))
        start = (sub * size + within) * bits
        per_block = self.subs * size * bits // 8
        byte = self.at(shape, per_block, start >> 3).load(ref).astype(jnp.int32)
        if 8 % bits:  # a code may reach into the next byte
            # No code ends behind its block: where the last byte is read twice, the second reading is masked off below.
            after = jnp.minimum((start >> 3) + 1, per_block - 1)
            byte |= self.at(shape, per_block, after).load(ref).astype(jnp.int32) << 8
        return (byte >> (start & 7)) & ((1 << bits) - 1)


class _Place:
    """Indices into [A, n, B], and which of them are there."""

    def __init__(self, index: tuple[jax.Array, jax.Array, jax.Array], inside: jax.Array):
        self.index, self.inside = index, inside

    def load(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref.at[self.index], mask=self.inside, other=0)

    def store(self, ref: Ref, values: jax.Array) -> None:
        plgpu.store(ref.at[self.index], values.astype(ref.dtype), mask=self.inside)


def _call(
    kernel: Kernel,
    grid: tuple[int, ...],
    operands: list[jax.Array],
    out_shape: Shapes,
    *,
    name: str,
    interpret: bool,
    flops: int = 0,
) -> Any:
    said = _sizes()
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=said.warps, num_stages=said.stages),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out_shape)),
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def _dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """A product over axis 1 of `left`, summed in float32; of float32 by three products of tensor cores."""
    precision: lax.PrecisionLike = lax.Precision.DEFAULT
    if left.dtype == jnp.float32:
        precision = _FLOAT32_ON_GPU if compat.platform() == "gpu" else lax.Precision.HIGHEST
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _sizes() -> sizes.GpuTiles:
    return sizes.of_device(sizes.GPU, compat.device_kind())


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
