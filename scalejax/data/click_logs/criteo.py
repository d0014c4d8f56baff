"""The Criteo click logs: one example per line, tab separated: label, 13 integers, 26 hashes of 8 hex digits.

An empty field is a missing value. Hashes become ids by a coding (`coding`), in which id 0 stands for missing.

Of the integers log(x + 3) is taken, as in torchrec's Criteo preprocessing (they are -2 and above), then they are
standardised; a missing integer becomes the mean.

Text is slow to parse. `to_parquet` does it once:

    criteo.to_parquet("train.txt", "criteo.parquet", coding=Hashed(rows=1_000_000))
    CriteoData(path="criteo.parquet", access="windows")
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from scalejax.data.click_logs.delimited import Progress, hex_values, read_blocks
from scalejax.data.examples.coding import MILLION, Coder, Coding, Counted, Hashed
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.encode import NanPolicy
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, Fractions
from scalejax.data.tables import parquet
from scalejax.data.tables.parquet_files import ParquetFiles, find_files, natural_order, open_converted
from scalejax.data.tables.parquet_writing import writing
from scalejax.errors import UserError

__all__ = ["HASHES", "INTEGERS", "LABEL", "Counted", "CriteoData", "Hashed", "to_parquet"]

LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
HASHES = tuple(f"C{i}" for i in range(1, 27))

_KEY = b"scalejax.criteo"
_TYPES = {LABEL: pa.int8()} | dict.fromkeys(INTEGERS, pa.int32()) | dict.fromkeys(HASHES, pa.binary())
_WANTED = "a label, 13 integers and 26 hashes, tab separated, empty = missing"


@dataclasses.dataclass(frozen=True)
class Lines:
    """A block of lines.

    Attributes:
      numbers: label int8[N], and integers float64[N] with NaN = missing, by name.
      hashes: Values and which of them are there, by name.
      file: Number of the file.
      bytes_read: Of all files so far.
    """

    numbers: dict[str, np.ndarray]
    hashes: dict[str, tuple[np.ndarray, np.ndarray]]
    file: int
    bytes_read: int

    def __len__(self) -> int:
        return self.numbers[LABEL].size


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoData(parquet.ParquetReading):
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
      nan: "mean" = a missing integer becomes the mean of the training split; "zero" = 0, before the logarithm;
        "error" = it is refused.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    coding: Coding = MILLION
    split: Fractions = EIGHTY_TEN_TEN
    log_shift: float = 3.0
    nan: NanPolicy = "mean"

    def schema(self) -> Schema:
        """What batches hold. Of text with `Hashed` ids nothing is read, with `Counted` ids all; else the footer.

        Raises:
          UserError: as `build`.
        """
        converted = open_converted(self.path)
        return schema_of(rows_in(converted) if converted else self._fit().rows)

    def build(self) -> BatchedDataSet:
        """Reads or opens the files.

        Raises:
          UserError: a file is missing, damaged or not of this schema.
        """
        path = pathlib.Path(self.path)
        log_shift = tuple((name, self.log_shift) for name in INTEGERS)
        if converted := open_converted(self.path):
            return self.read(schema_of(rows_in(converted)), split=self.split, log_shift=log_shift, nan=self.nan)
        if self.access == "windows":
            raise UserError(f'{path}: access="windows" needs a converted file; run criteo.to_parquet on it first.')
        coder = self._fit()
        columns, _ = concatenated(coder, read_text(text_files(path)))
        return from_columns(
            columns,
            schema_of(coder.rows),
            batch_size=self.batch_size,
            split=self.split,
            order=self.order,
            seed=self.seed,
            log_shift=dict(log_shift),
            nan=self.nan,
            threads=self.threads,
            where=self.path,
            counted=coder.counted,
        )

    def _fit(self) -> Coder:
        return fit(self.coding, lambda: text_files(pathlib.Path(self.path)))


def to_parquet(
    source: str | pathlib.Path,
    path: str | pathlib.Path,
    *,
    coding: Coding = MILLION,
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
    files = text_files(pathlib.Path(source))
    write(files, pathlib.Path(path), fit(coding, lambda: files), row_group, progress)


def write(
    files: Sequence[pathlib.Path],
    path: pathlib.Path,
    coder: Coder,
    row_group: int,
    progress: Progress,
    constants: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Writes the lines of some files to one Parquet file, and columns of one small number each."""
    fields = [pa.field(LABEL, pa.int8()), *(pa.field(name, pa.int32()) for name in (*INTEGERS, *HASHES))]
    fields += [pa.field(name, pa.int8()) for name in constants]
    metadata = {"rows": coder.rows, "coding": coder.digest()}
    schema = pa.schema(fields, metadata={_KEY: json.dumps(metadata)})
    total = sum(file.stat().st_size for file in files)
    with writing(path, schema, row_group) as writer:
        for lines in read_text(files):
            constant = {name: np.full(len(lines), value, np.int8) for name, value in constants.items()}
            writer.write(lines.numbers | coder(lines.hashes) | constant)
            progress(lines.bytes_read, total)


def schema_of(rows: dict[str, int]) -> Schema:
    """The schema for some number of ids of each feature."""
    categorical = tuple(Categorical(name=name, rows=rows[name]) for name in HASHES)
    return Schema(categorical=categorical, dense=INTEGERS, labels=(LABEL,))


def rows_in(files: ParquetFiles) -> dict[str, int]:
    """The number of ids of each feature of converted files.

    Raises:
      UserError: another origin, or files converted with different codings.
    """
    found = files.key_value(_KEY, "was not written by criteo.to_parquet. Convert the text, or use ParquetData.")
    return json.loads(found)["rows"]


def fit(coding: Coding, files: Callable[[], Sequence[pathlib.Path]]) -> Coder:
    """The coder of some text files, which are looked for only if they must be read."""
    if isinstance(coding, Hashed):
        return Coder.fit(coding, HASHES, ())
    return Coder.fit(coding, HASHES, (lines.hashes for lines in read_text(files())))


def concatenated(coder: Coder, lines: Iterable[Lines]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns of all lines, coded, and the number of the file of each line."""
    chunks, files = [], []
    for block in lines:
        chunks.append(block.numbers | coder(block.hashes))
        files.append(np.full(len(block), block.file))
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in _TYPES}, np.concatenate(files)


def text_files(source: pathlib.Path) -> list[pathlib.Path]:
    """The file, or the text files of a folder in natural order (day_2 before day_10).

    Raises:
      UserError: there are none.
    """
    if not source.is_dir():
        return find_files(source, "*")
    files = [f for pattern in ("*.txt", "*.txt.gz", "*.tsv", "*.tsv.gz", "day_*") for f in source.glob(pattern)]
    if not files:
        raise UserError(
            f"{source}: the folder holds no *.txt, *.tsv or day_* files. Point data.path at the text files."
        )
    return [file for f in sorted(set(files), key=natural_order) for file in find_files(f, "*")]


def read_text(files: Sequence[pathlib.Path]) -> Iterator[Lines]:
    """Blocks of lines.

    Raises:
      UserError: a line that is not of the schema, a damaged file.
    """
    before = 0
    for number, file in enumerate(files):
        for batch, where, position in read_blocks(file, _TYPES, delimiter="\t", kind="Criteo", wanted=_WANTED):
            if batch.column(LABEL).null_count:
                raise UserError(f"{where}: a line has no label. Only labelled lines can be used; remove the others.")
            numbers = {LABEL: batch.column(LABEL).to_numpy(zero_copy_only=False)}
            for name in INTEGERS:
                numbers[name] = batch.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
            hashes = {name: hex_values(batch.column(name), name, where) for name in HASHES}
            yield Lines(numbers, hashes, number, before + position)
        before += file.stat().st_size
