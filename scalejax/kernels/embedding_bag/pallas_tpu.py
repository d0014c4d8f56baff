"""Row copies on a TPU's core: a DMA per row from HBM into vector memory, many of them in flight.

A table is float32[V, D] with D a multiple of 128, or bfloat16 packed as uint32[V, D/2] (`packing`) with D a multiple of
256. Narrower arrays are laid out column by column, where a row has no address: the compiler would copy the whole table
first, on every call.

Lookup. Bags are cut into blocks of Q, ids into chunks of C that fit scalar memory. One step of the grid is a pair of
them that have ids in common; a block's sums stay in vector memory from its first pair to its last:

    bags      |  block 0      | 1 |     block 2       |        ids of each, jagged
    ids       |  chunk 0  |  chunk 1  |  chunk 2  |
    steps       0,0      0,1 1,1 2,1    2,2                    (block, chunk); at most blocks + chunks - 1

Within a step, copies of the next rows run in a ring while one row is added to its bag in float32, in the order of ids.

Update. Distinct rows come R at a time; while a block is computed, the rows of the next one arrive and those of the
last one leave. The table and its row states of the table's shape are updated in place. A state of one number per row
has no address either; XLA gathers and scatters these 4 bytes.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from scalejax import compat
from scalejax.errors import UnsupportedError
from scalejax.kernels.embedding_bag import blocks, packing, steps, xla
from scalejax.kernels.embedding_bag.steps import Step
from scalejax.kernels.interpretation import Interpret
from scalejax.kernels.types import Copy, Number, Ref

_STEPS = 16384
"""Most steps of a lookup: three values each live in scalar memory, beside the ids."""
_POOLED_BYTES = 4 * 2**20
"""Most bytes of a block of sums; there are two of them in vector memory."""


def gather_rows(table: jax.Array, ids: jax.Array, *, interpret: Interpret = False) -> jax.Array:
    """out[n] = table[ids[n]], zeros where ids[n] is no row.

    Args:
      table: float32[V, D] or packed uint32[V, D/2].
      ids: int32[N].
      interpret: False compiles for a TPU; `pltpu.InterpretParams()` simulates one, True runs the body as XLA.

    Returns:
      [N, ...] in the form of `table`.

    Raises:
      ValueError: rows of a form or width that have no address of their own.
    """
    _check_rows("gather_rows", "table", table)
    count, (num_rows, width) = ids.shape[0], table.shape
    if count == 0:
        return jnp.zeros((0, width), table.dtype)
    block = min(_sizes().rows, _round_up(count, 128))
    ids = _pad(no_row_as_minus_one(ids, num_rows), block, -1)
    return pl.pallas_call(
        functools.partial(_gather_kernel, block=block),
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((count, width), table.dtype),
        in_specs=[
            pl.BlockSpec((block,), lambda i: (i,), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((block, width), lambda i: (i, 0)),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=count * (2 * 4 * width + 4)),
        interpret=interpret,
        name="embedding_gather_rows",
    )(ids, table)


def _gather_kernel(ids: Ref, table: Ref, out: Ref, arrived: Ref, *, block: int) -> None:
    def copy(row: Number, place: Number) -> Copy:
        return pltpu.make_async_copy(table.at[pl.ds(row, 1)], out.at[pl.ds(place, 1)], arrived)

    @pl.loop(0, block)
    def _(j: jax.Array) -> None:
        row = ids[j]

        @pl.when(row >= 0)
        def _() -> None:
            copy(row, j).start()

        @pl.when(row < 0)
        def _() -> None:
            out[pl.ds(j, 1), :] = jnp.zeros((1, out.shape[1]), out.dtype)

    @pl.loop(0, block)
    def _(j: jax.Array) -> None:
        @pl.when(ids[j] >= 0)
        def _() -> None:
            # A semaphore counts what has arrived and not from where: any copy of this size names it.
            copy(0, j).wait()


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    lengths: jax.Array,
    weights: jax.Array | None,
    pooling: str,
    *,
    interpret: Interpret = False,
) -> jax.Array:
    """The pooled lookup of `api.embedding_bag`, without a derivative.

    Args:
      table: float32[V, D] or packed uint32[V, D/2].
      ids: int32[N].
      lengths: int32[B].
      weights: float[N] or None; used as float32.
      pooling: "sum" or "mean".
      interpret: As in `gather_rows`.

    Returns:
      float32[B, D].

    Raises:
      ValueError: rows of a form or width that have no address of their own, or more ids and bags than the steps that
        scalar memory has room for.
    """
    _check_rows("embedding_bag", "table", table)
    num_rows, width = table.shape
    dim = width if table.dtype == jnp.float32 else 2 * width
    weighted = weights is not None

    def value(row: jax.Array, *weight: jax.Array) -> jax.Array:
        if row.dtype == jnp.uint32:
            row = jnp.concatenate(packing.halves(row), axis=1)
        return row * weight[0] if weighted else row

    return pool_copied_rows(
        table,
        no_row_as_minus_one(ids, num_rows),
        lengths,
        [weights.astype(jnp.float32)] if weighted else [],
        value,
        dim,
        pooling,
        flops=(2 if weighted else 1) * ids.shape[0] * dim,
        interpret=interpret,
        name="embedding_bag",
    )


def most_bags(dim: int) -> int:
    """The most bags that `pool_copied_rows` takes at once."""
    return _STEPS // 2 * max(_sizes().bags, _POOLED_BYTES // (4 * dim) // 8 * 8)


def pool_copied_rows(
    table: jax.Array,
    rows: jax.Array,
    lengths: jax.Array,
    scalars: Sequence[jax.Array],
    value: Callable[..., jax.Array],
    dim: int,
    pooling: str,
    *,
    flops: int,
    interpret: Interpret,
    name: str,
) -> jax.Array:
    """Pools what `value` makes of rows that are copied into vector memory: the lookup of the module's docstring.

    Args:
      table: [V, W] of 32-bit words, W a multiple of 128.
      rows: int32[N], the row that each id wants a copy of, in [0, V), or -1, which adds nothing.
      lengths: int32[B], ids per bag.
      scalars: int32[N] or float32[N] each; what `value` needs besides the row.
      value: (row [1, W], scalars of an id) -> float32[1, dim]; part of the kernel.
      dim: Width of the sums, a multiple of 128.
      pooling: "sum" or "mean".
      flops: Of all calls of `value` and their sums, for XLA's schedule.
      interpret: As in `gather_rows`.
      name: Of the operation.

    Returns:
      float32[B, dim].

    Raises:
      UnsupportedError: more bags than `most_bags`.
    """
    count, bags, width = rows.shape[0], lengths.shape[0], table.shape[1]
    if count == 0 or bags == 0:
        return jnp.zeros((bags, dim), jnp.float32)
    if bags > most_bags(dim):
        raise UnsupportedError(
            f'{name}: implementation="pallas_tpu" takes at most {most_bags(dim)} bags of width {dim} at once; got '
            f'{bags}. Cut the batch, or name implementation="xla".'
        )
    sizes = _sizes()
    chunk = min(_round_up(max(sizes.ids, pl.cdiv(count, _STEPS // 2)), 128), _round_up(count, 128))
    block = min(_round_up(max(sizes.bags, pl.cdiv(bags, _STEPS // 2)), 8), _round_up(bags, 8))
    steps_most = pl.cdiv(bags, block) + pl.cdiv(count, chunk) - 1
    starts, block_of, chunk_of = _schedule(lengths, count, block, chunk)

    of_ids = [rows, xla.slot_bags(lengths, count), *scalars]
    ring = min(sizes.ring, chunk)
    last = pl.cdiv(count, chunk) - 1
    # Steps that are left over name a chunk behind the last, of which they read nothing.
    by_chunk = pl.BlockSpec(
        (chunk,), lambda i, starts, block_of, chunk_of: (jnp.minimum(chunk_of[i], last),), memory_space=pltpu.SMEM
    )
    pooled = pl.pallas_call(
        functools.partial(_lookup_kernel, value=value, block=block, chunk=chunk, ring=ring),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(steps_most,),
            in_specs=[by_chunk] * len(of_ids) + [pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((block, dim), lambda i, starts, block_of, chunk_of: (block_of[i], 0)),
            scratch_shapes=[pltpu.VMEM((ring, width), table.dtype), pltpu.SemaphoreType.DMA((ring,))],
        ),
        out_shape=jax.ShapeDtypeStruct((bags, dim), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=4 * (count * (width + len(of_ids)) + bags * dim),
        ),
        interpret=interpret,
        name=name,
    )(starts, block_of, chunk_of, *(_pad(s, chunk, 0) for s in of_ids), table)
    if pooling == "mean":
        ends = jnp.minimum(jnp.cumsum(lengths), count)
        counts = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
        pooled = pooled / jnp.maximum(counts, 1).astype(jnp.float32)[:, None]
    return pooled


def _schedule(lengths: jax.Array, count: int, block: int, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first id of each block of bags [blocks + 1], block of each step, chunk of each step).

    Steps left over get the last block and the chunk after its last one, where it has no ids.
    """
    num_blocks, num_chunks = pl.cdiv(lengths.shape[0], block), pl.cdiv(count, chunk)
    ends = jnp.minimum(jnp.cumsum(lengths), count).astype(jnp.int32)
    last = jnp.minimum((jnp.arange(num_blocks, dtype=jnp.int32) + 1) * block, lengths.shape[0]) - 1
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[last]])  # blocks + 1
    first_chunk = jnp.minimum(starts[:-1] // chunk, num_chunks - 1)
    last_chunk = jnp.maximum((starts[1:] - 1) // chunk, first_chunk)  # a block without ids has one step: its zeros
    step_ends = jnp.cumsum(last_chunk - first_chunk + 1)
    step = lax.iota(jnp.int32, num_blocks + num_chunks - 1)
    block_of = jnp.minimum(jnp.searchsorted(step_ends, step, side="right").astype(jnp.int32), num_blocks - 1)
    begun = jnp.where(block_of > 0, step_ends[jnp.maximum(block_of - 1, 0)], 0)
    return starts, block_of, jnp.minimum(first_chunk[block_of] + step - begun, last_chunk[block_of] + 1)


def _lookup_kernel(
    starts: Ref,
    block_of: Ref,
    chunk_of: Ref,
    rows: Ref,
    bags: Ref,
    *refs: Ref,
    value: Callable[..., jax.Array],
    block: int,
    chunk: int,
    ring: int,
) -> None:
    *scalars, table, out, buffer, arrived = refs
    step = pl.program_id(0)
    mine, here = block_of[step], chunk_of[step]

    @pl.when((step == 0) | (block_of[jnp.maximum(step - 1, 0)] != mine))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    # Ids of this block in this chunk, as places in the chunk.
    begin = jnp.maximum(starts[mine] - here * chunk, 0)
    end = jnp.minimum(starts[mine + 1] - here * chunk, chunk)

    def copy(row: Number, place: Number) -> Copy:
        return pltpu.make_async_copy(table.at[pl.ds(row, 1)], buffer.at[pl.ds(place, 1)], arrived.at[place])

    def start(j: jax.Array) -> None:
        # The index stays inside the chunk: both sides of the condition are evaluated, whatever the first one says.
        @pl.when((j < end) & (rows[jnp.minimum(j, chunk - 1)] >= 0))
        def _() -> None:
            copy(rows[jnp.minimum(j, chunk - 1)], lax.rem(j, ring)).start()

    @pl.loop(begin, jnp.minimum(begin + ring, end))
    def _(j: jax.Array) -> None:
        start(j)

    @pl.loop(begin, end)
    def _(j: jax.Array) -> None:
        place = lax.rem(j, ring)

        @pl.when(rows[j] >= 0)
        def _() -> None:
            copy(0, place).wait()
            term = value(buffer[pl.ds(place, 1), :], *(scalar[j] for scalar in scalars))
            out[pl.ds(bags[j] - mine * block, 1), :] += term

        start(j + ring)


def update_rows(
    arrays: tuple[jax.Array, ...],
    distinct: jax.Array,
    sums: jax.Array,
    step: Step,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, ...]:
    """The update of `api.update_rows`: rows and wide states are written in place, each row once.

    Args:
      arrays: The table, float32[V, D] or packed uint32[V, D/2], and its row states, float32[V] or float32[V, D].
      distinct: int32[U], distinct rows, ascending, then fillers >= V.
      sums: float32[U, D].
      step: As in `api.update_rows`; row by row, since blocks of rows are handed to it.
      interpret: As in `gather_rows`.

    Raises:
      ValueError: an array whose rows have no address of their own, sums that are not float32, or a step that a kernel
        cannot hold.
    """
    for number, array in enumerate(arrays):
        if array.ndim == 2:
            _check_rows("update_rows", f"arrays[{number}]", array)
        elif array.dtype != jnp.float32:
            raise ValueError(
                f'update_rows: implementation="pallas_tpu" wants float32 row states; arrays[{number}] is '
                f'{array.dtype}. Name implementation="xla".'
            )
    if sums.dtype != jnp.float32:
        raise ValueError(
            f'update_rows: implementation="pallas_tpu" computes in float32; sums are {sums.dtype}. Cast them, or name '
            'implementation="xla".'
        )
    capacity, dim = sums.shape
    num_rows = arrays[0].shape[0]
    if capacity == 0:
        return arrays
    block = min(_sizes().rows, _round_up(capacity, 128))
    wide = [n for n, a in enumerate(arrays) if a.ndim == 2]
    narrow = [n for n, a in enumerate(arrays) if a.ndim == 1]
    closed = steps.close(
        step,
        tuple(jax.ShapeDtypeStruct((block, dim) if a.ndim == 2 else (block,), jnp.float32) for a in arrays),
        jax.ShapeDtypeStruct((block, dim), jnp.float32),
    )

    used = (distinct < num_rows).sum(dtype=jnp.int32).reshape(1)
    rows = _pad(distinct, block, num_rows)
    last = pl.cdiv(capacity, block) - 1
    smem = functools.partial(pl.BlockSpec, (block,), memory_space=pltpu.SMEM)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    per_row = pl.BlockSpec((block,), lambda i, used: (i,))
    buffers = [pltpu.VMEM((2, block, arrays[n].shape[1]), arrays[n].dtype) for n in wide]
    moved = 2 * sum(4 * arrays[n].shape[1] if arrays[n].ndim == 2 else 4 for n in range(len(arrays))) + 4 * dim + 4
    before = len(closed.scalars) + 4  # operands ahead of the wide arrays: used, rows twice, scalars, sums
    after = pl.pallas_call(
        functools.partial(_update_kernel, closed=closed, wide=wide, narrow=narrow, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(last + 1,),
            in_specs=[
                smem(lambda i, used: (i,)),
                smem(lambda i, used: (jnp.minimum(i + 1, last),)),
                *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in closed.scalars),
                pl.BlockSpec((block, dim), lambda i, used: (i, 0)),
                *(whole for _ in wide),
                *(per_row for _ in narrow),
            ],
            out_specs=[*(whole for _ in wide), *(per_row for _ in narrow)],
            scratch_shapes=[
                *buffers,
                *buffers,
                pltpu.SemaphoreType.DMA((len(wide), 2)),
                pltpu.SemaphoreType.DMA((len(wide), 2)),
            ],
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in wide),
            *(jax.ShapeDtypeStruct((capacity,), jnp.float32) for _ in narrow),
        ],
        input_output_aliases={before + k: k for k in range(len(wide))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=4 * capacity * dim, transcendentals=0, bytes_accessed=capacity * moved),
        interpret=interpret,
        name="embedding_update_rows",
    )(
        used,
        rows,
        rows,
        *closed.scalars,
        sums,
        *(arrays[n] for n in wide),
        *(arrays[n].at[distinct].get(mode="fill", fill_value=0) for n in narrow),
    )
    updated = list(arrays)
    for place, n in enumerate(wide):
        updated[n] = after[place]
    for place, n in enumerate(narrow):
        updated[n] = (
            arrays[n]
            .at[distinct]
            .set(after[len(wide) + place], mode="drop", indices_are_sorted=True, unique_indices=True)
        )
    return tuple(updated)


def _update_kernel(
    used: Ref,
    rows: Ref,
    rows_next: Ref,
    *refs: Ref,
    closed: steps.ClosedStep,
    wide: list[int],
    narrow: list[int],
    block: int,
) -> None:
    scalars, refs = refs[: len(closed.scalars)], refs[len(closed.scalars) :]
    sums, refs = refs[0], refs[1:]
    refs = refs[len(wide) :]  # the wide arrays as inputs; as outputs they are the same memory
    per_row, refs = refs[: len(narrow)], refs[len(narrow) :]
    tables, refs = refs[: len(wide)], refs[len(wide) :]
    per_row_out, refs = refs[: len(narrow)], refs[len(narrow) :]
    read, written, arrived, left = refs[: len(wide)], refs[len(wide) : 2 * len(wide)], refs[-2], refs[-1]
    step, num_blocks = pl.program_id(0), pl.num_programs(0)
    slot = lax.rem(step, 2)

    def filled(number: jax.Array) -> jax.Array:
        """Rows of a block that are none of the fillers; no block, no rows."""
        return jnp.where(number < 0, 0, jnp.clip(used[0] - number * block, 0, block))

    def fetch(row: Number, k: int, place: Number, slot: jax.Array) -> Copy:
        return pltpu.make_async_copy(
            tables[k].at[pl.ds(row, 1)], read[k].at[slot, pl.ds(place, 1)], arrived.at[k, slot]
        )

    def put(row: Number, k: int, place: Number, slot: jax.Array) -> Copy:
        return pltpu.make_async_copy(
            written[k].at[slot, pl.ds(place, 1)], tables[k].at[pl.ds(row, 1)], left.at[k, slot]
        )

    def for_each(count: jax.Array, do: Callable[[jax.Array, int], None]) -> None:
        @pl.loop(0, count)
        def _(j: jax.Array) -> None:
            for k in range(len(wide)):
                do(j, k)

    @pl.when(step == 0)
    def _() -> None:
        for_each(filled(step), lambda j, k: fetch(rows[j], k, j, slot).start())

    # Rows are distinct, so that none that is read ahead is among those that are still to be written.
    for_each(filled(step + 1), lambda j, k: fetch(rows_next[j], k, j, 1 - slot).start())
    for_each(filled(step), lambda j, k: fetch(0, k, j, slot).wait())

    # What is written now lies where the block before the last one was written: that must have left.
    for_each(filled(step - 2), lambda j, k: put(0, k, j, slot).wait())

    @pl.when(filled(step) > 0)
    def _() -> None:
        values: dict[int, jax.Array] = {}
        for k, n in enumerate(wide):
            block_k = read[k][slot]
            values[n] = block_k if block_k.dtype == jnp.float32 else jnp.concatenate(packing.halves(block_k), axis=1)
        for k, n in enumerate(narrow):
            values[n] = per_row[k][...]
        made = closed(tuple(s[0] for s in scalars), tuple(values[n] for n in range(len(values))), sums[...])
        for k, n in enumerate(wide):
            if written[k].dtype == jnp.float32:
                written[k][slot] = made[n]
            else:
                half = made[n].shape[1] // 2
                written[k][slot] = packing.join(made[n][:, :half], made[n][:, half:])
        for k, n in enumerate(narrow):
            per_row_out[k][...] = made[n]

    for_each(filled(step), lambda j, k: put(rows[j], k, j, slot).start())

    @pl.when(step == num_blocks - 1)
    def _() -> None:
        # No step comes that would wait for the copies of the last two blocks.
        for_each(filled(step - 1), lambda j, k: put(0, k, j, 1 - slot).wait())
        for_each(filled(step), lambda j, k: put(0, k, j, slot).wait())


def _sizes() -> blocks.TpuBlocks:
    return blocks.TPU.get(compat.device_kind(), blocks.TPU[""])


def _check_rows(op: str, name: str, array: jax.Array) -> None:
    if array.dtype not in (jnp.float32, jnp.uint32) or array.shape[1] % 128:
        raise ValueError(
            f'{op}: implementation="pallas_tpu" wants {name} as float32 with a width that is a multiple of 128, or as '
            f"bfloat16 packed by pack_rows with a multiple of 256; got {array.dtype}{list(array.shape)}"
            f'{" (packed)" if array.dtype == jnp.uint32 else ""}. Name implementation="xla".'
        )


def no_row_as_minus_one(ids: jax.Array, num_rows: int) -> jax.Array:
    """int32[N] of integers[N] of any width."""
    return jnp.where((ids >= 0) & (ids < num_rows), ids, -1).astype(jnp.int32)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _pad(array: jax.Array, multiple: int, value: int) -> jax.Array:
    return jnp.pad(array, (0, -array.shape[0] % multiple), constant_values=value)
