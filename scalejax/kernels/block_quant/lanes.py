"""Rows of a few bytes in rows of 128 lanes of 32 bits ("lane rows"), the least that a TPU copies.

As many rows as fit lie side by side in a lane row; a row is its codes, then its codebook if it has one, each filled up
to whole words:

    int4, D = 72: 9 words a row, 14 rows a lane row, 2 words are left

    lane    0       9       18              117     126
    lane row 0  row 0 | row 1 | row 2 | ...   | row 13 | ..
    lane row 1  row 14| row 15| ...

A row of more than 128 words has lane rows of its own, as many as it needs. The first code is in the lowest bits of the
first word.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.kernels.block_quant.formats import ENCODINGS, DecodableRows

LANES = 128
_LANE_ROWS = 1024
"""That are made together: on their way a TPU has arrays of a few words a row, each in a lane row of 512 bytes."""


@dataclasses.dataclass(frozen=True)
class LaneLayout:
    """Where rows lie.

    Attributes:
      words: of a row; a multiple of 128 where it is above that.
      book: Word of a row where its codebook begins, None without one. A codebook never straddles two lane rows.
    """

    words: int
    book: int | None

    @property
    def per_lane_row(self) -> int:
        """Rows of a lane row."""
        return max(1, LANES // self.words)

    @property
    def width(self) -> int:
        """Words of a lane row, or of the lane rows of a row that has several."""
        return max(LANES, self.words)

    def place(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(lane row, first word in it) of each row, int32."""
        return rows // self.per_lane_row, rows % self.per_lane_row * self.words


def layout(bits: int, dim: int, *, book_words: int = 0) -> LaneLayout:
    """Of rows of `dim` codes of `bits` bits, and a codebook of so many words if there are any."""
    codes = -(-dim * bits // 32)
    words, book = codes + book_words, codes
    if words > LANES:
        book = -(-codes // LANES) * LANES
        words = -(-(book + book_words) // LANES) * LANES
    return LaneLayout(words, book if book_words else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneRows:
    """A table as a TPU's copies address it: rows side by side in lane rows, from `pack_lanes`.

    A row takes w words of 32 bits: its codes, ceil(D * bits / 32), and its codebook, 8 for kmeans4 and 2 for kmeans2.
    floor(128 / w) rows share a lane row; w above 128 is filled up to a multiple of it, and the row has lane
    rows of its own.
    What is left of a lane row is zeros:

        bytes a row, scale and bias included, at D =    16     32     64     72     128    256
        int8                                            24     40     72     81.1   136    264
        int4                                            12     20     36     40.6   68     132

    Attributes:
      lane_rows: int32[ceil(V / floor(128 / w)), 128], or int32[V, w] if w is above 128.
      scales: float32[V] for int8, float16[V] for the other formats of rows, None for codebooks.
      biases: as `scales`.
      format: of the rows.
      dim: D.
      num_rows: V.
    """

    lane_rows: jax.Array
    scales: jax.Array | None
    biases: jax.Array | None
    format: str = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, with what is left of each 128 lanes."""
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self))

    @property
    def layout(self) -> LaneLayout:
        """Where each row lies among the lane rows."""
        return layout_of(self.format, self.dim)

    def dequantize(self) -> jax.Array:
        """See `api.dequantize_rows`."""
        return self.unpack().dequantize()

    def gather(self, ids: jax.Array) -> jax.Array:
        """See `api.gather_quantized_rows`."""
        inside = (ids >= 0) & (ids < self.num_rows)
        at = jnp.where(inside, ids, 0).astype(jnp.int32)
        parameters = jax.tree.map(lambda array: array[at], (self.scales, self.biases))
        found = self._decodable(take(self.lane_rows, at, self.layout), *parameters).dequantize()
        return jnp.where(inside[:, None], found, 0)

    def unpack(self) -> DecodableRows:
        """See `api.unpack_lanes`."""
        return self._decodable(unpack(self.lane_rows, self.num_rows, self.layout), self.scales, self.biases)

    def _decodable(self, words: jax.Array, scales: jax.Array | None, biases: jax.Array | None) -> DecodableRows:
        """Rows of words, int32[N, w], with scales and biases of their own and all else that of these."""
        encoding = ENCODINGS[self.format]
        assert encoding.in_lanes is not None
        codes, own = codes_of(words, encoding.code_bytes(self.dim)), {"scales": scales, "biases": biases}
        if encoding.book_words:
            own = {"books": books_of(words, 2 * encoding.book_words, self.layout)}
        return encoding.in_lanes(codes=codes, **own, format=self.format, dim=self.dim)


def pack_rows(rows: DecodableRows) -> LaneRows:
    """See `api.pack_lanes`."""
    own = vars(rows)
    return LaneRows(
        lane_rows=pack(rows.codes, own.get("books"), layout_of(rows.format, rows.dim)),
        scales=own.get("scales"),
        biases=own.get("biases"),
        format=rows.format,
        dim=rows.dim,
        num_rows=rows.codes.shape[0],
    )


def layout_of(format: str, dim: int) -> LaneLayout:
    """The layout of rows of `dim` elements in a format."""
    return layout(ENCODINGS[format].bits, dim, book_words=ENCODINGS[format].book_words)


@functools.partial(jax.jit, static_argnames=("where",))
def pack(codes: jax.Array, books: jax.Array | None, where: LaneLayout) -> jax.Array:
    """uint8[V, n], float16[V, 2^bits] or None -> int32[lane rows, width]."""
    block = _LANE_ROWS * where.per_lane_row
    whole, rest = divmod(codes.shape[0], block)

    def cut(number: jax.Array | int, size: int) -> list[jax.Array]:
        # Of the table itself: padded or reshaped, a copy of it would be in memory.
        parts = [codes] if books is None else [codes, books]
        return [lax.dynamic_slice_in_dim(part, number * block, size) for part in parts]

    last = [jnp.pad(part, ((0, -rest % where.per_lane_row), (0, 0))) for part in cut(whole, rest)]
    if not whole:
        return _pack(*last, where=where)
    lane_rows = lax.map(lambda number: _pack(*cut(number, block), where=where), jnp.arange(whole))
    return jnp.concatenate([lane_rows.reshape(-1, where.width), _pack(*last, where=where)])


def _pack(codes: jax.Array, books: jax.Array | None = None, *, where: LaneLayout) -> jax.Array:
    words = _words(codes)
    if books is not None:
        assert where.book is not None
        halves = lax.bitcast_convert_type(books, jnp.uint16).astype(jnp.int32)
        words = jnp.pad(words, ((0, 0), (0, where.book - words.shape[1])))
        words = jnp.concatenate([words, halves[:, 0::2] | halves[:, 1::2] << 16], axis=1)
    used = where.per_lane_row * where.words
    lane_rows = jnp.pad(words, ((0, 0), (0, where.words - words.shape[1]))).reshape(-1, used)
    return jnp.pad(lane_rows, ((0, 0), (0, where.width - used)))


def unpack(lane_rows: jax.Array, num_rows: int, where: LaneLayout) -> jax.Array:
    """int32[lane rows, width] -> int32[V, words]."""
    return lane_rows[:, : where.per_lane_row * where.words].reshape(-1, where.words)[:num_rows]


def take(lane_rows: jax.Array, rows: jax.Array, where: LaneLayout) -> jax.Array:
    """int32[N, words] of int32[N], which are rows."""

    def one(lane_row: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice(lane_rows, (lane_row, first), (1, where.words))[0]

    return jax.vmap(one)(*where.place(rows))


def codes_of(words: jax.Array, count: int) -> jax.Array:
    """int32[V, words] -> uint8[V, count], their first bytes."""
    byte = jnp.arange(count, dtype=jnp.int32)
    spread = jnp.repeat(words[:, : -(-count // 4)], 4, axis=1)[:, :count]
    return (spread >> (byte % 4 * 8)[None, :] & 0xFF).astype(jnp.uint8)


def books_of(words: jax.Array, size: int, where: LaneLayout) -> jax.Array:
    """int32[V, words] -> float16[V, size]."""
    assert where.book is not None
    own = words[:, where.book : where.book + size // 2]
    halves = jnp.stack([own & 0xFFFF, own >> 16 & 0xFFFF], axis=2).reshape(-1, size)
    return lax.bitcast_convert_type(halves.astype(jnp.uint16), jnp.float16)


def _words(data: jax.Array) -> jax.Array:
    """uint8[V, n] -> int32[V, ceil(n / 4)], the first byte lowest."""
    wide = jnp.pad(data, ((0, 0), (0, -data.shape[1] % 4))).astype(jnp.int32)
    return wide[:, 0::4] | wide[:, 1::4] << 8 | wide[:, 2::4] << 16 | wide[:, 3::4] << 24
