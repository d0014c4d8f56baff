"""Rows that are read into a cache of pages, each into pages of its own."""

import dataclasses

import numpy as np

from scalejax import nn


@dataclasses.dataclass
class Rows:
    """So many rows of at most so many tokens; pages are handed out from the last one on, so that none lies in order."""

    rows: int
    length: int
    page: int = 8

    def __post_init__(self):
        each = -(-self.length // self.page)
        self.table = np.arange(self.rows * each, dtype=np.int32)[::-1].reshape(self.rows, each)
        self.counts = np.zeros(self.rows, np.int32)

    @property
    def pages(self):
        return nn.PageShape(self.table.size, self.page)

    def reading(self, counts, width):
        """Of the next counts[b] tokens of each row, in the first of `width` columns."""
        counts = np.asarray(counts, np.int32)
        columns = np.arange(width, dtype=np.int32)[None, :]
        positions = np.where(columns < counts[:, None], self.counts[:, None] + columns, -1).astype(np.int32)
        self.counts = self.counts + counts
        return nn.Reading(positions, self.table, np.maximum(counts - 1, 0).astype(np.int32))
