"""The synthetic multi-hot Criteo logs of MLPerf's DLRM-DCNv2: 26 features of fixed, different numbers of ids.

MLPerf makes them from the 1TB logs (`criteo_terabyte`): each id is replaced by a fixed list of ids of its table, drawn
uniformly. Of the 13 numbers the logarithm log(x + 3) has been taken. Sources, in github.com/facebookresearch/dlrm:
`torchrec_dlrm/scripts/materialize_synthetic_multihot_dataset.py` for sizes and rows,
`torchrec_dlrm/data/multi_hot_criteo.py` for the form of its files.

Read are Parquet files day_0.parquet to day_23.parquet with the columns label, I1 to I13 (numbers, used as they are) and
C1 to C26: lists of integers, or one integer where the size is 1. `to_parquet` makes them of MLPerf's NumPy files.
"""

import contextlib
import dataclasses
import pathlib
import zipfile
from collections.abc import Iterator
from typing import IO, Literal

import numpy as np
import pyarrow as pa

from scalejax.data.click_logs.criteo import HASHES, INTEGERS, LABEL
from scalejax.data.click_logs.criteo_terabyte import DAYS, TABLE_ROWS, converted_days, day_files, last_day_split
from scalejax.data.click_logs.delimited import Progress
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.jagged import check_ids
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.tables import parquet
from scalejax.data.tables.parquet_writing import writing
from scalejax.errors import UserError

MULTI_HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per example of C1 to C26, 214 in all."""

_CHUNK = 65_536
_LABELS, _DENSE, _SPARSE = "_labels.npy", "_dense.npy", "_sparse_multi_hot.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoMultiHotData(parquet.ParquetReading):
    """Examples of MLPerf's multi-hot Criteo logs.

    Attributes:
      path: Folder of day_0.parquet, day_1.parquet, ...
      days: Number of days that must be there; the last one is divided into validation and test.
      sizes: Ids per example of each feature.
      rows: Rows of each feature.
      access: "memory" or "windows", see `ParquetData`.
      window: Row groups per window.
      order: "shuffled", or "time" = file order.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    days: int = DAYS
    sizes: tuple[int, ...] = MULTI_HOT_SIZES
    rows: tuple[int, ...] = TABLE_ROWS
    access: Literal["memory", "windows"] = "windows"
    batch_size: int = 65_536

    def schema(self) -> Schema:
        """What batches hold; does no I/O."""
        return schema_of(self.sizes, self.rows)

    def build(self) -> BatchedDataSet:
        """Opens the files.

        Raises:
          UserError: a day is missing, a file is damaged or not of this schema.
        """
        schema = self.schema()
        if not pathlib.Path(self.path).is_dir():
            raise UserError(
                f"{self.path}: is not a folder; wanted the folder of day_0.parquet to day_{self.days - 1}.parquet. Set "
                "data.path."
            )
        files = converted_days(self.path, self.days)
        if files is None:
            raise UserError(
                f"{self.path}: holds no *.parquet; wanted day_0.parquet to day_{self.days - 1}.parquet. Convert "
                "MLPerf's NumPy files with criteo_multi_hot.to_parquet."
            )
        split = last_day_split(list(files.files().values()))
        return self.read(schema, split=split, scaling="none", nan="error")


def schema_of(sizes: tuple[int, ...], rows: tuple[int, ...]) -> Schema:
    """The schema for some sizes and rows of C1 to C26.

    Raises:
      UserError: not one of each per feature.
    """
    for field, given in (("sizes", sizes), ("rows", rows)):
        if len(given) != len(HASHES):
            raise UserError(f"data.{field} must have one number for each of {len(HASHES)} features; got {len(given)}.")
    return Schema(
        categorical=tuple(
            Categorical(name=name, rows=n, length=size) for name, n, size in zip(HASHES, rows, sizes, strict=True)
        ),
        dense=INTEGERS,
        labels=(LABEL,),
    )


def arrow_schema(schema: Schema) -> pa.Schema:
    """Column types of the Parquet files."""
    fields = [pa.field(LABEL, pa.int8()), *(pa.field(name, pa.float32()) for name in schema.dense)]
    for feature in schema.categorical:
        type_ = pa.int32() if feature.length == 1 else pa.list_(pa.int32(), feature.length or -1)
        fields.append(pa.field(feature.name, type_))
    return pa.schema(fields)


def to_parquet(
    source: str | pathlib.Path,
    folder: str | pathlib.Path,
    *,
    days: int = DAYS,
    sizes: tuple[int, ...] = MULTI_HOT_SIZES,
    rows: tuple[int, ...] = TABLE_ROWS,
    row_group: int = 65_536,
    progress: Progress = lambda done, total: None,
) -> None:
    """Converts MLPerf's NumPy files to one Parquet file a day, streaming; each file appears when it is complete.

    Args:
      source: Folder of day_N_labels.npy int[n, 1], day_N_dense.npy float32[n, 13] and day_N_sparse_multi_hot.npz with
        the arrays "0" to "25", int32[n, size].
      folder: Where day_0.parquet and so on go.
      days: Number of days that must be there.
      sizes: Ids per example of each feature.
      rows: Rows of each feature.
      row_group: Examples per row group, the grain of the shuffle in windows.
      progress: Called with (days done, days in all) after each day.
    Raises:
      UserError: a file is missing, damaged or of another form, or an id is out of range.
    """
    schema = schema_of(sizes, rows)
    parts = [day_files(source, days, (suffix,)) for suffix in (_LABELS, _DENSE, _SPARSE)]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for day, files in enumerate(zip(*parts, strict=True)):
        with writing(folder / f"day_{day}.parquet", arrow_schema(schema), row_group) as writer:
            for columns in _read_day(files, schema):
                writer.write(columns)
        progress(day + 1, days)


def _read_day(files: tuple[pathlib.Path, ...], schema: Schema) -> Iterator[dict[str, np.ndarray]]:
    labels_file, dense_file, sparse_file = files
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(sparse_file))
            members = [stack.enter_context(archive.open(f"{c}.npy")) for c in range(len(schema.categorical))]
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise UserError(
                f"{sparse_file}: is not an npz file of the arrays '0' to '{len(schema.categorical) - 1}' ({error}); "
                "truncated or damaged? Copy it again."
            ) from error
        labels = _Rows(stack.enter_context(labels_file.open("rb")), f"{labels_file}", 1)
        dense = _Rows(stack.enter_context(dense_file.open("rb")), f"{dense_file}", len(schema.dense))
        sparse = [
            _Rows(member, f"{sparse_file}, array {c}", feature.length or 0)
            for c, (member, feature) in enumerate(zip(members, schema.categorical, strict=True))
        ]
        sizes = {array.where: array.rows for array in (labels, dense, *sparse)}
        if len(set(sizes.values())) > 1:
            raise UserError(f"{sparse_file}: the arrays of a day must have equally many rows; got {sizes}.")
        for start in range(0, labels.rows, _CHUNK):
            count = min(_CHUNK, labels.rows - start)
            numbers = dense.read(count)
            columns = {LABEL: labels.read(count)[:, 0]}
            columns |= {name: numbers[:, d] for d, name in enumerate(schema.dense)}
            for feature, array in zip(schema.categorical, sparse, strict=True):
                ids = array.read(count)
                lengths = np.full(count, feature.length)
                check_ids(
                    ids.reshape(-1),
                    feature.name,
                    feature.rows,
                    lengths=lengths,
                    first_example=start,
                    where=str(sparse_file),
                )
                columns[feature.name] = ids[:, 0] if feature.length == 1 else ids
            yield columns


class _Rows:
    """Rows of a two-dimensional .npy stream, from the front; np.load would read an array of 80 GB at once."""

    def __init__(self, stream: IO[bytes], where: str, width: int) -> None:
        self._stream, self.where = stream, where
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, self._dtype = read(stream)
        except (ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{where}: is not an .npy array ({error}). Copy it again from its source.") from error
        if len(shape) != 2 or shape[1] != width or (fortran and width > 1):
            raise UserError(f"{where}: must be an array of {width} columns, row by row; got shape {shape}.")
        if self._dtype.kind not in "iuf":
            raise UserError(f"{where}: must hold numbers; got {self._dtype}.")
        self.rows, self._width = int(shape[0]), width

    def read(self, count: int) -> np.ndarray:
        """The next `count` rows, [count, width]."""
        size = count * self._width * self._dtype.itemsize
        try:
            raw = self._stream.read(size)
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{self.where}: is damaged ({error}). Copy it again from its source.") from error
        if len(raw) < size:
            raise UserError(f"{self.where}: is truncated. Copy it again from its source.")
        return np.frombuffer(raw, self._dtype).reshape(count, self._width)
