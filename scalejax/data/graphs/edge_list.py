"""Edges in text or Parquet files."""

import pathlib
import zlib

import numpy as np

from scalejax.data.examples.records import Ragged
from scalejax.data.graphs.adjacency import Adjacency
from scalejax.data.graphs.npz import nodes_of, one_file
from scalejax.data.packed_files import open_unpacked
from scalejax.errors import UserError

_COMMENTS = ("#", "%")
_LONGEST_NUMBER = 64


def read_edge_list(path: str | pathlib.Path, *, num_nodes: int | None = None) -> Adjacency:
    """Reads lines `source destination` or `source destination weight`, as SNAP and many others write them.

    Fields are separated by white space or commas; empty lines and those that begin with # or % are passed over.

    Args:
      path: Text, or text that gzip or zstd has compressed (.gz, .zst).
      num_nodes: N; None = one more than the highest id.
    Raises:
      UserError: missing, damaged, or a line that is no edge (named by its number).
    """
    file = one_file(path, "*")
    try:
        with open_unpacked(file) as stream:
            text = stream.read().decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{file}: is no complete text ({error}). Copy it again from its source.") from error
    lines = [(number, line.replace(",", " ").split()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, fields) for number, fields in lines if fields and not fields[0].startswith(_COMMENTS)]
    if not lines:
        raise UserError(f"{file}: holds no edges. Point at a file with a line `source destination` each.")
    width = len(lines[0][1])
    wrong = next((item for item in lines if len(item[1]) != width), None)
    if width not in (2, 3) or wrong is not None:
        number, fields = wrong or lines[0]
        raise UserError(
            f"{file}, line {number}: has {len(fields)} fields; wanted `source destination`, or a weight besides, and "
            "the same in every line."
        )
    columns = list(zip(*(fields for _, fields in lines), strict=True))
    numbers = [number for number, _ in lines]
    senders, receivers = (_numbers(column, np.int64, "a node", file, numbers) for column in columns[:2])
    values = _numbers(columns[2], np.float64, "a weight", file, numbers) if width == 3 else None
    return _adjacency(senders, receivers, values, num_nodes, str(file))


def read_edge_parquet(
    path: str | pathlib.Path,
    *,
    source: str = "source",
    destination: str = "destination",
    weight: str | None = None,
    num_nodes: int | None = None,
) -> Adjacency:
    """Reads edges from columns of Parquet.

    Args:
      path: File, or folder of `*.parquet`.
      source: Column of sources, integers.
      destination: Column of destinations, integers.
      weight: Column of weights; None = 1 each.
      num_nodes: N; None = one more than the highest id.
    Raises:
      UserError: missing, damaged, a column is not there or is no number.
    """
    from scalejax.data.tables.parquet_files import ParquetFiles

    files = ParquetFiles(path)
    names = [source, destination, *([] if weight is None else [weight])]
    for name in names:
        if name not in files.arrow_schema.names:
            raise UserError(
                f"{path}: has no column {name!r}, only {', '.join(files.arrow_schema.names)}. Name another."
            )
    groups = [files.read(group, names) for group in files.groups]
    columns = [np.concatenate([_flat(group[name], name, path) for group in groups]) for name in names]
    return _adjacency(columns[0], columns[1], columns[2] if weight else None, num_nodes, str(path))


def _flat(column: np.ndarray | Ragged, name: str, path: str | pathlib.Path) -> np.ndarray:
    if isinstance(column, Ragged):
        raise UserError(f"{path}: column {name!r} holds lists; wanted one number per edge.")
    return column


def _adjacency(
    senders: np.ndarray, receivers: np.ndarray, values: np.ndarray | None, num_nodes: int | None, where: str
) -> Adjacency:
    nodes = nodes_of(num_nodes, senders, receivers)
    try:
        return Adjacency.from_edges(senders, receivers, shape=(nodes, nodes), values=values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _numbers(texts: tuple[str, ...], dtype: type, what: str, file: pathlib.Path, numbers: list[int]) -> np.ndarray:
    if (longest := max(map(len, texts))) > _LONGEST_NUMBER:  # as an array each text would be as long
        number = numbers[next(i for i, text in enumerate(texts) if len(text) == longest)]
        raise UserError(f"{file}, line {number}: {longest} characters are not {what}; wanted a number.")
    try:
        return np.array(texts).astype(dtype)
    except (ValueError, OverflowError):
        for number, text in zip(numbers, texts, strict=True):
            try:
                dtype(text)
            except (ValueError, OverflowError):
                raise UserError(f"{file}, line {number}: {text!r} is not {what}; wanted a number.") from None
        raise
