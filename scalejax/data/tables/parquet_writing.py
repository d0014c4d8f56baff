"""Streaming columns to a Parquet file that appears when it is complete."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


class RowGroupWriter:
    """Gathers chunks of columns into row groups of one size; the last may be smaller."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema, row_group: int) -> None:
        self._writer, self._schema, self._row_group = writer, schema, row_group
        self._pending: list[pa.Table] = []
        self._rows = 0

    def write(self, columns: Mapping[str, np.ndarray]) -> None:
        """Adds a chunk: number[N] or, for lists of one length, int[N, L]; NaN becomes missing."""
        arrays = [_to_arrow(columns[field.name], field.type) for field in self._schema]
        self._pending.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows += self._pending[-1].num_rows
        self._flush(self._row_group)

    def finish(self) -> None:
        """Writes what is left."""
        self._flush(1)

    def _flush(self, at_least: int) -> None:
        while self._rows >= at_least:
            table = pa.concat_tables(self._pending)
            first = table.slice(0, self._row_group)
            self._writer.write_table(first, row_group_size=self._row_group)
            self._pending, self._rows = [table.slice(self._row_group)], self._rows - first.num_rows


@contextlib.contextmanager
def writing(path: pathlib.Path, schema: pa.Schema, row_group: int) -> Iterator[RowGroupWriter]:
    """A writer of `path`. Until the block is left without an error the file is called `path`.partial."""
    partial = path.with_name(path.name + ".partial")
    with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:
        groups = RowGroupWriter(writer, schema, row_group)
        yield groups
        groups.finish()
    os.replace(partial, path)


def _to_arrow(column: np.ndarray, type_: pa.DataType) -> pa.Array:
    if column.ndim == 2:
        values = pa.array(column.reshape(-1)).cast(type_.value_type, safe=True)
        return pa.FixedSizeListArray.from_arrays(values, column.shape[1]).cast(type_)
    mask = np.isnan(column) if np.issubdtype(column.dtype, np.floating) else None
    return pa.array(column, mask=mask).cast(type_, safe=True)
