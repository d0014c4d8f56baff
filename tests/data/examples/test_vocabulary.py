import collections
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalejax.data.examples.vocabulary import FIRST, RARE, ValueCounter
from scalejax.errors import UserError

LEAST = 64 * 16


def counted(chunks: list[np.ndarray], memory_bytes: int, folder: pathlib.Path) -> tuple[dict[int, int], ValueCounter]:
    with ValueCounter(memory_bytes=memory_bytes, folder=folder) as counter:
        for chunk in chunks:
            counter.add(chunk)
        found = {}
        for values, counts in counter.counts():
            piece = dict(zip(values.tolist(), counts.tolist(), strict=True))
            assert not piece.keys() & found.keys()
            found |= piece
    return found, counter


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [LEAST, 10 * LEAST, 1 << 30])
def test_counts_equal_those_of_a_counter_whatever_the_memory(tmp_path: pathlib.Path, memory_bytes: int) -> None:
    rng = np.random.default_rng(0)
    chunks = [(rng.zipf(1.1, n) % 2**62 - 5).astype(np.int64) for n in (30_000, 0, 1, 9_000)]
    found, counter = counted(chunks, memory_bytes, tmp_path)
    assert found == collections.Counter(np.concatenate(chunks).tolist())
    assert counter.peak_bytes <= memory_bytes
    # With 64 different values in memory some ten thousand must have been spilled, and spilled again.
    assert (counter.spilled_bytes > 0) == (memory_bytes < 1 << 30)
    assert not list(tmp_path.iterdir())


@settings(max_examples=50, deadline=None)
@given(chunks=st.lists(hnp.arrays(np.int64, st.integers(0, 200)), max_size=4))
def test_any_64_bit_values_are_counted(tmp_path_factory: pytest.TempPathFactory, chunks: list[np.ndarray]) -> None:
    found, counter = counted(chunks, LEAST, tmp_path_factory.mktemp("counts"))
    assert found == collections.Counter(v for chunk in chunks for v in chunk.tolist())
    assert counter.peak_bytes <= LEAST


@pytest.mark.parametrize("memory_bytes", [LEAST, 1 << 20])
@pytest.mark.parametrize(("min_count", "max_values"), [(1, None), (3, None), (1, 50), (2, 7), (10**9, 5)])
def test_a_vocabulary_holds_the_most_frequent_values(
    tmp_path: pathlib.Path, memory_bytes: int, min_count: int, max_values: int | None
) -> None:
    values = np.random.default_rng(1).zipf(1.3, 4000) % 3000 - 7
    counts = collections.Counter(values.tolist())
    kept = sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))[:max_values]
    with ValueCounter(memory_bytes=memory_bytes, folder=tmp_path) as counter:
        counter.add(values)
        vocabulary = counter.vocabulary(min_count=min_count, max_values=max_values)
    id_of = {v: FIRST + i for i, v in enumerate(kept)}
    assert vocabulary.rows == FIRST + len(kept)
    asked = np.append(values, [10**15, -(10**15)])
    assert vocabulary(asked).tolist() == [id_of.get(v, RARE) for v in asked.tolist()]


def test_what_was_spilled_is_deleted_when_counting_fails(tmp_path: pathlib.Path) -> None:
    def fail() -> None:
        with ValueCounter(memory_bytes=LEAST, folder=tmp_path) as counter:
            counter.add(np.arange(1000))
            assert list(tmp_path.iterdir())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    with (
        ValueCounter(memory_bytes=LEAST, folder=tmp_path / "none") as counter,
        pytest.raises(UserError, match=r"none: counts of values cannot be written \(No such file"),
    ):
        counter.add(np.arange(1000))


def test_senseless_limits_are_refused() -> None:
    with pytest.raises(UserError, match="memory_bytes must be at least 1024; got 100"):
        ValueCounter(memory_bytes=100)
    with pytest.raises(UserError, match="min_count must be at least 1; got 0"):
        ValueCounter().vocabulary(min_count=0)
    with pytest.raises(UserError, match="max_values must be at least 1, or None; got 0"):
        ValueCounter().vocabulary(min_count=1, max_values=0)
