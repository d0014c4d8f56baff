"""Data sets of named arrays in memory: images and their labels, pairs, anything that fits.

    data = ArrayDataSet({"train": {"images": x, "labels": y}, "test": {...}}, batch_size=64, seed=0)

Batches are {name: array} of that many rows, with "weights", float32[B], added where there are none: 0 marks the rows
that fill up the last batch of a split that is scored.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from scalejax.data.permutation import Permutation
from scalejax.data.reading import check_sizes, check_start, share
from scalejax.errors import UserError

Arrays = dict[str, np.ndarray]
WEIGHTS = "weights"


class ArrayDataSet:
    """Examples of every split, addressed by global example number; the training stream is `train` without end.

    Example i of the stream is example i % n of epoch i // n, in the order of that epoch's seeded permutation.

    Args:
      splits: Split -> name -> array [n, ...].
      batch_size: Global.
      seed: Of the order.
      schema: What a model must know of the data; None = {name: (shape of an example, dtype)} of the training split.

    Raises:
      UserError: arrays of a split differ in length, or splits in their names, there is no training split, or a number
        does not fit the 32 bits that devices have: it would become another one there.
    """

    def __init__(
        self, splits: Mapping[str, Mapping[str, np.ndarray]], *, batch_size: int, seed: int = 0, schema: object = None
    ) -> None:
        check_sizes(batch_size, 1)
        if not splits.get("train"):
            raise UserError(f"ArrayDataSet: splits must have 'train'; got {', '.join(splits) or 'none'}.")
        names = set(splits["train"])
        for split, arrays in splits.items():
            lengths = {name: len(array) for name, array in arrays.items()}
            if set(arrays) != names or len(set(lengths.values())) > 1:
                raise UserError(
                    f"ArrayDataSet: every split must have the arrays {', '.join(sorted(names))}, equally long; split "
                    f"{split!r} has {lengths}."
                )
            for name, array in arrays.items():
                _check_range(array, f"ArrayDataSet: {name!r} of split {split!r}")
        self.splits = {split: _weighted(arrays) for split, arrays in splits.items()}
        self.seed, self.batch_size = seed, batch_size
        train = self.splits["train"]
        self.schema = schema or {name: (array.shape[1:], array.dtype) for name, array in train.items()}

    def num_examples(self, split: str) -> int:
        """Examples of a split; 0 where there is none of that name."""
        return len(self.splits[split][WEIGHTS]) if split in self.splits else 0

    def fingerprint(self) -> str:
        """Hex digest of all arrays and of the order."""
        digest = hashlib.sha256(repr(self.seed).encode())
        for split, arrays in sorted(self.splits.items()):
            for name, array in sorted(arrays.items()):
                digest.update(repr((split, name, array.shape, str(array.dtype))).encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def train_batches(self, *, start_example: int, process_index: int = 0, process_count: int = 1) -> Iterator[Arrays]:
        """This process's contiguous slice of each global batch from a position of the stream, without end."""
        check_start(start_example)
        arrays = self.splits["train"]
        own = share(self.batch_size, process_index, process_count)
        while True:
            rows = self.rows_at(start_example + process_index * own + np.arange(own))
            yield {name: array[rows] for name, array in arrays.items()}
            start_example += self.batch_size

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """int64[M] positions of the training stream -> int64[M] rows of the training split."""
        count = self.num_examples("train")
        rows = np.empty(len(positions), np.int64)
        for epoch in np.unique(positions // count).tolist():
            here = positions // count == epoch
            rows[here] = _order(count, self.seed, epoch)(positions[here] % count)
        return rows

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[Arrays]:
        """One pass over a split in its order, the last batch filled up with examples of weight 0."""
        arrays, count = self.splits[split], self.num_examples(split)
        own = share(self.batch_size, process_index, process_count)
        for start in range(0, count, self.batch_size):
            rows = start + process_index * own + np.arange(own)
            batch = {name: array[np.minimum(rows, count - 1)] for name, array in arrays.items()}
            inside = (rows < count).reshape(-1, *(1,) * (batch[WEIGHTS].ndim - 1))
            yield batch | {WEIGHTS: np.where(inside, batch[WEIGHTS], np.zeros_like(batch[WEIGHTS]))}


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> Permutation:
    return Permutation(count, seed, epoch)


def _check_range(array: np.ndarray, what: str) -> None:
    if array.dtype.kind not in "iuf" or array.dtype.itemsize < 8:
        return
    limits = np.finfo(np.float32) if array.dtype.kind == "f" else np.iinfo(np.int32)
    beyond = np.isfinite(array) & ((array < limits.min) | (array > limits.max))
    if not beyond.any():
        return
    row, *inside = np.argwhere(beyond)[0].tolist()
    column = f", column {inside[0]}" if inside else ""
    raise UserError(
        f"{what} has {array[beyond][0]:g} in row {row}{column}, which {limits.dtype} does not hold. Scale such a "
        "column, or number ids and classes from 0."
    )


def _weighted(arrays: Mapping[str, np.ndarray]) -> Arrays:
    if WEIGHTS in arrays:
        return dict(arrays)
    (length,) = {len(array) for array in arrays.values()}
    return {**arrays, WEIGHTS: np.ones(length, np.float32)}
