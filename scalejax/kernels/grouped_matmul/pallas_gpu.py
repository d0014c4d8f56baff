"""Grouped products on a GPU in Pallas Triton.

    all but the next    a program owns a tile of rows of one group, beginning where the group does, and of columns, and
                        walks along the axis that is summed over
    weight_gradients    a program owns a tile of one group's matrix and walks along its rows

Tiles of rows are listed by XLA from the sizes; there are as many programs as the shapes allow, and those that have no
tile end at once. Rows behind the last group are a group without weights, whose rows are zeros. Nothing is added to what
another program writes: no atomics, the same bits every time. `gated` reads its rows once for both products, and neither
leaves registers unless a gradient wants it. `gate_gradients` turns them into their gradients where they lie; that of
what is between the layers is never in memory.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. Their
tests passed on an H200; they have not been timed there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.grouped_matmul import tiles
from scalejax.kernels.grouped_matmul.forms import Finish, Forms
from scalejax.kernels.types import Kernel, Ref

_FLOAT32_ON_GPU = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""No name for it on a CPU, where the kernels are interpreted."""


def lacks(dtype: jax.typing.DTypeLike) -> str | None:
    """Which part of a case is missing here, or None."""
    if dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        return None
    return f"computes in float32, bfloat16 and float16; got {dtype}."


def weight_gradients(
    x: jax.Array, grads: tuple[jax.Array, ...], sizes: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """See `blocks.weight_gradients`."""
    tile = _tiles(len(grads), x.dtype)
    rows, inner, outer = x.shape[0], x.shape[1], grads[0].shape[1]
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])

    def kernel(begins: Ref, ends: Ref, x: Ref, *refs: Ref) -> None:
        grads, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
        group = pl.program_id(2)
        k = pl.program_id(0) * tile.rows + lax.iota(jnp.int32, tile.rows)
        n = pl.program_id(1) * tile.columns + lax.iota(jnp.int32, tile.columns)
        begin, end = begins[group], ends[group]

        def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = begin + step * tile.depth + lax.iota(jnp.int32, tile.depth)
            left = _load(x, (row, k), (end, inner))
            return tuple(
                total + _dot(left, _load(g, (row, n), (end, outer)), (0, 0))
                for total, g in zip(sums, grads, strict=True)
            )

        zeros = tuple(jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in grads)
        sums = lax.fori_loop(0, (end - begin + tile.depth - 1) // tile.depth, add, zeros)
        for out, total in zip(outs, sums, strict=True):
            _store(out, (k, n), (inner, outer), total, group)

    return tuple(
        _call(
            kernel,
            (pl.cdiv(inner, tile.rows), pl.cdiv(outer, tile.columns), sizes.shape[0]),
            [begins, ends, x, *grads],
            [jax.ShapeDtypeStruct((sizes.shape[0], inner, outer), x.dtype) for _ in grads],
            tile,
            flops=2 * len(grads) * rows * inner * outer,
            name="grouped_matmul_weight_gradients",
            interpret=interpret,
        )
    )


class _RowsCall:
    """Products of tiles of rows with matrices of their groups.

    Args:
      name: Of the kernel.
      sizes: int32[n].
      interpret: Whether there is no GPU.
      contract: Axis of the weights that is summed over, 1 or 2.
    """

    def __init__(self, name: str, sizes: jax.Array, interpret: bool, contract: int):
        self.name, self.sizes, self.interpret, self.contract = name, sizes, interpret, contract

    def __call__(
        self,
        rows: tuple[jax.Array, ...],
        weights: tuple[jax.Array, ...],
        finish: Finish,
        kept: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """See `forms.RowsCall`."""
        tile = _tiles(max(len(weights), len(kept)), rows[0].dtype)
        count, length = rows[0].shape
        width, groups = weights[0].shape[3 - self.contract], self.sizes.shape[0]
        together = _sizes().together
        found = _row_tiles(self.sizes, count, tile.rows, together)
        shape = jax.ShapeDtypeStruct((tile.rows, tile.columns), jnp.float32)
        given = len(rows) + len(weights) + len(kept)
        results = len(jax.eval_shape(finish, *[shape for _ in (*weights, *kept)]))

        def kernel(group: Ref, begins: Ref, ends: Ref, *refs: Ref) -> None:
            xs, ws, olds = refs[: len(rows)], refs[len(rows) : given - len(kept)], refs[given - len(kept) : given]
            outs = refs[given:]
            number = pl.program_id(2) * together + pl.program_id(0)
            here, begin, end = group[number], begins[number], ends[number]
            row = begin + lax.iota(jnp.int32, tile.rows)
            n = pl.program_id(1) * tile.columns + lax.iota(jnp.int32, tile.columns)

            def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                k = step * tile.depth + lax.iota(jnp.int32, tile.depth)
                lefts = [_load(x, (row, k), (end, length)) for x in xs]
                at, most = ((k, n), (length, width)) if self.contract == 1 else ((n, k), (width, length))
                return tuple(
                    total + _dot(lefts[i % len(lefts)], _load(w, at, most, here), (1, self.contract - 1))
                    for i, (w, total) in enumerate(zip(ws, sums, strict=True))
                )

            zeros = tuple(jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in ws)
            steps = ((here < groups) & (begin < end)).astype(jnp.int32) * pl.cdiv(length, tile.depth)
            sums = lax.fori_loop(0, steps, add, zeros)
            known = [_load(old, (row, n), (end, width)).astype(jnp.float32) for old in olds]
            for out, value in zip(outs, finish(*sums, *known), strict=True):
                _store(out, (row, n), (end, width), value)

        return tuple(
            _call(
                kernel,
                (together, pl.cdiv(width, tile.columns), found[0].shape[0] // together),
                [*found, *rows, *weights, *kept],
                [jax.ShapeDtypeStruct((count, width), rows[0].dtype) for _ in range(results)],
                tile,
                flops=2 * len(weights) * count * length * width,
                # A program reads its tile before it writes it, and no other program reads that.
                in_place={len(found) + given - i: results - i for i in range(1, len(kept) + 1)},
                name=self.name,
                interpret=self.interpret,
            )
        )


_FORMS = Forms(_RowsCall)
multiply, multiply_transposed = _FORMS.multiply, _FORMS.multiply_transposed
gated, gated_with_products, gate_gradients = _FORMS.gated, _FORMS.gated_with_products, _FORMS.gate_gradients


def _row_tiles(sizes: jax.Array, rows: int, row_tile: int, multiple: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, begin and end of each tile of rows, int32[tiles]; n is the group of rows behind the last one.

    A tile belongs to one group and begins with it or where the one before ends. Tiles that are not needed have no rows.
    """
    ends = jnp.append(jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows), jnp.int32(rows))
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles = (ends - begins + row_tile - 1) // row_tile
    stops = jnp.cumsum(tiles, dtype=jnp.int32)
    most = (rows + ends.shape[0] * (row_tile - 1)) // row_tile
    number = jnp.arange(pl.cdiv(most, multiple) * multiple, dtype=jnp.int32)
    group = jnp.minimum((number[:, None] >= stops[None, :]).sum(1, dtype=jnp.int32), sizes.shape[0])
    begin = jnp.minimum(begins[group] + (number - (stops - tiles)[group]) * row_tile, rows)
    return group, begin, jnp.minimum(begin + row_tile, ends[group])


def _load(
    ref: Ref, at: tuple[jax.Array, jax.Array], most: tuple[Any, Any], group: jax.Array | None = None
) -> jax.Array:
    """A tile of ref, or of its matrix `group`; zeros beyond `most`."""
    index, inside = _tile(at, most, group)
    return plgpu.load(ref.at[index], mask=inside, other=0)


def _store(
    ref: Ref, at: tuple[jax.Array, jax.Array], most: tuple[Any, Any], value: jax.Array, group: jax.Array | None = None
) -> None:
    index, inside = _tile(at, most, group)
    plgpu.store(ref.at[index], value.astype(ref.dtype), mask=inside)


def _tile(at: tuple[jax.Array, jax.Array], most: tuple[Any, Any], group: jax.Array | None) -> tuple[Any, jax.Array]:
    first, second = at[0][:, None], at[1][None, :]
    inside = jnp.broadcast_to((first < most[0]) & (second < most[1]), (at[0].shape[0], at[1].shape[0]))
    return (first, second) if group is None else (group, first, second), inside


def _call(
    kernel: Kernel,
    grid: tuple[int, int, int],
    operands: list[jax.Array],
    out_shape: list[jax.ShapeDtypeStruct],
    tile: tiles.GpuTiles,
    *,
    flops: int,
    name: str,
    interpret: bool,
    in_place: dict[int, int] | None = None,
) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=in_place or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape)),
        ),
        interpret=interpret,
        name=name,
    )(*operands)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product summed in float32; of float32 operands by three products of tensor cores, which is nearly exact."""
    precision: lax.PrecisionLike = lax.Precision.DEFAULT
    if a.dtype == jnp.float32:
        precision = _FLOAT32_ON_GPU if compat.platform() == "gpu" else lax.Precision.HIGHEST
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _tiles(held: int, dtype: jax.typing.DTypeLike) -> tiles.GpuTiles:
    said = _sizes().one if held == 1 else _sizes().two
    return said if jnp.dtype(dtype).itemsize == 2 else _halved(said)


def _halved(said: tiles.GpuTiles) -> tiles.GpuTiles:
    return tiles.GpuTiles(
        rows=said.rows, columns=said.columns, depth=said.depth // 2, warps=said.warps, stages=said.stages
    )


def _sizes() -> tiles.GpuSizes:
    return tiles.of_device(tiles.GPU, compat.device_kind())
