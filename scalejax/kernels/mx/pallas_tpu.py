"""Packed blocks on a TPU: blocks always lie along the sublanes of a tile, so that everything about one is a vector.

    another axis than the last    tile [L, columns] as it lies
    the last axis                 tile [rows, L], transposed in the kernel, and what is written transposed back

A tile lies in vector memory as int32, and a loop takes eight blocks at a time out of it, which is as much as the
compiler unrolls in a few seconds. Codes become bytes by shifts and sums over groups of sublanes: no cast to floats of 4
or 8 bits, which chips before 7x lack. An axis that is no multiple of eight blocks is padded by XLA before.

Products of x [M, K] with packed weights decode a tile [K, N] into vector memory and multiply it there. K is the inner
dimension of the grid, and sums stay in a float32 tile.

Compiled for every chip and interpreted; they have not run on a TPU.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.mx import blocks as sizes
from scalejax.kernels.mx import tiles, xla
from scalejax.kernels.types import Kernel, Ref, Shapes
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.quantize import QuantizeCall

_AT_ONCE = 8
"""Blocks of a turn of a loop: their scales are a tile of 8 sublanes."""


def lacks_blocks(format: BlockFormat) -> str | None:
    """Which part of quantizing and decoding is missing here, or None."""
    fits = format.k1 % 8 == 0 and format.k1 <= 128
    return tiles.lacks_blocks(format, None if fits else "wants k1 as a multiple of 8, at most 128")


def lacks_products(format: BlockFormat) -> str | None:
    """Which part of a product is missing here, or None."""
    return lacks_blocks(format) or tiles.lacks_products(format)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def quantize(
    x: jax.Array,
    key: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
    *,
    interpret: Interpret = False,
) -> Packed:
    """`api.quantize_blocks`."""
    format, axis, rule, rounding = call
    if x.dtype == jnp.float16:  # which not every chip can load
        x = lax.bitcast_convert_type(float32.float_bits(x), jnp.float32)
    chance = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    if format.scale == "e4m3" and tensor_scale is None:
        tensor_scale = xla.tensor_scale_of(x, format, axis)
    view = _View(x.shape, axis, format)
    operands = [view.padded(array) for array in (x, chance) if array is not None]
    depths = [view.length * bits // 8 // width for width, bits in tiles.streams(format)] + [view.length // format.k1]

    along, other = view.tile(format)
    streams = tiles.streams(format)

    def kernel(*refs: Ref) -> None:
        given, made, held = refs[: len(operands)], refs[len(operands) : -len(scratch)], refs[-len(scratch) :]
        inputs, outputs = held[: -len(made)], held[-len(made) :]
        arrays = given[1:] if tensor_scale is not None else given
        scale = None if tensor_scale is None else jnp.full((1, 1, 1, 1), given[0][0])
        inputs[0][...] = view.turned(float32.float_bits(arrays[0][...]))
        if chance is not None:
            inputs[1][...] = view.turned(lax.bitcast_convert_type(arrays[1][...], jnp.int32))
        apart = (_AT_ONCE, format.k1 // format.k2, format.k2, other)

        @pl.loop(0, along // (_AT_ONCE * format.k1))
        def _(step: jax.Array) -> None:
            def block(ref: Ref) -> jax.Array:
                return _rows(ref, step, _AT_ONCE * format.k1).reshape(apart)

            random = None if chance is None else lax.bitcast_convert_type(block(inputs[1]), jnp.uint32)
            encoded = tiles.encode(
                block(inputs[0]), format, axis=1, rule=rule, rounding=rounding, chance=random, tensor_scale=scale
            )
            outputs[-1][_span(step, _AT_ONCE), :] = encoded.scales.astype(jnp.int32).reshape(_AT_ONCE, other)
            for out, values, (width, size) in zip(outputs, (encoded.codes, encoded.sub_scales), streams, strict=False):
                if values is not None:
                    flat = values.astype(jnp.int32).reshape(_AT_ONCE * format.k1 // width, other)
                    data = _packed(flat, size)
                    out[_span(step, data.shape[0]), :] = data

        for ref, out in zip(made, outputs, strict=True):
            ref[...] = view.turned(out[...]).astype(jnp.uint8)

    scratch = [pltpu.VMEM((along, other), jnp.int32) for _ in operands]
    scratch += [pltpu.VMEM((along * depth // view.length, other), jnp.int32) for depth in depths]
    specs = [view.spec(format, 1, 1) for _ in operands]
    if tensor_scale is not None:
        operands.insert(0, tensor_scale.reshape(1))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    *packed, scales = _call(
        kernel,
        view.grid(format),
        specs,
        [view.spec(format, depth, view.length) for depth in depths],
        operands,
        [jax.ShapeDtypeStruct(view.shape_of(depth), jnp.uint8) for depth in depths],
        scratch_shapes=scratch,
        name="mx_quantize",
        interpret=interpret,
    )
    packed = [view.back(array) for array in packed]
    return Packed(
        codes=packed[0],
        scales=view.back(scales),
        sub_scales=packed[1] if len(packed) > 1 else None,
        tensor_scale=tensor_scale,
        format=format,
        axis=axis - x.ndim,
        length=x.shape[axis],
    )


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def dequantize(packed: Packed, dtype: jax.typing.DTypeLike, *, interpret: Interpret = False) -> jax.Array:
    """`api.dequantize_blocks`."""
    if dtype == jnp.float16:  # which not every chip can store
        decoded = dequantize(packed, jnp.dtype(jnp.float32), interpret=interpret)
        return float32.to_dtype(lax.bitcast_convert_type(decoded, jnp.int32), dtype)
    format, axis = packed.format, packed.axis + packed.codes.ndim
    shape = list(packed.codes.shape)
    shape[axis] = packed.length
    view = _View(tuple(shape), axis, format)
    arrays = [packed.codes, packed.scales] + [a for a in (packed.sub_scales,) if a is not None]
    operands = [view.padded_parts(array) for array in arrays]
    depths = [array.shape[1] for array in operands]
    specs = [view.spec(format, depth, view.length) for depth in depths]
    if packed.tensor_scale is not None:
        operands.insert(0, packed.tensor_scale.reshape(1))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    along, other = view.tile(format)

    def kernel(*refs: Ref) -> None:
        given, out, held = refs[: len(operands)], refs[len(operands)], refs[len(operands) + 1 :]
        *inputs, decoded = held
        arrays = given[1:] if packed.tensor_scale is not None else given
        scale = None if packed.tensor_scale is None else jnp.full((1, 1, 1, 1), given[0][0])
        for ref, array in zip(inputs, arrays, strict=True):
            ref[...] = view.turned(array[...].astype(jnp.int32))

        @pl.loop(0, along // (_AT_ONCE * format.k1))
        def _(step: jax.Array) -> None:
            codes, scales, subs = _parts(inputs, step, format, other)
            encoded = blocks.EncodedBlocks(codes, scales, None if subs is None else subs.astype(jnp.uint8))
            bits = blocks.decode_blocks(encoded, format, scale)
            decoded[_span(step, _AT_ONCE * format.k1), :] = bits.reshape(_AT_ONCE * format.k1, other)

        # To the dtype behind the transposition, which is of 32 bits.
        out[...] = float32.to_dtype(view.turned(decoded[...]), dtype)

    out = _call(
        kernel,
        view.grid(format),
        specs,
        view.spec(format, 1, 1),
        operands,
        jax.ShapeDtypeStruct(view.shape_of(view.length), dtype),
        scratch_shapes=[
            pltpu.VMEM((along * depth // view.length, other), jnp.int32) for depth in (*depths, view.length)
        ],
        name="mx_dequantize",
        interpret=interpret,
    )
    return lax.slice_in_dim(view.back(out), 0, packed.length, axis=axis)


@functools.partial(jax.jit, static_argnames=("interpret",))
def matmul(x: jax.Array, weights: Packed, *, interpret: Interpret = False) -> jax.Array:
    """float32[M, N] of x [M, K], float32 or bfloat16, operands in its dtype."""
    format, along_rows = weights.format, weights.axis == -2
    said = _sizes()
    columns = weights.codes.shape[1 if along_rows else 0]
    rows, unit = x.shape[0], _AT_ONCE * format.k1
    length = pl.cdiv(weights.scales.shape[0 if along_rows else 1] * format.k1, unit) * unit
    depth = min(length, (32 if along_rows else 128) * format.k1)
    steps = pl.cdiv(length, depth)
    x = jnp.pad(x, ((0, 0), (0, steps * depth - x.shape[1])))
    row_block, column_block = min(rows, said.rows), min(columns, said.columns)
    count = weights.length
    arrays = [weights.codes, weights.scales] + [a for a in (weights.sub_scales,) if a is not None]
    fills = [length * array.shape[0 if along_rows else 1] // _whole(count, format) for array in arrays]
    arrays = [_pad(array, fill, 0 if along_rows else 1) for array, fill in zip(arrays, fills, strict=True)]

    def kernel(x: Ref, *refs: Ref) -> None:
        given, (out, total, values), held = refs[: len(arrays)], refs[len(arrays) :][:3], refs[len(arrays) + 3 :]

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        first = pl.program_id(2) * depth
        for ref, array in zip(held, given, strict=True):
            whole = array[...].astype(jnp.int32)
            ref[...] = whole if along_rows else whole.T

        @pl.loop(0, depth // unit)
        def _(step: jax.Array) -> None:
            codes, scales, taus = _parts(held, step, format, column_block)
            decoded = tiles.decode_for_product(codes, scales, taus, format, jnp.float32).reshape(unit, column_block)
            if length % depth:  # what lies beyond the end of an array is anything
                place = first + step * unit + lax.broadcasted_iota(jnp.int32, decoded.shape, 0)
                decoded = jnp.where(place < length, decoded, 0)
            values[_span(step, unit), :] = decoded.astype(values.dtype)

        total[...] += lax.dot_general(
            x[...],
            values[...],
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

        @pl.when(pl.program_id(2) == steps - 1)
        def _() -> None:
            out[...] = total[...]

    def spec(fill: int) -> pl.BlockSpec:
        own = depth * fill // length
        if along_rows:
            return pl.BlockSpec((own, column_block), lambda m, n, k: (k, n))
        return pl.BlockSpec((column_block, own), lambda m, n, k: (n, k))

    sums = _call(
        kernel,
        (pl.cdiv(rows, row_block), pl.cdiv(columns, column_block), steps),
        [pl.BlockSpec((row_block, depth), lambda m, n, k: (m, k)), *(spec(fill) for fill in fills)],
        pl.BlockSpec((row_block, column_block), lambda m, n, k: (m, n)),
        [x, *arrays],
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((row_block, column_block), jnp.float32),
            pltpu.VMEM((depth, column_block), x.dtype),
            *(pltpu.VMEM((depth * fill // length, column_block), jnp.int32) for fill in fills),
        ],
        name="mx_matmul",
        interpret=interpret,
        flops=2 * rows * length * columns,
    )
    return sums if weights.tensor_scale is None else sums * weights.tensor_scale


class _View:
    """An array as [A, L, B], or [A, L] where the blocks lie along the last axis, L a multiple of eight blocks."""

    def __init__(self, shape: tuple[int, ...], axis: int, format: BlockFormat):
        self.given, self.axis = shape, axis
        self.leading, self.trailing = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        self.is_last = self.trailing == 1
        self.whole = _whole(shape[axis], format)
        self.length = pl.cdiv(shape[axis], _AT_ONCE * format.k1) * _AT_ONCE * format.k1

    def shape_of(self, depth: int) -> tuple[int, ...]:
        return (self.leading, depth) if self.is_last else (self.leading, depth, self.trailing)

    def padded(self, x: jax.Array) -> jax.Array:
        """Values, with zeros up to the length."""
        return _pad(x.reshape(self.shape_of(self.given[self.axis])), self.length, 1)

    def padded_parts(self, array: jax.Array) -> jax.Array:
        """What whole blocks are packed to, with zeros up to the length."""
        depth = array.shape[self.axis]
        return _pad(array.reshape(self.shape_of(depth)), self.length * depth // self.whole, 1)

    def back(self, array: jax.Array) -> jax.Array:
        """In the dimensions of the array that was given, without what was padded beyond whole blocks."""
        kept = array.shape[1] * self.whole // self.length
        array = lax.slice_in_dim(array, 0, kept, axis=1)
        return array.reshape(*self.given[: self.axis], kept, *self.given[self.axis + 1 :])

    def turned(self, tile: jax.Array) -> jax.Array:
        """Blocks along sublanes, and back."""
        return tile.T if self.is_last else tile

    def tile(self, format: BlockFormat) -> tuple[int, int]:
        """(along L, the other)."""
        # Bytes come in tiles of 32 sublanes or 128 lanes; a block has one scale.
        most = (128 if self.is_last else 32) * format.k1
        other = self.leading if self.is_last else self.trailing
        return min(self.length, most), min(other, _sizes().columns)

    def grid(self, format: BlockFormat) -> tuple[int, ...]:
        along, other = self.tile(format)
        steps = pl.cdiv(self.length, along)
        if self.is_last:
            return pl.cdiv(self.leading, other), steps
        return self.leading, steps, pl.cdiv(self.trailing, other)

    def spec(self, format: BlockFormat, numerator: int, denominator: int) -> pl.BlockSpec:
        """Blocks of an array that has numerator / denominator entries for one along L."""
        along, other = self.tile(format)
        own = along * numerator // denominator
        if self.is_last:
            return pl.BlockSpec((other, own), lambda i, j: (i, j))
        return pl.BlockSpec((None, own, other), lambda i, j, k: (i, j, k))


def _packed(values: jax.Array, bits: int) -> jax.Array:
    """int32[n, columns] of `bits` bits -> int32[n bits / 8, columns], bytes."""
    group, taken = tiles.group_of(bits)
    if group == taken == 1:
        return values
    count, columns = values.shape[0] // group, values.shape[1]
    words = tiles.words(values.reshape(count, group, columns), bits, 1)
    made = [(words[i // 4] >> (8 * (i % 4))) & 0xFF for i in range(taken)]
    return made[0] if taken == 1 else jnp.stack(made, axis=1).reshape(count * taken, columns)


def _unpacked(data: jax.Array, bits: int) -> jax.Array:
    """int32[n bits / 8, columns], bytes -> int32[n, columns]."""
    group, taken = tiles.group_of(bits)
    if group == taken == 1:
        return data
    count, columns = data.shape[0] // taken, data.shape[1]
    apart = data.reshape(count, taken, columns)
    parts = [apart[:, i] for i in range(taken)]
    made = [tiles.from_bytes(parts, bits, place) for place in range(group)]
    return jnp.stack(made, axis=1).reshape(count * group, columns)


def _parts(
    refs: Sequence[Ref], step: jax.Array, format: BlockFormat, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """int32 codes [blocks, k1 / k2, k2, columns], scales [blocks, 1, 1, columns] and second scales, or None."""
    subs = format.k1 // format.k2
    codes = _unpacked(_rows(refs[0], step, _AT_ONCE * format.k1 * format.element.bits // 8), format.element.bits)
    scales = _rows(refs[1], step, _AT_ONCE)
    taus = None
    if format.sub_scale != "none":
        taus = _unpacked(_rows(refs[2], step, _AT_ONCE * subs * format.d2 // 8), format.d2)
        taus = taus.reshape(_AT_ONCE, subs, 1, columns)
    return codes.reshape(_AT_ONCE, subs, format.k2, columns), scales.reshape(_AT_ONCE, 1, 1, columns), taus


def _rows(ref: Ref, step: jax.Array, count: int) -> jax.Array:
    return ref[_span(step, count), :]


def _span(step: jax.Array, count: int) -> slice | pl.Slice:
    return pl.ds(pl.multiple_of(step * count, count), count)


def _whole(length: int, format: BlockFormat) -> int:
    return pl.cdiv(length, format.k1) * format.k1


def _pad(x: jax.Array, length: int, axis: int) -> jax.Array:
    if x.shape[axis] == length:
        return x
    return jnp.pad(x, [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])


def _call(
    kernel: Kernel,
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: pl.BlockSpec | list[pl.BlockSpec],
    operands: list[jax.Array],
    out_shape: Shapes,
    *,
    name: str,
    interpret: Interpret,
    scratch_shapes: Sequence[pl.MemoryRef] = (),
    flops: int = 0,
) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - 1) + ("arbitrary",), vmem_limit_bytes=_sizes().vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out_shape)),
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def _sizes() -> sizes.TpuTiles:
    return sizes.of_device(sizes.TPU, compat.device_kind())
