"""FBGEMM's table-batched embeddings on a CPU: one fused operator for all tables, exact row-wise AdaGrad in its
backward."""

from collections.abc import Sequence

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)


class Tables:
    """Tables of equal width with one-hot features.

    Args:
      rows: Per table float32[rows, dim].
      learning_rate, eps: Of row-wise AdaGrad.
      threads: CPU threads.
    """

    def __init__(self, rows: Sequence[np.ndarray], learning_rate: float, eps: float, threads: int) -> None:
        torch.set_num_threads(threads)
        specs = [(len(r), r.shape[1], EmbeddingLocation.HOST, ComputeDevice.CPU) for r in rows]
        self._operator = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=specs,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=learning_rate,
            eps=eps,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        for weight, values in zip(self._operator.split_embedding_weights(), rows, strict=True):
            weight.copy_(torch.from_numpy(values))

    def place(self, ids: np.ndarray, grads: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(indices, offsets, gradients) of int32[tables, B] ids."""
        flat = torch.from_numpy(ids.reshape(-1).astype(np.int64))
        return flat, torch.arange(flat.numel() + 1, dtype=torch.int64), torch.from_numpy(grads)

    def step(self, placed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """One lookup and one update."""
        indices, offsets, grads = placed
        self._operator(indices, offsets).backward(grads)

    def lookup(self, placed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> np.ndarray:
        """float32[B, tables * dim]."""
        with torch.no_grad():
            return self._operator(*placed[:2]).numpy()
