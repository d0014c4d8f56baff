"""Rows under codebooks that many of them share: which rows go together, and a codebook for each of these clusters.

Two tiers, one after the other:

    rows      k-means over the *sorted* values of each row. A codebook knows nothing of columns, and the squared
              distance of two sorted rows is that between the distributions of their values.
    values    k-means over all values of a cluster. It begins with the best codebook of some of them (`codebook`), and
              moves to the means of the values that each entry is nearest to, which never adds to the error, until
              nothing changes; of two beginnings the better end counts. Entries are float16; a number takes the nearest
              of them, the lower one where two are as near.

A codebook costs nothing at rest beside the hundreds of rows that share it, and a row keeps one byte that says which.

Source: H. Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019 (arXiv 1911.02079), which clusters
rows and gives each cluster a codebook; that rows are sorted first is chosen here.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.block_quant import codebook, formats
from scalejax.kernels.block_quant.formats import ENCODINGS, Encoding

SharedCodebookFormat = Literal["kmeans4_shared", "kmeans2_shared"]
SHARED_CODEBOOK_FORMATS: tuple[SharedCodebookFormat, ...] = ("kmeans4_shared", "kmeans2_shared")
MOST_BOOKS = 255
"""Codebooks of a table: a byte says which one a row has, and one value of it that it has none."""
NO_BOOK = 255
"""Instead of a codebook: the row decodes to NaN."""
_ROWS_A_BOOK = 16
"""At least, unless the caller says: then codebooks cost a row 2^bits / 8 bytes at most."""
_SAMPLE = 64  # values of a cluster that its first codebook is made for, or a few more
_FITTED = 2**14  # rows that clusters are looked for among
_PASSES_OVER_ROWS = 30  # at most
_PASSES_OVER_NUMBERS = 100  # at most, over sorted ones, which are cheap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCodebookRows:
    """A table of V rows of D values under K codebooks, which rows share.

    Attributes:
      codes: uint8[V, ceil(D * bits / 8)].
      codebook_ids: uint8[V], the codebook of each row; one that there is not stands for NaN.
      books: float16[K, 2^bits], ascending.
      format: of the rows.
      dim: D.
    """

    codes: jax.Array
    codebook_ids: jax.Array
    books: jax.Array
    format: SharedCodebookFormat = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and codebooks."""
        encoding = ENCODINGS[self.format]
        return self.codes.shape[0] * encoding.row_bytes(self.dim) + self.books.shape[0] * encoding.shared

    def dequantize(self) -> jax.Array:
        """See `api.dequantize_rows`."""
        own = self.books.at[self.codebook_ids].get(mode="fill", fill_value=jnp.nan)
        return codebook.decode(self.codes, own, ENCODINGS[self.format].bits, self.dim)

    def gather(self, ids: jax.Array) -> jax.Array:
        """See `api.gather_quantized_rows`."""
        inside, take = formats.taker(ids, self.codes.shape[0])
        found = dataclasses.replace(self, codes=take(self.codes), codebook_ids=take(self.codebook_ids)).dequantize()
        return jnp.where(inside[:, None], found, 0)  # no number of a codebook stands for zero

    def nonfinite_rows(self) -> jax.Array:
        """See `api.nonfinite_rows`."""
        return jnp.sum(self.codebook_ids >= self.books.shape[0], dtype=jnp.int32)


for _format, _bits in zip(SHARED_CODEBOOK_FORMATS, (4, 2), strict=True):
    ENCODINGS[_format] = Encoding(bits=_bits, beside=1, shared=2 << _bits)


def count(rows: int) -> int:
    """Codebooks of a table of so many rows, unless the caller says."""
    return min(MOST_BOOKS, max(1, -(-rows // _ROWS_A_BOOK)))


def quantize(table: np.ndarray, bits: int, books: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32[V, D] -> (codes uint8[V, D], ascending codebooks float16[books, 2^bits], codebook_ids uint8[V]).

    Rows that hold what float16 does not, have no codebook, and belong to no cluster. On the host, for a table at rest.
    """
    with np.errstate(over="ignore"):
        sound = np.isfinite(table.astype(np.float16)).all(axis=1)
    codebook_ids = np.full(len(table), NO_BOOK, np.uint8)
    codebook_ids[sound] = clusters(np.sort(table[sound], axis=1), books)
    codes = np.zeros(table.shape, np.uint8)
    made = np.zeros((books, 1 << bits), np.float16)
    held = np.unique(codebook_ids[sound])
    values = [np.sort(table[codebook_ids == book], axis=None) for book in held]
    for book, own, starts in zip(held, values, _starts(values, table.shape[1], bits), strict=True):
        settled = [_settled(own, start, 1 << bits) for start in starts]
        made[book] = min(settled, key=lambda entries: _error(own, entries))
        codes[codebook_ids == book] = np.searchsorted(_middles(made[book]), table[codebook_ids == book])
    return codes, made, codebook_ids


def clusters(rows: np.ndarray, books: int) -> np.ndarray:
    """float32[V, D], each ascending -> int64[V], the cluster of each row, by k-means; the same in every run."""
    if not len(rows):
        return np.zeros(0, np.int64)
    some = rows[:: -(-len(rows) // _FITTED)].astype(np.float64)
    middle = some.mean(axis=0)
    # Distances are found by products, which lose digits where all rows are far from zero.
    some -= middle
    centers = _spread(some, books)
    found = _nearest(some, centers)
    for _ in range(_PASSES_OVER_ROWS):
        order = np.argsort(found, kind="stable")
        held, starts, sizes = np.unique(found[order], return_index=True, return_counts=True)
        centers[held] = np.add.reduceat(some[order], starts, axis=0) / sizes[:, None]
        before, found = found, _nearest(some, centers)
        if np.array_equal(before, found):
            break
    return found if len(some) == len(rows) else _nearest(rows - middle, centers)


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """float64[K, D], rows to begin k-means with: each drawn by its squared distance from those before (k-means++).

    Few rows are far larger than the others in an embedding table, and want codebooks of their own. K is less than
    `count` where there are fewer different rows.
    """
    # A fixed seed: the same table is to have the same bytes whenever it is quantized.
    random = np.random.default_rng(0)
    chosen = [0]
    apart = np.square(rows - rows[0]).sum(axis=1)
    while len(chosen) < count and apart.any():
        chosen.append(int(random.choice(len(rows), p=apart / apart.sum())))
        apart = np.minimum(apart, np.square(rows - rows[chosen[-1]]).sum(axis=1))
    return rows[chosen]


def _nearest(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """int64[V], some rows at a time."""
    half = np.square(centers).sum(axis=1) / 2
    step = max(1, 2**22 // len(centers))
    return np.concatenate([np.argmax(rows[i : i + step] @ centers.T - half, axis=1) for i in range(0, len(rows), step)])


def _starts(clusters: list[np.ndarray], width: int, bits: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two codebooks to begin with for each cluster of ascending values: the best of some that are evenly spaced in
    their order, and of some that are so in value, which do not miss a few large ones."""
    if not clusters:
        return []
    size = -(-_SAMPLE // width) * width
    places = (np.arange(size) + 0.5) / size
    samples = [own[(places * own.size).astype(np.int64)] for own in clusters]
    samples += [own[np.searchsorted(own, np.linspace(own[0], own[-1], size, dtype=own.dtype))] for own in clusters]
    codes, books = codebook.quantize(jnp.asarray(np.stack(samples)), bits)
    decoded = [np.unique(values) for values in np.asarray(codebook.decode(codes, books, bits, size))]
    return list(zip(decoded[: len(clusters)], decoded[len(clusters) :], strict=True))


def _settled(values: np.ndarray, book: np.ndarray, size: int) -> np.ndarray:
    """float16[size], ascending: k-means of ascending values, begun with a codebook; the last entry fills the rest."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    book, cuts = book.astype(np.float64), None
    for _ in range(_PASSES_OVER_NUMBERS):
        before, cuts = cuts, np.searchsorted(values, _middles(book), side="right")
        if before is not None and np.array_equal(before, cuts):
            break
        starts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(values)]])
        taken = ends > starts
        book = (sums[ends] - sums[starts])[taken] / (ends - starts)[taken]
    narrow = book.astype(np.float16)
    return np.concatenate([narrow, np.full(size - len(narrow), narrow[-1])])


def _error(values: np.ndarray, book: np.ndarray) -> float:
    """Squared, of ascending values under the nearest entries."""
    found = book.astype(np.float64)[np.searchsorted(_middles(book), values)]
    return float(np.square(found - values).sum())


def _middles(book: np.ndarray) -> np.ndarray:
    """float64, between neighbours: exact, and a number on one belongs to the lower entry."""
    wide = book.astype(np.float64)
    return (wide[1:] + wide[:-1]) / 2
