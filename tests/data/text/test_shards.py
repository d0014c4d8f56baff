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
    for row, segments, positions in zip(rows.tokens, rows.segment_ids, rows.positions, strict=True):
        for number in range(1, segments.max() + 1):
            here = np.flatnonzero(segments == number)
            np.testing.assert_array_equal(here, here[0] + np.arange(here.size))
            np.testing.assert_array_equal(positions[here], np.arange(here.size))
            pieces.append(row[here].tolist())
    # A document is its pieces, one behind the other; each is taken once.
    whole = sum(document.tolist() in pieces for document in made)
    assert whole > len(made) / 2
    for document in sorted(map(np.ndarray.tolist, made), key=len):
        at = 0
        while at < len(document):
            fitting = [piece for piece in pieces if document[at : at + len(piece)] == piece]
            assert fitting, (document, at)
            pieces.remove(longest := max(fitting, key=len))
            at += len(longest)
    assert not pieces


@pytest.mark.parametrize(("low", "most_text"), [(0.2, 40), (0.4, 30)])  # 2 images are 0.36 of a row
def test_rows_keep_the_bounds_and_images_are_whole(tmp_path: pathlib.Path, low: float, most_text: int) -> None:
    write(tmp_path, documents(200))
    data = make(tmp_path, image_share=(low, 0.6))
    assert data.schema().capacities == (most_text, 30)
    built = data.build()
    rows = built.examples.stream(0, built.num_examples("train"))
    assert rows.modality is not None
    known = rows.segment_ids != 0
    np.testing.assert_array_equal(rows.modality, np.where(known, rows.tokens >= 100, -1))
    of_text, of_images = ((rows.modality == number).sum(1) for number in (0, 1))
    assert of_text.max() == most_text
    assert of_images.max() <= 30
    full = of_text + of_images == 50
    assert full.sum() >= 5
    assert known.mean() > 0.8
    share = of_images[full] / 50
    assert low <= share.min() <= share.max() <= 0.6
    for row in rows.modality:
        runs = np.diff(np.flatnonzero(np.diff(row, prepend=-2, append=-2)))
        kinds = row[np.flatnonzero(np.diff(row, prepend=-2))]
        assert set((runs[kinds == 1] % IMAGE).tolist()) <= {0}
    devices = rows.modality[: len(rows) // 8 * 8].reshape(8, -1)  # whatever the mesh
    assert ((devices == 1).sum(1) <= 0.6 * devices.shape[1]).all()


def test_ids_beyond_16_bits_are_kept(tmp_path: pathlib.Path) -> None:
    write(tmp_path, [np.array([65_535, 65_536, 69_999, END])] * 3)
    data = make(tmp_path, ranges=(("text", 0, 70_000),), image_share=(0.0, 1.0))
    batch = next(data.build().train_batches(start_example=0))
    np.testing.assert_array_equal(batch.tokens[0, :4], [65_535, 65_536, 69_999, END])


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


def test_documents_are_made_anew_where_the_files_are_read_in_another_way(tmp_path: pathlib.Path) -> None:
    (tmp_path / "shards").mkdir()
    np.array([5, 6, END, 7, 8, 9, 2, 4], "<u2").tofile(tmp_path / "shards" / "a.bin")
    pq.write_table(pa.table({"first": [[3, 4]], "second": [[5, 6, 7]]}), tmp_path / "a.parquet")

    def first_row(**fields: Any) -> list[list[int]]:
        data = make(tmp_path, ranges=(("text", 0, 2**20),), image_share=(0.0, 1.0), order="file", **fields)
        rows = data.build().examples.stream(0, 1)
        segments = rows.segment_ids[0]
        return [rows.tokens[0, segments == number].tolist() for number in range(1, segments.max() + 1)]

    assert first_row(separator=END) == [[5, 6, END], [7, 8, 9, 2, 4]]
    assert first_row(separator=2) == [[5, 6, END, 7, 8, 9, 2], [4]]
    assert first_row(dtype="uint32") == [[5 + (6 << 16), END + (7 << 16), 8 + (9 << 16), 2 + (4 << 16)]]
    parquet = {"path": str(tmp_path / "a.parquet")}
    assert first_row(column="first", **parquet) == [[3, 4]]
    assert first_row(column="second", **parquet) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_share": (0.2, 0.1)}, r"image_share=\(0.2, 0.1\): wanted two shares"),
        ({"ranges": (("text", 0, 150),)}, "is of the modality image, and data.ranges has text"),
        ({"vocabulary": 100}, "data.vocabulary=100 is too small: data.ranges has 150 ids"),
        ({"ranges": (("text", 0, 100), ("image", 120, 150))}, r"0.parquet, document \d+: Token 1\d\d of row 0"),
        ({"column": "ids"}, r"^\S+0.parquet: wanted a column 'ids' of lists of whole numbers; the file has 'tokens'"),
        ({"image_share": (0.2, 0.16), "length": 50}, "wanted two shares"),
        ({"image_share": (0.0, 0.16)}, r"9 tokens of image follow one another .* a row of 50 has room for 8\. Widen"),
        ({"image_share": None}, r"image_share=None: wanted two shares"),
        ({"image_share": ("0.2", "0.6")}, r"image_share=\('0.2', '0.6'\): wanted two shares"),
        ({"image_share": (0.2,)}, r"image_share=\(0.2,\): wanted two shares"),
        ({"image_share": (float("nan"), 1.0)}, r"image_share=\(nan, 1.0\): wanted two shares"),
        (
            {"ranges": (("text", 0, 50), ("sound", 50, 100), ("image", 100, 150))},
            r"image_share=\(0.2, 0.6\): a lower bound above 0 .* data.ranges has 3 \(text, sound, image\)",
        ),
        ({"ranges": (("image", 0, 150),)}, r"a lower bound above 0 .* data.ranges has 1 \(image\)"),
        ({"path": "/nowhere"}, r"/nowhere does not exist. Name a file or a folder of token ids"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path, fields: dict[str, Any], words: str) -> None:
    write(tmp_path, documents())
    with pytest.raises(UserError, match=words):
        make(tmp_path, **fields).build()


def test_a_file_that_cannot_be_read_is_said_once(tmp_path: pathlib.Path) -> None:
    write(tmp_path, documents())
    path = tmp_path / "shards" / "0.parquet"
    with pytest.raises(UserError) as wrong_column:
        make(tmp_path, column="ids").build()
    path.write_bytes(b"no table")
    with pytest.raises(UserError) as unreadable:
        make(tmp_path).build()
    path.rename(tmp_path / "shards" / "0.txt")
    with pytest.raises(UserError) as unknown:
        make(tmp_path, path=str(tmp_path / "shards" / "0.txt")).build()
    for error, words in (
        (wrong_column, "wanted a column 'ids'"),
        (unreadable, "cannot be read as Parquet"),
        (unknown, "wanted a file that ends in"),
    ):
        said = str(error.value)
        assert words in said
        assert said.count(str(tmp_path)) == 1
        assert "cannot be read as token ids" not in said


def test_without_a_lower_bound_three_modalities_share_a_row(tmp_path: pathlib.Path) -> None:
    write(tmp_path, documents())
    ranges = (("text", 0, 50), ("sound", 50, 100), ("image", 100, 150))
    data = make(tmp_path, ranges=ranges, image_share=(0.0, 0.6))
    assert data.schema().capacities == (50, 50, 30)
    rows = data.build().examples.stream(0, 20)
    assert rows.modality is not None
    assert 0 < (rows.modality == 2).sum(1).max() <= 30


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
