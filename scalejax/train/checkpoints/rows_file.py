"""Blocks of touched rows in files that NumPy alone can read.

    rows/00000.bin      of process 0: arrays one after the other, little-endian, each at a multiple of 64 bytes
    rows/00000.json     {"blocks": [{"table": "user", "rows": 812, "numbers": 0, "leaves": [
                           {"name": "rows", "columns": [0, 64], "dtype": "float32", "shape": [812, 64], "offset": 6528},
                           ...]}, ...]}

`numbers` is the offset of the rows' numbers in their table, int64; `columns` which columns of the table the values are,
null for states of one number a row. Blocks are written and read one by one, so that memory is that of one block.
"""

import pathlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypedDict

import jax.numpy as jnp
import numpy as np

from scalejax.parallel.embedding.stored.tracking import TableRows
from scalejax.train import disk

FOLDER = "rows"

_ALIGNED = 64


class Leaf(TypedDict):
    """One array of a block."""

    name: str
    columns: tuple[int, int] | None
    dtype: str
    shape: list[int]
    offset: int


class Block(TypedDict):
    """Rows of one table, as the index describes them."""

    table: str
    rows: int
    numbers: int
    leaves: list[Leaf]


def write(folder: pathlib.Path, process: int, blocks: Iterable[TableRows]) -> dict[str, int]:
    """Writes the rows of one process.

    Args:
      folder: Of the checkpoint.
      process: Number of this process.
      blocks: Rows; taken one by one.

    Returns:
      Rows written, by table; a row in several column slices counts once in each.
    """
    folder = folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    index: list[Block] = []
    counts: dict[str, int] = {}
    with open(folder / f"{process:05d}.bin", "wb") as file:
        for rows in blocks:
            counts[rows.table] = counts.get(rows.table, 0) + len(rows.numbers)
            index.append(
                {
                    "table": rows.table,
                    "rows": len(rows.numbers),
                    "numbers": _append(file, rows.numbers),
                    "leaves": [
                        {
                            "name": name,
                            "columns": columns,
                            "dtype": str(values.dtype),
                            "shape": list(values.shape),
                            "offset": _append(file, values),
                        }
                        for name, (columns, values) in rows.leaves.items()
                    ],
                }
            )
    disk.write_json(folder / f"{process:05d}.json", {"blocks": index})
    return counts


def read(folder: pathlib.Path) -> Iterator[TableRows]:
    """The rows of all processes, in one order, block by block. Check the digests of the files first."""
    return (read_block(path, block) for path, block in blocks(folder))


def blocks(folder: pathlib.Path) -> list[tuple[pathlib.Path, Block]]:
    """File and description of each block of a checkpoint, of which `read_block` takes one."""
    indices = sorted((folder / FOLDER).glob("*.json"))
    return [(path.with_suffix(".bin"), block) for path in indices for block in disk.read_json(path)["blocks"]]


def read_block(path: pathlib.Path, block: Block) -> TableRows:
    """The rows of one block."""
    with disk.explained(f"cannot read {path}"), open(path, "rb") as file:
        return TableRows(
            block["table"],
            _read(file, block["numbers"], "int64", [block["rows"]]),
            {
                leaf["name"]: (
                    None if leaf["columns"] is None else (leaf["columns"][0], leaf["columns"][1]),
                    _read(file, leaf["offset"], leaf["dtype"], leaf["shape"]),
                )
                for leaf in block["leaves"]
            },
        )


def _append(file: BinaryIO, array: np.ndarray) -> int:
    file.write(bytes(-file.tell() % _ALIGNED))
    offset = file.tell()
    # As bytes: NumPy hands out no buffer of bfloat16.
    file.write(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return offset


def _read(file: BinaryIO, offset: int, dtype: str, shape: list[int]) -> np.ndarray:
    file.seek(offset)
    kind = jnp.dtype(dtype)  # which knows bfloat16
    data = file.read(int(np.prod(shape)) * kind.itemsize)
    return np.frombuffer(data, kind).reshape(shape)
