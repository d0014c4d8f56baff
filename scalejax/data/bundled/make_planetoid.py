"""Makes an npz of Cora, Citeseer or Pubmed from the files of Planetoid (Yang et al., 2016; MIT licence).

    git clone https://github.com/kimiyoung/planetoid
    git -C planetoid checkout af6abf46
    python -m scalejax.data.bundled.make_planetoid planetoid/data cora cora.npz

The bundled `cora.npz` has these bytes where zlib is the same, and the same arrays in any case.

The files are Python pickles. They are read without running anything that they name: arrays, matrices, lists and
dictionaries are built here, and any other name ends the reading.

What it does to the source: puts the rows of test nodes, which come in the order of `test.index`, back to their nodes;
gives nodes that have no row at all (15 of Citeseer) no words and the label -1; lists each edge in both directions,
without repeats and loops, sorted by source. Features stay as they are, in compressed rows.
"""

import argparse
import pathlib
import pickle
from collections import defaultdict
from typing import Any, BinaryIO

import numpy as np

from scalejax.errors import UserError

VALIDATION = 500
"""Nodes after those of the training split, by the authors' and everyone's convention."""


class Rows:
    """What a pickled matrix of scipy is made of."""

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    _shape: tuple[int, int]


_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_NAMES: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("scipy.sparse.csr", "csr_matrix"): Rows,
    ("scipy.sparse._csr", "csr_matrix"): Rows,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


class _Reader(pickle.Unpickler):
    """Knows the names of `_NAMES` and no others."""

    def find_class(self, module_name: str, global_name: str) -> object:
        if (module_name, global_name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which is no part of arrays or lists")
        return _NAMES[module_name, global_name]


def read(folder: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of a graph, as `scalejax.data.graphs.npz` describes them.

    Args:
      folder: With `ind.NAME.x` and so on.
      name: "cora", "citeseer" or "pubmed".
    Raises:
      UserError: a file is missing, damaged, or no part of the data set.
    """
    parts = {part: _load(folder / f"ind.{name}.{part}") for part in ("y", "tx", "ty", "allx", "ally", "graph")}
    order = np.array(_text(folder / f"ind.{name}.test.index").split(), np.int64)
    known, nodes = parts["ally"].shape[0], int(order.max()) + 1
    row = np.full(nodes, -1)  # of the rows of allx and then of tx
    row[:known] = np.arange(known)
    row[order] = known + np.arange(order.size)
    indptr, indices, values = _taken([parts["allx"], parts["tx"]], row)
    classes = np.concatenate([parts["ally"], parts["ty"]])
    labels = np.where((row >= 0) & classes[row].any(1), classes[row].argmax(1), -1)
    pairs = np.array([(a, b) for a, found in parts["graph"].items() for b in found if a != b], np.int64)
    pairs = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    train = parts["y"].shape[0]
    return {
        "edge_src": pairs[:, 0].astype(np.int32),
        "edge_dst": pairs[:, 1].astype(np.int32),
        "feat_indptr": indptr.astype(np.int32),
        "feat_indices": indices.astype(np.int32),
        "feat_values": values.astype(np.float32),
        "num_nodes": np.array(nodes, np.int32),
        "num_features": np.array(parts["allx"]._shape[1], np.int32),
        "labels": labels.astype(np.int8),
        "train_idx": np.arange(train, dtype=np.int32),
        "val_idx": np.arange(train, min(train + VALIDATION, known), dtype=np.int32),
        "test_idx": np.sort(order).astype(np.int32),
    }


def _taken(matrices: list[Rows], row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compressed rows of matrices one below the other, the one of each node; -1 = an empty one. Columns sorted."""
    lengths = np.concatenate([np.diff(m.indptr) for m in matrices])
    starts = np.cumsum(lengths) - lengths
    columns, values = (np.concatenate([getattr(m, name) for m in matrices]) for name in ("indices", "data"))
    counts = np.where(row < 0, 0, lengths[row])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(row.size), counts)
    place = starts[row[owner]] + np.arange(indptr[-1]) - indptr[owner]
    place = place[np.lexsort((columns[place], owner))]
    return indptr, columns[place], values[place]


def _load(file: pathlib.Path) -> Any:
    with _open(file) as opened:
        try:
            return _Reader(opened, encoding="latin1").load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{file}: is no file of Planetoid ({error}). Copy it again from its source.") from error


def _text(file: pathlib.Path) -> str:
    with _open(file) as opened:
        return opened.read().decode()


def _open(file: pathlib.Path) -> BinaryIO:
    if not file.is_file():
        raise UserError(f"{file}: is missing. Point at the folder `data` of a clone of Planetoid.")
    return file.open("rb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="data of a clone of Planetoid")
    parser.add_argument("name", choices=("cora", "citeseer", "pubmed"))
    parser.add_argument("output", type=pathlib.Path, help="npz to write")
    options = parser.parse_args()
    try:
        arrays: dict[str, Any] = read(options.folder, options.name)
    except UserError as error:
        parser.error(str(error))
    np.savez_compressed(options.output, **arrays)
    print(f"{arrays['num_nodes']} nodes, {arrays['edge_src'].size} edges, {arrays['feat_values'].size} features")


if __name__ == "__main__":
    main()
