"""Any data set as one memory-mapped Arrow file: a full permutation of more examples than fit in memory.

`convert` writes an uncompressed Arrow IPC file, training split first, then validation, then test:

  record    fixed_size_list<int32>[W]   the 32-bit words of an example (`records.py`), so that fetching an example
                                        from disk touches one place and not one per column
  <name>    list<int32>                 one column per feature of varying length (list<int64> for ids of 64 bits)

Schema, split, scaling and the fingerprint of the source are fixed at conversion and stand in the file's metadata.
Record batches carry a CRC-32, which is checked when the file is opened. All else, the bytes that say where records lie,
is checked before Arrow reads any of it: between the messages and the footer of the file, where Arrow never looks, stand

  int64[B, 2]   first byte and end of the body of each record batch
  32 bytes      SHA-256 of the file without these bodies and these 32 bytes
  int64, 8 bytes   B, and a mark

Files of format 1 have none of that: there Arrow's own validation and the bounds of every buffer must do.
"""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa

from scalejax import json_reading
from scalejax.data.examples.dataset import BatchedDataSet, TableExamples
from scalejax.data.examples.jagged import check_ids, gather_runs, lengths_to_offsets
from scalejax.data.examples.memory import Order
from scalejax.data.examples.records import ExampleRecords, Ragged, RecordLayout
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import SPLITS
from scalejax.data.tables.parquet_files import find_files, first_line
from scalejax.errors import UserError

_KEY = b"scalejax"
_FORMAT = 2
_FIRST_FORMAT = 1
_MARK = b"SCALEJX2"
_END = b"ARROW1"  # of an Arrow file, after the length of its footer


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
    ends: list[tuple[int, int]] = []  # of the messages of record batches
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for split, size in sizes.items():
            for start in range(0, size, chunk_rows):
                rows = source.examples.held(split, start, min(start + chunk_rows, size))
                begin = sink.tell()
                writer.write_batch(_to_arrow(rows, schema), custom_metadata={"crc32": str(_checksum(rows))})
                ends.append((begin, sink.tell()))
                done += len(rows)
                progress(done, sum(sizes.values()))
    with open(partial, "r+b") as file:
        _seal(file, ends)
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
            with open(self.path, "rb") as file:
                sealed = _check_seal(file)
            mapped = pa.memory_map(str(self.path))
            self._reader = pa.ipc.open_file(mapped)
            self.metadata = _metadata(self._reader.schema, self.path)
            whole = mapped.read_buffer()
            batches = [self._reader.get_batch(b) for b in range(self._reader.num_record_batches)]
            if not sealed:
                if self.metadata["format"] != _FIRST_FORMAT:
                    raise ValueError("the digest of its description is missing")
                for batch in batches:
                    batch.validate(full=True)
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{self.path}: is not a complete Arrow file ({first_line(error)}); truncated or damaged? Convert the "
                "source again."
            ) from error
        try:
            self._lay_out(batches, whole)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.path}: is damaged: what it holds is not what its description says ({first_line(error)}). "
                "Convert the source again."
            ) from error

    def _lay_out(self, batches: list[pa.RecordBatch], whole: pa.Buffer) -> None:
        """Finds the places of all columns.

        Raises:
          ValueError, KeyError, TypeError, AttributeError: the description is no such description, or a buffer lies
            outside of the file or is shorter than its rows need.
        """
        self.layout = RecordLayout(_schema_of(self.metadata["schema"]))
        self._words = np.frombuffer(whole, np.int32, count=whole.size // 4)
        # Row r of the file: record batch and row inside it. Only the last batch of a split is shorter than the others.
        self._firsts = lengths_to_offsets(np.array([batch.num_rows for batch in batches], np.int64))
        splits = [self.metadata["splits"][split] for split in SPLITS]
        if any(type(size) is not int or size < 0 for size in splits) or self._firsts[-1] != sum(splits):
            raise ValueError(f"{self._firsts[-1]} examples, not those it names")
        width = self.layout.width
        kinds = [pa.list_(pa.int32(), width)]
        kinds += [
            pa.list_(pa.int64() if feature.name in self.layout.wide else pa.int32()) for feature in self.layout.jagged
        ]
        for batch in batches:
            if [field.type for field in batch.schema] != kinds or any(c.null_count or c.offset for c in batch.columns):
                raise ValueError(f"columns of types {', '.join(str(field.type) for field in batch.schema)}")

        def place(buffer: pa.Buffer | None, words: int) -> int:
            """The word at which a buffer of at least so many begins."""
            if words == 0:
                return 0
            if buffer is None:
                raise ValueError("a buffer is missing")
            first, over = divmod(buffer.address - whole.address, 4)
            if over or first < 0 or buffer.size < 4 * words or first + words > self._words.size:
                raise ValueError(f"a buffer of {buffer.size} bytes is outside of the file or short of {4 * words}")
            return first

        self._records = np.array([place(b.column(0).buffers()[-1], b.num_rows * width) for b in batches], np.int64)
        self._lists = []
        for c, feature in enumerate(self.layout.jagged, start=1):
            words = 2 if feature.name in self.layout.wide else 1
            columns = [batch.column(c) for batch in batches]
            offsets = [place(column.buffers()[1], len(column) + 1 if len(column) else 0) for column in columns]
            counts = [len(column.values) for column in columns]
            values = [place(a.buffers()[-1], words * count) for a, count in zip(columns, counts, strict=True)]
            self._lists.append(tuple(np.array(item, np.int64) for item in (offsets, values, counts)))
        # Every possible record as a row of overlapping windows, so that gathering records is one indexing operation.
        if self._words.size < width:
            raise ValueError("shorter than one record")
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
        for feature, (offsets_at, values_at, counts) in zip(self.layout.jagged, self._lists, strict=True):
            words = 2 if feature.name in self.layout.wide else 1
            begins = self._words[offsets_at[batch] + inside].astype(np.int64)
            ends = self._words[offsets_at[batch] + inside + 1]
            if (wrong := (begins < 0) | (ends < begins) | (ends > counts[batch])).any():
                raise UserError(
                    f"{self.path}, record batch {batch[wrong.argmax()]} is damaged: a list of {feature.name!r} ends "
                    "where it cannot. Convert the source again."
                )
            lengths = ends - begins
            values = gather_runs(self._words, values_at[batch] + words * begins, words * lengths)
            values = values.view(np.int64) if words == 2 else values
            check_ids(values, feature.name, feature.rows, where=f"{self.path} (damaged)")
            jagged.append(Ragged(lengths_to_offsets(lengths), values))
        return ExampleRecords(records, tuple(jagged))

    def verify(self) -> None:
        """Compares the checksum of every record batch.

        Raises:
          UserError: naming the file and the record batch.
        """
        for b in range(self._reader.num_record_batches):
            try:
                found = self._reader.get_batch_with_custom_metadata(b)
                intact = int((found.custom_metadata or {})[b"crc32"]) == _checksum(self.take_batch(b))
            except (pa.ArrowException, OSError, KeyError, ValueError):  # a batch or checksum that is none
                intact = False
            if not intact:
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
    metadata = json_reading.parse(text)
    known = isinstance(metadata, dict) and isinstance(metadata.get("splits"), dict)
    if not known or not isinstance(metadata.get("schema"), dict) or type(metadata.get("format")) is not int:
        raise ValueError("its description is not one that convert writes")
    if metadata["format"] > _FORMAT:
        raise UserError(
            f"{path}: has format {metadata['format']}; this version reads up to {_FORMAT}. Convert the source again."
        )
    return metadata


def _seal(file: BinaryIO, messages: list[tuple[int, int]]) -> None:
    """Puts the places of bodies and a digest of everything else before the footer; see the module.

    Args:
      file: A complete Arrow file, open for reading and writing.
      messages: First byte and end of the message of each record batch: a mark and a length of 4 bytes each, a
        description so long, the body.
    """
    bodies = []
    file.seek(12)
    schema_end = 16 + int.from_bytes(file.read(4), "little")
    for begin, end in messages:
        begin = begin or schema_end  # the schema is written with the first record batch
        file.seek(begin + 4)
        bodies.append((begin + 8 + int.from_bytes(file.read(4), "little"), end))
    size = file.seek(0, io.SEEK_END)
    start = size - _tail_bytes(file, size)
    file.seek(start)
    tail = file.read()
    table = np.array(bodies, "<i8").reshape(-1, 2)
    count = len(bodies).to_bytes(8, "little")
    file.seek(start)
    file.write(table.tobytes() + bytes(32) + count + _MARK + tail)
    digest = _digest_around(file, table, start)
    file.seek(start + table.nbytes)
    file.write(digest)
    file.flush()
    os.fsync(file.fileno())


def _check_seal(file: BinaryIO) -> bool:
    """Compares the digest of what is no record, before anything of it is believed; False where there is none.

    Raises:
      ValueError: it differs, or the file is none of Arrow.
    """
    size = file.seek(0, io.SEEK_END)
    mark = size - _tail_bytes(file, size) - len(_MARK)
    file.seek(max(0, mark - 8))
    count = int.from_bytes(file.read(8), "little")
    if mark < 48 or file.read(len(_MARK)) != _MARK:
        return False
    start = mark - 8 - 32 - 16 * count
    if start < 8:
        raise ValueError("the places of its record batches are damaged")
    file.seek(start)
    table = np.frombuffer(file.read(16 * count), "<i8").reshape(-1, 2)
    flat = table.reshape(-1)
    if flat.size and (flat[0] < 8 or flat[-1] > start or (flat[1:] < flat[:-1]).any()):
        raise ValueError("the places of its record batches are damaged")
    stored = file.read(32)
    if _digest_around(file, table, start) != stored:
        raise ValueError("the digest of its description differs")
    return True


def _tail_bytes(file: BinaryIO, size: int) -> int:
    """Bytes of the footer of an Arrow file, its length and the mark behind it."""
    last = len(_END) + 4
    if size < last:
        raise ValueError(f"it has {size} bytes")
    file.seek(size - last)
    length, end = int.from_bytes(file.read(4), "little", signed=True), file.read()
    if end != _END or not 0 < length <= size - last:
        raise ValueError("its end is not that of an Arrow file")
    return length + last


def _digest_around(file: BinaryIO, bodies: np.ndarray, table: int) -> bytes:
    """SHA-256 of a file without bodies, int64[B, 2], and without the digest behind their table at byte `table`."""
    left_out = [*bodies.tolist(), [table + 16 * len(bodies), table + 16 * len(bodies) + 32]]
    size, at, digest = file.seek(0, io.SEEK_END), 0, hashlib.sha256()
    for begin, end in [*left_out, [size, size]]:
        file.seek(at)
        while at < begin:
            part = file.read(min(begin - at, 1 << 20))
            if not part:
                raise ValueError("it became shorter while it was read")
            digest.update(part)
            at += len(part)
        at = end
    return digest.digest()


def _schema_of(fields: dict[str, Any]) -> Schema:
    return Schema(
        categorical=tuple(Categorical(**feature) for feature in fields["categorical"]),
        dense=tuple(fields["dense"]),
        labels=tuple(fields["labels"]),
        group=fields["group"],
    )
