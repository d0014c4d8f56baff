"""Documents of every kind of file, in blocks, and what is said of files that cannot be read."""

import functools
import gzip
import json
import pathlib
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax.data.text import sources
from scalejax.data.text.sources import SUFFIXES, TextFile, find_texts, read_documents
from scalejax.errors import UserError

TEXTS = ["plain\r\nlines\n", "", "é€😀\n\n", "last"]


def documents(path: pathlib.Path, column: str = "text") -> list[str]:
    found = [""]
    for block in read_documents(TextFile(path, path.name), column):
        found[-1] += block.text
        if block.last:
            found.append("")
    assert found[-1] == ""  # the last block of a file ends its document
    return found[:-1]


def write(path: pathlib.Path) -> None:
    """TEXTS, in the form that the name asks for."""
    bare = path.name.removesuffix(".gz").removesuffix(".zst")
    if bare.endswith(".parquet"):
        pq.write_table(pa.table({"n": range(4), "text": TEXTS}), path, row_group_size=3)
        return
    content = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS) if "json" in bare else TEXTS[0]
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(content.encode())
    else:
        path.write_bytes(content.encode())


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.ndjson", "a.json", "a.parquet"])
def test_documents_come_back_whatever_they_are_stored_in(tmp_path: pathlib.Path, name: str, packed: str) -> None:
    if name == "a.parquet" and packed:
        with pytest.raises(UserError, match="cannot be read as Parquet"):
            (tmp_path / f"a.parquet{packed}").write_bytes(b"PAR1")
            documents(tmp_path / f"a.parquet{packed}")
        return
    write(tmp_path / (name + packed))
    assert documents(tmp_path / (name + packed)) == (TEXTS[:1] if name == "a.txt" else TEXTS)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str)
def test_a_column_may_hold_strings_in_any_way(tmp_path: pathlib.Path, kind: pa.DataType) -> None:
    texts = pa.array(TEXTS).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(TEXTS, kind)
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert pq.ParquetFile(tmp_path / "a.parquet").schema_arrow.field("text").type == kind
    assert documents(tmp_path / "a.parquet") == TEXTS


@pytest.mark.parametrize("text", ["another", "the body"], ids=["name of a column", "text"])
def test_bytes_of_a_parquet_file_that_are_no_text_are_damage(tmp_path: pathlib.Path, text: str) -> None:
    table = pa.table({"text": ["the body"], "another": [1]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    damaged = (tmp_path / "a.parquet").read_bytes().replace(text.encode(), b"\xb0" + text[1:].encode())
    (tmp_path / "a.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 100])
def test_blocks_are_no_longer_than_asked_for_and_the_last_one_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", size)
    monkeypatch.setattr(sources, "pieces", functools.partial(sources.pieces, characters=size))
    text = "0123456789é€😀a\r\n" * 2
    if name == "a.txt":
        (tmp_path / name).write_bytes(text.encode())
    elif name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps({"text": text}))
    else:
        pq.write_table(pa.table({"text": [text]}), tmp_path / name)
    blocks = list(read_documents(TextFile(tmp_path / name, name), "text"))
    assert "".join(block.text for block in blocks) == text
    assert all(len(block.text) == size for block in blocks[:-1])
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]


def test_an_empty_file_is_an_empty_document(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.jsonl").write_text("\n \n")  # empty lines are no documents
    assert documents(tmp_path / "a.txt") == [""]
    assert documents(tmp_path / "a.jsonl") == []


def test_a_folder_stands_for_its_files_sorted_by_path(tmp_path: pathlib.Path) -> None:
    for name in ("b/z.txt", "b/a.txt.gz", "a.md", "c/d/x.jsonl", "skip.c", ".git/x.txt", "b/.hidden.txt", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = [file.name for file in find_texts(str(tmp_path), SUFFIXES)]
    assert names == ["B.txt", "a.md", "b/a.txt.gz", "b/z.txt", "c/d/x.jsonl"]
    assert [file.name for file in find_texts(str(tmp_path), (".c",))] == ["skip.c"]
    several = find_texts((str(tmp_path / "skip.c"), str(tmp_path / "b")), SUFFIXES)
    assert [file.name for file in several] == ["skip.c", "a.txt.gz", "z.txt"]


def test_files_that_cannot_be_read_are_named_with_what_is_wrong(tmp_path: pathlib.Path) -> None:
    def refused(name: str, content: bytes, match: str, column: str = "text") -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=match) as error:
            documents(tmp_path / name, column)
        assert str(tmp_path / name) in str(error.value)

    refused("latin.txt", "naïve".encode("latin-1"), "is not UTF-8: byte 0xEF")
    refused("cut.txt.gz", gzip.compress(b"x" * 1000)[:-10], "truncated or damaged")
    refused("not.txt.gz", b"plain", "cannot be read")
    packed = bytearray(gzip.compress(random.Random(0).randbytes(10_000).hex().encode()))
    packed[5000:5010] = bytes(10)
    refused("bits.txt.gz", bytes(packed), "truncated or damaged")
    refused("not.txt.zst", b"plain", "cannot be read")
    refused("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2: is not JSON")
    refused("deep.jsonl", b"[" * 100_000, "line 1: is not JSON")
    refused("b.jsonl", b'{"text": "x"}\n{"body": "x"}\n', "line 2: wanted text in field 'text'; the line has 'body'")
    refused("c.jsonl", b'{"text": 3}\n', "line 1: wanted text in field 'text'")
    refused("d.jsonl", b'["x"]\n', "the line has list")
    refused("e.jsonl", b'{"text": "x"}', "wanted text in field 'body'", "body")
    refused("a.parquet", b"PAR1 no", "cannot be read as Parquet")
    for table, match in (
        (pa.table({"body": ["x"]}), r"wanted a column 'text' of strings; the file has 'body' \(string\)"),
        (pa.table({"text": [1]}), r"wanted a column 'text' of strings; the file has 'text' \(int64\)"),
        (pa.table({"text": ["x", None]}), "row 1: column 'text' is null"),
    ):
        pq.write_table(table, tmp_path / "x.parquet")
        refused("y.parquet", (tmp_path / "x.parquet").read_bytes(), match)
    with pytest.raises(UserError, match="cannot be read"):
        documents(tmp_path / "missing.txt")
