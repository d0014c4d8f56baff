import gzip
import io
import pathlib
import zipfile

import numpy as np
import pytest

from scalejax.data import packed_files
from scalejax.data.graphs import read_edge_list, read_npz, read_ogb
from scalejax.data.text.sources import find_texts, read_documents
from scalejax.errors import UserError


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_files, "ALWAYS_BYTES", 10_000)


def test_a_small_file_may_unpack_to_anything_small(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"0 1\n" * 20_000))
    assert read_edge_list(tmp_path / "a.txt.gz").num_edges == 20_000


@pytest.mark.usefixtures("small_bound")
def test_a_bomb_is_refused_by_every_reader_of_packed_text(tmp_path: pathlib.Path) -> None:
    bomb = gzip.compress(b"0 1\n" * 2_000_000)
    (tmp_path / "raw").mkdir()
    for name in ("edges.txt.gz", "text.txt.gz", "raw/edge.csv.gz"):
        (tmp_path / name).write_bytes(bomb)
    message = "unpacks to more than 500 times its"
    with pytest.raises(UserError, match=message):
        read_edge_list(tmp_path / "edges.txt.gz")
    with pytest.raises(UserError, match=message):
        list(read_documents(find_texts(str(tmp_path / "text.txt.gz"), ())[0], "text"))
    with pytest.raises(UserError, match=message):
        read_ogb(tmp_path, edges="as-written")


@pytest.mark.usefixtures("small_bound")
def test_an_npz_that_is_a_bomb_is_refused_before_it_is_unpacked(tmp_path: pathlib.Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", edge_src=np.zeros(1_000_000, np.int64), edge_dst=np.zeros(9, np.int64))
    with pytest.raises(UserError, match="unpacks to more than 500 times its"):
        read_npz(tmp_path / "a.npz")


def _npz(path: pathlib.Path, array: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("edge_src.npy", array)


def _npy() -> bytes:
    data = io.BytesIO()
    np.save(data, np.arange(20))
    return data.getvalue()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda npy: npy.replace(b"(20,), }   ", b"(2**40,), }"), "malformed|Cannot parse|ill-formed"),
        (lambda npy: npy.replace(b"(20,), }      ", b"(99999999,), }"), "has 160 bytes for an array of 799999992"),
        (lambda npy: npy.replace(b"(20,), }         ", b"(((((((((((((((((("), "."),
        (lambda npy: npy[:-1], "has 159 bytes for an array of 160"),
        (lambda npy: npy + b"\0", "has 161 bytes for an array of 160"),
    ],
)
def test_a_shape_that_the_bytes_do_not_have_is_refused(harm, message: str, tmp_path: pathlib.Path) -> None:
    _npz(tmp_path / "a.npz", harm(_npy()))
    with pytest.raises(UserError, match=message):
        read_npz(tmp_path / "a.npz")


def test_a_table_of_contents_that_swallows_an_array_is_refused(tmp_path: pathlib.Path) -> None:
    """Found by flipping bits: the length of a comment went up, and the arrays behind it were gone in silence."""
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(2), b=np.arange(3))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 33] ^= 0x80
    path.write_bytes(content)
    with np.load(path) as arrays:
        assert arrays.files == ["a"]
    with pytest.raises(ValueError, match="table of contents is damaged"):
        packed_files.read_npz(path)
