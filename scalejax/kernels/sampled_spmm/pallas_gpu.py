"""Sums of gathered rows on a GPU, written for Hopper in Pallas Triton: sampling, gather and sum in one pass.

    out[r] = sum over k < count[r] of value[edge(r, k)] * h[column[edge(r, k)]] / divisor[r]

    rows of a CSR, sampled   edge = indptr[r] + position(k, n), by the rule and the row's length n: computed here, so
                             that picked edges are never written to memory
    picked edges (ELL)       edge = (r, k)
    runs of a CSR, exact     edge = start[r] + k: bins of runs of like length, at most 256 edges each; `balance` adds
                             the parts of longer rows up in a second pass, in a fixed order

A program sums a few rows and a range of features, a tile [rows, columns] that its threads load in 16-byte pieces. It
walks over the slots with some tiles in flight, while the columns of the next ones are on their way. A row is added up
in the order of its slots, in float32, by one program: no atomics, the same bits every time.

jax 0.12 lowers this kernel with a warning that Triton will leave Pallas in some later version. It was right
on an H200, and has not been timed there, so that it is taken by name.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.sampled_spmm import blocks
from scalejax.kernels.sampled_spmm.balance import Balance, reduce_rows
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.features import check_kernel
from scalejax.kernels.sampled_spmm.sampling import EdgeSampling, Ell
from scalejax.kernels.types import Number, Ref

_Located = tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]
_Sums = tuple[jax.Array, list[tuple[jax.Array, ...]]]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What is summed.

    Attributes:
      operands: What `locate` reads.
      locate: (refs of the operands, int32[R] rows, bool[R] which of them are there) -> int32[R] slots of each, and a
        function from a slot to the index of the edges in it.
      count: Rows.
      most: The most slots that they have in all, for the estimate of the cost.
    """

    operands: tuple[jax.Array, ...]
    locate: Callable[[Sequence[Ref], jax.Array, jax.Array], _Located]
    count: int
    most: int


def spmm(csr: Csr, balance: Balance, h: jax.Array, dtype: jax.typing.DTypeLike, *, interpret: bool) -> jax.Array:
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]], in the bins of `balance`: see `api`."""
    check_kernel("pallas_gpu", h, dtype)

    def sum_runs(starts: jax.Array, counts: jax.Array, slots: int) -> jax.Array:
        rows = _Rows((starts, counts), _locate_runs, starts.shape[0], starts.shape[0] * slots)
        return _sum(rows, csr.indices, csr.values, h, None, jnp.float32, interpret=interpret, name="spmm")

    return reduce_rows(balance, sum_runs)


def sampled_sum(
    ell: Ell, h: jax.Array, divisor: jax.Array | None, dtype: jax.typing.DTypeLike, *, interpret: bool
) -> jax.Array:
    """The sum over picked edges, divided: see `api`."""
    check_kernel("pallas_gpu", h, dtype)
    rows = _Rows((ell.counts,), _locate_slots, ell.shape[0], ell.shape[0] * ell.width)
    return _sum(rows, ell.indices, ell.values, h, divisor, dtype, interpret=interpret, name="sampled_spmm")


def picking_sum(
    csr: Csr,
    sampling: EdgeSampling,
    width: int,
    h: jax.Array,
    divisor: jax.Array | None,
    dtype: jax.typing.DTypeLike,
    *,
    interpret: bool,
) -> jax.Array:
    """The same over edges that are picked on the way."""
    check_kernel("pallas_gpu", h, dtype)

    def locate(refs: Sequence[Ref], row: jax.Array, there: jax.Array) -> _Located:
        begin, end = (plgpu.load(refs[0].at[row + k], mask=there, other=0) for k in (0, 1))
        degrees = (end - begin).astype(jnp.int32)
        return sampling.slots(degrees, width), lambda slot: (begin + sampling.positions(slot, degrees, width),)

    rows = _Rows((csr.indptr,), locate, csr.shape[0], min(csr.shape[0] * width, csr.nnz))
    return _sum(rows, csr.indices, csr.values, h, divisor, dtype, interpret=interpret, name="sampled_spmm")


def _locate_runs(refs: Sequence[Ref], row: jax.Array, there: jax.Array) -> _Located:
    starts, counts = (plgpu.load(ref.at[row], mask=there, other=0) for ref in refs)
    return counts, lambda slot: (starts + slot,)


def _locate_slots(refs: Sequence[Ref], row: jax.Array, there: jax.Array) -> _Located:
    return plgpu.load(refs[0].at[row], mask=there, other=0), lambda slot: (row, jnp.broadcast_to(slot, row.shape))


def _sum(
    rows: _Rows,
    indices: jax.Array,
    values: jax.Array | None,
    h: jax.Array,
    divisor: jax.Array | None,
    dtype: jax.typing.DTypeLike,
    *,
    interpret: bool,
    name: str,
) -> jax.Array:
    """[rows, F]: one kernel."""
    nodes, features = h.shape
    sizes = _sizes()
    columns = min(sizes.columns, pl.next_power_of_2(features))
    group = max(1, sizes.elements // columns)
    operands = {"indices": indices, "h": h}
    if values is not None:
        operands["values"] = values.astype(jnp.float32)
    if divisor is not None:
        operands["divisor"] = divisor

    def kernel(*refs: Ref) -> None:
        located, refs, out = refs[: len(rows.operands)], refs[len(rows.operands) : -1], refs[-1]
        ref = dict(zip(operands, refs, strict=True))
        row = pl.program_id(0) * group + lax.iota(jnp.int32, group)
        column = pl.program_id(1) * columns + lax.iota(jnp.int32, columns)
        there, in_row = row < rows.count, column < features
        counts, edge_of = rows.locate(located, row, there)

        def read_ahead(number: Number) -> list[tuple[jax.Array, ...]]:
            """Columns, and values, of some slots; a column of -1 for none."""
            found = []
            for u in range(sizes.unroll):
                slot = jnp.asarray(number * sizes.unroll + u, jnp.int32)
                edge, active = edge_of(slot), slot < counts
                node = plgpu.load(ref["indices"].at[edge], mask=active, other=-1)
                value = (plgpu.load(ref["values"].at[edge], mask=active, other=0.0),) if "values" in ref else ()
                found.append((node, *value))
            return found

        def add(number: jax.Array, carry: _Sums) -> _Sums:
            total, now = carry
            # The columns of the next slots are on their way while the rows of these are loaded and added.
            ahead = read_ahead(number + 1)
            # All loads before the first addition that waits for one.
            tiles = [_load_tile(ref["h"], node, (node >= 0) & (node < nodes), column, in_row) for node, *_ in now]
            for tile, (_, *value) in zip(tiles, now, strict=True):
                tile = tile.astype(jnp.float32)
                total = total + (tile * value[0][:, None] if value else tile)
            return total, ahead

        start = jnp.zeros((group, columns), jnp.float32), read_ahead(0)
        total, _ = lax.fori_loop(0, pl.cdiv(jnp.max(counts), sizes.unroll), add, start)
        if "divisor" in ref:
            total = total / plgpu.load(ref["divisor"].at[row], mask=there, other=1.0)[:, None]
        mask = there[:, None] & in_row[None, :]
        plgpu.store(out.at[row[:, None], column[None, :]], total.astype(out.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows.count, group), pl.cdiv(features, columns)),
        out_shape=jax.ShapeDtypeStruct((rows.count, features), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows.most * features,
            transcendentals=0,
            bytes_accessed=rows.most * (features * h.dtype.itemsize + indices.dtype.itemsize)
            + rows.count * features * jnp.dtype(dtype).itemsize,
        ),
        interpret=interpret,
        name=name,
    )(*rows.operands, *operands.values())


def _load_tile(ref: Ref, row: jax.Array, wanted: jax.Array, column: jax.Array, in_row: jax.Array) -> jax.Array:
    mask = wanted[:, None] & in_row[None, :]
    return plgpu.load(ref.at[row[:, None], column[None, :]], mask=mask, other=0)


def _sizes() -> blocks.GpuBlocks:
    return blocks.GPU.get(compat.device_kind(), blocks.GPU[""])
