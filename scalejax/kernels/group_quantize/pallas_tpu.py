"""Groups on a TPU: rows of 128 lanes as they lie in memory, a group in k rows, 128 groups at a time.

Row j of 128 groups is a load with a stride of k, so that what is done with a group's rows is done lane by lane:

    largest     over the rows of a group, then of a tile [128 groups, 128] that is transposed: a vector with a lane a
                group, in which scales are computed and stored
    factors     that vector along the lanes of a tile, transposed back
    bytes       row i with row i + k / 2 in one; of groups of 128 the two halves of a row, of two groups at a time

A transform adds lanes to lanes 1, 2, 4, 8 and 16 farther: rotations, by which its sums have the order that they have
everywhere. Arithmetic is of 32 bits, in vector memory; bytes are made of whole tiles.

Compiled for every chip and interpreted; it has not run on a TPU.
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

from scalejax.kernels.group_quantize import values
from scalejax.kernels.group_quantize.groups import IntGroups
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.types import Kernel, Ref, Shapes

LANES = 128
_AT_ONCE = 128
"""Groups whose scales are a vector."""
_ROWS = 2048
"""Of a step, about: a megabyte of float32. Not tuned on a chip."""
_MOST = 4096
"""Values of a group."""


def lacks(*formats: IntGroups) -> str | None:
    """Which of the formats is missing here, or None."""
    for format in formats:
        rows, rest = divmod(format.size, LANES)
        if rest or format.size > _MOST or (format.bits == 4 and rows > 1 and rows % 2):
            return (
                f"wants group sizes that are multiples of {LANES}, of 4 bits {LANES} or multiples of {2 * LANES}, at "
                f"most {_MOST}; got {format.bits} bits, {format.size}."
            )
    return None


@functools.partial(jax.jit, static_argnames=("format", "transform", "interpret"))
def quantize(
    x: jax.Array, seed: jax.Array | None, *, format: IntGroups, transform: bool, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """`xla.quantize`."""
    cut = _Cut(x.size, format)

    def kernel(*refs: Ref) -> None:
        (x, *seeds), (codes, scales, work, *held) = refs[: len(operands)], refs[len(operands) :]
        work[...] = x[...]
        if transform:
            _transform(work)
        _quantize(work, codes, scales, held, format, seeds, pl.program_id(0) * cut.rows)

    operands, specs = [cut.values(x)], [cut.spec(cut.rows)]
    if seed is not None:
        operands, specs = [*operands, seed.reshape(1)], [*specs, pl.BlockSpec(memory_space=pltpu.SMEM)]
    codes, scales = _call(
        kernel, (cut.steps,), specs, cut.specs(format), operands, cut.shapes(format),
        [_float32(cut.rows), *cut.held(format)], name="group_quantize", interpret=interpret,
    )  # fmt: skip
    return cut.back(codes, scales, format)


@functools.partial(jax.jit, static_argnames=("format", "transform", "to", "interpret"))
def combine(
    codes: jax.Array,
    scales: jax.Array,
    base: jax.Array | None,
    seed: jax.Array | None,
    *,
    format: IntGroups,
    transform: bool,
    to: IntGroups | None,
    interpret: Interpret = False,
) -> Any:
    """`xla.combine`."""
    count, groups = scales.shape
    cut = _Cut(groups * format.size, format, *([] if to is None else [to]))

    def kernel(*refs: Ref) -> None:
        codes, scales, *rest = refs[: len(operands)]
        made, (total, *scratch) = refs[len(operands) : -len(held)], refs[-len(held) :]
        step, row = pl.program_id(0), pl.program_id(1)

        @pl.when(row == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total) if base is None else rest[0][...].astype(jnp.float32)

        _add(total, codes, scales, scratch[:2], format)

        @pl.when(row == count - 1)
        def _() -> None:
            if transform:
                _transform(total)
                total[...] = total[...] * (1 / values.TRANSFORM)
            if to is None:
                made[0][...] = total[...].astype(made[0].dtype)
            else:
                _quantize(total, made[0], made[1], scratch[2:], to, rest, step * cut.rows)

    code_rows = cut.rows * format.bits // 8
    operands = [cut.bytes_of(codes, format), cut.scales_of(scales, format)]
    specs = [
        pl.BlockSpec((None, code_rows, LANES), lambda step, row: (row, step, 0)),
        pl.BlockSpec((None, cut.units(format), 1, _AT_ONCE), lambda step, row: (row, step, 0, 0)),
    ]
    if base is not None:
        operands, specs = [*operands, cut.values(base)], [*specs, cut.spec(cut.rows)]
    if seed is not None:
        operands, specs = [*operands, seed.reshape(1)], [*specs, pl.BlockSpec(memory_space=pltpu.SMEM)]
    held = [_float32(cut.rows), *cut.held(format)]
    if to is None:
        out = [jax.ShapeDtypeStruct((cut.whole // LANES, LANES), jnp.float32 if base is None else base.dtype)]
        out_specs = [cut.spec(cut.rows)]
    else:
        out, out_specs, held = cut.shapes(to), cut.specs(to), held + cut.held(to)
    made = _call(
        kernel, (cut.steps, count), specs, out_specs, operands, out, held,
        name="group_dequantize" if to is None else "group_requantize", interpret=interpret,
    )  # fmt: skip
    return made[0].reshape(-1)[: cut.n] if to is None else cut.back(made[0], made[1], to)


class _Cut:
    """n values as rows of 128 lanes, cut into steps of whole groups, 128 of each format at a time."""

    def __init__(self, n: int, *formats: IntGroups) -> None:
        unit = _AT_ONCE * math.lcm(*(format.size for format in formats)) // LANES
        self.n = n
        # Two groups of 128 share a row of bytes.
        self.whole = pl.cdiv(n, 2 * LANES) * 2 * LANES
        self.rows = unit * max(1, min(_ROWS // unit, pl.cdiv(self.whole // LANES, unit)))
        self.steps = pl.cdiv(self.whole // LANES, self.rows)

    def units(self, format: IntGroups) -> int:
        """Vectors of scales of a step."""
        return self.rows * LANES // (format.size * _AT_ONCE)

    def spec(self, rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, LANES), lambda step, *_: (step, 0))

    def specs(self, format: IntGroups) -> list[pl.BlockSpec]:
        """Of codes and scales."""
        scales = pl.BlockSpec((self.units(format), 1, _AT_ONCE), lambda step, *_: (step, 0, 0))
        return [self.spec(self.rows * format.bits // 8), scales]

    def shapes(self, format: IntGroups) -> list[jax.ShapeDtypeStruct]:
        """Of codes and scales."""
        return [
            jax.ShapeDtypeStruct((self.whole * format.bits // 8 // LANES, LANES), jnp.uint8),
            jax.ShapeDtypeStruct((self.steps * self.units(format), 1, _AT_ONCE), jnp.float32),
        ]

    def held(self, format: IntGroups) -> list[pl.MemoryRef]:
        """Scratch of `_quantize` and `_add`: bytes, and levels of 128 groups."""
        return [_int32(self.rows * format.bits // 8), _int32(_AT_ONCE)]

    def values(self, x: jax.Array) -> jax.Array:
        return _filled(x, self.whole).reshape(-1, LANES)

    def bytes_of(self, codes: jax.Array, format: IntGroups) -> jax.Array:
        """[rows of arrivals, rows, 128]."""
        return _filled(codes, self.whole * format.bits // 8).reshape(codes.shape[0], -1, LANES)

    def scales_of(self, scales: jax.Array, format: IntGroups) -> jax.Array:
        """[rows of arrivals, units, 1, 128]."""
        count = self.steps * self.units(format) * _AT_ONCE
        return _filled(scales, count).reshape(scales.shape[0], -1, 1, _AT_ONCE)

    def back(self, codes: jax.Array, scales: jax.Array, format: IntGroups) -> tuple[jax.Array, jax.Array]:
        return codes.reshape(-1)[: self.n * format.bits // 8], scales.reshape(-1)[: self.n // format.size]


def _transform(ref: Ref) -> None:
    """Each 32 lanes, in place."""
    lane = lax.broadcasted_iota(jnp.int32, (_AT_ONCE, LANES), 1)

    @pl.loop(0, ref.shape[0] // _AT_ONCE)
    def _(unit: jax.Array) -> None:
        span = _span(unit * _AT_ONCE, _AT_ONCE, 1)
        x = ref[span, :]
        for half in values.HALVES:
            second = (lane & half) != 0
            other = jnp.where(second, pltpu.roll(x, half, 1), pltpu.roll(x, LANES - half, 1))
            x = other + jnp.where(second, -x, x)
        ref[span, :] = x


def _quantize(
    rows: Ref,
    codes: Ref,
    scales: Ref,
    scratch: Sequence[Ref],
    format: IntGroups,
    seeds: Sequence[Ref],
    first: jax.Array,
) -> None:
    """Codes and scales of float32[rows, 128], of which the first is row `first` of the array."""
    held, levels = scratch
    k, bits = format.size // LANES, format.bits
    shape = (_AT_ONCE, LANES)
    group, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))

    @pl.loop(0, rows.shape[0] // (_AT_ONCE * k))
    def _(unit: jax.Array) -> None:
        start = unit * (_AT_ONCE * k)

        def part(j: int) -> jax.Array:
            return rows[_span(start + j, _AT_ONCE, k), :]

        largest = functools.reduce(jnp.maximum, (values.magnitude(part(j)) for j in range(k)))
        scale, factor = values.scale_and_factor(jnp.max(largest.T, axis=0, keepdims=True), bits)
        scales[unit] = scale
        spread = _along_groups(factor)

        def level(j: int) -> jax.Array:
            drawn = None
            if seeds:
                place = (first + start + j + group * k) * LANES + lane
                drawn = values.chance(seeds[0][0], lax.bitcast_convert_type(place, jnp.uint32))
            return values.level(part(j), spread, bits, drawn)

        if bits == 8:
            for j in range(k):
                held[_span(start + j, _AT_ONCE, k), :] = level(j) & 255
        elif k > 1:
            for i in range(k // 2):
                byte = (level(i) & 15) | ((level(i + k // 2) & 15) << 4)
                held[_span(unit * (_AT_ONCE * k // 2) + i, _AT_ONCE, k // 2), :] = byte
        else:
            levels[...] = level(0) & 15
            even, odd = (levels[pl.ds(i, _AT_ONCE // 2, stride=2), :] for i in range(2))
            low = jnp.where(_first_half(even), even, _turned(odd))
            high = jnp.where(_first_half(even), _turned(even), odd)
            held[_span(unit * (_AT_ONCE // 2), _AT_ONCE // 2, 1), :] = low | (high << 4)

    codes[...] = held[...].astype(jnp.uint8)


def _add(total: Ref, codes: Ref, scales: Ref, scratch: Sequence[Ref], format: IntGroups) -> None:
    """Adds what codes and scales stand for to float32[rows, 128]."""
    held, levels = scratch
    k, bits = format.size // LANES, format.bits
    held[...] = codes[...].astype(jnp.int32)

    @pl.loop(0, total.shape[0] // (_AT_ONCE * k))
    def _(unit: jax.Array) -> None:
        start = unit * (_AT_ONCE * k)
        spread = _along_groups(scales[unit])

        def add(j: int, level: jax.Array) -> None:
            span = _span(start + j, _AT_ONCE, k)
            total[span, :] = total[span, :] + values.value(level, spread)

        if bits == 8:
            for j in range(k):
                add(j, values.signed(held[_span(start + j, _AT_ONCE, k), :], 8))
        elif k > 1:
            for i in range(k // 2):
                byte = held[_span(unit * (_AT_ONCE * k // 2) + i, _AT_ONCE, k // 2), :]
                add(i, values.signed(byte, 4))
                add(i + k // 2, values.signed(byte >> 4, 4))
        else:
            byte = held[_span(unit * (_AT_ONCE // 2), _AT_ONCE // 2, 1), :]
            low, high = byte, byte >> 4
            levels[pl.ds(0, _AT_ONCE // 2, stride=2), :] = jnp.where(_first_half(low), low, _turned(high))
            levels[pl.ds(1, _AT_ONCE // 2, stride=2), :] = jnp.where(_first_half(low), _turned(low), high)
            add(0, values.signed(levels[...], 4))


def _along_groups(vector: jax.Array) -> jax.Array:
    """[1, 128] -> [128, 128], the number of a group in all lanes of its row."""
    return jnp.broadcast_to(vector, (_AT_ONCE, LANES)).T


def _first_half(like: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, like.shape, 1) < LANES // 2


def _turned(x: jax.Array) -> jax.Array:
    """The halves of rows exchanged."""
    return pltpu.roll(x, LANES // 2, 1)


def _span(start: jax.Array, count: int, stride: int) -> slice | pl.Slice:
    """`count` rows, `stride` apart."""
    return pl.ds(start, count, stride=stride)


def _float32(rows: int) -> pl.MemoryRef:
    return pltpu.VMEM((rows, LANES), jnp.float32)


def _int32(rows: int) -> pl.MemoryRef:
    return pltpu.VMEM((rows, LANES), jnp.int32)


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Zeros behind the last axis."""
    missing = length - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _call(
    kernel: Kernel,
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: list[pl.BlockSpec],
    operands: list[jax.Array],
    out_shape: Shapes,
    scratch_shapes: list[pl.MemoryRef],
    *,
    name: str,
    interpret: Interpret,
) -> Any:
    moved = sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out_shape))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")[: len(grid)]),
        cost_estimate=pl.CostEstimate(flops=5 * moved, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=name,
    )(*operands)
