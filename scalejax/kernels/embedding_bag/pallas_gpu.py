"""Sums of rows on a GPU, written for Hopper in Pallas Triton.

One kernel body does the lookup and the sums of gradients by row:

    out[s] = sum over k of weight[k] * source[index[k]],   start[s] <= k < start[s] + count[s]

    lookup      segments are bags, sources are rows, the index is the id; of rows that were looked up before, none
    gradients   segments are distinct rows, sources are gradients, the index is the occurrence, sorted by row

A program takes a few segments at once, a tile of [segments, D] that its threads load in 16-byte pieces; it walks over
k, a few tiles in flight, and adds them in the order of k. Nobody adds to anything that another program writes: no
atomics, the same bits every time.

Gradients of a row that occurs more than 64 times are cut into runs of 64, each summed by a program; the runs of a row
are summed likewise, and so on. Cuts are counted from the first occurrence of a row, so a sum depends on its own
occurrences and their order alone. The last kernel starts from these sums for such rows, and from zeros for others.

Offsets are row * D in 64 bits where an array is larger than 2^32 bytes: Pallas decides it by the shape.

jax 0.12 lowers these kernels with a warning that Triton will leave Pallas in some later version. They have
run on an H200 (benchmarks/results/gpu_kernels.md).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scalejax import compat
from scalejax.kernels.embedding_bag import blocks, steps
from scalejax.kernels.embedding_bag.steps import Step
from scalejax.kernels.types import Ref


@dataclasses.dataclass(frozen=True)
class _Segments:
    """What is summed.

    Attributes:
      source: [M, D].
      index: int32[N], row of `source` of each place; None: places are rows.
      starts: int32[S], first place of each segment.
      counts: int32[S], places of each segment.
    """

    source: jax.Array
    index: jax.Array | None
    starts: jax.Array
    counts: jax.Array


def gather_rows(table: jax.Array, ids: jax.Array, *, interpret: bool = False) -> jax.Array:
    """out[n] = table[ids[n]], zeros where ids[n] is no row.

    Args:
      table: float32, bfloat16 or float16 [V, D].
      ids: int32[N].
      interpret: False compiles for a GPU; True runs the body as XLA, on any platform.

    Returns:
      [N, D] in the dtype of `table`.

    Raises:
      ValueError: a table of another dtype.
    """
    _check_table("gather_rows", table)
    count, (num_rows, width) = ids.shape[0], table.shape
    if count == 0:
        return jnp.zeros((0, width), table.dtype)
    sizes = _sizes()
    columns = pl.next_power_of_2(width)
    group = max(1, sizes.elements // columns)

    def kernel(ids: Ref, table: Ref, out: Ref) -> None:
        place = pl.program_id(0) * group + lax.iota(jnp.int32, group)
        column = lax.iota(jnp.int32, columns)
        row = plgpu.load(ids.at[place], mask=place < count, other=-1)
        rows = _load_tile(table, row, (row >= 0) & (row < num_rows), column)
        _store_tile(out, place, place < count, column, rows)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, group),),
        out_shape=jax.ShapeDtypeStruct((count, width), table.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=count * (2 * width * table.dtype.itemsize + 4)
        ),
        interpret=interpret,
        name="embedding_gather_rows",
    )(_as_int32(ids, num_rows), table)


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    lengths: jax.Array,
    weights: jax.Array | None,
    pooling: str,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The pooled lookup of `api.embedding_bag`, without a derivative.

    A bag is walked by one program from end to end: bags of thousands of ids are right, but slow.

    Args:
      table: float32, bfloat16 or float16 [V, D].
      ids: int32[N].
      lengths: int32[B].
      weights: float[N] or None; used as float32.
      pooling: "sum" or "mean".
      interpret: As in `gather_rows`.

    Returns:
      float32[B, D].

    Raises:
      ValueError: a table of another dtype.
    """
    _check_table("embedding_bag", table)
    count, bags = ids.shape[0], lengths.shape[0]
    if count == 0 or bags == 0:
        return jnp.zeros((bags, table.shape[1]), jnp.float32)
    ends = jnp.minimum(jnp.cumsum(lengths), count).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    segments = _Segments(table, _as_int32(ids, table.shape[0]), starts, ends - starts)
    return _sum(segments, weights=weights, pooling=pooling, interpret=interpret, name="embedding_bag")


def pool_rows(rows: jax.Array, bags: jax.Array, num_bags: int, pooling: str, *, interpret: bool = False) -> jax.Array:
    """The sums of `api.pool_rows`, in the order of `embedding_bag`.

    Args:
      rows: float32[N, D].
      bags: int32[N], non-decreasing.
      num_bags: B.
      pooling: "sum" or "mean".
      interpret: As in `gather_rows`.

    Returns:
      float32[B, D].

    Raises:
      ValueError: rows that are not float32.
    """
    _check_float32("pool_rows", "rows", rows)
    if rows.shape[0] == 0 or num_bags == 0:
        return jnp.zeros((num_bags, rows.shape[1]), jnp.float32)
    bounds = _bounds(bags, num_bags)
    segments = _Segments(rows, None, bounds[:-1], bounds[1:] - bounds[:-1])
    return _sum(segments, pooling=pooling, interpret=interpret, name="embedding_pool_rows")


def gather_and_pool_rows(
    table: jax.Array, ids: jax.Array, bags: jax.Array, num_bags: int, *, interpret: bool = False
) -> jax.Array:
    """The sums of `api.gather_and_pool_rows`, in the order of `embedding_bag`.

    Unused places of a batch may all be counted to one bag, which a single program would walk over: a bag ends with its
    last id that is a row.

    Args:
      table: float32, bfloat16 or float16 [V, D].
      ids: int32[N].
      bags: int32[N], non-decreasing.
      num_bags: B.
      interpret: As in `gather_rows`.

    Returns:
      float32[B, D].

    Raises:
      ValueError: a table of another dtype.
    """
    _check_table("gather_and_pool_rows", table)
    if ids.shape[0] == 0 or num_bags == 0:
        return jnp.zeros((num_bags, table.shape[1]), jnp.float32)
    starts = _bounds(bags, num_bags)[:-1]
    places = jnp.where((ids >= 0) & (ids < table.shape[0]), lax.iota(jnp.int32, ids.shape[0]) + 1, 0)
    ends = jnp.zeros(num_bags, jnp.int32).at[bags].max(places, mode="drop", indices_are_sorted=True)
    segments = _Segments(table, _as_int32(ids, table.shape[0]), starts, jnp.maximum(ends - starts, 0))
    return _sum(segments, interpret=interpret, name="embedding_gather_and_pool_rows")


def sum_by_row(
    grads: jax.Array, order: jax.Array, slots: jax.Array, capacity: int, *, interpret: bool = False
) -> jax.Array:
    """The sums of `api.sum_by_row`: runs of 64 occurrences in order, then the runs of a row in order, and so on.

    Args:
      grads: float32[N, D], per occurrence.
      order: int32[N], occurrences sorted by row.
      slots: int32[N], non-decreasing; slot of occurrence order[i], `capacity` or more if it has none.
      capacity: U.
      interpret: As in `gather_rows`.

    Returns:
      float32[U, D].

    Raises:
      ValueError: gradients that are not float32.
    """
    _check_float32("sum_by_row", "grads", grads)
    if grads.shape[0] == 0 or capacity == 0:
        return jnp.zeros((capacity, grads.shape[1]), jnp.float32)
    return _sum_cut(_by_slot(grads, order, slots, capacity), interpret=interpret)


def update_rows(
    arrays: tuple[jax.Array, ...],
    distinct: jax.Array,
    sums: jax.Array,
    step: Step,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """The update of `api.update_rows`: each row is read once and written once, in place.

    Args:
      arrays: The table, float[V, D], and its row states, float[V] or float[V, D].
      distinct: int32[U], distinct rows, then fillers >= V.
      sums: float32[U, D].
      step: As in `api.update_rows`, row by row.
      interpret: As in `gather_rows`.

    Raises:
      ValueError: D is no power of two, arrays of another dtype, sums that are not float32, or a step that a kernel
        cannot hold.
    """
    _check_float32("update_rows", "sums", sums)
    if sums.shape[0] == 0:
        return arrays
    size, dim = sums.shape
    num_rows = arrays[0].shape[0]
    if dim != pl.next_power_of_2(dim):
        raise ValueError(
            f'update_rows: implementation="pallas_gpu" wants a width that is a power of two; got {dim}. Pad the table, '
            'or name implementation="xla".'
        )
    for number, array in enumerate(arrays):
        _check_table("update_rows", array, f"arrays[{number}]")
    sizes = _sizes()
    group = max(1, sizes.elements // dim)
    closed = steps.close(
        step,
        tuple(jax.ShapeDtypeStruct((group, dim)[: a.ndim], jnp.float32) for a in arrays),
        jax.ShapeDtypeStruct((group, dim), jnp.float32),
    )

    def kernel(sums: Ref, distinct: Ref, *refs: Ref) -> None:
        scalars, tables, updated = refs[:ahead], refs[ahead : -len(arrays)], refs[-len(arrays) :]
        segment = pl.program_id(0) * group + lax.iota(jnp.int32, group)
        column = lax.iota(jnp.int32, dim)
        grads = _load_tile(sums, segment, segment < size, column)
        row = plgpu.load(distinct.at[segment], mask=segment < size, other=num_rows)
        used = row < num_rows
        before = [
            _load_tile(t, row, used, column) if len(t.shape) == 2 else plgpu.load(t.at[row], mask=used, other=0)
            for t in tables
        ]
        rows = tuple(b.astype(jnp.float32) for b in before)
        after = closed(tuple(s[0] for s in scalars), rows, grads, {"slice": _slice})
        for ref, value in zip(updated, after, strict=True):
            if len(ref.shape) == 2:
                _store_tile(ref, row, used, column, value)
            else:
                plgpu.store(ref.at[row], value.astype(ref.dtype), mask=used)

    ahead = len(closed.scalars)
    moved = 4 + sums.dtype.itemsize * dim + sum(2 * a.dtype.itemsize * (dim if a.ndim == 2 else 1) for a in arrays)
    return tuple(
        pl.pallas_call(
            kernel,
            grid=(pl.cdiv(size, group),),
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays],
            input_output_aliases={2 + ahead + n: n for n in range(len(arrays))},
            compiler_params=plgpu.CompilerParams(num_warps=sizes.warps),
            cost_estimate=pl.CostEstimate(flops=size * dim, transcendentals=0, bytes_accessed=size * moved),
            interpret=interpret,
            name="embedding_update_rows",
        )(sums, distinct, *closed.scalars, *arrays)
    )


def _slice(
    x: jax.Array, *, start_indices: tuple[int, ...], limit_indices: tuple[int, ...], strides: tuple[int, ...] | None
) -> jax.Array:
    """`lax.slice`, which Pallas Triton lacks: one of several equal parts of an axis, as a sum with zeros.

    A negative zero becomes a positive one.
    """
    for axis, (start, limit) in enumerate(zip(start_indices, limit_indices, strict=True)):
        size, length = x.shape[axis], limit - start
        if length == size:
            continue
        if size % length or start % length or strides is not None:
            raise ValueError(
                'update_rows: with implementation="pallas_gpu" a step may take one of several equal parts of an axis; '
                f'it takes [{start}:{limit}] of {size}. Name implementation="xla".'
            )
        parts = x.reshape(*x.shape[:axis], size // length, length, *x.shape[axis + 1 :])
        number = lax.broadcasted_iota(jnp.int32, parts.shape, axis)
        x = jnp.where(number == start // length, parts, 0).sum(axis, dtype=x.dtype)
    return x


def _as_int32(ids: jax.Array, num_rows: int) -> jax.Array:
    """Ids that the kernel compares with the number of rows; wider ones that are no row must not wrap into one."""
    return ids if ids.dtype == jnp.int32 else jnp.where((ids >= 0) & (ids < num_rows), ids, -1).astype(jnp.int32)


def _by_slot(grads: jax.Array, order: jax.Array, slots: jax.Array, capacity: int) -> _Segments:
    bounds = _bounds(slots, capacity)
    return _Segments(grads, order.astype(jnp.int32), bounds[:-1], bounds[1:] - bounds[:-1])


def _bounds(segments: jax.Array, count: int) -> jax.Array:
    """int32[count + 1], where each of `count` segments begins, and the last one ends, of their numbers in order."""
    return jnp.searchsorted(segments, jnp.arange(count + 1, dtype=segments.dtype)).astype(jnp.int32)


def _sum_cut(segments: _Segments, *, interpret: bool) -> jax.Array:
    """float32[S, D]: sums of segments of any length, none of them walked further than 64 places."""
    short, first = _sum_long(segments, interpret=interpret)
    return _sum(short, first=first, interpret=interpret, name="embedding_sum_by_row")


def _sum_long(segments: _Segments, *, interpret: bool) -> tuple[_Segments, tuple[jax.Array, jax.Array] | None]:
    """Sums the segments that are longer than 64 and takes them out.

    N places hold at most N / 65 such segments, and these at most N / 64 + N / 65 runs.

    Returns:
      The segments, those empty; and (float32[L, D] sums, int32[S] which of them a segment starts from, -1 = none), or
      None where no segment can be so long.
    """
    longest, size = _sizes().longest, segments.counts.shape[0]
    places = (segments.source if segments.index is None else segments.index).shape[0]
    most = min(size, places // (longest + 1))
    if most == 0:
        return segments, None
    is_long = segments.counts > longest
    which = jnp.nonzero(is_long, size=most, fill_value=size)[0].astype(jnp.int32)
    starts = segments.starts.at[which].get(mode="fill", fill_value=0)
    counts = segments.counts.at[which].get(mode="fill", fill_value=0)
    run_ends = jnp.cumsum((counts + longest - 1) // longest)
    run_starts = jnp.concatenate([jnp.zeros(1, run_ends.dtype), run_ends[:-1]])

    run = lax.iota(jnp.int32, places // longest + most)
    owner = jnp.searchsorted(run_ends, run, side="right").astype(jnp.int32)  # `most` past the last run
    offset = (run - run_starts.at[owner].get(mode="fill", fill_value=0)) * longest
    runs = _Segments(
        segments.source,
        segments.index,
        starts.at[owner].get(mode="fill", fill_value=0) + offset,
        jnp.clip(counts.at[owner].get(mode="fill", fill_value=0) - offset, 0, longest),
    )
    partial = _sum(runs, interpret=interpret, name="embedding_sum_runs")
    sums = _sum_cut(_Segments(partial, None, run_starts, run_ends - run_starts), interpret=interpret)
    place = jnp.full(size, -1, jnp.int32).at[which].set(lax.iota(jnp.int32, most), mode="drop")
    return dataclasses.replace(segments, counts=jnp.where(is_long, 0, segments.counts)), (sums, place)


def _sum(
    segments: _Segments,
    *,
    interpret: bool,
    name: str,
    weights: jax.Array | None = None,
    pooling: str = "sum",
    first: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """float32[S, D]: one kernel; `first` is from `_sum_long`."""
    size, width = segments.counts.shape[0], segments.source.shape[1]
    sizes = _sizes()
    columns = pl.next_power_of_2(width)
    group = max(1, sizes.elements // columns)
    operands = _operands(segments, weights, first)

    def kernel(*refs: Ref) -> None:
        out = refs[-1]
        segment = pl.program_id(0) * group + lax.iota(jnp.int32, group)
        column = lax.iota(jnp.int32, columns)
        total, counts = _walk(dict(zip(operands, refs, strict=False)), segment, column, size, sizes.unroll)
        if pooling == "mean":
            total = total / jnp.maximum(counts, 1).astype(jnp.float32)[:, None]
        _store_tile(out, segment, segment < size, column, total)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(size, group),),
        out_shape=jax.ShapeDtypeStruct((size, width), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps),
        cost_estimate=_cost(segments, 4 * size * width),
        interpret=interpret,
        name=name,
    )(*operands.values())


def _operands(
    segments: _Segments, weights: jax.Array | None, first: tuple[jax.Array, jax.Array] | None
) -> dict[str, jax.Array]:
    """What `_walk` reads, by name."""
    operands = {"source": segments.source, "starts": segments.starts, "counts": segments.counts}
    if segments.index is not None:
        operands["index"] = segments.index
    if weights is not None:
        operands["weights"] = weights.astype(jnp.float32)
    if first is not None:
        operands["first"], operands["place"] = first
    return operands


def _walk(
    refs: dict[str, Ref], segment: jax.Array, column: jax.Array, size: int, unroll: int
) -> tuple[jax.Array, jax.Array]:
    """float32[segments, columns] sums of the given segments in the order of their places, and their counts."""
    inside = segment < size
    starts = plgpu.load(refs["starts"].at[segment], mask=inside, other=0)
    counts = plgpu.load(refs["counts"].at[segment], mask=inside, other=0)
    source = refs["source"]
    total = jnp.zeros((segment.shape[0], column.shape[0]), jnp.float32)
    if "first" in refs:
        place = plgpu.load(refs["place"].at[segment], mask=inside, other=-1)
        total = _load_tile(refs["first"], place, place >= 0, column)

    def term(k: jax.Array) -> jax.Array:
        place, active = starts + k, k < counts
        row = plgpu.load(refs["index"].at[place], mask=active, other=-1) if "index" in refs else place
        rows = _load_tile(source, row, active & (row >= 0) & (row < source.shape[0]), column).astype(jnp.float32)
        if "weights" in refs:
            rows = rows * plgpu.load(refs["weights"].at[place], mask=active, other=0.0)[:, None]
        return rows

    def some(number: jax.Array, total: jax.Array) -> jax.Array:
        # All loads before the first addition that waits for one.
        terms = [term(number * unroll + u) for u in range(unroll)]
        for rows in terms:
            total = total + rows
        return total

    return lax.fori_loop(0, pl.cdiv(jnp.max(counts), unroll), some, total), counts


def _load_tile(ref: Ref, row: jax.Array, wanted: jax.Array, column: jax.Array) -> jax.Array:
    """Rows of a matrix, zeros where not wanted and past its width."""
    mask = wanted[:, None] & (column < ref.shape[1])[None, :]
    return plgpu.load(ref.at[row[:, None], column[None, :]], mask=mask, other=0)


def _store_tile(ref: Ref, row: jax.Array, wanted: jax.Array, column: jax.Array, value: jax.Array) -> None:
    mask = wanted[:, None] & (column < ref.shape[1])[None, :]
    plgpu.store(ref.at[row[:, None], column[None, :]], value.astype(ref.dtype), mask=mask)


def _cost(segments: _Segments, written_bytes: int) -> pl.CostEstimate:
    source, index = segments.source, segments.index
    places = (source if index is None else index).shape[0]
    read = places * (source.shape[1] * source.dtype.itemsize + (0 if index is None else 4))
    return pl.CostEstimate(
        flops=places * source.shape[1],
        transcendentals=0,
        bytes_accessed=read + 8 * segments.counts.shape[0] + written_bytes,
    )


def _sizes() -> blocks.GpuBlocks:
    kind = compat.device_kind()
    listed = next((name for name in blocks.GPU if name and kind.startswith(name)), "")
    return blocks.GPU[listed]


def _check_table(op: str, array: jax.Array, name: str = "table") -> None:
    if array.dtype.name not in blocks.GPU_TABLES:
        raise ValueError(
            f'{op}: implementation="pallas_gpu" wants {name} as float32, bfloat16 or float16; got {array.dtype}. '
            'Packed rows are for TPUs; name implementation="xla" for other dtypes.'
        )


def _check_float32(op: str, name: str, array: jax.Array) -> None:
    if array.dtype != jnp.float32:
        raise ValueError(
            f'{op}: implementation="pallas_gpu" sums in float32; {name} are {array.dtype}. Cast them, or name '
            'implementation="xla".'
        )
