"""DLRM in PyTorch: the equations of `scalejax.models.recsys.dlrm` for one-hot features of equal width."""

from collections.abc import Sequence

import torch
from torch import nn

from scalejax.bench.peers.torch_training import Mlp


class Dlrm(nn.Module):
    """(embedded [B, F, d], dense [B, D]) -> logits [B].

    Args:
      vectors: n = F + 1.
      bottom: Sizes of the MLP on the dense features.
      top: Sizes of the MLP that makes the logit.
    """

    pairs: torch.Tensor

    def __init__(self, vectors: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.bottom, self.top = Mlp(bottom), Mlp(top)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", row * vectors + column)

    def forward(self, embedded: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        v = torch.relu(self.bottom(dense))  # B d
        x = torch.cat([v[:, None], embedded], 1)  # B n d
        z = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, self.pairs)  # B n(n-1)/2
        return self.top(torch.cat([v, z], 1))[:, 0]
