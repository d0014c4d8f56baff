"""Shapes and masks that implementations tend to get wrong, for tests and for timing on devices."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch for attention.

    Attributes:
      batch: B.
      queries: S.
      keys: T; None = S.
      heads: H.
      kv_heads: K.
      width: D.
      mask: As in `flash_attention`.
      window: As in `flash_attention`.
      offset: None, an int, or one per row.
      documents: Packed documents of a row; 0 = no segment ids.
      permuted: Whether positions are given, and in what order: "queries", "both" or "no".
    """

    batch: int = 1
    queries: int
    keys: int | None = None
    heads: int = 2
    kv_heads: int = 1
    width: int = 64
    mask: str = "causal"
    window: int | None = None
    offset: int | tuple[int, ...] | None = None
    documents: int = 0
    permuted: str = "no"

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 q, k, v."""
        random = np.random.default_rng(seed)
        keys = (self.batch, self.num_keys, self.kv_heads, self.width)
        return (
            random.normal(size=(self.batch, self.queries, self.heads, self.width)),
            random.normal(size=keys),
            random.normal(size=keys),
        )

    def masks(self) -> dict[str, str | int | np.ndarray | None]:
        """The keyword arguments of `flash_attention` that say what is visible; arrays are int32."""
        random = np.random.default_rng(7)
        said: dict[str, str | int | np.ndarray | None] = {"mask": self.mask, "window": self.window}
        if self.documents:
            of_all = self._segments(random, max(self.queries, self.num_keys))
            said["segment_ids"] = of_all[:, : self.queries]
            if self.num_keys != self.queries:
                said["kv_segment_ids"] = of_all[:, : self.num_keys]
        if self.permuted != "no":
            offset = np.broadcast_to(np.asarray(self.offset or 0, np.int32).reshape(-1, 1), (self.batch, 1))
            rows = [random.permutation(self.queries).astype(np.int32) for _ in range(self.batch)]
            said["query_positions"] = np.stack(rows) + offset
            if self.permuted == "both":
                rows = [random.permutation(self.num_keys).astype(np.int32) for _ in range(self.batch)]
                said["key_positions"] = np.stack(rows)
        elif isinstance(self.offset, tuple):
            said["query_offset"] = np.array(self.offset, np.int32)
        else:
            said["query_offset"] = self.offset
        return said

    @property
    def num_keys(self) -> int:
        """T, the number of keys."""
        return self.queries if self.keys is None else self.keys

    def _segments(self, random: np.random.Generator, length: int) -> np.ndarray:
        """Documents 1, 2, ... of drawn lengths, then padding, which is 0."""
        rows = []
        for _ in range(self.batch):
            cuts = np.sort(random.integers(1, length + 1, self.documents))
            ids = np.searchsorted(cuts, np.arange(length), side="right") + 1
            rows.append(np.where(ids > self.documents, 0, ids))
        return np.stack(rows).astype(np.int32)


CASES = {
    "one query": Case(queries=1, keys=33, offset=32, heads=4, kv_heads=2),
    "causal": Case(queries=128, kv_heads=2),
    "full": Case(queries=40, keys=72, mask="full", width=24),
    "no multiples of a block": Case(batch=2, queries=131, keys=197, offset=66, heads=6, kv_heads=2, width=96),
    "window": Case(queries=150, window=17),
    "window with keys after the query": Case(queries=70, window=1, mask="full", width=160),
    "documents": Case(batch=2, queries=160, documents=4),
    "documents, both ways": Case(queries=90, documents=3, mask="full"),
    "offset by row": Case(batch=3, queries=24, keys=80, offset=(0, 56, 31), heads=8),
    "queries before the keys": Case(batch=2, queries=60, keys=40, offset=(-20, -61)),
    "permuted": Case(batch=2, queries=75, permuted="both"),
    "permuted queries": Case(batch=2, queries=40, keys=90, permuted="queries", offset=50, window=25),
    "all at once": Case(
        batch=2, queries=100, keys=164, offset=(64, 20), documents=3, window=50, heads=6, kv_heads=2, width=64
    ),
}
"""By what is special about them."""
