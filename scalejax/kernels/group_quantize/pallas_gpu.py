"""Groups on a GPU in Pallas Triton: each number is read once, and each byte written once.

A program takes a tile of values that lie together, whole groups of them, and holds it in registers:

    quantize     load, transform, largest of each group, stochastic levels, halves of groups into bytes, store
    combine      bytes of one row after the other, decoded and added up; then as above, or the sum itself

The five stages of a transform see the tile as [pairs, 2, distance] and sum over the two, with a sign. A sum of two
numbers has one order, so that the bits are those of every implementation.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. They have been
compiled for Hopper and interpreted, and have not run on a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax.kernels.group_quantize import values
from scalejax.kernels.group_quantize.groups import IntGroups
from scalejax.kernels.types import Kernel, Ref, Shapes


@dataclasses.dataclass(frozen=True)
class GpuBlocks:
    """Sizes of one program.

    Attributes:
      elements: Values that it quantizes or decodes; a power of two. It takes a whole group where that is larger.
      warps: Warps of 32 threads that share them.
      unroll: Rows that are loaded before the first of them is added.
    """

    elements: int
    warps: int
    unroll: int


BLOCKS = GpuBlocks(elements=2048, warps=4, unroll=1)
_MOST = 8192
"""Values of a group."""


def lacks(*formats: IntGroups) -> str | None:
    """Which of the formats is missing here, or None."""
    for format in formats:
        if format.size & (format.size - 1) or format.size > _MOST:
            return f"wants group sizes that are powers of two, at most {_MOST}; got {format.size}."
    return None


@functools.partial(jax.jit, static_argnames=("format", "transform", "interpret"))
def quantize(
    x: jax.Array, seed: jax.Array | None, *, format: IntGroups, transform: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`xla.quantize`."""
    n, size = x.size, _elements(format)

    def kernel(x: Ref, *rest: Ref) -> None:
        tile = _Tile(n, size)
        given = tile.load(x, format.size).reshape(size)
        tile.quantize(_butterfly(given) if transform else given, format, *rest)

    operands = [x.reshape(-1, format.size), *_seeds(seed)]
    out = _shapes(n, format)
    codes, scales = _call(kernel, n, size, operands, out, name="group_quantize", interpret=interpret)
    return codes.reshape(-1), scales


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
    interpret: bool = False,
) -> Any:
    """`xla.combine`."""
    count, groups = scales.shape
    n, size = groups * format.size, _elements(format, to or format)
    row_bytes, unroll = format.size * format.bits // 8, min(count, BLOCKS.unroll)

    def kernel(codes: Ref, scales: Ref, *rest: Ref) -> None:
        tile = _Tile(n, size)
        total = jnp.zeros(size, jnp.float32)
        if base is not None:
            total = tile.load(rest[0], format.size).reshape(size).astype(jnp.float32)
            rest = rest[1:]

        def add(row: jax.Array, total: jax.Array) -> jax.Array:
            bytes_of = tile.load(codes, row_bytes, row).astype(jnp.int32)
            level = values.from_bytes(bytes_of) if format.bits == 4 else values.signed(bytes_of, 8)
            scale = tile.load_scales(scales, row, format)
            scale = jnp.broadcast_to(scale[:, None], (scale.shape[0], format.size)).reshape(size)
            return total + values.value(level.reshape(size), scale)

        def some(number: jax.Array, total: jax.Array) -> jax.Array:
            for row in range(unroll):
                total = add(number * unroll + row, total)
            return total

        total = lax.fori_loop(0, count // unroll, some, total)
        for row in range(count - count % unroll, count):
            total = add(jnp.int32(row), total)
        if transform:
            total = _butterfly(total) * (1 / values.TRANSFORM)
        if to is not None:
            tile.quantize(total, to, *rest)
        else:
            tile.store(rest[-1], total, format.size)

    operands = [codes.reshape(count, groups, row_bytes), scales]
    operands += [] if base is None else [base.reshape(groups, format.size)]
    if to is not None:
        out = _shapes(n, to)
        made = _call(kernel, n, size, operands + _seeds(seed), out, name="group_requantize", interpret=interpret)
        return made[0].reshape(-1), made[1]
    out = jax.ShapeDtypeStruct((groups, format.size), jnp.float32 if base is None else base.dtype)
    return _call(kernel, n, size, operands, out, name="group_dequantize", interpret=interpret).reshape(-1)


class _Tile:
    """`size` of n values, those of this program, and where they lie in arrays [groups, n of a group]."""

    def __init__(self, n: int, size: int) -> None:
        self.n, self.size = n, size
        self.number = pl.program_id(0)

    def _place(self, size: int, width: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Indices of groups of `size` values with `width` entries each, and which are there."""
        per = self.size // size
        group = self.number * per + lax.broadcasted_iota(jnp.int32, (per, width), 0)
        return (group, lax.broadcasted_iota(jnp.int32, (per, width), 1)), group < self.n // size

    def load(self, ref: Ref, width: int, row: jax.Array | None = None) -> jax.Array:
        """[groups, width] of an array [groups, width], or of row `row` of [rows, groups, width]."""
        index, inside = self._place(self.n // ref.shape[-2], width)
        at = index if row is None else (jnp.full_like(index[0], row), *index)
        return plgpu.load(ref.at[at], mask=inside, other=0)

    def load_scales(self, ref: Ref, row: jax.Array, format: IntGroups) -> jax.Array:
        per = self.size // format.size
        group = self.number * per + lax.iota(jnp.int32, per)
        return plgpu.load(ref.at[jnp.full_like(group, row), group], mask=group < self.n // format.size, other=0.0)

    def store(self, ref: Ref, flat: jax.Array, width: int) -> None:
        index, inside = self._place(self.n // ref.shape[-2], width)
        plgpu.store(ref.at[index], flat.reshape(-1, width).astype(ref.dtype), mask=inside)

    def quantize(self, flat: jax.Array, format: IntGroups, *refs: Ref) -> None:
        """Writes codes and scales; `refs` are the seed, if there is one, codes and scales."""
        *seed, codes, scales = refs
        size, per = format.size, self.size // format.size
        groups = flat.reshape(per, size)
        scale, factor = values.scale_and_factor(jnp.max(values.magnitude(groups), axis=1), format.bits)
        (group, within), _ = self._place(size, size)
        drawn = None
        if seed:
            place = group.astype(jnp.uint32) * jnp.uint32(size) + within.astype(jnp.uint32)
            drawn = values.chance(seed[0][0], place)
        level = values.level(groups, jnp.broadcast_to(factor[:, None], groups.shape), format.bits, drawn)
        if format.bits == 4:
            level = values.in_bytes(level.reshape(per, 2, size // 2))
        self.store(codes, level & 255, size * format.bits // 8)
        group = self.number * per + lax.iota(jnp.int32, per)
        plgpu.store(scales.at[group], scale, mask=group < self.n // size)


def _butterfly(x: jax.Array) -> jax.Array:
    """Each 32 of float32[n] transformed."""
    for half in values.HALVES:
        shape = (x.shape[0] // (2 * half), 2, 2, half)  # pairs, from, to, distance
        both = lax.broadcasted_iota(jnp.int32, shape, 1) & lax.broadcasted_iota(jnp.int32, shape, 2)
        pairs = jnp.broadcast_to(x.reshape(shape[0], 2, 1, half), shape)
        x = jnp.sum(jnp.where(both == 1, -pairs, pairs), axis=1).reshape(x.shape)
    return x


def _seeds(seed: jax.Array | None) -> list[jax.Array]:
    return [] if seed is None else [seed.reshape(1)]


def _shapes(n: int, format: IntGroups) -> list[jax.ShapeDtypeStruct]:
    groups = n // format.size
    return [
        jax.ShapeDtypeStruct((groups, format.size * format.bits // 8), jnp.uint8),
        jax.ShapeDtypeStruct((groups,), jnp.float32),
    ]


def _elements(*formats: IntGroups) -> int:
    return max(BLOCKS.elements, *(format.size for format in formats))


def _call(
    kernel: Kernel, n: int, size: int, operands: list[jax.Array], out: Shapes, *, name: str, interpret: bool
) -> Any:
    moved = sum(x.size * x.dtype.itemsize for x in operands + jax.tree.leaves(out))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, size),),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=BLOCKS.warps),
        cost_estimate=pl.CostEstimate(flops=20 * n, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=name,
    )(*operands)
