"""Grouped products on a TPU's core: tiles of rows, each with every group that has rows in it.

    rows     0          512        1024       1536            visits (tile, group)
    groups   0 0 0 0 0 1 1 1 3 3 3 3 3 3 3 - - - - -          0,0  0,1  1,1  1,3  2,3  2,-  3,-

Groups need not begin where tiles do: a tile that several groups share is visited by one after another, and each keeps
its own rows of the result, which stays in vector memory meanwhile. Rows behind the last group are a group without
weights, whose rows are zeros. The list of visits is made by XLA from the sizes and read from scalar memory; its length
is known on the device alone, and so is that of the grid.

    all but the next    grid (columns, visits, parts of the sum): a tile of rows by a matrix or two
    weight_gradients    grid (inner, columns, visits): a sum for as long as the group is the same;
                        a group without rows is visited once, and gets its zeros

`gated` reads its rows once for both products, and neither leaves vector memory unless a gradient wants it.
`gate_gradients` turns them into their gradients where they lie; that of what is between the layers is never in memory.

Compiled for every chip and interpreted in the tests; it has not run on a TPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.kernels.grouped_matmul import tiles
from scalejax.kernels.grouped_matmul.forms import Finish, Forms
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.types import Kernel, Number, Ref, Shapes


def lacks(dtype: jax.typing.DTypeLike) -> str | None:
    """Which part of a case is missing here, or None."""
    return None if dtype in (jnp.float32, jnp.bfloat16) else f"computes in float32 and bfloat16; got {dtype}."


def weight_gradients(
    x: jax.Array, grads: tuple[jax.Array, ...], sizes: jax.Array, *, interpret: Interpret = False
) -> tuple[jax.Array, ...]:
    """See `blocks.weight_gradients`."""
    said = _sizes()
    rows, inner, outer = x.shape[0], x.shape[1], grads[0].shape[1]
    row_tile = _row_tile(rows, x.dtype)
    chunk = _chunk(row_tile, said.chunk // x.dtype.itemsize)
    # A sum of 2^20 float32 for each gradient.
    inner_tile, outer_tile = (min(length, 2 * said.columns) for length in (inner, outer))
    visits = _Visits(sizes, rows, row_tile, least=1)

    def kernel(tile: Ref, group: Ref, begins: Ref, ends: Ref, x: Ref, *refs: Ref) -> None:
        grads, outs, sums = (refs[i * len(refs) // 3 : (i + 1) * len(refs) // 3] for i in range(3))
        visit, last = pl.program_id(2), pl.num_programs(2) - 1
        here = group[visit]
        begin, end, first_row = begins[here], ends[here], tile[visit] * row_tile

        @pl.when((visit == 0) | (group[jnp.maximum(visit - 1, 0)] != here))
        def _() -> None:
            for total in sums:
                total[...] = jnp.zeros(total.shape, jnp.float32)

        def add(is_whole: bool) -> None:
            def own(ref: Ref, number: jax.Array) -> jax.Array:
                value = ref[pl.ds(pl.multiple_of(number * chunk, chunk), chunk), :]
                if is_whole:
                    return value
                row = first_row + number * chunk + lax.broadcasted_iota(jnp.int32, value.shape, 0)
                return jnp.where((row >= begin) & (row < end), value.astype(jnp.float32), 0).astype(value.dtype)

            @pl.loop(0, row_tile // chunk)
            def _(number: jax.Array) -> None:
                for g, total in zip(grads, sums, strict=True):
                    total[...] += _dot(own(x, number), own(g, number), (0, 0))

        is_whole = (begin <= first_row) & (first_row + row_tile <= end)
        pl.when(is_whole)(functools.partial(add, True))
        pl.when(~is_whole & (begin < end))(functools.partial(add, False))

        @pl.when((visit == last) | (group[jnp.minimum(visit + 1, last)] != here))
        def _() -> None:
            for out, total in zip(outs, sums, strict=True):
                out[...] = total[...].astype(out.dtype)

    out_spec = pl.BlockSpec((None, inner_tile, outer_tile), lambda k, n, visit, tile, group, *_: (group[visit], k, n))
    return tuple(
        _call(
            kernel,
            visits,
            (pl.cdiv(inner, inner_tile), pl.cdiv(outer, outer_tile), visits.count),
            [
                pl.BlockSpec((row_tile, inner_tile), lambda k, n, visit, tile, *_: (tile[visit], k)),
                *[pl.BlockSpec((row_tile, outer_tile), lambda k, n, visit, tile, *_: (tile[visit], n)) for _ in grads],
            ],
            [out_spec for _ in grads],
            [x, *grads],
            [jax.ShapeDtypeStruct((sizes.shape[0], inner, outer), x.dtype) for _ in grads],
            [pltpu.VMEM((inner_tile, outer_tile), jnp.float32) for _ in grads],
            flops=2 * len(grads) * rows * inner * outer,
            # Rows are read again for every tile of the other axis.
            read=x.nbytes * pl.cdiv(outer, outer_tile) + sum(g.nbytes for g in grads) * pl.cdiv(inner, inner_tile),
            name="grouped_matmul_weight_gradients",
            interpret=interpret,
        )
    )


class _RowsCall:
    """Products of tiles of rows with matrices of their groups.

    Args:
      name: Of the kernel.
      sizes: int32[n].
      interpret: Whether there is no TPU.
      contract: Axis of the weights that is summed over, 1 or 2.
    """

    def __init__(self, name: str, sizes: jax.Array, interpret: Interpret, contract: int):
        self.name, self.sizes, self.interpret, self.contract = name, sizes, interpret, contract

    def __call__(
        self,
        rows: tuple[jax.Array, ...],
        weights: tuple[jax.Array, ...],
        finish: Finish,
        kept: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """See `forms.RowsCall`."""
        said = _sizes()
        count, length = rows[0].shape
        width = weights[0].shape[3 - self.contract]
        dtype = rows[0].dtype
        row_tile, column_tile = _row_tile(count, dtype), min(width, said.columns)
        depth = _depth(length, said.depth_bytes // dtype.itemsize)
        chunk = _chunk(depth, 2 * said.chunk // dtype.itemsize)
        steps, groups = pl.cdiv(length, depth), self.sizes.shape[0]
        visits = _Visits(self.sizes, count, row_tile, least=0)
        shape = jax.ShapeDtypeStruct((row_tile, column_tile), jnp.float32)
        given = len(rows) + len(weights) + len(kept)
        results = len(jax.eval_shape(finish, *[shape for _ in (*weights, *kept)]))

        def kernel(tile: Ref, group: Ref, begins: Ref, ends: Ref, *refs: Ref) -> None:
            xs, ws, olds = refs[: len(rows)], refs[len(rows) : given - len(kept)], refs[given - len(kept) : given]
            outs, sums = refs[given : given + results], refs[given + results :]
            visit, step = pl.program_id(1), pl.program_id(2)
            here = group[visit]

            @pl.when(step == 0)
            def _() -> None:
                for total in sums:
                    total[...] = jnp.zeros(total.shape, jnp.float32)

            def part(ref: Ref, axis: int, number: jax.Array) -> jax.Array:
                span = pl.ds(pl.multiple_of(number * chunk, chunk), chunk)
                value = ref[(slice(None), span) if axis else (span, slice(None))]
                if length % depth == 0:
                    return value
                # The last block of an axis may reach beyond its end, where memory holds anything.
                place = step * depth + number * chunk + lax.broadcasted_iota(jnp.int32, value.shape, axis)
                return jnp.where(place < length, value.astype(jnp.float32), 0).astype(value.dtype)

            @pl.when(here < groups)
            def _() -> None:
                @pl.loop(0, depth // chunk)
                def _(number: jax.Array) -> None:
                    for i, (w, total) in enumerate(zip(ws, sums, strict=True)):
                        left, right = part(xs[i % len(xs)], 1, number), part(w, self.contract - 1, number)
                        total[...] += _dot(left, right, (1, self.contract - 1))

            @pl.when(step == steps - 1)
            def _() -> None:
                row = tile[visit] * row_tile + lax.broadcasted_iota(jnp.int32, (row_tile, column_tile), 0)
                own = (row >= begins[here]) & (row < ends[here])
                is_first = (visit == 0) | (tile[jnp.maximum(visit - 1, 0)] != tile[visit])
                before = [old[...].astype(jnp.float32) for old in olds]
                # What takes the place of `kept` keeps it for the groups to come: they may read it from there again.
                first = [jnp.zeros(row.shape, jnp.float32)] * (results - len(kept)) + before
                known = [*[total[...] for total in sums], *before]
                for out, value, at_first in zip(outs, finish(*known), first, strict=True):
                    others = jnp.where(is_first, at_first, out[...].astype(jnp.float32))
                    out[...] = jnp.where(own, value, others).astype(out.dtype)

        def of_rows(n: Number, visit: Number, k: Number, tile: Ref, *_: Ref) -> tuple[Number, ...]:
            return tile[visit], k

        def of_weights(n: Number, visit: Number, k: Number, tile: Ref, group: Ref, *_: Ref) -> tuple[Number, ...]:
            # Rows behind the last group name none: they read the last one's weights, and do not use them.
            at = jnp.minimum(group[visit], groups - 1)
            return (at, k, n) if self.contract == 1 else (at, n, k)

        out_spec = pl.BlockSpec((row_tile, column_tile), lambda n, visit, k, tile, *_: (tile[visit], n))
        weight_tile = (depth, column_tile) if self.contract == 1 else (column_tile, depth)
        return tuple(
            _call(
                kernel,
                visits,
                (pl.cdiv(width, column_tile), visits.count, steps),
                [
                    *[pl.BlockSpec((row_tile, depth), of_rows) for _ in rows],
                    *[pl.BlockSpec((None, *weight_tile), of_weights) for _ in weights],
                    *[out_spec for _ in kept],
                ],
                [out_spec] * results,
                [*rows, *weights, *kept],
                [jax.ShapeDtypeStruct((count, width), dtype) for _ in range(results)],
                [pltpu.VMEM((row_tile, column_tile), jnp.float32) for _ in weights],
                flops=2 * len(weights) * count * length * width,
                # Rows are read again for every tile of columns, weights for every visit where they do not stay.
                read=sum(x.nbytes for x in rows) * pl.cdiv(width, column_tile)
                + sum(x.nbytes for x in kept)
                + sum(w.nbytes for w in weights) * (1 if steps == 1 else pl.cdiv(visits.most, groups)),
                # A tile is read before it is written, and no other step reads it later.
                in_place={len(visits.operands) + given - i: results - i for i in range(1, len(kept) + 1)},
                name=self.name,
                interpret=self.interpret,
            )
        )


_FORMS = Forms(_RowsCall)
multiply, multiply_transposed = _FORMS.multiply, _FORMS.multiply_transposed
gated, gated_with_products, gate_gradients = _FORMS.gated, _FORMS.gated_with_products, _FORMS.gate_gradients


class _Visits:
    """Tiles of rows and the groups that have rows in them, in the order of both.

    Args:
      sizes: int32[n].
      rows: R.
      row_tile: Rows of a tile.
      least: Visits of a group without rows; 0 also lists the rows behind the last group, as a group n.

    Attributes:
      operands: tile and group of a visit, int32[most] each; begin and end of each group, with the one of the rest.
      count: int32[], visits that there are.
      most: Visits that the shapes allow.
    """

    def __init__(self, sizes: jax.Array, rows: int, row_tile: int, *, least: int):
        steps = pl.cdiv(rows, row_tile)
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
        if not least:
            ends = jnp.append(ends, jnp.int32(rows))
        begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        first = begins // row_tile
        visits = jnp.where(ends > begins, (ends - 1) // row_tile - first + 1, least)
        stops = jnp.cumsum(visits, dtype=jnp.int32)
        self.most = steps + sizes.shape[0]
        number = jnp.arange(self.most, dtype=jnp.int32)
        group = (number[:, None] >= stops[None, :]).sum(1, dtype=jnp.int32)
        group = jnp.minimum(group, ends.shape[0] - 1)
        tile = jnp.minimum(first[group] + number - (stops - visits)[group], steps - 1)
        self.operands = (tile, group, begins, ends)
        self.count = stops[-1]


def _call(
    kernel: Kernel,
    visits: _Visits,
    grid: tuple[Number, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: list[pl.BlockSpec],
    operands: list[jax.Array],
    out_shape: list[jax.ShapeDtypeStruct],
    scratch_shapes: Sequence[pl.MemoryRef],
    *,
    flops: int,
    read: int,
    name: str,
    interpret: Interpret,
    in_place: dict[int, int] | None = None,
) -> Any:
    shapes: Shapes = out_shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits.operands),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=shapes,
        input_output_aliases=in_place or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_sizes().vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=read + sum(shape.size * shape.dtype.itemsize for shape in out_shape),
        ),
        interpret=interpret,
        name=name,
    )(*visits.operands, *operands)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product summed in float32, of float32 operands as they are."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _row_tile(rows: int, dtype: jax.typing.DTypeLike) -> int:
    # Float32 is multiplied in six passes of half precision, for which the compiler writes six times the code.
    most = _sizes().rows * 2 // jnp.dtype(dtype).itemsize
    return min(most, pl.cdiv(rows, 16) * 16)


def _chunk(depth: int, most: int) -> int:
    """What a turn of a loop sums over: compilers unroll products, for minutes where all of a tile is one."""
    return most if depth % most == 0 else depth


def _depth(length: int, most: int) -> int:
    """The whole axis where it fits, or else the largest part of whole lanes that divides it, if any does."""
    return length if length <= most else next((d for d in range(most, 127, -128) if length % d == 0), most)


def _sizes() -> tiles.TpuTiles:
    return tiles.of_device(tiles.TPU, compat.device_kind())
