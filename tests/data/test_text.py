"""Rows of text: every token once, targets inside documents, the same rows however they are read."""

import itertools
import pathlib

import numpy as np
import pytest

from scalejax.data.text import TextData, TextSplit
from scalejax.data.tokens import TokenBatch

ALL = TextSplit(train=1.0, validation=0.0)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Documents whose bytes say which document they are and where in it they stand."""
    rng = np.random.default_rng(0)
    for d in range(40):
        size = int(rng.integers(0, 90))
        (tmp_path / f"{d:02}.txt").write_text("".join(chr(65 + (d + 3 * i) % 58) for i in range(size)))
    return tmp_path


def make(folder: pathlib.Path, **fields: object) -> TextData:
    options = {"path": str(folder), "length": 32, "batch_size": 6, "split": ALL, "folder": str(folder / "cache" / "t")}
    return TextData(**(options | fields))  # pyright: ignore[reportArgumentType]


def joined(batches: list[TokenBatch]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([b.arrays()[name] for b in batches]) for name in batches[0].arrays()}


def test_concatenated_rows_are_the_stream_of_documents_and_targets_stay_inside_them(folder: pathlib.Path) -> None:
    data = make(folder, order="file", packing="concatenate").build()
    documents = [[*path.read_bytes(), 257] for path in sorted(folder.glob("*.txt"))]
    stream = [
        (token, i + 1 < len(d), d[i + 1] if i + 1 < len(d) else 0) for d in documents for i, token in enumerate(d)
    ]
    assert data.num_examples("train") == -(-len(stream) // 32)
    got = joined(list(data.eval_batches("train")))
    flat = {name: array.reshape(-1)[: len(stream)] for name, array in got.items()}
    assert flat["tokens"].tolist() == [token for token, _, _ in stream]
    assert flat["weights"].tolist() == [float(more) for _, more, _ in stream]
    assert flat["targets"].tolist() == [target for _, _, target in stream]
    assert all(not array.reshape(-1)[len(stream) :].any() for array in got.values())


@pytest.mark.parametrize("order", ["shuffled", "file", "random-crops"])
def test_any_start_and_any_number_of_processes_read_the_same_rows(folder: pathlib.Path, order: str) -> None:
    data = make(folder, order=order, packing="concatenate").build()
    whole = joined(list(itertools.islice(data.train_batches(start_example=0), 30)))
    assert 2 * data.num_examples("train") < len(whole["tokens"])  # epochs go by
    for start, processes in ((0, 2), (6, 3), (54, 6), (90, 1)):
        streams = [
            data.train_batches(start_example=start, process_index=p, process_count=processes) for p in range(processes)
        ]
        for k in range(4):
            batch = joined([next(stream) for stream in streams])
            for name, array in batch.items():
                np.testing.assert_array_equal(array, whole[name][start + 6 * k : start + 6 * k + 6])
