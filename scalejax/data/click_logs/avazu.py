"""The Avazu click log: 40 million mobile ads of ten days (21 to 30 October 2014), as a CSV with a header.

    id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,
    device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21

`click` is the label, `hour` is YYMMDDHH, `id` numbers the lines and is not used. Features are the 21 other columns, 9
of them hashes of 8 hex digits and 12 integers (also negative: -1 is a value like any other), and two made of `hour`:
hour_of_day (0 to 23) and weekday (0 = Monday to 6). An empty field is a missing value. Values become ids by a coding
(`coding`), in which id 0 stands for missing; hour_of_day and weekday are ids as they are. There are no numbers.

The split is by `hour` in the file's own notation: `ByTime(column="hour", ...)`; by default the ninth day validates and
the tenth tests.

    avazu.to_parquet("train.gz", "avazu.parquet", coding=Counted(min_count=2))
    AvazuData(path="avazu.parquet", access="windows")
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from scalejax.data.click_logs.delimited import Progress, first_fields, hex_values, read_blocks
from scalejax.data.examples.coding import MILLION, Coder, Coding, Hashed
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.encode import missing_column
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import ByTime, Fractions
from scalejax.data.tables import parquet
from scalejax.data.tables.parquet_files import ParquetFiles, find_files, open_converted
from scalejax.data.tables.parquet_writing import writing
from scalejax.errors import UserError

HASHED = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
FEATURES = (
    *("C1", "banner_pos"),
    *HASHED,
    *("device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)
COLUMNS = ("id", "click", "hour", *FEATURES)
"""In the order of the file."""

CALENDAR = {"hour_of_day": 24, "weekday": 7}
BY_DAY = ByTime(column="hour", validation_from=14_10_29_00, test_from=14_10_30_00)

_KEY = b"scalejax.avazu"
_LABEL, _HOUR, _DAY = "click", "hour", "day"
_TYPES = {
    name: pa.binary() if name in ("id", *HASHED) else pa.int8() if name == _LABEL else pa.int64() for name in COLUMNS
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AvazuData(parquet.ParquetReading):
    """Examples in the Avazu schema.

    Attributes:
      path: A CSV (also gzipped), a folder of them (`*.csv`, `*.gz`), read into memory, or what `to_parquet` made.
      coding: Of text files; a converted file has its own.
      split: `ByTime(column="hour", ...)` with hours as YYMMDDHH, or `Fractions`.
      access: Of a converted file: "memory" or "windows", see `ParquetData`.
      window: Row groups per window.
      order: "shuffled", or "time" = by day; the data set then knows the days ("20141021", ...).
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    coding: Coding = MILLION
    split: ByTime | Fractions = BY_DAY

    def schema(self) -> Schema:
        """What batches hold. Of text with `Hashed` ids nothing is read, with `Counted` ids all; else the footer.

        Raises:
          UserError: as `build`.
        """
        converted = open_converted(self.path)
        return _schema(_rows_in(converted) if converted else self._fit().rows)

    def build(self) -> BatchedDataSet:
        """Reads or opens the files.

        Raises:
          UserError: a file is missing, damaged or not of this schema.
        """
        if isinstance(self.split, ByTime) and self.split.column != _HOUR:
            raise UserError(f"data.split: the time of this log is the column 'hour'; got {self.split.column!r}.")
        if converted := open_converted(self.path):
            return self.read(
                _schema(_rows_in(converted)), split=self.split, time=_DAY if self.order == "time" else None
            )
        if self.access == "windows":
            raise UserError(f'{self.path}: access="windows" needs a converted file; run avazu.to_parquet on it first.')
        coder = self._fit()
        chunks = [coder(values) | others for others, values, _ in _read_text(self._text_files())]
        return from_columns(
            {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]},
            _schema(coder.rows),
            batch_size=self.batch_size,
            split=self.split,
            order=self.order,
            seed=self.seed,
            time=_DAY,
            threads=self.threads,
            where=self.path,
            counted=coder.counted,
        )

    def _text_files(self) -> list[pathlib.Path]:
        return _text_files(pathlib.Path(self.path))

    def _fit(self) -> Coder:
        if isinstance(self.coding, Hashed):
            return Coder.fit(self.coding, FEATURES, ())
        return Coder.fit(self.coding, FEATURES, (values for _, values, _ in _read_text(self._text_files())))


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
      source: A CSV with its header, also gzipped, or a folder of them.
      path: The file to write; `AvazuData(path=...)` reads it.
      coding: How values become ids.
      row_group: Examples per row group, the grain of the shuffle in windows.
      progress: Called with (bytes read, bytes in all) after each block.
    Raises:
      UserError: a line that is not of the schema.
    """
    files = _text_files(pathlib.Path(source))
    coder = AvazuData(path=str(source), coding=coding)._fit()  # pyright: ignore[reportPrivateUsage] (of the same module)
    fields = [pa.field(_LABEL, pa.int8()), pa.field(_HOUR, pa.int32()), pa.field(_DAY, pa.int32())]
    fields += [pa.field(name, pa.int32()) for name in (*CALENDAR, *FEATURES)]
    metadata = {"rows": coder.rows, "coding": coder.digest()}
    schema = pa.schema(fields, metadata={_KEY: json.dumps(metadata)})
    total = sum(file.stat().st_size for file in files)
    with writing(pathlib.Path(path), schema, row_group) as writer:
        for others, values, position in _read_text(files):
            writer.write(coder(values) | others)
            progress(position, total)


def _schema(rows: dict[str, int]) -> Schema:
    categorical = [Categorical(name=name, rows=n) for name, n in CALENDAR.items()]
    categorical += [Categorical(name=name, rows=rows[name]) for name in FEATURES]
    return Schema(categorical=tuple(categorical), labels=(_LABEL,))


def _rows_in(files: ParquetFiles) -> dict[str, int]:
    found = files.key_value(_KEY, "was not written by avazu.to_parquet. Convert the text, or use ParquetData.")
    return json.loads(found)["rows"]


def _text_files(source: pathlib.Path) -> list[pathlib.Path]:
    if not source.is_dir():
        return find_files(source, "*")
    files = sorted(f for pattern in ("*.csv", "*.gz") for f in source.glob(pattern))
    if not files:
        raise UserError(f"{source}: the folder holds no *.csv or *.gz. Point data.path at the text files.")
    return files


def _read_text(
    files: Sequence[pathlib.Path],
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]], int]]:
    """Blocks of lines: label, time and calendar columns; values of the features and which are there; bytes read."""
    before = 0
    for file in files:
        _check_header(file)
        blocks = read_blocks(
            file,
            _TYPES,
            delimiter=",",
            kind="Avazu",
            wanted=f"{len(COLUMNS)} fields, separated by commas, hashes and integers in the order of the header",
            skip=1,
        )
        for batch, where, position in blocks:
            for name in (_LABEL, _HOUR):
                if batch.column(name).null_count:
                    raise UserError(f"{where}: a line has no {name}. Complete or remove such lines.")
            hour = batch.column(_HOUR).to_numpy(zero_copy_only=False)
            others = {_LABEL: batch.column(_LABEL).to_numpy(zero_copy_only=False), _HOUR: hour} | _calendar(hour, where)
            yield others, {name: _values(batch.column(name), name, where) for name in FEATURES}, before + position
        before += file.stat().st_size


def _check_header(file: pathlib.Path) -> None:
    header = first_fields(file, ",")
    for name in COLUMNS:
        if name not in header:
            raise missing_column(name, header, f"{file}, line 1")
    if header != COLUMNS:
        raise UserError(
            f"{file}, line 1: columns must be {', '.join(COLUMNS)}, in this order; got {', '.join(header)}."
        )


def _values(array: pa.Array, name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    if name in HASHED:
        return hex_values(array, name, where)
    return array.fill_null(0).to_numpy(zero_copy_only=False), array.is_valid().to_numpy(zero_copy_only=False)


def _calendar(hour: np.ndarray, where: str) -> dict[str, np.ndarray]:
    """int64[N] as YYMMDDHH -> day as YYYYMMDD, hour_of_day, weekday."""
    different, inverse = np.unique(hour, return_inverse=True)
    weekday = np.empty(different.size, np.int64)
    for i, value in enumerate(different.tolist()):
        date, hours = divmod(value, 100)
        try:
            weekday[i] = datetime.date(2000 + date // 10_000, date // 100 % 100, date % 100).weekday()
            if not 0 <= hours < 24 or not 0 <= date < 1_000_000:
                raise ValueError
        except ValueError as error:
            raise UserError(
                f"{where}: hour is {value} {int((hour == value).argmax())} lines further; wanted YYMMDDHH, such as "
                "14102100. Correct the line."
            ) from error
    return {_DAY: 20_000_000 + hour // 100, "hour_of_day": hour % 100, "weekday": weekday[inverse]}
