"""The directory of a cache: what is in it, and who makes room."""

import collections

import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.row_cache import Directory

TABLE = TableConfig(name="item", rows=50, dim=4, features=("item",))


def test_rows_that_were_not_asked_for_longest_make_room():
    """Hits and evictions are those of an ordered dictionary."""
    rng = np.random.default_rng(0)
    directory, model = Directory(TABLE, np.full(10, -1, np.int64)), collections.OrderedDict()
    for row in np.minimum(rng.zipf(1.3, size=500) - 1, 49):
        swap = directory.prepare(np.array([row, row]))
        if row in model:
            model.move_to_end(row)
            assert swap.slots.size == 0
            continue
        gone = model.popitem(last=False)[0] if len(model) == 10 else -1
        model[row] = None
        assert (swap.arriving.tolist(), swap.leaving.tolist()) == ([row], [gone])


def test_every_row_of_a_batch_has_a_slot_of_its_own_and_keeps_it_until_it_leaves():
    rng, held = np.random.default_rng(1), np.full(24, -1, np.int64)
    held[3] = 7
    directory = Directory(TABLE, held)
    for _ in range(200):
        rows = rng.choice(50, size=rng.integers(1, 25), replace=False)
        swap = directory.prepare(rows)
        np.testing.assert_array_equal(held[swap.slots], swap.leaving)
        held[swap.slots] = swap.arriving
        np.testing.assert_array_equal(held[directory.slots(rows)], rows)
        assert len(set(held[held >= 0])) == (held >= 0).sum()
    with pytest.raises(UserError, match="'item' has 24 slots, and a batch has 25 distinct ids"):
        directory.prepare(np.arange(25))
