"""Click logs as text: blocks of lines of files with a delimiter, plain or compressed, and their hexadecimal hashes."""

import pathlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.csv

from scalejax.data.packed_files import check_ratio
from scalejax.data.tables.parquet_files import first_line
from scalejax.errors import UserError

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each block."""

_LONGEST_HEADER = 1 << 16
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# ASCII -> value of a hex digit, 255 = none.
_NIBBLES = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLES[np.frombuffer(_digits, np.uint8)] = np.arange(16)


def read_blocks(
    file: pathlib.Path, types: Mapping[str, pa.DataType], *, delimiter: str, kind: str, wanted: str, skip: int = 0
) -> Iterator[tuple[pa.RecordBatch, str, int]]:
    """Blocks of lines as pyarrow reads them, where they lie ("file, line n and following"), and bytes read.

    Args:
      file: Text, or compressed text by its suffix.
      types: Columns, in the order of the file.
      delimiter: Between fields. Nothing is quoted; an empty field is missing.
      kind: Name of the schema, for messages.
      wanted: What a line must hold, for messages.
      skip: Lines at the beginning that are left out.

    Raises:
      UserError: a line with another number of fields, a field of another type, a damaged file.
    """
    raw = pa.OSFile(str(file))
    done, unpacked = skip, 0
    try:
        reader = pyarrow.csv.open_csv(
            _decompressed(raw, file),
            read_options=pyarrow.csv.ReadOptions(column_names=list(types), block_size=16 << 20, skip_rows=skip),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char=False, ignore_empty_lines=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict(types), null_values=[""], strings_can_be_null=True, check_utf8=False
            ),
        )
        for batch in reader:
            unpacked += batch.nbytes
            check_ratio(unpacked, raw.size())
            yield batch, f"{file}, line {done + 1} and following", raw.tell()
            done += batch.num_rows
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file}: is not in the {kind} schema after line {done} ({first_line(error)}); wanted {wanted}."
        ) from error
    except OSError as error:
        raise _unreadable(file, done, error) from error


def first_fields(file: pathlib.Path, delimiter: str) -> tuple[str, ...]:
    """The fields of the first line.

    Raises:
      UserError: a damaged file.
    """
    try:
        with _decompressed(pa.OSFile(str(file)), file) as stream:
            start = stream.read(_LONGEST_HEADER)
    except OSError as error:
        raise _unreadable(file, 0, error) from error
    return tuple(start.split(b"\n", 1)[0].decode(errors="replace").rstrip("\r").split(delimiter))


def _decompressed(raw: pa.OSFile, file: pathlib.Path) -> pa.NativeFile:
    codec = _CODECS.get(file.suffix)
    return raw if codec is None else pa.CompressedInputStream(raw, codec)


def _unreadable(file: pathlib.Path, done: int, error: OSError) -> UserError:
    codec = _CODECS.get(file.suffix)
    compressed = "" if codec is None else f", or not {codec}"
    return UserError(
        f"{file}: cannot be read after line {done} ({first_line(error)}); truncated, damaged{compressed}? Copy it "
        "again from its source."
    )


def hex_values(array: pa.Array, name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Binary strings of 8 hex digits, or null -> int64[N] values in [0, 2**32), bool[N] which are there.

    Raises:
      UserError: anything else; names the line.
    """
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    wrong = (lengths != 0) & (lengths != 8)
    data = array.buffers()[2]
    text = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    digits = _NIBBLES[text]
    if not wrong.any():
        digits = digits.reshape(-1, 8)
        if digits.size and digits.max() == 255:
            wrong[np.flatnonzero(lengths)[(digits == 255).any(axis=1)]] = True
    if wrong.any():
        row = int(wrong.argmax())
        raise UserError(
            f"{where}: column {name} holds {array[row].as_py()!r} {row} lines further; wanted 8 hex digits or nothing."
        )
    values = np.zeros(len(array), np.int64)
    octets = digits[:, 0::2] << 4 | digits[:, 1::2]
    values[lengths == 8] = octets.view(">u4")[:, 0]
    return values, lengths == 8
