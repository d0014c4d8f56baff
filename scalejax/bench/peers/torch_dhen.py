"""DHEN in PyTorch: crosses beside factorization machines, summed, as `scalejax.models.recsys.dhen` has them."""

from collections.abc import Sequence

import torch
from torch import nn

from scalejax.bench.peers.torch_training import Mlp
from scalejax.bench.peers.torch_wukong import LowRankFm, Mix


class Crosses(nn.Module):
    """W (x * (V x + b)), x the flattened vectors: [n, B, d] -> [n, B, d]."""

    def __init__(self, n: int, dim: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Parameter(torch.empty(n * dim, rank))
        self.affine = nn.Linear(rank or n * dim, n * dim)
        self.mix = Mix(n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.transpose(0, 1).flatten(1)  # B nd
        crossed = flat * self.affine(flat if self.down is None else flat @ self.down)
        return self.mix(crossed.view(flat.shape[0], -1, x.shape[-1]).transpose(0, 1))


class FmBlock(nn.Module):
    """MLP(LN(flatten(X (X^T Y)))): [n, B, d] -> [n, B, d]."""

    def __init__(self, n: int, rank: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.fm = LowRankFm(n, rank)
        self.fm_norm = nn.LayerNorm(n * rank)
        self.mlp = Mlp(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.mlp(self.fm_norm(self.fm(x).flatten(1)))
        return f.view(f.shape[0], -1, x.shape[-1]).transpose(0, 1)


class DhenLayer(nn.Module):
    """LN(crosses + FM block + X)."""

    def __init__(self, n: int, dim: int, cross_rank: int | None, rank: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.interactions = nn.ModuleList([Crosses(n, dim, cross_rank), FmBlock(n, rank, sizes)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        crosses, machine = self.interactions
        return self.norm(crosses(x) + machine(x) + x)


class Dhen(nn.Module):
    """(embedded [B, F, d], dense [B, D]) -> logits [B].

    Args:
      dim: d.
      bottom: Sizes of the MLP on the dense features; it makes one d-vector, the first of X_0.
      layers: How many, each of n vectors in and out.
      n: Vectors.
      cross_rank: Of the crosses; None = full.
      rank: Of the factorization machines.
      sizes: Of the MLPs in their FM blocks.
      head: Sizes of the MLP that makes the logit.
    """

    def __init__(
        self,
        dim: int,
        bottom: Sequence[int],
        layers: int,
        n: int,
        cross_rank: int | None,
        rank: int,
        sizes: Sequence[int],
        head: Sequence[int],
    ) -> None:
        super().__init__()
        self.before = nn.ModuleDict({"bottom": Mlp(bottom)})
        self.layers = nn.ModuleList(DhenLayer(n, dim, cross_rank, rank, sizes) for _ in range(layers))
        self.head = Mlp(head)

    def forward(self, embedded: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.before["bottom"](dense)[None], embedded.transpose(0, 1)])  # n B d
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1).flatten(1))[:, 0]
