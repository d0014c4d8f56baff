"""Any data set as one memory-mapped Arrow file: a full permutation of more examples than fit in memory.

`convert` writes an uncompressed Arrow IPC file, training split first, then validation, then test:

  record    fixed_size_list<int32>[W]   the 32-bit words of an example (`records.py`), so that fetching an example
                                        from disk touches one place and not one per column
  <name>    list<int32>                 one column per feature of varying length (list<int64> for ids of 64 bits)

Schema, split, scaling and the fingerprint of the source are fixed at conversion and stand in the file's metadata.
Record batches carry a CRC-32, which is checked when the file is opened.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from scalejax.data.examples.dataset import BatchedDataSet, TableExamples
from scalejax.data.examples.jagged import check_ids, gather_runs, lengths_to_offsets
from scalejax.data.examples.memory import Order
from scalejax.data.examples.records import ExampleRecords, Ragged, RecordLayout
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import SPLITS
from scalejax.data.tables.parquet_files import find_files, first_line
from scalejax.errors import UserError

_KEY = b"scalejax"
_FORMAT = 1


def convert(
    source: BatchedDataSet,
    path: str | pathlib.Path,
    *,
    chunk_rows: int = 131_072,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes all examples of a data set to `path`; the file appears when it is complete.

    Args:
      source: What to convert, for example `ParquetData(..., access="windows").build()`.
      path: The file to write.
      chunk_rows: Examples per record batch.
      progress: Called with (examples done, examples in all) after each record batch.
    Raises:
      UserError: the source is deduplicated, which this form is not.
    """
    path = pathlib.Path(path)
    layout = source.examples.layout
    if layout.groups:
        raise UserError(
            f"convert: the file would hold every list of every row; got dedup={layout.groups}. Leave it out."
        )
    schema_fields = dataclasses.asdict(source.schema)
    if schema_fields.pop("weight") is not None:
        raise UserError("convert: the file would not keep the weights of examples. Train on the source itself.")
    sizes = {split: source.num_examples(split) for split in SPLITS}
    metadata = {
        "format": _FORMAT,
        "schema": schema_fields,
        "splits": sizes,
        "chunk_rows": chunk_rows,
        "fingerprint": source.fingerprint(),
    }
    fields = [pa.field("record", pa.list_(pa.int32(), layout.width), nullable=False)]
    kinds = {feature.name: pa.int64() if feature.name in layout.wide else pa.int32() for feature in layout.jagged}
    fields += [pa.field(name, pa.list_(kind), nullable=False) for name, kind in kinds.items()]
    schema = pa.schema(fields, metadata={_KEY: json.dumps(metadata)})
    partial = path.with_name(path.name + ".partial")
    done = 0
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for split, size in sizes.items():
            for start in range(0, size, chunk_rows):
                rows = source.examples.held(split, start, min(start + chunk_rows, size))
                writer.write_batch(_to_arrow(rows, schema), custom_metadata={"crc32": str(_checksum(rows))})
                done += len(rows)
                progress(done, sum(sizes.values()))
    os.replace(partial, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrowData:
    """Examples of a file that `convert` wrote, shuffled fully without being read into memory.

    Attributes:
      path: The file, or a folder that holds one `*.arrow`.
      order: "shuffled", or "time" = in the order of the file.
      verify: "checksums" = read the file once when it is opened and compare; "nothing" = do not.
      batch_size: Global batch size.
      seed: Of the order of training.
      threads: Reading threads.
    """

    path: str
    order: Order = "shuffled"
    verify: Literal["checksums", "nothing"] = "checksums"
    batch_size: int = 1024
    seed: int = 0
    threads: int = 2

    def schema(self) -> Schema:
        """What batches hold; reads no examples.

        Raises:
          UserError: as `build`, checksums apart.
        """
        return MappedTable(self.path).layout.schema

    def build(self) -> BatchedDataSet:
        """Maps the file.

        Raises:
          UserError: it is missing, damaged, not made by `convert`, or one of several.
        """
        table = MappedTable(self.path)
        if self.verify == "checksums":
            table.verify()
        key = repr((table.metadata, self.order, self.seed))
        bounds = lengths_to_offsets(np.array([table.metadata["splits"][split] for split in SPLITS]))
        splits = {split: np.arange(a, b) for split, a, b in zip(SPLITS, bounds, bounds[1:], strict=False)}
        examples = TableExamples(
            table,
            table.layout,
            splits,
            seed=None if self.order == "time" else self.seed,
            fingerprint=hashlib.sha256(key.encode()).hexdigest(),
        )
        return BatchedDataSet(examples, batch_size=self.batch_size, threads=self.threads)


class MappedTable:
    """Random access to the examples of a converted file; nothing is copied but what is asked for.

    Args:
      path: The file, or a folder that holds one `*.arrow`.
    Raises:
      UserError: missing, damaged, not made by `convert`, or several files.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path, *others = find_files(path, "*.arrow")
        if others:
            raise UserError(
                f"{path}: the folder holds {1 + len(others)} *.arrow files; wanted one. Point data.path at the one to "
                f"read, for example {self.path}."
            )
        try:
            mapped = pa.memory_map(str(self.path))
            self._reader = pa.ipc.open_file(mapped)
            self.metadata = _metadata(self._reader.schema, self.path)
            whole = mapped.read_buffer()
            batches = [self._reader.get_batch(b) for b in range(self._reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.path}: is not a complete Arrow file ({first_line(error)}); truncated or damaged? Convert the "
                "source again."
            ) from error
        self.layout = RecordLayout(_schema_of(self.metadata["schema"]))
        self._words = np.frombuffer(whole, np.int32, count=whole.size // 4)
        # Row r of the file: record batch and row inside it. Only the last batch of a split is shorter than the others.
        self._firsts = lengths_to_offsets(np.array([batch.num_rows for batch in batches], np.int64))
        if self._firsts[-1] != sum(self.metadata["splits"].values()):
            raise UserError(f"{self.path}: holds {self._firsts[-1]} examples, not those it names. Convert again.")

        def places(buffer_of: Callable[[Any], Any]) -> np.ndarray:
            return np.array([(buffer_of(b).address - whole.address) // 4 for b in batches], np.int64)

        self._records = places(lambda batch: batch.column(0).flatten().buffers()[1])
        self._lists = [
            (places(lambda batch, c=c: batch.column(c).buffers()[1]), places(lambda b, c=c: b.column(c).buffers()[3]))
            for c in range(1, 1 + len(self.layout.jagged))
        ]
        # Every possible record as a row of overlapping windows, so that gathering records is one indexing operation.
        width = self.layout.width
        self._windows = np.lib.stride_tricks.sliding_window_view(self._words, width)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def take(self, rows: np.ndarray) -> ExampleRecords:
        """Examples number `rows`, int[R], in that order.

        Raises:
          UserError: an id is out of range, so the file was damaged after it was written.
        """
        batch = np.searchsorted(self._firsts, rows, side="right") - 1
        inside = rows - self._firsts[batch]
        records = self._windows[self._records[batch] + inside * self.layout.width]
        for feature in self.layout.fixed:
            ids = self.layout.ids_of(records, feature.name)
            check_ids(np.ascontiguousarray(ids).reshape(-1), feature.name, feature.rows, where=f"{self.path} (damaged)")
        jagged = []
        for feature, (offsets_at, values_at) in zip(self.layout.jagged, self._lists, strict=True):
            words = 2 if feature.name in self.layout.wide else 1
            begins = self._words[offsets_at[batch] + inside].astype(np.int64)
            lengths = self._words[offsets_at[batch] + inside + 1] - begins
            values = gather_runs(self._words, values_at[batch] + words * begins, words * lengths)
            values = values.view(np.int64) if words == 2 else values
            jagged.append(Ragged(lengths_to_offsets(lengths), values))
        return ExampleRecords(records, tuple(jagged))

    def verify(self) -> None:
        """Compares the checksum of every record batch.

        Raises:
          UserError: naming the file and the record batch.
        """
        for b in range(self._reader.num_record_batches):
            found = self._reader.get_batch_with_custom_metadata(b)
            stored = (found.custom_metadata or {}).get(b"crc32")
            rows = self.take_batch(b)
            if stored is None or int(stored) != _checksum(rows):
                raise UserError(
                    f"{self.path}, record batch {b} is damaged (its checksum differs). Convert the source again."
                )

    def take_batch(self, number: int) -> ExampleRecords:
        """All examples of one record batch, as views of the file."""
        batch = self._reader.get_batch(number)
        records = batch.column(0).flatten().to_numpy().reshape(-1, self.layout.width)
        jagged = []
        for c in range(1, 1 + len(self.layout.jagged)):
            column = batch.column(c)
            jagged.append(Ragged(column.offsets.to_numpy().astype(np.int64), column.values.to_numpy()))
        return ExampleRecords(records, tuple(jagged))


def _to_arrow(rows: ExampleRecords, schema: pa.Schema) -> pa.RecordBatch:
    width = rows.records.shape[1]
    columns: list[pa.Array] = [pa.FixedSizeListArray.from_arrays(pa.array(rows.records.reshape(-1)), width)]
    for lists in rows.jagged:
        if lists.weights is not None:
            raise UserError("convert: the file would not keep the weights of lists. Train on the source itself.")
        if lists.offsets[-1] > 2**31 - 1:
            raise UserError(
                "convert: a record batch holds more than 2**31 ids of one feature; choose fewer chunk_rows."
            )
        columns.append(pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values)))
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _checksum(rows: ExampleRecords) -> int:
    crc = zlib.crc32(np.ascontiguousarray(rows.records).data)
    for lists in rows.jagged:
        crc = zlib.crc32(lists.offsets.astype(np.int32).data, crc)
        crc = zlib.crc32(np.ascontiguousarray(lists.values).data, crc)
    return crc


def _metadata(schema: pa.Schema, path: pathlib.Path) -> dict[str, Any]:
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise UserError(
            f"{path}: was not written by scalejax.data.tables.arrow.convert. Convert the source, or use ParquetData."
        )
    metadata = json.loads(text)
    if metadata["format"] != _FORMAT:
        raise UserError(
            f"{path}: has format {metadata['format']}; this version reads {_FORMAT}. Convert the source again."
        )
    return metadata


def _schema_of(fields: dict[str, Any]) -> Schema:
    return Schema(
        categorical=tuple(Categorical(**feature) for feature in fields["categorical"]),
        dense=tuple(fields["dense"]),
        labels=tuple(fields["labels"]),
        group=fields["group"],
    )
