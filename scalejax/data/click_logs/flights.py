"""The bundled data: will a flight that leaves New York arrive more than 15 minutes late? (`bundled/README.md`)"""

import dataclasses
import datetime
import importlib.resources
import itertools
import pathlib
from typing import Literal

import numpy as np

from scalejax.data.examples.binning import quantile_bins
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.encode import NanPolicy
from scalejax.data.examples.memory import Order, array_of, from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, SPLITS
from scalejax.errors import UserError

# Rows of each feature; the vocabularies are in bundled/flights.json, and a test compares.
FEATURES = {
    "carrier": 16,
    "tailnum": 4044,
    "origin": 3,
    "dest": 105,
    "month": 12,
    "weekday": 7,
    "plane_model": 128,
    "flight": 3844,
    "hour": 24,
}
NUMBERS = ("distance", "wx_temp", "wx_humid", "wx_wind_speed", "wx_precip", "wx_pressure", "wx_visib")
DAYS = 365
_FIRST = datetime.date(2013, 1, 1)

DateRange = tuple[str, str]
"""First and last day of a range, both of it, such as ("2013-01-01", "2013-06-30")."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByDate:
    """Splits of the flights by ranges of days: a model is trained on some and scored on later ones.

    Days that no range names are in no split. A run in phases trains on one range after another; numbers are then
    standardised and binned on the same days in all of them, or the model would meet other inputs.

    Attributes:
      train: Days of the training split.
      validation: Of the validation split; by default the month that follows.
      test: Of the test split.
      numbers: Days on which numbers are standardised and binned; None = those of the training split.
    """

    train: DateRange = ("2013-01-01", "2013-06-30")
    validation: DateRange = ("2013-07-01", "2013-07-31")
    test: DateRange = ("2013-12-01", "2013-12-31")
    numbers: DateRange | None = None

    def __post_init__(self) -> None:
        found = {split: _days(f"split.{split}", getattr(self, split)) for split in SPLITS}
        if self.numbers is not None:
            _days("split.numbers", self.numbers)
        for one, other in itertools.combinations(SPLITS, 2):
            if found[one].start < found[other].stop and found[other].start < found[one].stop:
                raise UserError(
                    f"ByDate: split.{one}={','.join(getattr(self, one))} and split.{other}="
                    f"{','.join(getattr(self, other))} have days in common. Give each split days of its own."
                )

    def assign(self, day: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of each split by the day of the year, int[N] from 0 on."""
        return {split: self._rows(day, split, getattr(self, split)) for split in SPLITS}

    def fitted(self, day: np.ndarray) -> np.ndarray:
        """Rows on which numbers are standardised and binned."""
        return self._rows(day, "numbers", self.numbers or self.train)

    def _rows(self, day: np.ndarray, name: str, days: DateRange) -> np.ndarray:
        found = _days(f"split.{name}", days)
        return np.flatnonzero((day >= found.start) & (day < found.stop))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterDays:
    """In a phase, the `ByDate` of the run with other days to train and to validate on; its test split stays.

    Numbers stay as they were binned, too. A `train.experiment.DerivedValue`.

    Attributes:
      train, validation: See `ByDate`.
    """

    train: DateRange
    validation: DateRange

    def derived(self, first: object) -> ByDate:
        """See `train.experiment.DerivedValue`."""
        if not isinstance(first, ByDate):
            raise UserError(
                f"LaterDays: data.split must be by dates in the whole run; got {first!r}. Give days, such as "
                "--set data.split.train=2013-01-01,2013-06-30."
            )
        numbers = first.numbers or first.train
        return dataclasses.replace(first, train=self.train, validation=self.validation, numbers=numbers)


def _days(name: str, dates: DateRange) -> range:
    """Days of the year of a range of dates, from 0 on."""
    given: tuple[str, ...] = (dates,) if isinstance(dates, str) else dates
    try:
        first, last = ((datetime.date.fromisoformat(text) - _FIRST).days for text in given)
    except ValueError:
        first, last = 0, -1
    if not 0 <= first <= last < DAYS:
        raise UserError(
            f"ByDate: {name} must be the first and the last day of a range in 2013, such as 2013-01-01,2013-06-30; got "
            f"{','.join(map(str, given))}."
        )
    return range(first, last + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlightsData:
    """327,346 departures of 2013, 9 categorical features and 7 numbers known before departure, 23.7 % late.

    Numbers are standardised by the training split; of precipitation, which is 0 in most hours, the logarithm
    log(x + 0.01 inch) is taken first (0.01 is the smallest amount reported).

    Attributes:
      path: A file with the same columns; None = the bundled one.
      split: "random" = 80/10/10 by `numpy.random.RandomState(0).permutation` over the flights in the order of their
        source, the split behind published reference numbers. "time" = train on January to October, validate on
        November, test on December. A `ByDate` = by ranges of days.
      calendar_day: "include" adds the day of the year as a feature. Under the random split it tells the model how bad
        a day was; under the others it is refused, since no day of the test split is ever trained.
      order: "shuffled" = a new permutation every epoch; "time" = by day, which progressive validation needs.
      number_bins: Also give each number as a categorical feature `<name>_bin` of this many bins, which hold equally
        many training examples, and one more for a missing value; 0 = off. The numbers stay as they are. Nothing is
        added that the columns do not hold: embeddings of bins let a model bend a number's effect and cross it.
      batch_size: Global batch size.
      seed: Seeds the order of training; the split is always the same.
      nan: What becomes of missing weather: "mean" = the mean of the training split (0 after standardisation);
        "error" = refused (the bundled file has missing weather).
      group: Feature whose values form the groups of grouped AUC: an airline compares its own flights.
      threads: Reading threads.
    """

    path: str | None = None
    split: Literal["random", "time"] | ByDate = "random"
    calendar_day: Literal["omit", "include"] = "omit"
    order: Order = "shuffled"
    number_bins: int = 0
    batch_size: int = 1024
    seed: int = 0
    nan: NanPolicy = "mean"
    group: Literal["carrier", "dest", "origin"] = "carrier"
    threads: int = 2

    def schema(self) -> Schema:
        """What batches hold; does no I/O."""
        rows = FEATURES | ({"calendar_day": DAYS} if self.calendar_day == "include" else {})
        if self.number_bins:
            rows |= {_bin_of(name): self.number_bins + 1 for name in NUMBERS}
        categorical = tuple(Categorical(name=name, rows=n) for name, n in rows.items())
        return Schema(categorical=categorical, dense=NUMBERS, labels=("late",), group=self.group)

    def build(self) -> BatchedDataSet:
        """Reads the file.

        Raises:
          UserError: the file is missing or damaged, or the fields contradict one another.
        """
        if self.split != "random" and self.calendar_day == "include":
            by = type(self.split).__name__ if isinstance(self.split, ByDate) else f'"{self.split}"'
            raise UserError(
                f'data.calendar_day="include" does not go with data.split={by}: the days of the test split are never '
                'trained. Set data.calendar_day="omit", or data.split="random".'
            )
        columns, where = self._read(dataclasses.replace(self, number_bins=0).schema())
        if isinstance(self.split, ByDate):
            day = array_of(columns, "calendar_day")
            split, fitted = self.split.assign(day), self.split.fitted(day)
        else:
            split = _split(array_of(columns, "month"), self.split)
            fitted = split["train"]
        if self.number_bins:
            for name in NUMBERS:
                columns[_bin_of(name)] = quantile_bins(array_of(columns, name), fitted, self.number_bins)
        return from_columns(
            columns,
            self.schema(),
            batch_size=self.batch_size,
            split=split,
            order=self.order,
            seed=self.seed,
            time="calendar_day",
            day_name=lambda day: str(_FIRST + datetime.timedelta(days=day)),
            log_shift={"wx_precip": 0.01},
            nan=self.nan,
            threads=self.threads,
            where=where,
            fitted=fitted,
        )

    def _read(self, schema: Schema) -> tuple[dict[str, np.ndarray | Ragged], str]:
        from scalejax.data.tables.parquet_files import ParquetFiles  # pyarrow takes 0.3 s to import

        bundled = importlib.resources.files("scalejax.data") / "bundled" / "flights.parquet"
        with importlib.resources.as_file(bundled) as bundled_path:
            files = ParquetFiles(pathlib.Path(self.path) if self.path else bundled_path)
            files.check(schema, others=("month", "calendar_day"))
            names = list(dict.fromkeys([*schema.keys, *schema.dense, *schema.labels, "month", "calendar_day"]))
            groups = [files.read(group, names) for group in files.groups]
        return {n: np.concatenate([array_of(group, n) for group in groups]) for n in names}, str(files.path)


def _bin_of(name: str) -> str:
    return f"{name}_bin"


def _split(month: np.ndarray, split: Literal["random", "time"]) -> dict[str, np.ndarray]:
    if split == "time":
        return {name: np.flatnonzero(m) for name, m in zip(SPLITS, (month < 10, month == 10, month == 11), strict=True)}
    # The source lists the months as text would sort, 1, 10, 11, 12, 2, ..., 9; the reference split counts rows so.
    rank = np.argsort(np.argsort([str(m + 1) for m in range(12)]))
    source_order = np.argsort(rank[month], kind="stable")
    return {name: np.sort(source_order[rows]) for name, rows in EIGHTY_TEN_TEN.assign(month.size).items()}
