"""Reading row groups of Parquet files, with a clear error for everything that can be wrong with one."""

import dataclasses
import difflib
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scalejax.data.examples.dedup import DedupKeyedJagged, Groups, check_names, deduplicate, deduplicate_runs
from scalejax.data.examples.encode import missing_column
from scalejax.data.examples.jagged import KeyedJagged, signed_ids
from scalejax.data.examples.records import Ragged, Shared
from scalejax.data.examples.schema import Schema
from scalejax.data.tables import clustered
from scalejax.errors import UserError

_THRIFT_NEXT_I32 = 0x15  # the field after the one before, a number of 32 bits
# pyarrow reports damage as either; ArrowNotImplementedError as well, when a flipped byte names an unknown codec.
_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)  # the last: a name of a column that is no text


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """One row group: its file, its number inside the file and its number of rows."""

    file: pathlib.Path
    number: int
    rows: int

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.file}, row group {self.number}"


class ParquetFiles:
    """One Parquet file, or all `*.parquet` of a folder in the natural order of their names (day_2 before day_10).

    Args:
      path: File or folder.
    Raises:
      UserError: missing, empty, not Parquet, damaged, files with different columns, or what an interrupted rewrite
        (`clustering.cluster_by_session`) left.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        files = find_files(path, "*.parquet")
        self._metadata = {file: read_footer(file) for file in files}
        rewritten = {file: (metadata.metadata or {}).get(clustered.KEY) for file, metadata in self._metadata.items()}
        manifest = clustered.check_complete(pathlib.Path(path), rewritten)
        self.repeats_left_out: Groups = () if manifest is None else manifest.groups
        self.path = pathlib.Path(path)
        self.arrow_schema = self._metadata[files[0]].schema.to_arrow_schema()
        for file in files[1:]:
            if not self._metadata[file].schema.to_arrow_schema().equals(self.arrow_schema):
                raise UserError(f"{file}: its columns differ from those of {files[0]}; files of a folder must agree.")
        self.groups: tuple[RowGroup, ...] = tuple(
            RowGroup(file, g, metadata.row_group(g).num_rows)
            for file, metadata in self._metadata.items()
            for g in range(metadata.num_row_groups)
            if metadata.row_group(g).num_rows
        )
        if not self.groups:
            raise UserError(f"{path}: there are no rows. Point data.path at a file that has some.")

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(group.rows for group in self.groups)

    def check(self, schema: Schema, others: Iterable[str] = ()) -> None:
        """Looks for the columns of a schema, and for `others` (numbers), and at their types.

        Raises:
          UserError: naming the column, with the nearest names.
        """
        for feature in schema.categorical:
            type_ = self._type(feature.name)
            wanted = "integers" if feature.length == 1 else "lists of integers"
            item = getattr(type_, "value_type", pa.null())
            if feature.length == 1 and not pa.types.is_fixed_size_list(type_):
                item = type_
            if not pa.types.is_integer(item):
                raise self._wrong_type(feature.name, wanted, "Code strings as integers when the file is prepared.")
        for name in (*schema.dense, *others):
            if not (pa.types.is_integer(self._type(name)) or pa.types.is_floating(self._type(name))):
                raise self._wrong_type(name, "numbers", "List it as categorical, or convert it.")
        for name in schema.labels:
            type_ = self._type(name)
            if not (pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_)):
                raise self._wrong_type(name, "labels 0 and 1 (boolean or number)", "Convert it.")

    def check_lists(self, names: Iterable[str]) -> None:
        """Looks whether columns hold lists.

        Raises:
          UserError: naming the first that does not.
        """
        for name in names:
            type_ = self._type(name)
            if not (pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)):
                raise self._wrong_type(name, "lists of integers", "Leave it out of dedup.")

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages before compression."""
        return sum(m.row_group(g).total_byte_size for m in self._metadata.values() for g in range(m.num_row_groups))

    @property
    def codecs(self) -> tuple[str, ...]:
        """Compression codecs in use, lower case, sorted."""
        found = set()
        for metadata in self._metadata.values():
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                found |= {group.column(c).compression.lower() for c in range(group.num_columns)}
        return tuple(sorted(found))

    def remarks(self) -> tuple[str, ...]:
        """What a user should know of the files before anything is trained on them."""
        return remarks_on_checksums(self._metadata)

    def files(self) -> dict[pathlib.Path, int]:
        """Rows of each file, in order."""
        return {file: metadata.num_rows for file, metadata in self._metadata.items()}

    def key_value(self, key: bytes, otherwise: str) -> bytes:
        """What every file's key-value metadata hold under a key.

        Args:
          key: The key.
          otherwise: What to say of a file that has no such key.

        Raises:
          UserError: a file has none, or files differ.
        """
        first, found = None, b""
        for file, metadata in self._metadata.items():
            text = (metadata.metadata or {}).get(key)
            if text is None:
                raise UserError(f"{file}: {otherwise}")
            if first is not None and text != found:
                raise UserError(f"{file}: was converted with another coding than {first}. Convert all files together.")
            first, found = file, text
        return found

    def read(self, group: RowGroup, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        """Reads some columns of a row group; nothing else is decoded.

        Integers keep their type, missing numbers become NaN.

        Raises:
          UserError: the row group is damaged, or has a missing id or label.
        """
        table = self.table(group, columns)
        return {name: _to_numpy(table[name], name, group.where) for name in columns}

    def read_shared(
        self, group: RowGroup, columns: Sequence[str], groups: Groups
    ) -> tuple[dict[str, np.ndarray | Ragged], dict[tuple[str, ...], Shared]]:
        """As `read`, and the lists of groups of other columns with every row of lists once.

        Where a file leaves repeats out, its rows are those that it writes: nothing is expanded, hashed or compared, and
        equal lists that do not follow each other stay rows of their own. The lists of a group that the file writes out
        are deduplicated here (`dedup.deduplicate`).

        Raises:
          UserError: as `read`, or a column of a group holds no lists.
        """
        table = self._stored(group, [*columns, *(name for members in groups for name in members)])
        plain = self._filled(table.select(list(dict.fromkeys(columns))), group)
        return (
            {name: _to_numpy(plain[name], name, group.where) for name in columns},
            {members: self._shared(table, members, group) for members in groups},
        )

    def _shared(self, table: pa.Table, members: tuple[str, ...], group: RowGroup) -> Shared:
        if not {name for stored in self.repeats_left_out for name in stored}.issuperset(members):
            lists = lists_of(self._filled(table.select(list(members)), group), members, group.where)
            found = deduplicate(lists, [members])
            distinct = found.distinct[0]
            rows = tuple(Ragged(distinct.offsets(name), distinct[name].values) for name in members)
            return Shared(rows, found.inverse[0])
        written = [_written(table[name], group) for name in members]
        heads = np.logical_or.reduce(written)
        rows = []
        for name, own in zip(members, written, strict=True):
            lists = _to_numpy(table[name].drop_null(), name, group.where)
            assert isinstance(lists, Ragged)
            # Features of one group of the file are written in the same rows; others have theirs repeated.
            rows.append(lists if own.sum() == heads.sum() else lists.take((np.cumsum(own) - 1)[heads]))
        return Shared(tuple(rows), np.cumsum(heads, dtype=np.int32) - np.int32(1))

    def features(self, group: RowGroup, names: Sequence[str], groups: Sequence[Sequence[str]] = ()) -> DedupKeyedJagged:
        """List columns of a row group, as `deduplicate(..., groups)` of all of them gives.

        The repeats that a file leaves out are neither decoded nor hashed.

        Raises:
          UserError: the row group is damaged, has a missing list or id, or there is no such column or group.
        """
        for name in names:
            self._type(name)
        check_names([name for members in groups for name in members], tuple(names))
        table = self._stored(group, names)
        known = [tuple(members) for members in groups if self._runs_are_known(members)]
        rest = [name for name in names if not any(name in members for members in known)]
        others = [tuple(members) for members in groups if tuple(members) not in known]
        found = deduplicate(lists_of(self._filled(table.select(rest), group), rest, group.where), others)
        parts = dict(zip(others, zip(found.distinct, found.inverse, strict=True), strict=True))
        for members in known:
            written = _written(table[members[0]], group)
            heads = table.select(list(members)).take(pa.array(np.flatnonzero(written)))
            parts[members] = deduplicate_runs(lists_of(heads, members, group.where), np.cumsum(written) - 1)
        ordered = tuple(tuple(members) for members in groups)
        plain = found.plain if rest else KeyedJagged((), np.zeros(0, np.int64), np.zeros((0, group.rows), np.int32))
        distinct = tuple(parts[members][0] for members in ordered)
        return DedupKeyedJagged(tuple(names), ordered, distinct, tuple(parts[m][1] for m in ordered), plain)

    def _runs_are_known(self, members: Sequence[str]) -> bool:
        return any(set(members) == set(stored) for stored in self.repeats_left_out)

    def table(self, group: RowGroup, columns: Sequence[str] | None = None) -> pa.Table:
        """A row group, or some of its columns, with the repeats that a file leaves out.

        Raises:
          UserError: the row group is damaged.
        """
        return self._filled(self._stored(group, columns), group)

    def _filled(self, table: pa.Table, group: RowGroup) -> pa.Table:
        for name in (name for members in self.repeats_left_out for name in members):
            if name in table.schema.names:
                written = _written(table[name], group)
                last = np.maximum.accumulate(np.where(written, np.arange(written.size), 0))
                place = table.schema.get_field_index(name)
                table = table.set_column(place, table.schema.field(place), table[name].take(pa.array(last)))
        return table

    def _stored(self, group: RowGroup, columns: Sequence[str] | None) -> pa.Table:
        try:
            # A reader per call: they are not thread-safe, and the footer is not parsed again.
            with pq.ParquetFile(
                group.file, metadata=self._metadata[group.file], page_checksum_verification=True
            ) as reader:
                names = None if columns is None else list(dict.fromkeys(columns))
                table = reader.read_row_group(group.number, columns=names)
        except FileNotFoundError as error:
            raise UserError(f"{group.file}: the file has gone while it was in use. Restore it and resume.") from error
        except _DAMAGE as error:
            raise UserError(
                f"{group.where} is damaged ({first_line(error)}). Restore the file from its source; the other row "
                "groups may be fine."
            ) from error
        if table.num_rows != group.rows:
            raise UserError(
                f"{group.where} is damaged ({table.num_rows} rows instead of {group.rows}). Restore the file."
            )
        return table

    def fingerprint(self) -> str:
        """Hex digest of the footers and sizes: they list the place and, if written, the statistics of every page."""
        digest = hashlib.sha256()
        for file in self._metadata:
            size = file.stat().st_size
            with file.open("rb") as f:
                f.seek(max(0, size - 8))
                footer = 8 + int.from_bytes(f.read(8)[:4], "little")
                f.seek(max(0, size - footer))
                digest.update(size.to_bytes(8, "little") + f.read())
        return digest.hexdigest()

    def _type(self, name: str) -> pa.DataType:
        index = self.arrow_schema.get_field_index(name)
        if index < 0:
            raise missing_column(name, self.arrow_schema.names, str(self.path))
        return self.arrow_schema.field(index).type

    def _wrong_type(self, name: str, wanted: str, next_step: str) -> UserError:
        return UserError(f"{self.path}: column {name!r} holds {self._type(name)}; wanted {wanted}. {next_step}")


def open_converted(path: str) -> ParquetFiles | None:
    """What a log was converted to, or None where `path` is text."""
    at = pathlib.Path(path)
    found = at.suffix == ".parquet" or (at.is_dir() and any(at.glob("*.parquet")))
    return ParquetFiles(at) if found else None


def find_files(path: str | pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """The file itself, or the files of a folder that match `pattern`, in natural order.

    Raises:
      UserError: nothing is there, or a file is empty.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        files = sorted(path.glob(pattern), key=natural_order)
        if not files:
            raise UserError(f"{path}: the folder holds no {pattern}. Point data.path at the files.")
    elif path.exists():
        files = [path]
    else:
        raise UserError(f"{path}: there is no such file or folder.{_nearest_file(path)} Set data.path.")
    for file in files:
        try:
            empty = file.stat().st_size == 0
            with file.open("rb"):
                pass
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}). Check its permissions.") from error
        if empty:
            raise UserError(f"{file}: the file is empty (0 bytes). Copy it again from its source.")
    return files


def natural_order(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """A sort key by name in which numbers count as numbers."""
    return [(int(part), 0, part) if part.isdigit() else (-1, 1, part) for part in re.split(r"(\d+)", path.name)]


def lists_of(table: pa.Table, names: Sequence[str], where: str = "") -> KeyedJagged:
    """List columns of a table as features, without weights.

    Raises:
      UserError: a column holds something else, or a list or an id is missing.
    """
    lists = []
    for name in names:
        column = _to_numpy(table[name], name, where)
        if not isinstance(column, Ragged):
            raise UserError(f"{where}: column {name!r} holds {table[name].type}; wanted lists of ids. Leave it out.")
        lists.append(column)
    lengths = np.array([column.lengths for column in lists], np.int32).reshape(len(lists), table.num_rows)
    values = [signed_ids(column.values) for column in lists] or [np.zeros(0, np.int64)]
    return KeyedJagged(tuple(names), np.concatenate(values), lengths)


def _written(column: pa.ChunkedArray, group: RowGroup) -> np.ndarray:
    """bool[N]: which lists of a column stand in the file; the others are those of the row before."""
    written = column.is_valid().to_numpy()
    if not written[0]:
        raise UserError(f"{group.where} is damaged (its first row lacks a list). Run the rewrite again.")
    return written


def _nearest_file(path: pathlib.Path) -> str:
    present = [p.name for p in path.parent.iterdir() if p.suffix != ".partial"] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, present, n=1, cutoff=0.7)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def remarks_on_checksums(footers: Mapping[pathlib.Path, pq.FileMetaData]) -> tuple[str, ...]:
    """Says which files have pages without a checksum, by the first page of each."""
    unchecked = [file for file, footer in footers.items() if not _has_checksum(file, footer)]
    if not unchecked:
        return ()
    first, *others = unchecked
    more = f" and {len(others)} more files" if others else ""
    return (
        f"data: {first}{more}: pages have no checksums, so damage may be read as other values. Writers add "
        "them on request (pyarrow: write_page_checksum=True).",
    )


def read_footer(file: pathlib.Path) -> pq.FileMetaData:
    """What a Parquet file says of itself.

    Raises:
      UserError: it is none, or not whole.
    """
    try:
        return pq.read_metadata(file)
    except _DAMAGE as error:
        raise UserError(
            f"{file}: is not a complete Parquet file ({first_line(error)}); truncated or damaged? Copy it again from "
            "its source."
        ) from error


def _has_checksum(file: pathlib.Path, metadata: pq.FileMetaData) -> bool:
    """Whether the header of the first page has a checksum: in Thrift's compact form, the fourth number of 32 bits."""
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups) if metadata.row_group(g).num_rows]
    if not groups or not groups[0].num_columns:
        return True
    with file.open("rb") as opened:
        opened.seek(groups[0].column(0).data_page_offset)
        header = iter(opened.read(64))
    for _ in range(3):  # kind of page, its bytes, and its bytes when compressed
        if next(header, None) != _THRIFT_NEXT_I32:
            return False
        while next(header, 0) & 0x80:
            pass
    return next(header, None) == _THRIFT_NEXT_I32


def first_line(error: BaseException) -> str:
    """What an error says, for use inside a message."""
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _to_numpy(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray | Ragged:
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        values = array.flatten()  # leaves out null lists, which are refused below
        if array.null_count or values.null_count:
            raise UserError(
                f"{where}: column {name!r} has {array.null_count} missing lists and {values.null_count} missing ids; "
                "wanted an empty list, or an id of its own for what is missing."
            )
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        return Ragged(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), values.to_numpy(zero_copy_only=False))
    if array.null_count and not pa.types.is_floating(array.type):
        if pa.types.is_integer(array.type):
            # Ids and labels are refused when they are encoded; a number may be missing.
            return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        raise UserError(
            f"{where}: column {name!r} has {array.null_count} missing values; wanted a value in every row. "
            "Fill them in when the file is prepared."
        )
    return array.to_numpy(zero_copy_only=False)
