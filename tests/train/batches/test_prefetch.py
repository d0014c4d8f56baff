"""Prefetch: batches that a thread places while a step runs."""

import pytest

from scalejax.train.batches.prefetch import Prefetch


def test_batches_come_in_order_and_the_end_is_said_as_often_as_one_asks():
    with Prefetch(iter([1, 2, 3]), lambda batch: 10 * batch, depth=2) as ready:
        assert list(ready) == [(1, 10), (2, 20), (3, 30)]
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(ready)


def test_an_error_of_the_thread_is_raised_as_often_as_one_asks():
    def place(batch):
        raise RuntimeError("no room")

    with Prefetch(iter([1]), place, depth=2) as ready:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no room"):
                next(ready)
