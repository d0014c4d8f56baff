"""`TokenShards`: documents of token ids from every kind of file, rows inside of the bounds, and what is refused."""

import itertools
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax.data import MixtureData, TokenShards
from scalejax.data.text.files import TextSplit
from scalejax.data.text.tokens import TokenBatch
from scalejax.errors import UserError

RANGES = (("text", 0, 100), ("image", 100, 150))
END = 1
IMAGE = 9  # tokens of an image


def documents(count: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Text, images of 9 tokens in it, and the separator."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        parts = [random.integers(2, 100, random.integers(1, 30))]
        for _ in range(random.integers(0, 4)):
            parts += [random.integers(100, 150, IMAGE), random.integers(2, 100, random.integers(1, 12))]
        made.append(np.concatenate([*parts, [END]]).astype(np.int64))
    return made


def make(folder: pathlib.Path, /, **fields: Any) -> TokenShards:
    everything = {
        "path": str(folder / "shards"),
        "ranges": RANGES,
        "image_share": (0.2, 0.6),
        "separator": END,
        "length": 50,
        "batch_size": 4,
        "split": TextSplit(train=1.0, validation=0.0),
        "folder": str(folder / "kept"),
    }
    return TokenShards(**(everything | fields))


def write(folder: pathlib.Path, made: list[np.ndarray], kind: str = "parquet") -> None:
    (folder / "shards").mkdir(exist_ok=True)
    for number, part in enumerate((made[: len(made) // 3], made[len(made) // 3 :])):
        path = folder / "shards" / f"{number}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"tokens": [document.tolist() for document in part]}), path)
        elif kind == "npy":
            np.save(path, np.concatenate(part).astype(np.uint16))
        else:
            np.concatenate(part).astype("<u2").tofile(path)


def read(data: Any, count: int, **where: int) -> dict[str, np.ndarray]:
    batches: list[TokenBatch] = list(itertools.islice(data.train_batches(**where), count))
    return {name: np.concatenate([b.arrays()[name] for b in batches]) for name in batches[0].arrays()}


@pytest.mark.parametrize("kind", ["parquet", "npy", "bin"])
def test_every_token_of_every_document_is_in_one_row(tmp_path: pathlib.Path, kind: str) -> None:
    made = documents()
    write(tmp_path, made, kind)
    built = make(tmp_path, order="file", window=7).build()
    rows = built.examples.stream(0, built.num_examples("train"))
    pieces = []
    for row, segments in zip(rows.tokens, rows.segment_ids, strict=True):
        pieces += [row[segments == number] for number in range(1, segments.max() + 1)]
    # A piece that does not end its document is followed by the rest of it, in whichever row that is.
    beginnings = {tuple(document[:8]): document for document in made}
    assert len(beginnings) == len(made)
    whole = sum(tuple(piece) in {tuple(document) for document in made} for piece in pieces)
    assert whole > len(made) / 2
    counted = np.bincount(np.concatenate(pieces), minlength=150)
    np.testing.assert_array_equal(counted, np.bincount(np.concatenate(made), minlength=150))


def test_rows_keep_the_bounds_and_images_are_whole(tmp_path: pathlib.Path) -> None:
    write(tmp_path, documents(200))
    data = make(tmp_path)
    assert data.schema().capacities == (40, 30)
    built = data.build()
    rows = built.examples.stream(0, built.num_examples("train"))
    assert rows.modality is not None
    known = rows.segment_ids != 0
    np.testing.assert_array_equal(rows.modality, np.where(known, rows.tokens >= 100, -1))
    of_text, of_images = ((rows.modality == number).sum(1) for number in (0, 1))
    assert of_text.max() == 40
    assert of_images.max() <= 30
    full = of_text + of_images == 50
    assert full.mean() > 0.1
    assert known.mean() > 0.8
    share = of_images[full] / 50
    assert 0.2 <= share.min() <= share.max() <= 0.6
    for row in rows.modality:
        runs = np.diff(np.flatnonzero(np.diff(row, prepend=-2, append=-2)))
        kinds = row[np.flatnonzero(np.diff(row, prepend=-2))]
        assert set((runs[kinds == 1] % IMAGE).tolist()) <= {0}
    devices = rows.modality[: len(rows) // 8 * 8].reshape(8, -1)  # whatever the mesh
    assert ((devices == 1).sum(1) <= 0.6 * devices.shape[1]).all()


def test_a_resumed_run_reads_the_same_bits(tmp_path: pathlib.Path) -> None:
    write(tmp_path, documents())
    whole = read(make(tmp_path).build(), 12)
    for process in range(2):
        got = read(make(tmp_path).build(), 5, start_example=20, process_index=process, process_count=2)
        for name, array in got.items():
            expected = whole[name][20:40].reshape(5, 2, 2, -1)[:, process]
            np.testing.assert_array_equal(array, expected.reshape(array.shape))
    mixed = MixtureData(sources=((make(tmp_path), 1.0), (make(tmp_path, seed=1), 1.0)), batch_size=4).build()
    assert set(read(mixed, 2)["modality"].ravel().tolist()) == {-1, 0, 1}
    fingerprints = {data.build().fingerprint() for data in (make(tmp_path), make(tmp_path, image_share=(0.2, 0.7)))}
    assert len(fingerprints) == 2


def test_tokens_of_text_alone_are_packed_as_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards" / "a.npy", np.arange(2, 62).reshape(3, 20))  # a document a row, without a separator
    data = make(tmp_path, ranges=(("text", 0, 100),), image_share=(0.0, 1.0), separator=None, order="file")
    assert data.schema().modalities == ("text",)
    batch = next(data.build().train_batches(start_example=0))
    assert batch.modality is None
    np.testing.assert_array_equal(batch.tokens[0, :40], np.arange(2, 42))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_share": (0.2, 0.1)}, r"image_share=\(0.2, 0.1\): wanted two shares"),
        ({"ranges": (("text", 0, 150),)}, "is of the modality image, and data.ranges has text"),
        ({"vocabulary": 100}, "data.vocabulary=100 is too small: data.ranges has 150 ids"),
        ({"ranges": (("text", 0, 100), ("image", 120, 150))}, r"0.parquet, document \d+: Token 1\d\d of row 0"),
        ({"column": "ids"}, r"wanted a column 'ids' of lists of whole numbers; the file has 'tokens'"),
        ({"image_share": (0.2, 0.16), "length": 50}, "wanted two shares"),
        ({"image_share": (0.0, 0.16)}, r"9 tokens of image follow one another .* a row of 50 has room for 8\. Widen"),
        ({"path": "/nowhere"}, r"/nowhere does not exist. Name a file or a folder of token ids"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path, fields: dict[str, Any], words: str) -> None:
    write(tmp_path, documents())
    with pytest.raises(UserError, match=words):
        make(tmp_path, **fields).build()


def test_files_that_are_no_tokens_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "shards").mkdir()
    path = tmp_path / "shards" / "a.npy"
    for content, words in (
        (np.zeros(4, np.float32), r"wanted whole numbers \[N\] or \[documents, tokens\]; got float32 \[4\]"),
        (np.zeros(4, np.int32), "data.separator=None does not say where they end"),
    ):
        np.save(path, content)
        with pytest.raises(UserError, match=words):
            make(tmp_path, separator=None).build()
    path.write_bytes(b"no array")
    with pytest.raises(UserError, match=r"a.npy: cannot be read as token ids"):
        make(tmp_path).build()
    path.unlink()
    with pytest.raises(UserError, match=r"holds no file whose name ends in .parquet, .npy, .bin"):
        make(tmp_path).build()
