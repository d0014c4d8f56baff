"""Groups on a GPU in Pallas Triton: each number is read once, and each byte written once.

A program takes a tile of values that lie together, whole groups of them, and holds it in registers:

    quantize     load, transform, largest of each group, stochastic levels, halves of groups into bytes, store
    combine      bytes of one row after the other, decoded and added up; then as above, or the sum itself

A sum of two numbers has one order, so that the bits are those of every implementation. A transform as sums over an axis
of a tile moved every value between threads five times; with the blocks of 32 in threads (`_Tile`) it took a third of
the time on an H200.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. They have
run on an H200 (benchmarks/results/gpu_kernels.md), but for how `decode` reads its bytes, which is newer.
"""

import dataclasses
import functools
import itertools
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
      elements: Values that it quantizes or decodes; a power of two. It takes a whole group where that is larger. A
        thread holds a whole block of 32, of 4 bits two: fewer values leave threads with nothing of their own.
      warps: Warps of 32 threads that share them.
      unroll: Rows that are loaded before the first of them is added.
    """

    elements: int
    warps: int
    unroll: int


BLOCKS = GpuBlocks(elements=8192, warps=4, unroll=1)
_VECTOR = 4
"""Numbers that a thread reads at once: 16 bytes of float32."""
_MOST = 8192
"""Values of a group."""


def lacks(*formats: IntGroups) -> str | None:
    """Which of the formats is missing here, or None."""
    for format in formats:
        if format.size & (format.size - 1) or format.size > _MOST:
            return f"wants group sizes that are powers of two, at most {_MOST}; got {format.size}."
        if format.size * format.bits < 256:
            return f"wants groups of at least 64 values of 4 bits; got {format.size}."
    return None


@functools.partial(jax.jit, static_argnames=("format", "transform", "interpret"))
def quantize(
    x: jax.Array, seed: jax.Array | None, *, format: IntGroups, transform: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`xla.quantize`."""
    n, size = x.size, _elements(format)

    def kernel(x: Ref, *rest: Ref) -> None:
        tile = _Tile(n, size, format, blocks=True)
        pieces = [tile.load(x, piece) for piece in tile.pieces]
        tile.quantize(_transformed(pieces) if transform else pieces, *rest)

    operands, out = [x.reshape(-1), *_seeds(seed)], _shapes(n, format)
    return _call(kernel, n, size, operands, out, name="group_quantize", interpret=interpret)


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
    unroll = min(count, BLOCKS.unroll)

    def kernel(codes: Ref, scales: Ref, *rest: Ref) -> None:
        tile = _Tile(n, size, to or format, blocks=transform or to is not None)
        totals = [jnp.zeros((tile.rows, _VECTOR), jnp.float32) for _ in tile.pieces]
        if base is not None:
            totals = [tile.load(rest[0], piece).astype(jnp.float32) for piece in tile.pieces]
            rest = rest[1:]

        def add(row: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            decoded = tile.decode(codes, scales, row, format)
            return [total + value for total, value in zip(totals, decoded, strict=True)]

        def some(number: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            for row in range(unroll):
                totals = add(number * unroll + row, totals)
            return totals

        totals = lax.fori_loop(0, count // unroll, some, totals)
        for row in range(count - count % unroll, count):
            totals = add(jnp.int32(row), totals)
        if transform:
            totals = [total * (1 / values.TRANSFORM) for total in _transformed(totals)]
        if to is not None:
            tile.quantize(totals, *rest)
        else:
            for piece, total in zip(tile.pieces, totals, strict=True):
                tile.store(rest[-1], piece, total)

    operands = [codes.reshape(count, -1), scales]
    operands += [] if base is None else [base.reshape(-1)]
    if to is not None:
        out = _shapes(n, to)
        return _call(kernel, n, size, operands + _seeds(seed), out, name="group_requantize", interpret=interpret)
    out = jax.ShapeDtypeStruct((n,), jnp.float32 if base is None else base.dtype)
    return _call(kernel, n, size, operands, out, name="group_dequantize", interpret=interpret)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Four neighbours in each of many places.

    Attributes:
      group: int32[rows, 1], numbers of their groups in the array.
      half: Which half of the group they lie in; 0 where a group is not cut in halves.
      start: int32[rows, 1], places within the half of the first of the four.
    """

    group: jax.Array
    half: int
    start: jax.Array

    @property
    def within(self) -> jax.Array:
        """int32[rows, 4], places within the half."""
        return self.start + _offsets()


def _offsets() -> jax.Array:
    """int32[1, 4], of the numbers that a thread reads at once."""
    return lax.broadcasted_iota(jnp.int32, (1, _VECTOR), 1)


class _Tile:
    """`size` of n values, those of this program, as pieces.

    Of 4 bits a piece lies in the first or the second halves of groups: pairs that share a byte are two pieces then. By
    `blocks` a thread holds whole blocks of 32, so that the sums of a transform are sums of pieces, and nothing moves
    between threads but the maxima of groups. Otherwise neighbouring threads hold neighbouring values, as memory has
    them.
    """

    def __init__(self, n: int, size: int, format: IntGroups, *, blocks: bool) -> None:
        self.n, self.format = n, format
        halves = 2 if format.bits == 4 else 1
        self.half, count = format.size // halves, 32 // _VECTOR
        self.rows = size // halves // 32
        first = pl.program_id(0) * (size // format.size)
        row = lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        self.pieces: list[_Piece] = []
        for half, number in itertools.product(range(halves), range(count)):
            if blocks:
                group, start = row // (self.half // 32), row % (self.half // 32) * 32 + number * _VECTOR
            else:
                four = number * self.rows + row
                group, start = four // (self.half // _VECTOR), four % (self.half // _VECTOR) * _VECTOR
            self.pieces.append(_Piece(first + group, half, start))

    def place(self, piece: _Piece) -> jax.Array:
        """int32[rows, 4], in the flat array."""
        return piece.group * self.format.size + piece.half * self.half + piece.within

    def load(self, ref: Ref, piece: _Piece) -> jax.Array:
        place = self.place(piece)
        return plgpu.load(ref.at[place], mask=place < self.n, other=0)

    def store(self, ref: Ref, piece: _Piece, value: jax.Array) -> None:
        place = self.place(piece)
        plgpu.store(ref.at[place], value.astype(ref.dtype), mask=place < self.n)

    def decode(self, codes: Ref, scales: Ref, row: jax.Array, format: IntGroups) -> list[jax.Array]:
        """The values of every piece in row `row` of [rows, bytes] codes and [rows, groups] scales."""
        loaded: list[jax.Array] = []
        made: list[jax.Array] = []
        half = format.size // 2
        for piece in self.pieces:
            if format.size == self.format.size:
                group, within = piece.group, piece.half * self.half + piece.start
            else:
                four = (piece.group * self.format.size + piece.half * self.half + piece.start) // _VECTOR
                group, within = four // (format.size // _VECTOR), four % (format.size // _VECTOR) * _VECTOR
            # Of groups, the same for many pieces: their scales are then loaded once.
            inside = group < self.n // format.size
            if format.bits == 4 and self.half == half and piece.half:
                code, shift = loaded[len(made) - len(loaded)], 4  # a byte holds both
            else:
                place = group * format.size + within + _offsets()
                shift = jnp.zeros_like(within)
                if format.bits == 4:
                    place = group * half + within // _VECTOR % (half // _VECTOR) * _VECTOR + _offsets()
                    shift = within // half * 4
                code = plgpu.load(codes.at[jnp.full_like(place, row), place], mask=inside, other=0).astype(jnp.int32)
                loaded.append(code)
            scale = plgpu.load(scales.at[jnp.full_like(group, row), group], mask=inside, other=0.0)
            made.append(values.value(values.signed(code >> shift, format.bits), scale))
        return made

    def quantize(self, pieces: list[jax.Array], *refs: Ref) -> None:
        """Writes codes and scales of a tile by blocks; `refs` are the seed, if there is one, codes and scales."""
        *seed, codes, scales = refs
        size, bits = self.format.size, self.format.bits
        largest = functools.reduce(jnp.maximum, [values.magnitude(piece) for piece in pieces])
        largest = jnp.max(jnp.max(largest, axis=1).reshape(-1, self.half // 32), axis=1)
        scale, factor = values.scale_and_factor(largest, bits)
        factor = jnp.broadcast_to(factor[:, None], (factor.shape[0], self.half // 32)).reshape(self.rows, 1)
        levels = []
        for piece, x in zip(self.pieces, pieces, strict=True):
            drawn = values.chance(seed[0][0], self.place(piece).astype(jnp.uint32)) if seed else None
            levels.append(values.level(x, jnp.broadcast_to(factor, x.shape), bits, drawn) & (1 << bits) - 1)
        if bits == 8:
            for piece, level in zip(self.pieces, levels, strict=True):
                self.store(codes, piece, level)
        else:
            count = len(levels) // 2
            for piece, low, high in zip(self.pieces[:count], levels[:count], levels[count:], strict=True):
                place = piece.group * self.half + piece.within
                plgpu.store(codes.at[place], (low | high << 4).astype(jnp.uint8), mask=place < self.n // 2)
        group = pl.program_id(0) * scale.shape[0] + lax.iota(jnp.int32, scale.shape[0])
        plgpu.store(scales.at[group], scale, mask=group < self.n // size)


def _transformed(pieces: list[jax.Array]) -> list[jax.Array]:
    """Hadamard transforms of blocks of 32, whose pieces follow each other."""
    columns = [column for piece in pieces for column in _columns(piece)]
    for half in values.HALVES:
        for low in (i for i in range(len(columns)) if not i & half):
            a, b = columns[low], columns[low + half]
            columns[low], columns[low + half] = a + b, a - b
    return [_joined(columns[i : i + _VECTOR]) for i in range(0, len(columns), _VECTOR)]


def _columns(piece: jax.Array) -> list[jax.Array]:
    """float32[rows, 4] -> float32[rows] each, which are in the registers of one thread."""
    number = lax.broadcasted_iota(jnp.int32, piece.shape, 1)
    words = lax.bitcast_convert_type(piece, jnp.int32)  # an integer plus 0 costs nothing, a float plus 0 is computed
    picked = [jnp.sum(jnp.where(number == i, words, 0), axis=1) for i in range(_VECTOR)]
    return [lax.bitcast_convert_type(column, jnp.float32) for column in picked]


def _joined(columns: list[jax.Array]) -> jax.Array:
    """The inverse of `_columns`."""
    shape = (columns[0].shape[0], _VECTOR)
    number = lax.broadcasted_iota(jnp.int32, shape, 1)
    piece = jnp.broadcast_to(columns[0][:, None], shape)
    for i, column in enumerate(columns[1:], 1):
        piece = jnp.where(number == i, column[:, None], piece)
    return piece


def _seeds(seed: jax.Array | None) -> list[jax.Array]:
    return [] if seed is None else [seed.reshape(1)]


def _shapes(n: int, format: IntGroups) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((n * format.bits // 8,), jnp.uint8),
        jax.ShapeDtypeStruct((n // format.size,), jnp.float32),
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
