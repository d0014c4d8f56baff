"""The keys that each query sees, as data that every implementation shares.

Query i of a row sees key j where all that is asked for holds:

    causal     key_position[j] <= query_position[i]
    window     query_position[i] - key_position[j] < window
    segments   query_segment[i] == key_segment[j]

Positions are `start + offset + i` and `j`, values that a kernel makes by itself, or arrays. What can be said of a
block of queries and a block of keys follows from the smallest and largest position and segment in each of them: no pair
is visible, all pairs are, or one has to look. `pairs` says it for all blocks of a row.
"""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.kernels.types import AnyArray

HIDDEN, PARTLY, WHOLE = 0, 1, 2
"""What a block of queries sees of a block of keys: nothing, some of it, everything."""


class BackwardInputs(NamedTuple):
    """What a backward pass takes besides q, k and v: the result, and its cotangents.

    Attributes:
      out: [B, S, H, D].
      lse: float[B, H, S]; +inf for rows that see nothing.
      d_out: [B, S, H, D].
      correction: float[B, H, S], sum over D of out * d_out, less the cotangent of lse.
    """

    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    correction: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """Masks of a batch.

    Attributes:
      causal: Whether keys after the query are hidden.
      window: Keys this far before the query, or farther, are hidden; None = none are.
      start: Position of query 0 among the keys; the part of it that is known while tracing.
      offset: int32[B], what has to be added to `start`, or None.
      query_positions: int32[B, S], or None for those that follow from `start` and `offset`.
      key_positions: int32[B, T], or None for 0 ... T - 1. Both arrays are given, or none.
      query_segments: int32[B, S], or None.
      key_segments: int32[B, T], or None. Both arrays are given, or none.
    """

    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    start: int = dataclasses.field(metadata={"static": True})
    offset: jax.Array | None
    query_positions: jax.Array | None
    key_positions: jax.Array | None
    query_segments: jax.Array | None
    key_segments: jax.Array | None

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.query_segments is None

    @property
    def uses_positions(self) -> bool:
        return self.causal or self.window is not None

    @property
    def is_same_for_all_rows(self) -> bool:
        """Whether the masks of all rows are equal, as far as can be known while tracing."""
        return self.offset is None and self.query_positions is None and self.query_segments is None

    @property
    def _numpy(self) -> ModuleType:
        """numpy where all is known while tracing, so that what follows from it is known as well; else jax.numpy."""
        return np if self.is_same_for_all_rows else jnp

    def positions(self, queries: int, keys: int) -> tuple[AnyArray, AnyArray]:
        """int32 positions, [B or 1, S] of queries and [B or 1, T] of keys; NumPy arrays where they are known."""
        if self.query_positions is not None and self.key_positions is not None:
            return self.query_positions, self.key_positions
        query = self.start + np.arange(queries, dtype=np.int32)[None]
        if self.offset is not None:
            query = query + self.offset[:, None]
        return query, np.arange(keys, dtype=np.int32)[None]

    def compare(
        self,
        query_positions: jax.Array,
        key_positions: jax.Array,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
    ) -> jax.Array | None:
        """What the given queries see of the given keys, by broadcasting; None = everything.

        Arrays come in any shapes that broadcast, e.g. [bq, 1] for queries and [1, bk] for keys.
        """
        visible = None
        if self.causal:
            visible = key_positions <= query_positions
        if self.window is not None:
            near = key_positions > query_positions - self.window
            visible = near if visible is None else visible & near
        if query_segments is not None and key_segments is not None:
            same = query_segments == key_segments
            visible = same if visible is None else visible & same
        return visible

    def pairs(self, queries: int, keys: int, query_block: int, key_block: int) -> AnyArray:
        """What each block of queries sees of each block of keys.

        Args:
          queries: S.
          keys: T.
          query_block: Queries in a block; the last block may have fewer.
          key_block: Keys in a block; a last block with fewer is never WHOLE, for what is past its keys.

        Returns:
          int32[B or 1, blocks of queries, blocks of keys] of HIDDEN, PARTLY and WHOLE; where the answer is not sure
          it is PARTLY. A NumPy array where it is known while tracing.
        """
        query_blocks, key_blocks = -(-queries // query_block), -(-keys // key_block)
        some = np.ones((1, query_blocks, key_blocks), bool)
        every: AnyArray = some
        if self.uses_positions:
            query, key = self.positions(queries, keys)
            query_least, query_most = (x[:, :, None] for x in block_bounds(query, query_block))
            key_least, key_most = (x[:, None, :] for x in block_bounds(key, key_block))
            if self.causal:
                some, every = some & (key_least <= query_most), every & (key_most <= query_least)
            if self.window is not None:
                some = some & (key_most > query_least - self.window)
                every = every & (key_least > query_most - self.window)
        if self.query_segments is not None and self.key_segments is not None:
            query_least, query_most = (x[:, :, None] for x in block_bounds(self.query_segments, query_block))
            key_least, key_most = (x[:, None, :] for x in block_bounds(self.key_segments, key_block))
            some = some & (query_least <= key_most) & (key_least <= query_most)
            every = every & (query_least == query_most) & (key_least == key_most) & (query_least == key_least)
        if keys % key_block:
            every = every & (np.arange(key_blocks) < key_blocks - 1)[None, None]
        numpy = self._numpy
        return numpy.where(some, numpy.where(every, WHOLE, PARTLY), HIDDEN).astype(np.int32)

    def most_pairs(self, queries: int, keys: int, query_block: int, key_block: int, *, by: str) -> int:
        """Pairs of blocks in a row that are not HIDDEN, at most, as far as can be known while tracing.

        A block of queries (`by` "query") or of keys ("key") that has no such pair counts as one.
        """
        query_blocks, key_blocks = -(-queries // query_block), -(-keys // key_block)
        if self.offset is None and self.query_positions is None:
            # Segments may hide what positions show: a block has fewer pairs then, or one instead of some.
            of_positions = dataclasses.replace(self, query_segments=None, key_segments=None)
            seen = of_positions.pairs(queries, keys, query_block, key_block)[0] != HIDDEN
            return int(np.maximum(seen.sum(axis=1 if by == "query" else 0), 1).sum())
        if self.query_positions is None and self.causal and self.window is not None:
            own, other, most = (
                (query_block, key_block, key_blocks) if by == "query" else (key_block, query_block, query_blocks)
            )
            count = query_blocks if by == "query" else key_blocks
            # A block of n positions sees, or is seen by, a stretch of n + window - 1 of them.
            return count * min(most, -(-(own + self.window - 2) // other) + 1)
        return query_blocks * key_blocks


def block_bounds(values: AnyArray, block: int) -> tuple[AnyArray, AnyArray]:
    """(smallest, largest) of each block of [B, N]: two [B, ceil(N / block)]; NumPy in, NumPy out."""
    cut = pad_row(values, block).reshape(values.shape[0], -1, block)
    return cut.min(axis=2), cut.max(axis=2)


def pad_row(values: AnyArray, block: int) -> AnyArray:
    """[B, N] -> [B, a multiple of the block], by repeating the last value."""
    numpy = np if isinstance(values, np.ndarray) else jnp
    return numpy.pad(values, ((0, 0), (0, -values.shape[1] % block)), mode="edge")


def first_and_last(seen: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Of bool[..., N]: index of the first True and the one after the last; equal where there is none."""
    first = seen.argmax(axis=-1)
    last = seen.shape[-1] - seen[..., ::-1].argmax(axis=-1)
    return first, (np if isinstance(seen, np.ndarray) else jnp).where(seen.any(axis=-1), last, first)


def stretches(sees: AnyArray) -> AnyArray:
    """Of [..., N] kinds of pairs, int32[..., 4]: first, begin, end, last.

    [first, last) holds every pair that is not HIDDEN, [begin, end) is a run of WHOLE ones in it; the pairs before and
    after the run may be of any kind.
    """
    numpy = np if isinstance(sees, np.ndarray) else jnp
    first, last = first_and_last(sees != HIDDEN)
    is_whole = sees == WHOLE
    begin = numpy.where(is_whole.any(axis=-1), is_whole.argmax(axis=-1), last)
    place = np.arange(sees.shape[-1]).reshape((1,) * (sees.ndim - 1) + (-1,))
    ends = (place > begin[..., None]) & ~is_whole
    end = numpy.where(ends.any(axis=-1), ends.argmax(axis=-1), last)
    return numpy.stack([first, begin, numpy.maximum(begin, numpy.minimum(end, last)), last], axis=-1).astype(np.int32)
