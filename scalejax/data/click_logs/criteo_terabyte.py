"""The Criteo 1TB click logs: 24 files, day_0 to day_23, of the lines of `criteo`; 4.4 billion examples.

The split is MLPerf's: all days but the last train; the first half of the last day (rounded up) validates, the second
half tests. Table sizes are MLPerf's too, the cardinalities of its preprocessing capped at 40 million (`TABLE_ROWS`).
Sources: `torchrec_dlrm` of github.com/facebookresearch/dlrm (`data/multi_hot_criteo.py` for the split,
`scripts/materialize_synthetic_multihot_dataset.py` for the rows); torchrec's `datasets/criteo.py` for the numbers:
log(x + 3), a missing integer counts as 0.

Text of this size is read once, day by day:

    criteo_terabyte.to_parquet("criteo1tb", "criteo1tb-parquet", coding=Hashed(rows=TABLE_ROWS))
    CriteoTerabyteData(path="criteo1tb-parquet")

The multi-hot form of MLPerf's DLRM-DCNv2 is in `criteo_multi_hot`.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from scalejax.data.click_logs import criteo
from scalejax.data.click_logs.criteo import INTEGERS
from scalejax.data.click_logs.delimited import Progress
from scalejax.data.examples.coding import Coding, Hashed
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.encode import NanPolicy, Scaling
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.schema import Schema
from scalejax.data.splits import ByPosition
from scalejax.data.tables import parquet
from scalejax.data.tables.parquet_files import ParquetFiles, find_files
from scalejax.errors import UserError

DAYS = 24
TABLE_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""Rows of the tables of C1 to C26 in MLPerf's DLRM and DLRM-DCNv2, 204,184,588 in all."""

MLPERF = Hashed(rows=TABLE_ROWS)

DenseScaling = Literal["log", "standard"]
_NUMBERS: dict[DenseScaling, tuple[NanPolicy, Scaling]] = {"log": ("zero", "none"), "standard": ("mean", "standard")}
_TEXT = ("", ".gz", ".zst", ".txt", ".txt.gz", ".tsv", ".tsv.gz")
_DAY = "day"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoTerabyteData(parquet.ParquetReading):
    """Examples of the Criteo 1TB logs, one id per feature.

    Attributes:
      path: A folder of day_0, day_1, ... (text, also gzipped: read into memory), or of what `to_parquet` made of them.
      days: Number of days that must be there; the last one is divided into validation and test.
      coding: Of text files; converted files have their own.
      numbers: "log" = log(x + 3), a missing integer counts as 0, no pass over the data; "standard" = log(x + 3), then
        mean 0 and variance 1 on the training days, a missing integer becomes the mean.
      access: Of converted files: "memory" or "windows", see `ParquetData`.
      window: Row groups per window.
      order: "shuffled", or "time" = file order; the data set then knows the days ("0", "1", ...).
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    days: int = DAYS
    coding: Coding = MLPERF
    numbers: DenseScaling = "log"
    access: Literal["memory", "windows"] = "windows"
    batch_size: int = 8192

    def schema(self) -> Schema:
        """What batches hold. Of text with `Hashed` ids nothing is read, with `Counted` ids all; else the footers.

        Raises:
          UserError: as `build`.
        """
        converted = self._converted()
        if converted is not None:
            return criteo.schema_of(criteo.rows_in(converted))
        return criteo.schema_of(criteo.fit(self.coding, self._text_files).rows)

    def build(self) -> BatchedDataSet:
        """Reads or opens the files.

        Raises:
          UserError: a day is missing, a file is damaged or not of this schema.
        """
        nan, scaling = _NUMBERS[self.numbers]
        log_shift = dict.fromkeys(INTEGERS, 3.0)
        if converted := self._converted():
            return self.read(
                criteo.schema_of(criteo.rows_in(converted)),
                split=last_day_split(list(converted.files().values())),
                time=_DAY if self.order == "time" else None,
                log_shift=tuple(log_shift.items()),
                scaling=scaling,
                nan=nan,
            )
        files = self._text_files()
        if self.access == "windows":
            raise UserError(
                f'{self.path}: access="windows" needs converted files; run criteo_terabyte.to_parquet on the folder '
                'first, or set data.access="memory" for as much text as fits.'
            )
        coder = criteo.fit(self.coding, lambda: files)
        columns, day = criteo.concatenated(coder, criteo.read_text(files))
        return from_columns(
            columns | {_DAY: day},
            criteo.schema_of(coder.rows),
            batch_size=self.batch_size,
            split=last_day_split(np.bincount(day, minlength=self.days).tolist()),
            order=self.order,
            seed=self.seed,
            time=_DAY,
            log_shift=log_shift,
            nan=nan,
            scaling=scaling,
            threads=self.threads,
            where=self.path,
            counted=coder.counted,
        )

    def _text_files(self) -> list[pathlib.Path]:
        return day_files(self.path, self.days, _TEXT)

    def _converted(self) -> ParquetFiles | None:
        return converted_days(self.path, self.days)


def to_parquet(
    source: str | pathlib.Path,
    folder: str | pathlib.Path,
    *,
    coding: Coding = MLPERF,
    days: int = DAYS,
    row_group: int = 262_144,
    progress: Progress = lambda done, total: None,
) -> None:
    """Converts text to one Parquet file a day, streaming; each file appears when it is complete.

    Args:
      source: Folder of day_0, day_1, ..., as text, also gzipped.
      folder: Where day_0.parquet and so on go; `CriteoTerabyteData(path=...)` reads it.
      coding: How hashes become ids; counts are over all days.
      days: Number of days that must be there.
      row_group: Examples per row group, the grain of the shuffle in windows.
      progress: Called with (bytes read, bytes in all) after each block.
    Raises:
      UserError: a day is missing, or a line is not of the schema.
    """
    files = day_files(source, days, _TEXT)
    coder = criteo.fit(coding, lambda: files)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [file.stat().st_size for file in files]
    for day, file in enumerate(files):
        before = sum(sizes[:day])
        criteo.write(
            [file],
            folder / f"day_{day}.parquet",
            coder,
            row_group,
            lambda done, _, before=before: progress(before + done, sum(sizes)),
            {_DAY: day},
        )


def last_day_split(rows: Sequence[int]) -> ByPosition:
    """MLPerf's split: the last of the files is validation in its first half (rounded up) and test in its second.

    Args:
      rows: Examples of each day.
    """
    before = sum(rows[:-1])
    return ByPosition(validation_from=before, test_from=before + -(-rows[-1] // 2))


def converted_days(path: str | pathlib.Path, days: int) -> ParquetFiles | None:
    """The Parquet files of a folder of days, or None where it holds none.

    Raises:
      UserError: a day is missing, or there are others.
    """
    if pathlib.Path(path).suffix != ".parquet" and not any(pathlib.Path(path).glob("*.parquet")):
        return None
    wanted = day_files(path, days, (".parquet",))
    if others := sorted({file.name for file in pathlib.Path(path).glob("*.parquet")} - {file.name for file in wanted}):
        raise UserError(f"{path}: {', '.join(others)} is not a day of the log. Move it elsewhere.")
    return ParquetFiles(path)


def day_files(folder: str | pathlib.Path, days: int, suffixes: tuple[str, ...]) -> list[pathlib.Path]:
    """day_0 to day_{days - 1} of a folder, each with one of some suffixes.

    Raises:
      UserError: there is no such folder, a day is missing or there twice, or there are more.
    """
    folder = pathlib.Path(folder)
    if days < 2:
        raise UserError(f"data.days must be at least 2 (the last day validates and tests); got {days}.")
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; wanted the folder of day_0 to day_{days - 1}. Set data.path.")
    named = re.compile(r"day_0*(\d+)(?:" + "|".join(map(re.escape, suffixes)) + r")")
    found: dict[int, pathlib.Path] = {}
    for file in sorted(folder.iterdir()):
        if match := named.fullmatch(file.name):
            day = int(match[1])
            if day in found:
                raise UserError(f"{folder}: day {day} is there twice, as {found[day].name} and {file.name}. Keep one.")
            found[day] = file
    missing = [f"day_{day}" for day in range(days) if day not in found]
    if missing:
        raise UserError(
            f"{folder}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing of day_0 to "
            f"day_{days - 1} (endings: {', '.join(repr(s) for s in suffixes)}). Get the files, or set data.days for a "
            "shorter log."
        )
    more = sorted(set(found) - set(range(days)))
    if more:
        raise UserError(
            f"{folder}: holds day {', '.join(map(str, more))}, but data.days={days}. Set data.days={more[-1] + 1} to "
            "use them, or move them elsewhere."
        )
    return [file for day in range(days) for file in find_files(found[day], "*")]
