"""The Criteo click logs: one example per line, tab separated: label, 13 integers, 26 hashes of 8 hex digits.

An empty field is a missing value. Hashes become ids by one of two codings, in both of which id 0 stands for missing:

  Hashed   id = 1 + hash(column, value) % (rows - 1); needs no pass over the data, different values may share an id.
  Counted  values seen at least `min_count` times get the ids 2, 3, ... from the most frequent on (ties by value), the
           others share id 1; needs one more pass, counts over all lines of the files.

Of the integers log(x + 3) is taken, as in torchrec's Criteo preprocessing (they are -2 and above), then they are
standardised; a missing integer becomes the mean.

Text is slow to parse. `to_parquet` does it once:

    criteo.to_parquet("train.txt", "criteo.parquet", coding=Hashed(rows=1_000_000))
    CriteoData(path="criteo.parquet", access="windows")
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from scalejax.data import parquet
from scalejax.data.dataset import BatchedDataSet
from scalejax.data.encode import NanPolicy, check_schema
from scalejax.data.memory import Order, from_columns
from scalejax.data.parquet_files import ParquetFiles, find_files, first_line
from scalejax.data.permutation import key_of, mix
from scalejax.data.schema import Categorical, Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, Fractions
from scalejax.errors import UserError

LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
HASHES = tuple(f"C{i}" for i in range(1, 27))

_KEY = b"scalejax.criteo"
_MISSING, _RARE = 0, 1
# ASCII -> value of a hex digit, 255 = none.
_NIBBLES = np.full(256, 255, np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLES[np.frombuffer(_digits, np.uint8)] = np.arange(16)

_TYPES = {LABEL: pa.int8()} | dict.fromkeys(INTEGERS, pa.int32()) | dict.fromkeys(HASHES, pa.binary())
_CODECS = {".gz": "gzip", ".zst": "zstd"}

Progress = Callable[[int, int], None]
Lines = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed:
    """Hashes every feature into `rows` ids (id 0 = missing)."""

    rows: int = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """A vocabulary per feature of the values seen at least `min_count` times (id 0 = missing, 1 = rarer)."""

    min_count: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoData:
    """Examples in the Criteo schema.

    Attributes:
      path: A text file or a folder of them (`*.txt`, `*.tsv`, `day_*`, also gzipped; read into memory), or what
        `to_parquet` made.
      coding: Of text files; a converted file has its own.
      split: The lines are in time order, so `Fractions(by="position")` is a split by time.
      log_shift: log(x + log_shift) is taken of the integers.
      access: Of a converted file: "memory" or "windows", see `ParquetData`.
      window: Row groups per window.
      order: "shuffled", or "time" = file order.
      nan: "mean" = a missing integer becomes the mean of the training split; "error" = it is refused.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    path: str
    coding: Hashed | Counted = Hashed()
    split: Fractions = EIGHTY_TEN_TEN
    log_shift: float = 3.0
    access: Literal["memory", "windows"] = "memory"
    window: int = 4
    order: Order = "shuffled"
    nan: NanPolicy = "mean"
    batch_size: int = 1024
    seed: int = 0
    threads: int = 2

    def schema(self) -> Schema:
        """What batches hold. Of text with `Hashed` ids nothing is read, with `Counted` ids all; else the footer.

        Raises:
          UserError: as `build`.
        """
        converted = self._converted()
        return _schema(_rows_in(converted) if converted else _Coder.fit(self.coding, pathlib.Path(self.path)).rows)

    def build(self) -> BatchedDataSet:
        """Reads or opens the files.

        Raises:
          UserError: a file is missing, damaged or not of this schema.
        """
        path = pathlib.Path(self.path)
        log_shift = tuple((name, self.log_shift) for name in INTEGERS)
        if converted := self._converted():
            schema = _schema(_rows_in(converted))
            return parquet.ParquetData(
                path=self.path,
                categorical=schema.categorical,
                dense=schema.dense,
                labels=schema.labels,
                split=self.split,
                access=self.access,
                window=self.window,
                order=self.order,
                log_shift=log_shift,
                nan=self.nan,
                batch_size=self.batch_size,
                seed=self.seed,
                threads=self.threads,
            ).build()
        if self.access == "windows":
            raise UserError(f'{path}: access="windows" needs a converted file; run criteo.to_parquet on it first.')
        coder = _Coder.fit(self.coding, path)
        chunks = [coder(lines) for lines, _ in _read_text(path)]
        return from_columns(
            {name: np.concatenate([chunk[name] for chunk in chunks]) for name in (LABEL, *INTEGERS, *HASHES)},
            _schema(coder.rows),
            batch_size=self.batch_size,
            split=self.split,
            order=self.order,
            seed=self.seed,
            log_shift=dict(log_shift),
            nan=self.nan,
            threads=self.threads,
            where=self.path,
        )

    def _converted(self) -> ParquetFiles | None:
        """What `to_parquet` made, or None where `path` is text."""
        path = pathlib.Path(self.path)
        found = path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
        return ParquetFiles(path) if found else None


def to_parquet(
    source: str | pathlib.Path,
    path: str | pathlib.Path,
    *,
    coding: Hashed | Counted = Hashed(),
    row_group: int = 262_144,
    progress: Progress = lambda done, total: None,
) -> None:
    """Converts text files to one Parquet file, streaming; the file appears when it is complete.

    Args:
      source: A text file, or a folder of them.
      path: The file to write. `CriteoData(path=...)` reads it; `ParquetData` can, too.
      coding: How hashes become ids.
      row_group: Examples per row group, the grain of the shuffle in windows.
      progress: Called with (bytes read, bytes in all) after each block.
    Raises:
      UserError: a line that is not of the schema.
    """
    path, source = pathlib.Path(path), pathlib.Path(source)
    coder = _Coder.fit(coding, source)
    fields = [pa.field(LABEL, pa.int8()), *(pa.field(name, pa.int32()) for name in (*INTEGERS, *HASHES))]
    metadata = {"coding": repr(coding), "rows": coder.rows}
    schema = pa.schema(fields, metadata={_KEY: json.dumps(metadata)})
    partial = path.with_name(path.name + ".partial")
    total = sum(file.stat().st_size for file in _text_files(source))
    pending: list[pa.Table] = []
    with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:

        def flush(at_least: int) -> None:
            while (rows := sum(table.num_rows for table in pending)) >= at_least and rows:
                table = pa.concat_tables(pending)
                writer.write_table(table.slice(0, row_group), row_group_size=row_group)
                pending[:] = [table.slice(row_group)]

        for lines, position in _read_text(source):
            coded = coder(lines)
            columns = [
                pa.array(coded[field.name], mask=_mask(coded[field.name])).cast(field.type, safe=True)
                for field in schema
            ]
            pending.append(pa.Table.from_arrays(columns, schema=schema))
            flush(row_group)
            progress(position, total)
        flush(1)
    os.replace(partial, path)


def _mask(column: np.ndarray) -> np.ndarray | None:
    return np.isnan(column) if np.issubdtype(column.dtype, np.floating) else None


def _schema(rows: dict[str, int]) -> Schema:
    categorical = tuple(Categorical(name=name, rows=rows[name]) for name in HASHES)
    return Schema(categorical=categorical, dense=INTEGERS, labels=(LABEL,))


def _rows_in(files: ParquetFiles) -> dict[str, int]:
    text = (files.arrow_schema.metadata or {}).get(_KEY)
    if text is None:
        raise UserError(f"{files.path}: was not written by criteo.to_parquet. Convert the text, or use ParquetData.")
    return json.loads(text)["rows"]


class _Coder:
    """Lines as read -> columns with ids."""

    def __init__(self, rows: dict[str, int], vocabularies: dict[str, tuple[np.ndarray, np.ndarray]] | None) -> None:
        self.rows = rows
        self._vocabularies = vocabularies

    @classmethod
    def fit(cls, coding: Hashed | Counted, source: pathlib.Path) -> "_Coder":
        if isinstance(coding, Hashed):
            if coding.rows < 2:
                raise UserError(f"Hashed: rows must be at least 2 (id 0 stands for missing); got {coding.rows}.")
            coder = cls(dict.fromkeys(HASHES, coding.rows), None)
            check_schema(_schema(coder.rows))
            return coder
        counts = {name: _Counts() for name in HASHES}
        for lines, _ in _read_text(source):
            for name in HASHES:
                counts[name].add(lines[name])
        vocabularies = {name: count.vocabulary(coding.min_count) for name, count in counts.items()}
        return cls({name: 2 + values.size for name, (values, _) in vocabularies.items()}, vocabularies)

    def __call__(self, lines: Lines) -> Lines:
        coded = dict(lines)
        for c, name in enumerate(HASHES):
            value = lines[name]
            if self._vocabularies is None:
                spread = mix(value.astype(np.uint64) + np.uint64(key_of(c)))
                ids = 1 + (spread % np.uint64(self.rows[name] - 1)).astype(np.int64)
            else:
                known, id_of = self._vocabularies[name]
                at = np.minimum(np.searchsorted(known, value), max(known.size - 1, 0))
                ids = np.where(known[at] == value, id_of[at], _RARE) if known.size else np.full(value.size, _RARE)
            coded[name] = np.where(value < 0, _MISSING, ids).astype(np.int32)
        return coded


class _Counts:
    """How often each value of a column occurs."""

    def __init__(self) -> None:
        self._values, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, values: np.ndarray) -> None:
        self._pending.append(np.unique(values[values >= 0], return_counts=True))
        # Merged when the pending part has grown as large as the rest: every value is merged a few times at most.
        if sum(v.size for v, _ in self._pending) > max(self._values.size, 1 << 20):
            self._merge()

    def vocabulary(self, min_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Frequent values, ascending, and the id of each."""
        self._merge()
        frequent = self._counts >= min_count
        values, counts = self._values[frequent], self._counts[frequent]
        ids = np.empty(values.size, np.int64)
        ids[np.lexsort((values, -counts))] = np.arange(2, 2 + values.size)
        return values, ids

    def _merge(self) -> None:
        values = np.concatenate([self._values, *(v for v, _ in self._pending)])
        counts = np.concatenate([self._counts, *(c for _, c in self._pending)])
        self._values, inverse = np.unique(values, return_inverse=True)
        self._counts = np.zeros(self._values.size, np.int64)
        np.add.at(self._counts, inverse, counts)
        self._pending = []


def _text_files(source: pathlib.Path) -> list[pathlib.Path]:
    if not source.is_dir():
        return find_files(source, "*")
    files = [f for pattern in ("*.txt", "*.txt.gz", "*.tsv", "*.tsv.gz", "day_*") for f in source.glob(pattern)]
    if not files:
        raise UserError(
            f"{source}: the folder holds no *.txt, *.tsv or day_* files. Point data.path at the text files."
        )
    return [file for f in sorted(set(files)) for file in find_files(f, "*")]


def _read_text(source: pathlib.Path) -> Iterator[tuple[Lines, int]]:
    """Blocks of lines: label int8, integers float64 with NaN, hashes int64 with -1 = missing; and bytes read."""
    before = 0
    for file in _text_files(source):
        first_row = 0
        for batch, position in _read_blocks(file):
            where = f"{file}, line {first_row + 1} and following"
            yield {name: _column(batch.column(name), name, where) for name in _TYPES}, before + position
            first_row += batch.num_rows
        before += file.stat().st_size


def _read_blocks(file: pathlib.Path) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Blocks of lines as pyarrow reads them, and bytes read."""
    codec = _CODECS.get(file.suffix)
    raw = pa.OSFile(str(file))
    done = 0
    try:
        reader = pyarrow.csv.open_csv(
            raw if codec is None else pa.CompressedInputStream(raw, codec),
            read_options=pyarrow.csv.ReadOptions(column_names=list(_TYPES), block_size=16 << 20),
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=_TYPES, null_values=[""], strings_can_be_null=True, check_utf8=False
            ),
        )
        for batch in reader:
            done += batch.num_rows
            yield batch, raw.tell()
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file}: is not in the Criteo schema after line {done} ({first_line(error)}); wanted a label, 13 "
            "integers and 26 hashes, tab separated, empty = missing."
        ) from error
    except OSError as error:
        wanted = "" if codec is None else f", or not {codec}"
        raise UserError(
            f"{file}: cannot be read after line {done} ({first_line(error)}); truncated, damaged{wanted}? Copy it "
            "again from its source."
        ) from error


def _column(array: pa.Array, name: str, where: str) -> np.ndarray:
    if name == LABEL:
        if array.null_count:
            raise UserError(f"{where}: a line has no label. Only labelled lines can be used; remove the others.")
        return array.to_numpy(zero_copy_only=False)
    if name in INTEGERS:
        return array.cast(pa.float64()).to_numpy(zero_copy_only=False)
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
    values = np.full(len(array), -1, np.int64)
    octets = digits[:, 0::2] << 4 | digits[:, 1::2]
    values[lengths == 8] = octets.view(">u4")[:, 0]
    return values
