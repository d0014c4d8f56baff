"""Documents of text files, JSONL and Parquet, read in blocks so that none of them has to fit in memory.

  *.jsonl, *.ndjson, *.json   one JSON object a line, a document in its text field
  *.parquet                   a document in each row of the text column
  anything else               one document a file, UTF-8

all but Parquet also packed as *.gz or *.zst. A folder stands for all its files (at any depth) whose names end as asked
for, sorted by path and hidden ones left out; no path at all for the sources of Python's standard library, which every
machine has.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence

from scalejax import json_reading
from scalejax.data.packed_files import open_unpacked
from scalejax.errors import UserError

PIECE_CHARACTERS = 400_000
"""Longer texts are encoded in pieces of this many characters, as Llama 3's own tokenizer does."""

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson", ".parquet")
"""What is taken of a folder unless other endings are named."""

_JSON = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")
# The standard library without its tests, what others installed, and the one file that differs between two builds.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def pieces(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts a text every `characters` characters."""
    for start in range(0, len(text), characters):
        yield text[start : start + characters]


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file and the name it goes by: its path below the folder that was asked for."""

    path: pathlib.Path
    name: str


@dataclasses.dataclass(frozen=True)
class DocumentPiece:
    """A stretch of a document.

    Attributes:
      text: At most `PIECE_CHARACTERS` characters where the source is read in blocks.
      last: Whether the document ends here.
      where: For messages.
    """

    text: str
    last: bool
    where: str


def find_texts(
    path: str | Sequence[str] | None, suffixes: Sequence[str], *, of: str = "text, JSONL or Parquet"
) -> tuple[TextFile, ...]:
    """The files that a path stands for.

    Args:
      path: A file, a folder, several of them, or None for the standard library.
      suffixes: Endings of the names that are taken of a folder; a packing may follow them.
      of: What files hold, for messages.
    Raises:
      UserError: a path is missing, or holds no such file.
    """
    if path is None:
        return _standard_library()
    found: list[TextFile] = []
    for one in [path] if isinstance(path, str) else path:
        start = pathlib.Path(one)
        if start.is_file():
            found.append(TextFile(start, start.name))
            continue
        if not start.is_dir():
            raise UserError(f"data.path: {start} does not exist. Name a file or a folder of {of}.")
        inside = [file for file in start.rglob("*") if _wanted(file, start, suffixes)]
        if not inside:
            raise UserError(
                f"data.path: the folder {start} holds no file whose name ends in {', '.join(suffixes)}. Name a folder "
                f"of {of}, or its files one by one."
            )
        names = {file: file.relative_to(start).as_posix() for file in inside}
        found += [TextFile(file, names[file]) for file in sorted(inside, key=names.__getitem__)]
    if not found:
        raise UserError("data.path: names nothing; got (). Name a file or a folder, or None for the standard library.")
    return tuple(found)


def _wanted(file: pathlib.Path, start: pathlib.Path, suffixes: Sequence[str]) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
    return not hidden and bare_name(file).endswith(tuple(suffixes)) and file.is_file()


def _standard_library() -> tuple[TextFile, ...]:
    start = pathlib.Path(sysconfig.get_path("stdlib"))
    names = {}
    for folder, inner, files in os.walk(start):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                file = pathlib.Path(folder, name)
                names[file] = file.relative_to(start).as_posix()
    if not names:
        raise UserError(
            f"data.path: this Python has no sources of its standard library in {start}. Name a file or a folder of "
            "text in data.path."
        )
    return tuple(TextFile(file, names[file]) for file in sorted(names, key=names.__getitem__))


def read_documents(file: TextFile, column: str) -> Iterator[DocumentPiece]:
    """The documents of a file, block after block.

    Args:
      file: As `find_texts` gives it.
      column: Field of JSONL and column of Parquet that holds the text.
    Raises:
      UserError: not UTF-8, not JSON, without that column, or damaged.
    """
    name = bare_name(file.path)
    if name.endswith(".parquet"):
        return _parquet(file.path, column)
    if name.endswith(_JSON):
        return _json_lines(file.path, column)
    return _whole(file.path)


def read_text(path: pathlib.Path) -> Iterator[str]:
    """A text file in blocks of `PIECE_CHARACTERS` characters; line ends stay as they are.

    Raises:
      UserError: it cannot be read, or is not UTF-8.
    """
    with _reading(path) as stream:
        while block := stream.read(PIECE_CHARACTERS):
            yield block


def _whole(path: pathlib.Path) -> Iterator[DocumentPiece]:
    held = ""  # so that the block that ends the document is known to be the last
    for block in read_text(path):
        if held:
            yield DocumentPiece(held, False, str(path))
        held = block
    yield DocumentPiece(held, True, str(path))


def _json_lines(path: pathlib.Path, column: str) -> Iterator[DocumentPiece]:
    with _reading(path) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json_reading.parse(line)
            except ValueError as error:
                raise UserError(
                    f"{where}: is not JSON ({error}); wanted one object a line. Truncated? A file that holds one "
                    "large JSON array must be written out line by line."
                ) from error
            text = record.get(column) if isinstance(record, dict) else None
            if not isinstance(text, str):
                has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
                raise UserError(f"{where}: wanted text in field {column!r}; the line has {has}. Set data.column.")
            yield from _blocks(text, where)


def _parquet(path: pathlib.Path, column: str) -> Iterator[DocumentPiece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = {field.name: field.type for field in file.schema_arrow}
        kind = columns.get(column)
        if kind is not None and pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind is None or not (
            pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        ):
            has = ", ".join(f"{name!r} ({kind})" for name, kind in columns.items())
            raise UserError(f"{path}: wanted a column {column!r} of strings; the file has {has}. Set data.column.")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                where = f"{path}, row {row}"
                if text is None:
                    raise UserError(f"{where}: column {column!r} is null; wanted text. Leave such rows out.")
                yield from _blocks(text, where)
                row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read as Parquet ({str(error).strip().splitlines()[0]}); truncated or damaged? Copy it "
            "again from its source."
        ) from error


def _blocks(text: str, where: str) -> Iterator[DocumentPiece]:
    if len(text) <= PIECE_CHARACTERS:
        yield DocumentPiece(text, True, where)
        return
    cut = list(pieces(text))
    for piece in cut[:-1]:
        yield DocumentPiece(piece, False, where)
    yield DocumentPiece(cut[-1], True, where)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[io.TextIOWrapper]:
    try:
        with open_unpacked(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8: byte 0x{error.object[error.start]:02X} ({error.reason}). Convert it, for example "
            "with iconv -f latin1 -t utf-8, or leave it out."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); truncated or damaged? Copy it again.") from error


def bare_name(path: pathlib.Path) -> str:
    """The name without the ending of its packing."""
    return path.stem if path.suffix in _PACKED else path.name
