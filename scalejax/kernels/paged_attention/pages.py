"""Pages of keys and values: where each lies, and those of a row."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.types import AnyArray

NO_KEY = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """How a page lies. Taken as rows of D numbers, a row is a key or a value of one head and token.

    Attributes:
      order: "tokens": [page, 2 K, D], keys and values of a head in turn; "heads": [2, K, page, D].
      kv_heads: K.
      page: Tokens of a page.
    """

    order: Literal["tokens", "heads"]
    kv_heads: int
    page: int

    @classmethod
    def of(cls, op: str, pages: jax.Array) -> "PageLayout":
        """That of pages of a shape.

        Raises:
          ValueError: there is none.
        """
        if pages.ndim == 4 and pages.shape[2] % 2 == 0:
            return cls("tokens", pages.shape[2] // 2, pages.shape[1])
        if pages.ndim == 5 and pages.shape[1] == 2:
            return cls("heads", pages.shape[2], pages.shape[3])
        raise ValueError(f"{op}: pages must have shape (P, page, 2 K, D) or (P, 2, K, page, D); got {pages.shape}.")

    @property
    def rows(self) -> int:
        """Of a page."""
        return 2 * self.kv_heads * self.page

    @property
    def to_value(self) -> int:
        """How many rows after a key its value lies."""
        return 1 if self.order == "tokens" else self.kv_heads * self.page

    def head(self, row: AnyArray) -> AnyArray:
        """The head of keys or values of a row."""
        if self.order == "tokens":
            return row % (2 * self.kv_heads) // 2
        return row // self.page % self.kv_heads

    def row(self, token: jax.Array, head: jax.Array | int, is_value: int) -> jax.Array:
        """The row of a token in its page; the inverse of `head`."""
        if self.order == "tokens":
            return token * (2 * self.kv_heads) + 2 * head + is_value
        return (is_value * self.kv_heads + head) * self.page + token

    def positions_of_rows(self, positions: jax.Array) -> jax.Array:
        """[..., page] positions of tokens -> [..., rows], `NO_KEY` for values, which no query looks at."""
        if self.order == "tokens":
            each = jnp.where(np.arange(2 * self.kv_heads) % 2 == 0, positions[..., None], NO_KEY)
        else:
            each = jnp.broadcast_to(positions[..., None, None, :], (*positions.shape[:-1], 2, self.kv_heads, self.page))
            each = each.at[..., 1, :, :].set(NO_KEY)
        return each.reshape(*positions.shape[:-1], self.rows)

    def apart(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, W, one page, ...] -> keys and values, [B, W * page, K, ...] each."""
        if self.order == "tokens":
            rows = rows.reshape(*rows.shape[:3], self.kv_heads, 2, *rows.shape[4:])
            both = rows[:, :, :, :, 0], rows[:, :, :, :, 1]
        else:
            both = tuple(rows[:, :, which].swapaxes(2, 3) for which in range(2))
        keys, values = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in both)
        return keys, values


class PagedKeys(NamedTuple):
    """Everything that queries may see; arguments of `api.paged_attention`, checked.

    Attributes:
      pages: As there.
      layout: Of the pages.
      table: int32[B, W].
      positions: int32[P', page]; P' divides P.
      used: int32[B].
      scales: float32 in the shape of pages without D, or None.
    """

    pages: jax.Array
    layout: PageLayout
    table: jax.Array
    positions: jax.Array
    used: jax.Array
    scales: jax.Array | None

    def positions_of(self, table: jax.Array) -> jax.Array:
        """int32[B, W, page]: positions of the keys of each row, hidden in entries that it does not use."""
        of_row = np.arange(table.shape[1])[None] < self.used[:, None]
        return jnp.where(of_row[..., None], self.positions[table % self.positions.shape[0]], NO_KEY)
