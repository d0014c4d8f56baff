"""Packed blocks on a TPU: blocks always lie along the sublanes of a tile, so that everything about one is a vector.

    another axis than the last    tile [L, columns] as it lies
    the last axis                 tile [rows, L], transposed in the kernel, and what is written transposed back

Codes become bytes by shifts and sums over groups of sublanes, all of int32: no cast to floats of 4 or 8 bits, which
chips before 7x lack. An axis that is no multiple of the block is padded by XLA before.

Products of x [M, K] with packed weights decode a tile [K, N] into vector memory and multiply it there. K is the inner
dimension of the grid, and sums stay in a float32 tile.

Compiled for every chip and interpreted; they have not run on a TPU.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.mx import blocks as sizes
from scalejax.kernels.mx import tiles, xla
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.packing import Packed
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule

Interpret = bool | pltpu.InterpretParams


def lacks_blocks(format: BlockFormat) -> str | None:
    """Which part of quantizing and decoding is missing here, or None."""
    if format.scale == "float32":
        return f"has formats with scales of 8 bits; got {format.name} with float32 scales."
    if format.element.bits > 8:
        return f"has elements of at most 8 bits; got {format.name}."
    if format.k1 % 8 or format.k1 > 128:
        return f"wants k1 as a multiple of 8, at most 128; got {format.name}."
    for count, bits in ((format.k1, format.element.bits), (format.k1 // format.k2, format.d2)):
        if bits and count % tiles.group_of(bits)[0]:
            return f"wants the codes of a block to fill whole bytes; got {format.name}."
    return None


def lacks_products(format: BlockFormat) -> str | None:
    """Which part of a product is missing here, or None."""
    return lacks_blocks(format) or tiles.lacks_products(format)


@functools.partial(jax.jit, static_argnames=("format", "axis", "rule", "rounding", "interpret"))
def quantize(
    x: jax.Array,
    key: jax.Array | None,
    tensor_scale: jax.Array | None,
    format: BlockFormat,
    axis: int,
    rule: ScaleRule | None,
    rounding: Rounding,
    *,
    interpret: Interpret = False,
) -> Packed:
    """`api.quantize_blocks`; the axis is not negative."""
    chance = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    if format.scale == "e4m3" and tensor_scale is None:
        tensor_scale = xla.tensor_scale_of(x, format, axis)
    view = _View(x.shape, axis, format)
    operands = [view.padded(array) for array in (x, chance) if array is not None]
    depths = [view.length * bits // 8 // width for width, bits in _streams(format)] + [view.length // format.k1]

    def kernel(*refs: Any) -> None:
        given, made = list(refs[: -len(depths)]), list(refs[-len(depths) :])
        scale = None if tensor_scale is None else jnp.full((1, 1, 1, 1), given.pop(0)[0])
        bits = view.turned(float32.float_bits(given.pop(0)[...]))
        apart = (bits.shape[0] // format.k1, format.k1 // format.k2, format.k2, bits.shape[1])
        random = None if chance is None else view.turned(given.pop(0)[...]).reshape(apart)
        encoded = tiles.encode(
            bits.reshape(apart), format, axis=1, rule=rule, rounding=rounding, chance=random, tensor_scale=scale
        )
        _store(made.pop(), view, encoded.scales.astype(jnp.int32).reshape(apart[0], apart[3]))
        for ref, values, (width, size) in zip(
            made, (encoded.codes, encoded.sub_scales), _streams(format), strict=False
        ):
            assert values is not None
            flat = values.astype(jnp.int32).reshape(bits.shape[0] // width, apart[3])
            _store(ref, view, _packed(flat, size))

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
    format, axis = packed.format, packed.axis + packed.codes.ndim
    shape = list(packed.codes.shape)
    shape[axis] = packed.length
    view = _View(tuple(shape), axis, format)
    arrays = [packed.codes, packed.scales] + [a for a in (packed.sub_scales,) if a is not None]
    operands = [array.reshape(view.shape_of(array.shape[axis])) for array in arrays]
    specs = [view.spec(format, array.shape[axis], view.length) for array in arrays]
    if packed.tensor_scale is not None:
        operands.insert(0, packed.tensor_scale.reshape(1))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))

    def kernel(*refs: Any) -> None:
        given, out = list(refs[:-1]), refs[-1]
        scale = None if packed.tensor_scale is None else jnp.full((1, 1, 1, 1), given.pop(0)[0])
        codes = _unpacked(view.turned(given.pop(0)[...].astype(jnp.int32)), format.element.bits)
        apart = (codes.shape[0] // format.k1, format.k1 // format.k2, format.k2, codes.shape[1])
        scales = view.turned(given.pop(0)[...].astype(jnp.int32)).reshape(apart[0], 1, 1, apart[3])
        subs = None
        if packed.sub_scales is not None:
            subs = _unpacked(view.turned(given.pop(0)[...].astype(jnp.int32)), format.d2)
            subs = subs.reshape(apart[0], apart[1], 1, apart[3])
        bits = blocks.decode_blocks(blocks.Encoded(codes.reshape(apart), scales, subs), format, scale)
        # To the dtype behind the transposition, which is of 32 bits.
        out[...] = float32.to_dtype(view.turned(bits.reshape(codes.shape)), dtype)

    out = _call(
        kernel,
        view.grid(format),
        specs,
        view.spec(format, 1, 1),
        operands,
        jax.ShapeDtypeStruct(view.shape_of(view.length), dtype),
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
    length = weights.scales.shape[0 if along_rows else 1] * format.k1
    depth = min(length, (32 if along_rows else 128) * format.k1)
    steps, rows = pl.cdiv(length, depth), x.shape[0]
    x = jnp.pad(x, ((0, 0), (0, steps * depth - x.shape[1])))
    row_block, column_block = min(rows, said.rows), min(columns, said.columns)

    def kernel(x: Any, codes: Any, scales: Any, *rest: Any) -> None:
        *subs, out, total = rest

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def turned(ref: Any) -> jax.Array:
            values = ref[...].astype(jnp.int32)
            return values if along_rows else values.T

        code = _unpacked(turned(codes), format.element.bits)
        count = depth // format.k1
        apart = (count, format.k1 // format.k2, format.k2, code.shape[1])
        scale = turned(scales).reshape(count, 1, 1, code.shape[1])
        tau = None
        if subs:
            tau = _unpacked(turned(subs[0]), format.d2).reshape(count, apart[1], 1, code.shape[1])
        values = tiles.decode_for_product(code.reshape(apart), scale, tau, format, jnp.float32).reshape(code.shape)
        if length % depth:  # what lies beyond the end of an array is anything
            place = pl.program_id(2) * depth + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(place < length, values, 0)
        total[...] += lax.dot_general(
            x[...],
            values.astype(x.dtype),
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

        @pl.when(pl.program_id(2) == steps - 1)
        def _() -> None:
            out[...] = total[...]

    arrays = [weights.codes, weights.scales] + [a for a in (weights.sub_scales,) if a is not None]

    def spec(array: jax.Array) -> pl.BlockSpec:
        own = depth * array.shape[0 if along_rows else 1] // length
        if along_rows:
            return pl.BlockSpec((own, column_block), lambda m, n, k: (k, n))
        return pl.BlockSpec((column_block, own), lambda m, n, k: (n, k))

    sums = _call(
        kernel,
        (pl.cdiv(rows, row_block), pl.cdiv(columns, column_block), steps),
        [pl.BlockSpec((row_block, depth), lambda m, n, k: (m, k)), *(spec(array) for array in arrays)],
        pl.BlockSpec((row_block, column_block), lambda m, n, k: (m, n)),
        [x, *arrays],
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        scratch_shapes=[pltpu.VMEM((row_block, column_block), jnp.float32)],
        name="mx_matmul",
        interpret=interpret,
        flops=2 * rows * length * columns,
    )
    return sums if weights.tensor_scale is None else sums * weights.tensor_scale


class _View:
    """An array as [A, L, B], or [A, L] where the blocks lie along the last axis, L a multiple of the block."""

    def __init__(self, shape: tuple[int, ...], axis: int, format: BlockFormat):
        self.given, self.axis = shape, axis
        self.leading, self.trailing = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        self.is_last = self.trailing == 1
        self.length = pl.cdiv(shape[axis], format.k1) * format.k1

    def shape_of(self, depth: int) -> tuple[int, ...]:
        return (self.leading, depth) if self.is_last else (self.leading, depth, self.trailing)

    def padded(self, x: jax.Array) -> jax.Array:
        before = x.reshape(self.shape_of(self.given[self.axis]))
        return jnp.pad(before, [(0, self.length - before.shape[1] if a == 1 else 0) for a in range(before.ndim)])

    def back(self, array: jax.Array) -> jax.Array:
        """In the dimensions of the array that was given."""
        return array.reshape(*self.given[: self.axis], array.shape[1], *self.given[self.axis + 1 :])

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
        """Of an array that has numerator / denominator entries for one along L."""
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


def _store(ref: Any, view: _View, values: jax.Array) -> None:
    ref[...] = view.turned(values).astype(jnp.uint8)


def _streams(format: BlockFormat) -> list[tuple[int, int]]:
    """(numbers that share a value, its bits) of codes and second scales."""
    codes = (1, format.element.bits)
    return [codes] if format.sub_scale == "none" else [codes, (format.k2, format.d2)]


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: Any,
    operands: list[jax.Array],
    out_shape: Any,
    *,
    name: str,
    interpret: Interpret,
    scratch_shapes: Any = (),
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
