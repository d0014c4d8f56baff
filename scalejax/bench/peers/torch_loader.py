"""Batches from memory and from Parquet through torch's DataLoader, each in the fastest form that we know.

A row at a time (the DataLoader's default) is about a hundred times slower; nobody who cares about speed uses it here.
"""

import math
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids int32[B, F], dense float32[B, D], labels float32[B]."""


class _Columns(Dataset[Row]):
    """Tensors that are indexed with a whole batch of row numbers: one gather a tensor."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, rows: torch.Tensor) -> Row:
        return tuple(tensor[rows] for tensor in self._tensors)  # pyright: ignore[reportReturnType]


class _ShuffledBatches(Sampler[torch.Tensor]):
    """Index tensors of whole batches in a fresh random order per epoch."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self._rows, self._batch_size = rows, batch_size

    def __len__(self) -> int:
        return self._rows // self._batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(self._rows).split(self._batch_size)[: len(self)])


class _RowGroups(IterableDataset[Row]):
    """Row groups in random order; the rows of `window` groups are shuffled together and cut into batches."""

    def __init__(
        self, path: pathlib.Path, ids: Sequence[str], dense: Sequence[str], label: str, batch_size: int, window: int
    ) -> None:
        self._path, self._ids, self._dense, self._label = path, list(ids), list(dense), label
        self._batch_size, self._window = batch_size, window

    def __iter__(self) -> Iterator[Row]:
        file = pq.ParquetFile(self._path, memory_map=True)
        worker = get_worker_info()
        if worker is None:
            groups = torch.randperm(file.num_row_groups).tolist()
        else:
            # The seed that all workers of an epoch share: each by its own would assign the groups differently.
            shared = torch.Generator().manual_seed(worker.seed - worker.id)
            groups = torch.randperm(file.num_row_groups, generator=shared).tolist()[worker.id :: worker.num_workers]
        left: list[tuple[np.ndarray, ...]] = []
        for start in range(0, len(groups), self._window):
            columns = [*self._ids, *self._dense, self._label]
            table = file.read_row_groups(groups[start : start + self._window], columns=columns)
            ids = np.stack([table[name].to_numpy() for name in self._ids], 1)
            dense = np.stack([table[name].to_numpy() for name in self._dense], 1)
            parts = (ids, dense, table[self._label].to_numpy())
            order = torch.randperm(table.num_rows).numpy()
            left.append(tuple(part[order] for part in parts))
            joined = left[0] if len(left) == 1 else tuple(np.concatenate(part) for part in zip(*left, strict=True))
            whole = len(joined[0]) // self._batch_size * self._batch_size
            for at in range(0, whole, self._batch_size):
                yield tuple(  # pyright: ignore[reportReturnType]
                    torch.from_numpy(part[at : at + self._batch_size]) for part in joined
                )
            left = [tuple(part[whole:] for part in joined)]


def from_memory(
    ids: np.ndarray, dense: np.ndarray, labels: np.ndarray, batch_size: int, workers: int
) -> DataLoader[Row]:
    """Batches of ids int32[N, F], dense float32[N, D], labels float32[N] in random order."""
    columns = _Columns(torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(labels))
    return DataLoader(
        columns,
        sampler=_ShuffledBatches(len(columns), batch_size),
        batch_size=None,  # an element is a batch already
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def from_parquet(
    path: pathlib.Path,
    ids: Sequence[str],
    dense: Sequence[str],
    label: str,
    batch_size: int,
    window: int,
    workers: int,
) -> DataLoader[Row]:
    """Batches from a Parquet file, shuffled in windows of row groups."""
    groups = _RowGroups(path, ids, dense, label, batch_size, math.ceil(window / max(1, workers)))
    return DataLoader(groups, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
