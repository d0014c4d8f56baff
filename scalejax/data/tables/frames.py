"""Tables of any origin as polars frames, and what tells one content from another.

Of text (CSV, TSV) the whole file decides what a column holds: numbers if all of it are numbers and none has a leading
zero that a number would lose, times if all of it are ISO 8601 dates, with or without a time of day, else text. `NA`,
`?` and nothing stand for a missing value. Integers are kept to the last digit: as 64 bits, signed or not, or as text
where neither holds all of them.
"""

import csv
import functools
import hashlib
import io
import pathlib
import re
from collections.abc import Callable
from typing import Protocol

import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from scalejax.data import packed_files
from scalejax.data.tables.parquet_files import find_files, first_line, read_footer, remarks_on_checksums
from scalejax.errors import UserError

MISSING = ("", "NA", "?")
MOST_COLUMNS = 1000
IN_MEMORY = "frame:"
"""A path that begins so names a frame in memory by the digest of its content."""

_PARQUET = (".parquet", ".pq")
_TEXT = {".csv": ",", ".tsv": "\t"}
_READERS = {
    **dict.fromkeys(_PARQUET, functools.partial(pyarrow.parquet.read_table, page_checksum_verification=True)),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), functools.partial(pyarrow.feather.read_table, memory_map=False)),
}
_TIMES = ("%Y-%m-%d", "%Y/%m/%d", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M")
_ZONED = "%Y-%m-%dT%H:%M:%S%.f%#z"
_LEADING_ZERO = r"^[+-]?0\d"
_LONG_INTEGER = r"^[+-]?\d{16,}(\.0*)?$"
"""Of which float64 may not hold the last digit: 2^53 has 16."""
_held: dict[str, pl.DataFrame] = {}


class ArrowStream(Protocol):
    """Any table that offers its columns as Arrow: of pandas, polars, DuckDB, pyarrow and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def read(path: str) -> pl.DataFrame:
    """The table of a file, or the frame in memory that `hold` gave this path.

    Raises:
      UserError: no such file, of no known kind, or damaged; a line with too many or too few fields; two columns of one
        name; more than `MOST_COLUMNS`.
    """
    if path.startswith(IN_MEMORY):
        if path not in _held:
            raise UserError(
                f"{path}: this table was in the memory of another process. Make its TableData.from_frame again, of the "
                "same content, in a recipe file of yours, and name that: --recipe PATH.PY:FUNCTION."
            )
        return _held[path]
    file = _file(path)
    suffix = file.with_suffix("").suffix if file.suffix in (".gz", ".zst") else file.suffix
    if suffix in _TEXT:
        return _read_text(file, _TEXT[suffix])
    if file.suffix not in _READERS:
        raise UserError(
            f"{file}: wanted a table whose name ends in .csv or .tsv (or these with .gz or .zst), "
            f"{', '.join(_READERS)}; got {file.suffix or 'no ending'}. Rename or convert it."
        )
    try:
        table = _READERS[file.suffix](file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read ({first_line(error)}); truncated or damaged? Copy it again from its source."
        ) from error
    return _checked(table, str(file))


def hold(frame: ArrowStream) -> str:
    """Keeps a frame for as long as the process lives, and returns the path under which `read` finds it.

    The path is made of the content: equal frames have one path, in every process. The index of a pandas frame is left
    out: make a column of it where it means something (`reset_index`).
    """
    try:
        table = pa.RecordBatchReader.from_stream(frame).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(
            f"TableData.from_frame: {type(frame).__name__} cannot be taken as Arrow columns ({first_line(error)}). "
            "Give a pandas, polars or pyarrow table whose columns hold one type each."
        ) from error
    indices = [name for name in table.column_names if re.fullmatch(r"__index_level_\d+__", name)]  # of pandas
    found = _checked(table.drop_columns(indices), "TableData.from_frame")
    digest = hashlib.sha256()
    for column in found:
        digest.update(repr((column.name, str(column.dtype))).encode())
        _hash(column, digest.update)
    path = IN_MEMORY + digest.hexdigest()
    _held[path] = found
    return path


def remarks(path: str) -> tuple[str, ...]:
    """What a user should know of the file before anything is trained on it."""
    if path.startswith(IN_MEMORY) or pathlib.Path(path).suffix not in _PARQUET:
        return ()
    return remarks_on_checksums({pathlib.Path(path): read_footer(pathlib.Path(path))})


def digest_of(path: str) -> str:
    """SHA-256 of a file, in hex; of a frame in memory that of its content."""
    if path.startswith(IN_MEMORY):
        return path.removeprefix(IN_MEMORY)
    with _file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(path: str) -> pathlib.Path:
    if pathlib.Path(path).is_dir():
        raise UserError(f"{path}: is a folder; wanted one file. Name the file.")
    (file,) = find_files(path, "*")
    return file


def _hash(column: pl.Series, update: Callable[[bytes], None]) -> None:
    """What stands under a missing value does not count."""
    update(column.is_null().to_numpy().tobytes())
    if isinstance(column.dtype, pl.List):
        lengths = column.list.len().fill_null(0)
        _hash(lengths, update)
        _hash(column.filter(lengths > 0).explode(), update)
    elif isinstance(column.dtype, pl.Struct):
        for field in column.struct.unnest():
            _hash(field, update)
    elif column.dtype.is_numeric() or column.dtype.is_temporal():
        update(column.to_physical().fill_null(0).to_numpy().tobytes())
    else:
        text = (column.bin.encode("hex") if column.dtype == pl.Binary else column.cast(pl.String)).fill_null("")
        _hash(text.str.len_bytes(), update)
        update("".join(text).encode())


def _checked(table: pa.Table, where: str) -> pl.DataFrame:
    _check_names(table.column_names, where)
    try:
        table.validate(full=True)  # a damaged offset would be read far outside of the file
        for number, field in enumerate(table.schema):
            if pa.types.is_map(field.type):  # lists of (key, value)
                pair = pa.struct([("key", field.type.key_type), ("value", field.type.item_type)])
                table = table.set_column(number, field.name, table[field.name].cast(pa.list_(pair)))
        frame = pl.DataFrame(table)
    except (pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UserError(
            f"{where}: cannot be read ({first_line(error)}); damaged, or a column is of a type that no model sees. "
            "Leave that column out, or write the table again."
        ) from error
    texts = [name for name, kind in frame.schema.items() if kind in (pl.String, pl.Categorical, pl.Enum)]
    fixed = [name for name, kind in frame.schema.items() if isinstance(kind, pl.Array)]
    decimals = {name: frame[name].cast(pl.String) for name, kind in frame.schema.items() if kind.is_decimal()}
    return frame.with_columns(
        *(text if (numbers := _numbers(text)) is None else numbers for text in decimals.values()),
        *(_without_missing(frame[name].cast(pl.String)) for name in texts),
        *(frame[name].arr.to_list() for name in fixed),
        *(frame[name].fill_nan(None) for name, kind in frame.schema.items() if kind.is_float()),
    )


def _check_names(names: list[str], where: str) -> None:
    if len(names) > MOST_COLUMNS:
        raise UserError(
            f"{where}: has {len(names):,} columns; at most {MOST_COLUMNS:,} are taken, since each becomes a table of "
            "its own. Keep those that matter, or write what is sparse as one column of lists (Parquet or Arrow)."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two columns are called {twice[0]!r}; names must differ. Rename one of them.")


def _without_missing(column: pl.Series) -> pl.Series:
    text = column.str.strip_chars()
    return text.set(text.is_in(MISSING), None)


def _read_text(file: pathlib.Path, separator: str) -> pl.DataFrame:
    try:
        header, rows = _check_lines(file, separator)
        with packed_files.open_unpacked(file) as raw:
            frame = pl.read_csv(raw, separator=separator, infer_schema=False, encoding="utf8")
    except (OSError, UnicodeDecodeError, csv.Error, pl.exceptions.PolarsError, pa.ArrowException) as error:
        raise UserError(
            f"{file}: cannot be read as text in UTF-8 with {separator!r} between fields ({first_line(error)}); "
            "damaged, or of another kind? Write it again."
        ) from error
    if frame.width != len(header) or frame[rows:].height != frame[rows:].null_count().row(0)[0]:
        raise UserError(
            f"{file}: {rows:,} lines were counted and {frame.height:,} read. A quotation mark is not closed, or stands "
            'inside a field; write fields that hold one as "...""...".'
        )
    frame = frame[:rows]  # without empty lines at the end
    frame.columns = header
    return frame.with_columns(_typed(_without_missing(frame[name])) for name in header)


def _check_lines(file: pathlib.Path, separator: str) -> tuple[list[str], int]:
    """Names of the columns, and the number of lines below, each of which has that many fields."""
    with (
        packed_files.open_unpacked(file) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text,
    ):
        lines = csv.reader(text, delimiter=separator)
        header = [name.strip() for name in next(lines, [])]
        _check_names(header, str(file))
        rows = empty = 0
        for fields in lines:
            if not fields and len(header) > 1:
                empty += 1
                continue
            if len(fields) != len(header) or empty:
                raise UserError(
                    f"{file}, line {lines.line_num - bool(empty)}: has {0 if empty else len(fields)} fields; the first "
                    f"line names {len(header)} columns. Correct the line, or put quotation marks around a field that "
                    f"holds {separator!r}."
                )
            rows += 1
    return header, rows


def _typed(text: pl.Series) -> pl.Series:
    """Text as numbers or times where all of it are."""
    missing = text.null_count()
    if missing == len(text):
        return text
    if not text.str.contains(_LEADING_ZERO).any():
        numbers = _numbers(text)
        if numbers is not None:
            return numbers
    for form in _TIMES:
        times = text.str.to_datetime(form, strict=False)
        if times.null_count() == missing:
            return times
    times = text.str.to_datetime(_ZONED, strict=False, time_zone="UTC")
    return text if times.null_count() > missing else times.dt.replace_time_zone(None)


def _numbers(text: pl.Series) -> pl.Series | None:
    """Text as numbers; None where not all of it are, or one is an integer that no number of 64 bits here is."""
    for kind in (pl.Int64, pl.UInt64):
        integers = text.cast(kind, strict=False)
        if integers.null_count() == text.null_count():
            return integers
    numbers = text.cast(pl.Float64, strict=False)
    if numbers.null_count() > text.null_count():
        return None
    long = text.drop_nulls().unique()
    for integer in long.filter(long.str.contains(_LONG_INTEGER)):
        if f"{float(integer):.0f}" != integer.partition(".")[0].removeprefix("+"):
            return None
    return numbers.fill_nan(None)
