"""Signatures and checks.

A row of D values becomes D codes of 8, 4 or 2 bits, a scale and a bias: value = code * scale + bias. The bias is the
smallest number of the row itself, not an integer zero point, so that decoding is one multiplication and one addition.

    format      codes                         scale, bias     bytes of a row
    int8        D bytes                       float32 each    D + 8
    int8_half   D bytes                       float16 each    D + 4
    int4        2 in a byte, first one low    float16 each    ceil(D / 2) + 4
    int2        4 in a byte, first one low    float16 each    ceil(D / 4) + 4

or a codebook of values of its own, value = book[code] (`quantize_rows_kmeans`):

    kmeans4     as int4                       16 of float16   ceil(D / 2) + 32
    kmeans2     as int2                        4 of float16   ceil(D / 4) + 8

or codebooks that many rows share, value = books[owner][code] (`share_codebooks`):

    kmeans4_shared    as int4    a byte that says which codebook    ceil(D / 2) + 1, and 32 a codebook
    kmeans2_shared    as int2    the same                           ceil(D / 4) + 1, and  8 a codebook

Codes, scales and biases are arrays of their own here, which shard alike and suit the tiles of a TPU. `fuse_rows` puts
them into one array of bytes as FBGEMM has them, behind the codes ("training": its quantization operators) or before
them in rows padded to an alignment ("inference": its batched lookups); `split_rows` is the way back.

`implementation` of a lookup names one of

    reference    decodes the whole table, and looks up in that
    xla          gathers rows of bytes, decodes them and sums; what None picks but for `LaneRows` on a TPU
    pallas_gpu   a Triton kernel (`pallas_gpu`): rows are decoded where they are summed, and none is written
    pallas_tpu   the same for a TPU (`pallas_tpu`), from rows that `pack_lanes` has laid out

A TPU's copies address 512 bytes and more, and these rows have 136 at most at D = 128: `pack_lanes` puts several of them
into each lane row of 512 bytes, once for a table at rest.
"""

import importlib
import types
from typing import TYPE_CHECKING, Literal, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UnsupportedError, UserError, check_one_of
from scalejax.kernels import embedding_bag as bags
from scalejax.kernels import gpu_choices
from scalejax.kernels.block_quant import codebook, formats, lanes, search, shared_codebook, xla
from scalejax.kernels.block_quant.codebook import CODEBOOK_FORMATS, CodebookFormat, CodebookRows
from scalejax.kernels.block_quant.formats import ENCODINGS
from scalejax.kernels.block_quant.lanes import LaneRows
from scalejax.kernels.block_quant.scale_bias import ROW_FORMATS, QuantizedRows, RowFormat, scale_dtype
from scalejax.kernels.block_quant.shared_codebook import SharedCodebookFormat, SharedCodebookRows

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Float32, Int, Int32, UInt8

    from scalejax.kernels.interpretation import Interpret

PackedRows = QuantizedRows | CodebookRows | SharedCodebookRows
"""Rows one after the other; those of `LaneRows` lie side by side in rows of 128 lanes."""

Layout = Literal["training", "inference"]
Implementation = Literal["reference", "xla", "pallas_gpu", "pallas_tpu"]


def row_bytes(format: str, dim: int, *, align: int = 1) -> int:
    """Bytes of a row of `dim` values, filled up to a multiple of `align`; codebooks that rows share are apart.

    Raises:
      UserError: an unknown format.
    """
    formats.bits_of(format, ENCODINGS if format in ENCODINGS else ROW_FORMATS)
    return -(-ENCODINGS[format].row_bytes(dim) // align) * align


def book_bytes(format: SharedCodebookFormat) -> int:
    """Bytes of a codebook that rows share."""
    formats.bits_of(format, shared_codebook.SHARED_CODEBOOK_FORMATS)
    return ENCODINGS[format].shared


def table_bytes(format: str, rows: int, dim: int) -> int:
    """Bytes of a table, with the codebooks that its rows share by default.

    Raises:
      UserError: an unknown format.
    """
    return rows * row_bytes(format, dim) + shared_codebook.count(rows) * ENCODINGS[format].shared


def quantize_rows(
    table: "Float[Array, 'rows dim']", format: RowFormat, *, range: Literal["minmax", "greedy"] = "minmax"
) -> QuantizedRows:
    """Quantizes every row under its own scale and bias.

    "int8" takes min and range = max - min of the row, in float32: scale = range / 255, bias = min, code = (x - min) *
    (255 / (range + 1e-8)), rounded to nearest, ties to even. Where the range is near 1e-8 the constant, which the scale
    lacks, costs resolution; that is FBGEMM's definition. The others first round min to float16: range = max - that,
    scale = float16(range / (2^bits - 1)), or 1 where that is zero, code = (x - min) / scale, rounded and clamped.

    On CPUs scales, biases and codes are those of FBGEMM to the bit, subnormal numbers included. A row with a NaN gets a
    scale and a bias of NaN and codes of zero, so that all of it decodes to NaN; a row with an infinity, or with a range
    that overflows float32 (float16 after division, for all but int8), gets a scale that is infinite, and decodes to NaN
    as well. `nonfinite_rows` counts both.

    Args:
      table: float32, bfloat16 or float16 [V, D].
      format: of the rows.
      range: "minmax", or "greedy": for each row the range within [min, max] of least squared error that shrinking it
        step by step from either side meets, see `search`; never worse than "minmax".

    Raises:
      UserError: an unknown format or range, or a table of another dtype or rank.
    """
    bits = formats.bits_of(format, ROW_FORMATS)
    _check_table("quantize_rows", table)
    check_one_of("quantize_rows: range", range, ("minmax", "greedy"))
    chosen = search.quantize if range == "greedy" else xla.quantize
    codes, scales, biases = chosen(table.astype(jnp.float32), bits, scale_dtype(format).name)
    return QuantizedRows(codes=codes, scales=scales, biases=biases, format=format, dim=table.shape[1])


def quantize_rows_kmeans(table: "Float[Array, 'rows dim']", format: CodebookFormat) -> CodebookRows:
    """Quantizes every row under a codebook of its own, that of least squared error before its values are float16.

    Values of a row that are at most 16 (4) different ones, and are float16, come back as they were. A row that holds
    NaN, an infinity, or more than float16 does, gets a codebook of NaN and decodes to NaN; `nonfinite_rows` counts
    them. float16 has 11 digits: rows whose spread is far less than their mean are better off in `quantize_rows`.

    Args:
      table: float32, bfloat16 or float16 [V, D].
      format: of the rows.

    Raises:
      UserError: an unknown format, or a table of another dtype or rank.
    """
    bits = formats.bits_of(format, CODEBOOK_FORMATS)
    _check_table("quantize_rows_kmeans", table)
    codes, books = codebook.quantize(table.astype(jnp.float32), bits)
    return CodebookRows(codes=codes, books=books, format=format, dim=table.shape[1])


def share_codebooks(
    table: "Float[Array, 'rows dim']", format: SharedCodebookFormat, *, books: int | None = None
) -> SharedCodebookRows:
    """Quantizes rows under codebooks that they share: rows of like values together, see `shared_codebook`.

    A row that holds NaN, an infinity, or more than float16 does, decodes to NaN and bears on no codebook;
    `nonfinite_rows` counts them.

    Args:
      table: float32, bfloat16 or float16 [V, D], not traced: clusters are looked for on the host.
      format: of the rows.
      books: How many codebooks, 1 to 255; None = one for 16 rows, and 255 at most.

    Raises:
      UserError: an unknown format, a count out of range, or a table that is traced or of another dtype or rank.
    """
    bits = formats.bits_of(format, shared_codebook.SHARED_CODEBOOK_FORMATS)
    _check_table("share_codebooks", table)
    if isinstance(table, jax.core.Tracer):
        raise UserError("share_codebooks: table must be an array, not traced. Call it outside of jax.jit and jax.vmap.")
    if books is not None and not 1 <= books <= shared_codebook.MOST_BOOKS:
        most = shared_codebook.MOST_BOOKS
        raise UserError(f"share_codebooks: books must lie in [1, {most}], or be None; got {books}.")
    chosen = shared_codebook.count(table.shape[0]) if books is None else books
    codes, made, codebook_ids = shared_codebook.quantize(np.asarray(table.astype(jnp.float32)), bits, chosen)
    return SharedCodebookRows(
        codes=xla.packed(jnp.asarray(codes, jnp.int32), bits),
        codebook_ids=jnp.asarray(codebook_ids),
        books=jnp.asarray(made),
        format=format,
        dim=table.shape[1],
    )


def dequantize_rows(rows: PackedRows) -> "Float32[Array, 'rows dim']":
    """float32[V, D]: float32(float32(code * scale) + bias), or book[code], the same bits in every program.

    FBGEMM's CPU kernels round once, in a fused multiply-add, which for int8 may differ in the last bit; with float16
    scales the product is exact, and there is no difference. Where hardware takes subnormal numbers for zero, rows whose
    float32 scale is below 2^-114 lose the last bits of their products.
    """
    return rows.dequantize()


def quantized_bag(
    rows: PackedRows | LaneRows,
    ids: "Int[Array, 'num_ids']",
    lengths: "Int[Array, 'bags']",
    *,
    weights: "Float[Array, 'num_ids'] | None" = None,
    pooling: Literal["sum", "mean"] = "sum",
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'bags dim']":
    """Looks rows up and pools them: out[b] = sum over the ids i of bag b of weight * dequantized row i.

    Only the rows that are looked up are decoded. Equals `embedding_bag` of `dequantize_rows(rows)` to the bit.

    Args:
      rows: The table.
      ids: int32[N], the ids of bag 0, then of bag 1, ...; what is no row contributes zeros.
      lengths: int32[B], ids per bag.
      weights: float[N], one per id, or None.
      pooling: "sum" or "mean" (the sum divided by the number of ids); an empty bag gives zeros.
      dtype: Of the result; sums are float32 and cast once.
      implementation: None picks; a name never falls back.
      interpret: For tests of kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      dtype[B, D].

    Raises:
      UserError: an unknown implementation or pooling, ids or lengths that are no vectors of integers, weights of
        another shape than ids, a dtype of integers.
      UnsupportedError: rows that the kernel that was named does not take, or more bags than it takes.
    """
    known = ("reference", "xla", "pallas_gpu", "pallas_tpu")
    if implementation is not None and implementation not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise UserError(f"quantized_bag: implementation must be None or one of {names}; got {implementation!r}.")
    ids = _integers("quantized_bag", "ids", ids)
    lengths = _integers("quantized_bag", "lengths", lengths)
    if weights is not None and weights.shape != ids.shape:
        raise UserError(f"quantized_bag: weights must have the shape of ids, {ids.shape}; got {weights.shape}.")
    check_one_of("quantized_bag: pooling", pooling, ("sum", "mean"))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"quantized_bag: dtype must be of floating point; got {jnp.dtype(dtype)}. Cast the result.")
    chosen = _choose(rows, implementation, lengths.shape[0])
    if chosen == "reference":
        pooled = bags.embedding_bag(
            rows.dequantize(), ids, lengths, weights=weights, pooling=pooling, implementation="xla"
        )
        return pooled.astype(dtype)
    if chosen != "xla":
        return _kernel(chosen).bag(rows, ids, lengths, weights, pooling, interpret).astype(dtype)
    found = gather_quantized_rows(rows, ids)
    if weights is not None:
        found = found * weights.astype(jnp.float32)[:, None]
    slots = bags.slot_bags(lengths, ids.shape[0])
    return bags.pool_rows(found, slots, lengths.shape[0], pooling=pooling).astype(dtype)


def gather_quantized_rows(rows: PackedRows | LaneRows, ids: "Int[Array, 'num_ids']") -> "Float32[Array, 'num_ids dim']":
    """Decoded rows, float32[N, D]; zeros where ids[n] is no row.

    Raises:
      UserError: ids that are no vector of integers.
    """
    ids = _integers("gather_quantized_rows", "ids", ids)
    # Codes or lane rows come first, and are empty if there are no rows.
    return rows.gather(ids) if jax.tree.leaves(rows)[0].size else jnp.zeros((ids.shape[0], rows.dim), jnp.float32)


def nonfinite_rows(rows: PackedRows) -> "Int32[Array, '']":
    """int32[]: rows that decode to NaN, see `quantize_rows`, `quantize_rows_kmeans` and `share_codebooks`."""
    return rows.nonfinite_rows()


def pack_lanes(rows: QuantizedRows | CodebookRows) -> LaneRows:
    """Lays a table out for lookups on a TPU; no number changes. A pass over the table: for one at rest.

    Raises:
      UnsupportedError: codebooks that rows share.
    """
    if isinstance(rows, LaneRows) or ENCODINGS[rows.format].in_lanes is None:
        raise UnsupportedError(
            f"pack_lanes: lane rows have no codebooks that rows share; got {type(rows).__name__}. Look such rows up as "
            "they are, or take quantize_rows_kmeans or quantize_rows."
        )
    return lanes.pack_rows(rows)


def unpack_lanes(rows: LaneRows) -> QuantizedRows | CodebookRows:
    """The inverse of `pack_lanes`."""
    return cast("QuantizedRows | CodebookRows", rows.unpack())


def fuse_rows(rows: QuantizedRows, *, layout: Layout = "training", align: int = 1) -> "UInt8[Array, 'rows row_bytes']":
    """One array of bytes, uint8[V, row_bytes(format, dim, align=align)].

    Args:
      rows: The table.
      layout: "training": codes, scale, bias; "inference": scale, bias, codes.
      align: Rows are filled up with zeros to a multiple of this many bytes (16 for FBGEMM's lookups on GPUs).

    Raises:
      UserError: an unknown layout, an alignment below 1, or rows under codebooks.
    """
    _check_layout("fuse_rows", layout, align)
    if not isinstance(rows, QuantizedRows):
        raise UserError(
            f"fuse_rows: rows must be from quantize_rows; got {rows.format}, of which FBGEMM has no layout."
        )
    count = rows.codes.shape[0]
    tail = [jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(count, -1) for part in (rows.scales, rows.biases)]
    whole = jnp.concatenate([rows.codes, *tail] if layout == "training" else [*tail, rows.codes], axis=1)
    return jnp.pad(whole, ((0, 0), (0, row_bytes(rows.format, rows.dim, align=align) - whole.shape[1])))


def split_rows(
    data: "UInt8[Array, 'rows row_bytes']", format: RowFormat, dim: int, *, layout: Layout = "training", align: int = 1
) -> QuantizedRows:
    """The inverse of `fuse_rows`.

    Raises:
      UserError: the bytes of a row are not those of `dim` values in this format.
    """
    _check_layout("split_rows", layout, align)
    wanted = row_bytes(format, dim, align=align)
    if data.ndim != 2 or data.dtype != jnp.uint8 or data.shape[1] != wanted:
        raise UserError(
            f"split_rows: rows of {dim} values in {format} have {wanted} bytes each (align={align}); got "
            f"{data.dtype}{list(data.shape)}. Were they written in another format, width or alignment?"
        )
    kind = scale_dtype(format)
    codes = ENCODINGS[format].code_bytes(dim)
    at = codes if layout == "training" else 0

    def number(start: int) -> jax.Array:
        return jax.lax.bitcast_convert_type(data[:, start : start + kind.itemsize], kind)

    start = 0 if layout == "training" else 2 * kind.itemsize
    return QuantizedRows(
        codes=data[:, start : start + codes],
        scales=number(at),
        biases=number(at + kind.itemsize),
        format=format,
        dim=dim,
    )


def _choose(rows: PackedRows | LaneRows, implementation: Implementation | None, num_bags: int) -> Implementation:
    """The implementation of a lookup that was named, or the one for these rows on this platform.

    Raises:
      UnsupportedError: the one that was named does not have the case.
    """
    elsewhere = {"tpu": "pallas_tpu"} if isinstance(rows, LaneRows) else {}
    chosen = implementation or cast(
        Implementation, gpu_choices.first("block_quant", "quantized_bag", elsewhere=elsewhere)
    )
    lacks = None
    if chosen == "pallas_gpu" and not isinstance(rows, QuantizedRows):
        lacks = f"has no {'lanes' if isinstance(rows, LaneRows) else 'codebooks'}; got rows in {rows.format}. Take"
    if chosen == "pallas_tpu" and not isinstance(rows, LaneRows):
        lacks = f"takes LaneRows; got {type(rows).__name__}. Lay the table out with pack_lanes, once, or take"
    elif chosen == "pallas_tpu" and num_bags > (most := _kernel(chosen).most_bags(rows.dim)):
        lacks = f"takes at most {most} bags of width {rows.dim} at once; got {num_bags}. Cut the batch, or take"
    if lacks and implementation is not None:
        raise UnsupportedError(f'quantized_bag: implementation "{chosen}" {lacks} "xla".')
    return "xla" if lacks else chosen


def _kernel(name: Implementation) -> types.ModuleType:
    # Pallas takes longer to import than all the rest.
    return importlib.import_module(f"scalejax.kernels.block_quant.{name}")


def _check_table(op: str, table: jax.Array) -> None:
    if table.ndim != 2 or jnp.dtype(table.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise UserError(
            f"{op}: table must be float32, bfloat16 or float16 with two axes, rows and columns; got "
            f"{jnp.dtype(table.dtype).name}{list(table.shape)}. Cast or reshape it."
        )
    if table.shape[1] == 0:
        raise UserError(f"{op}: rows of table must have a number at least; got {list(table.shape)}.")


def _integers(op: str, name: str, array: jax.Array) -> jax.Array:
    """A vector of integers, of 32 bits at least: values of rows do not fit into fewer.

    Raises:
      UserError: it is none.
    """
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise UserError(f"{op}: {name} must be a vector of integers; got {array.dtype}{list(array.shape)}. Cast it.")
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)


def _check_layout(name: str, layout: str, align: int) -> None:
    check_one_of(f"{name}: layout", layout, ("training", "inference"))
    if align < 1:
        raise UserError(f"{name}: align must be at least 1 byte; got {align}.")
