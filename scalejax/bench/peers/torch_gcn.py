"""A GCN and its training step in PyTorch, on a CPU."""

import numpy as np
import torch

from scalejax.bench.peers.torch_sparse import csr


class _Aggregate(torch.autograd.Function):
    """A h of a symmetric A, which is its own transpose in the backward pass."""

    @staticmethod
    def forward(context, matrix: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        context.matrix = matrix
        return matrix @ h

    @staticmethod
    def backward(context, *gradients: torch.Tensor):
        return None, context.matrix @ gradients[0]


class TrainingStep:
    """Forward and backward over a whole graph, and Adam.

    Args:
      matrix: (row starts, columns, values) of the normalised adjacency, which is symmetric.
      nodes: Features float32[N, F] of all nodes; numbers and classes of those that are learnt.
      parameters: {"layers/0/kernel": ..., "layers/0/bias": ..., ...}.
    """

    def __init__(
        self,
        matrix: tuple[np.ndarray, ...],
        nodes: tuple[np.ndarray, np.ndarray, np.ndarray],
        parameters: dict[str, np.ndarray],
        *,
        learning_rate: float,
        threads: int,
    ) -> None:
        size = len(matrix[0]) - 1
        self._matrix = csr(matrix, (size, size), threads)
        features, numbers, classes = (torch.from_numpy(np.ascontiguousarray(array)) for array in nodes)
        self._features, self._numbers, self._classes = features, numbers.long(), classes.long()
        own = {path: torch.nn.Parameter(torch.from_numpy(p.copy())) for path, p in parameters.items()}
        self._layers = [(own[f"layers/{i}/kernel"], own[f"layers/{i}/bias"]) for i in range(len(own) // 2)]
        self._optimizer = torch.optim.Adam(own.values(), lr=learning_rate)

    def step(self) -> float:
        """One step; the mean loss before it."""
        h = self._features
        for number, (kernel, bias) in enumerate(self._layers):
            h = _Aggregate.apply(self._matrix, h @ kernel) + bias
            h = torch.relu(h) if number + 1 < len(self._layers) else h
        loss = torch.nn.functional.cross_entropy(h[self._numbers], self._classes)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())
