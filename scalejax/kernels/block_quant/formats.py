"""Bytes of a row by the name of its format, and taking rows from a table.

A format is a file of its own: a dataclass of rows with the methods `dequantize`, `gather` and `nonfinite_rows`, which
`api` calls, and an `Encoding` in `ENCODINGS`. `PackedRows` of this folder is the union of those classes.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol

import jax
import jax.numpy as jnp

from scalejax.errors import check_one_of


class DecodableRows(Protocol):
    """Rows whose codes stand alone: with scales and biases, or with a codebook, of each row."""

    @property
    def codes(self) -> jax.Array: ...

    @property
    def format(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def dequantize(self) -> jax.Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a format writes a row.

    Attributes:
      bits: Of a code.
      beside: Bytes of a row beside its codes.
      shared: Bytes of a codebook that rows share; 0 = they share none.
      book_words: Words of a row's own codebook in lane rows; 0 = it has a scale and a bias instead.
      in_lanes: Class of the rows that lane rows can hold; None = they do not have this format.
    """

    bits: int
    beside: int
    shared: int = 0
    book_words: int = 0
    in_lanes: Callable[..., "DecodableRows"] | None = None

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of a row of `dim` elements."""
        return -(-dim * self.bits // 8)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements, without codebooks that rows share."""
        return self.code_bytes(dim) + self.beside


ENCODINGS: dict[str, Encoding] = {}
"""By the names of formats; the file of a format adds its own."""


def bits_of(format: str, known: Collection[str]) -> int:
    """Bits of a code.

    Raises:
      UserError: the format is none of the known ones.
    """
    check_one_of("format", format, known)
    return ENCODINGS[format].bits


def taker(ids: jax.Array, num_rows: int) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Whether ids are rows, bool[N], and what takes these rows of an array [V, ...], zeros for the others."""
    inside = (ids >= 0) & (ids < num_rows)
    at = jnp.where(inside, ids, num_rows)
    return inside, lambda array: array.at[at].get(mode="fill", fill_value=0)
