"""Rewriting a Parquet log so that the rows of a session lie together.

A log in time order interleaves the samples of many sessions; a batch of it holds few samples of each. Clustered by
session (O2 of RecD, arXiv 2211.05239), the same rows compress better and a batch holds whole sessions, which is what
deduplication needs. Sessions are shuffled, not samples:

1. h(session) = mix(session + key(seed)), a bijection of 64-bit numbers, so no two sessions share a hash.
2. Partition p of P takes the sessions with floor(h P / 2^64) = p (`partition_of`).
3. The rows of a partition are sorted by (h, time), rows of equal time in the order of the source (`cluster_partition`).
4. Partition p is written as `part-<p>.parquet`, in row groups that end where a session ends.

Read by name, the files are sorted by (h, time) as a whole: P decides how much memory is needed, and nothing else.

Here, partitions are spooled to disk in one pass over the source, then clustered one at a time: memory is that of a row
group of the source and of one partition. A cluster engine does the same with its own shuffle; in Spark, with
`columns` the schema of the log:

    keyed = log.mapInPandas(lambda fs: (f.assign(p=partition_of(f.session_id.to_numpy(), 4096)) for f in fs), ...)
    keyed.groupBy("p").applyInArrow(lambda t: cluster_partition(pl.from_arrow(t)).to_arrow(), columns)

(rows of equal time in one session then come in the order in which the engine delivers them).

With `groups`, lists that a row has in common with the row before it are not written a second time (`Manifest.groups`).
Codecs find them, but not where ids are packed in bits, and a reader that finds them written has to decode, hash and
compare them; left out, they cost neither bytes nor time. `ParquetData(dedup=groups)` hands them on as they are, once
per row of lists; `ParquetFiles` puts them back wherever plain rows are asked for, other readers see nulls.

The result appears by one rename of a finished folder with its manifest (`clustered.py`); what an interruption leaves is
`<target>.partial`, which readers refuse.
"""

import dataclasses
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from scalejax.data.examples.dedup import Groups, repeats_previous
from scalejax.data.examples.encode import missing_column
from scalejax.data.examples.jagged import lengths_to_offsets
from scalejax.data.permutation import key_of, mix
from scalejax.data.tables import clustered
from scalejax.data.tables.clustered import ClusteredManifest, File
from scalejax.data.tables.parquet_files import ParquetFiles, lists_of
from scalejax.errors import UserError

Compression = Literal["zstd", "snappy", "lz4", "gzip", "none"]

# Pages before compression that one partition should have; decoded they take up to a few times as much.
_PARTITION_BYTES = 256 << 20
_KEY = 0xC1E5


def session_hashes(session_ids: np.ndarray, seed: int = 0) -> np.ndarray:
    """int64[N] -> uint64[N], a bijection chosen by the seed: sessions sorted by it are shuffled."""
    return mix(np.asarray(session_ids).astype(np.int64).view(np.uint64) + np.uint64(key_of(seed, _KEY)))


def partition_of(session_ids: np.ndarray, partitions: int, seed: int = 0) -> np.ndarray:
    """The partition of each row, int64[N] in [0, partitions).

    Args:
      session_ids: int64[N].
      partitions: P, in [1, 2**32).
      seed: Of the order of sessions.
    """
    if not 1 <= partitions < 1 << 32:
        raise UserError(f"partitions must be in [1, 2**32); got {partitions}.")
    high = session_hashes(session_ids, seed) >> np.uint64(32)
    return ((high * np.uint64(partitions)) >> np.uint64(32)).astype(np.int64)


def cluster_partition(
    frame: pl.DataFrame, *, session: str = "session_id", time: str = "timestamp", seed: int = 0
) -> pl.DataFrame:
    """The rows of one partition, sorted by (hash of the session, time), else in the order they have.

    Args:
      frame: All rows of the sessions it has.
      session: Integer column.
      time: Column that orders the rows of a session.
      seed: Of the order of sessions.
    """
    keys = frame.select(
        pl.Series("h", session_hashes(frame[session].to_numpy(), seed)), pl.col(time).alias("t")
    ).with_row_index("row")
    return frame[keys.sort("h", "t", maintain_order=True)["row"]]


def cluster_by_session(
    source: str | pathlib.Path,
    target: str | pathlib.Path,
    *,
    session: str = "session_id",
    time: str = "timestamp",
    partitions: int | None = None,
    seed: int = 0,
    row_group: int = 65_536,
    compression: Compression = "zstd",
    level: int | None = None,
    encoding: Literal["plain", "dictionary"] | None = None,
    groups: Sequence[Sequence[str]] = (),
    leftovers: Literal["refuse", "remove"] = "refuse",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ClusteredManifest:
    """Writes the rows of a log clustered by session (see the module).

    Args:
      source: Parquet file, or a folder of them, in the order of names.
      target: Folder that appears when everything is written; it must not exist.
      session: Integer column.
      time: Column that orders the rows of a session.
      partitions: Parts that are clustered one at a time; None = one per 256 MiB of uncompressed pages.
      seed: Of the order of sessions.
      row_group: Rows of a row group; it ends with the last session that fits, or holds one longer session alone.
      compression: Codec of every column.
      level: Of the codec; None = its default.
      encoding: "plain", or "dictionary" for all columns but numbers with a fraction and the time, whose values rarely
        repeat, where pyarrow finds it worth while. Every row group has dictionaries of its own, so larger ones save
        more. A dictionary packs ids into few bits, across bytes, where a codec does not see that a list repeats: lists
        that are written again and again come out larger, others smaller. None = "dictionary" if `groups` are given,
        else "plain".
      groups: Groups of list columns that change together, whose repeats are left out (see the module).
      leftovers: What happens to `<target>.partial` of an interrupted rewrite: "refuse" to start, or "remove" it.
      progress: Called with (row groups read + partitions written, all of both).

    Returns:
      The manifest, with the bytes before and after.

    Raises:
      UserError: the target exists, something is left of an interrupted rewrite, a column is missing or cannot be used,
        or the source is damaged.
    """
    target = pathlib.Path(target)
    files = ParquetFiles(source)
    _check_columns(files, session, time)
    groups = tuple(tuple(group) for group in groups)
    encoding = encoding or ("dictionary" if groups else "plain")
    _check_groups(files, groups)
    if row_group < 1:
        raise UserError(f"row_group must be at least 1 row; got {row_group}.")
    partitions = -(-files.page_bytes // _PARTITION_BYTES) if partitions is None else partitions
    partition_of(np.zeros(0, np.int64), partitions)  # refuses what it cannot be
    settings = (session, time, partitions, seed, row_group, compression, level, encoding, groups)
    rewrite = _Rewrite(
        files=files,
        folder=_make_partial(target, leftovers),
        session=session,
        time=time,
        partitions=partitions,
        seed=seed,
        row_group=row_group,
        groups=groups,
        writing={
            "compression": compression,
            "compression_level": level,
            "use_dictionary": _with_dictionary(files.arrow_schema, time) if encoding == "dictionary" else False,
            "write_page_checksum": True,
        },
        identity=hashlib.sha256(repr((files.fingerprint(), settings)).encode()).hexdigest(),
    )
    try:
        parts = rewrite.run(progress)
        manifest = ClusteredManifest(
            identity=rewrite.identity,
            session=session,
            time=time,
            seed=seed,
            compression="uncompressed" if compression == "none" else compression,
            source_bytes=sum(file.stat().st_size for file in files.files()),
            source_codecs=files.codecs,
            groups=groups,
            files=parts,
        )
        if manifest.rows != files.num_rows:
            raise AssertionError(f"{manifest.rows} rows were written of {files.num_rows}")
        _publish(rewrite.folder, target, manifest)
    except BaseException:
        shutil.rmtree(rewrite.folder, ignore_errors=True)
        raise
    return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rewrite:
    """The two passes, inside the unpublished folder."""

    files: ParquetFiles
    folder: pathlib.Path
    session: str
    time: str
    partitions: int
    seed: int
    row_group: int
    groups: Groups
    writing: dict[str, Any]
    identity: str

    def run(self, progress: Callable[[int, int], None]) -> tuple[File, ...]:
        """Both passes; the files that were written."""
        total = len(self.files.groups) + self.partitions
        spools = self.spool(lambda done: progress(done, total))
        parts = []
        for p in range(self.partitions):
            parts.append(self.cluster(p, spools[p]))
            progress(len(self.files.groups) + p + 1, total)
        (self.folder / "spool").rmdir()
        return tuple(part for part in parts if part is not None)

    def spool(self, progress: Callable[[int], None]) -> list[pathlib.Path]:
        """Writes all rows to one Arrow stream a partition, in the order of the source."""
        folder = self.folder / "spool"
        folder.mkdir()
        paths = [folder / f"{p}.arrow" for p in range(self.partitions)]
        schema = self.files.arrow_schema.remove_metadata()
        # Streams are opened for each row group anew, so that partitions may outnumber the files a process may open.
        for done, group in enumerate(self.files.groups, start=1):
            table = self.files.table(group).replace_schema_metadata(None)
            for name in (self.session, self.time):
                if missing := table[name].null_count:
                    raise UserError(
                        f"{group.where}: column {name!r} has {missing} missing values; wanted one in every row. Fill "
                        "them in, or leave those rows out, when the file is prepared."
                    )
            parts = partition_of(table[self.session].to_numpy(), self.partitions, self.seed)
            order = np.argsort(parts, kind="stable")
            bounds = lengths_to_offsets(np.bincount(parts, minlength=self.partitions))
            by_partition = table.take(pa.array(order))
            for p in np.flatnonzero(np.diff(bounds)):
                with open(paths[p], "ab") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    writer.write_table(by_partition.slice(bounds[p], bounds[p + 1] - bounds[p]))
            progress(done)
        return paths

    def cluster(self, number: int, spool: pathlib.Path) -> File | None:
        """Clusters one partition and writes its file; None where it has no rows."""
        if not spool.exists():
            return None
        schema = self.files.arrow_schema.with_metadata({clustered.KEY: self.identity})
        for name in (name for group in self.groups for name in group):
            place = schema.get_field_index(name)
            schema = schema.set(place, schema.field(place).with_nullable(True))
        table = _read_streams(spool)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        frame = cluster_partition(frame, session=self.session, time=self.time, seed=self.seed)
        sessions = frame[self.session].to_numpy()
        starts = np.flatnonzero(np.concatenate([[True], sessions[1:] != sessions[:-1]]))
        path = self.folder / f"part-{number:05d}.parquet"
        with open(path, "wb") as sink:
            with pq.ParquetWriter(sink, schema, **self.writing) as writer:
                for a, b in _row_groups(starts, sessions.size, self.row_group):
                    rows = frame[a:b].to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)
                    writer.write_table(_without_repeats(rows, self.groups), row_group_size=b - a)
            sink.flush()
            os.fsync(sink.fileno())
        spool.unlink()
        size = path.stat().st_size
        return File(name=path.name, rows=sessions.size, sessions=starts.size, bytes=size, sha256=clustered.sha256(path))


def _with_dictionary(schema: pa.Schema, time: str) -> list[str]:
    """Paths inside a file of the columns of whole numbers, or lists of them, but for the time."""
    empty = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), empty)
    columns = pq.read_metadata(pa.BufferReader(empty.getvalue())).schema
    paths = [columns.column(i).path for i in range(len(columns))]
    chosen = []
    for field in schema:
        type_ = getattr(field.type, "value_type", field.type)
        if not pa.types.is_floating(type_) and field.name != time:
            chosen += [path for path in paths if path == field.name or path.startswith(f"{field.name}.")]
    return chosen


def _without_repeats(rows: pa.Table, groups: Groups) -> pa.Table:
    """The rows with null for the lists of a group that are those of the row before."""
    for group in groups:
        repeats = repeats_previous(lists_of(rows, group))
        written = pa.array(np.arange(rows.num_rows), mask=repeats)
        for name in group:
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, rows.schema.field(place), rows[name].take(written))
    return rows


def _read_streams(path: pathlib.Path) -> pa.Table:
    """All Arrow streams of a file, one after another."""
    tables = []
    with pa.memory_map(str(path)) as source:
        while source.tell() < source.size():
            tables.append(pa.ipc.open_stream(source).read_all())
    return pa.concat_tables(tables)


def _row_groups(starts: np.ndarray, rows: int, row_group: int) -> list[tuple[int, int]]:
    """[begin, end) of row groups that end where a session ends; `starts` are the first rows of the sessions."""
    ends = np.append(starts[1:], rows)
    groups, begin = [], 0
    while begin < rows:
        # The last session that ends in time, or, if none does, the first.
        fits = int(np.searchsorted(ends, begin + row_group, side="right")) - 1
        end = int(ends[fits]) if fits >= 0 and ends[fits] > begin else int(ends[np.searchsorted(ends, begin, "right")])
        groups.append((begin, end))
        begin = end
    return groups


def _check_columns(files: ParquetFiles, session: str, time: str) -> None:
    schema = files.arrow_schema
    for name in (session, time):
        if name not in schema.names:
            raise missing_column(name, schema.names, str(files.path))
    if not pa.types.is_integer(type_ := schema.field(session).type):
        raise UserError(
            f"{files.path}: column {session!r} holds {type_}; wanted integers. Code sessions as integers when the file "
            "is prepared."
        )
    if pa.types.is_nested(type_ := schema.field(time).type):
        raise UserError(f"{files.path}: column {time!r} holds {type_}; wanted times or numbers, which have an order.")


def _check_groups(files: ParquetFiles, groups: Groups) -> None:
    names = [name for group in groups for name in group]
    for name in names:
        if name not in files.arrow_schema.names:
            raise missing_column(name, files.arrow_schema.names, str(files.path))
        type_ = files.arrow_schema.field(name).type
        if not (pa.types.is_list(type_) and pa.types.is_integer(type_.value_type)):
            raise UserError(
                f"{files.path}: column {name!r} holds {type_}; groups take lists of integers. Leave it out of groups."
            )
    if len(set(names)) < len(names) or not all(groups):
        raise UserError(f"groups must not be empty, and a column is in one of them at most; got {groups}.")


def _make_partial(target: pathlib.Path, leftovers: Literal["refuse", "remove"]) -> pathlib.Path:
    if target.exists():
        raise UserError(f"{target}: is there already. Name another target, or remove it.")
    if not target.parent.is_dir():
        raise UserError(f"{target}: its folder does not exist. Make it, or name another target.")
    partial = target.with_name(target.name + ".partial")
    if leftovers == "remove" and partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise UserError(
            f"{partial}: is what an interrupted rewrite left, or one that is running. If none is running, pass "
            'leftovers="remove".'
        ) from error
    return partial


def _publish(partial: pathlib.Path, target: pathlib.Path, manifest: ClusteredManifest) -> None:
    with open(partial / clustered.FILE, "w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    os.rename(partial, target)
    _sync(target.parent)


def _sync(folder: pathlib.Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
