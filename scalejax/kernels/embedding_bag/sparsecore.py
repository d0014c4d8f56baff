"""Row gathers on the SparseCores of a TPU (v5p, v6e and 7x have them), by indirect streams.

Ids are striped to all vector subcores of a chip in contiguous pieces. A subcore takes 128 at a time, or fewer where
rows are wide: ids into its memory, one indirect stream for their rows, one copy out. Pooling is left to XLA.

No interpreter runs indirect streams, and this has not run on a chip: it is compiled for every chip in the tests, and
nothing picks it but its name.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from scalejax import compat
from scalejax.kernels.embedding_bag import xla
from scalejax.kernels.types import Ref

_STREAM_IDS = 128
"""An indirect stream takes at most this many ids."""
_ROWS_BYTES = 64 * 2**10
"""Rows in a subcore's memory at a time; the smallest of them has 128 KiB."""


def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """out[n] = table[ids[n]], zeros where ids[n] is no row.

    Args:
      table: float32[V, D], D a multiple of 128.
      ids: int32[N].

    Returns:
      float32[N, D].

    Raises:
      ValueError: the chip has no SparseCores, or a table of another form.
    """
    if table.dtype != jnp.float32 or table.shape[1] % 128:
        raise ValueError(
            'gather_rows: implementation="sparsecore" wants a float32 table with a width that is a multiple of 128; '
            f'got {table.dtype}{list(table.shape)}. Name implementation="xla".'
        )
    count, (num_rows, width) = ids.shape[0], table.shape
    if count == 0:
        return jnp.zeros((0, width), table.dtype)
    cores, subcores = _cores()
    workers = cores * subcores
    piece = max(8, min(_STREAM_IDS, _ROWS_BYTES // (4 * width) // 8 * 8))
    pieces = pl.cdiv(count, workers * piece)
    is_row = (ids >= 0) & (ids < num_rows)
    padded = jnp.pad(jnp.where(is_row, ids, 0).astype(jnp.int32), (0, workers * pieces * piece - count))

    @functools.partial(
        pl.kernel,
        out_type=jax.ShapeDtypeStruct((padded.shape[0], width), table.dtype),
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        scratch_types=[
            pltpu.VMEM((piece,), jnp.int32),
            pltpu.VMEM((piece, width), table.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        name="embedding_gather_rows",
    )
    def gather(table: Ref, ids: Ref, out: Ref, some_ids: Ref, rows: Ref, arrived: Ref) -> None:
        worker = lax.axis_index("subcore") * cores + lax.axis_index("core")

        @pl.loop(0, pieces)
        def _(number: jax.Array) -> None:
            place = pl.ds((worker * pieces + number) * piece, piece)
            pltpu.sync_copy(ids.at[place], some_ids)
            pltpu.async_copy(table.at[some_ids], rows, arrived).wait()
            compat.copy_from_subcore(rows, out.at[place])

    rows = gather(table, padded)  # pyright: ignore[reportCallIssue] (pl.kernel made a function of its operands)
    return jnp.where(is_row[:, None], rows[:count], 0)


def embedding_bag(
    table: jax.Array, ids: jax.Array, lengths: jax.Array, weights: jax.Array | None, pooling: str
) -> jax.Array:
    """The pooled lookup of `api.embedding_bag`, without a derivative. Arguments and errors as in `gather_rows`."""
    rows = gather_rows(table, ids)
    if weights is not None:
        rows = rows * weights.astype(rows.dtype)[:, None]
    return xla.pool_rows(rows, xla.slot_bags(lengths, ids.shape[0]), lengths.shape[0], pooling)


def _cores() -> tuple[int, int]:
    """SparseCores of a device, and vector subcores of each."""
    try:
        info = plsc.get_sparse_core_info()
    except Exception as error:  # jax raises several kinds, by chip and by version
        raise ValueError(
            'gather_rows: implementation="sparsecore" wants a TPU with SparseCores (v5p, v6e, 7x); this is '
            f'"{compat.device_kind()}". Name "pallas_tpu" or "xla".'
        ) from error
    return info.num_cores, info.num_subcores
