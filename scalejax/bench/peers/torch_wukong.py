"""Wukong in PyTorch: the equations of `scalejax.models.recsys.wukong` for one-hot features of equal width."""

from collections.abc import Sequence

import torch
from torch import nn

from scalejax.bench.peers.torch_training import Mlp


class Mix(nn.Module):
    """W X for X of shape [n, B, d]: one matrix product over B * d columns."""

    def __init__(self, rows: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mix(self.weight, x)


class LowRankFm(nn.Module):
    """X (X^T Y): [n, B, d] -> [B, n, k]."""

    def __init__(self, n: int, rank: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.empty(n, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), mix(self.y.T, x).permute(1, 2, 0))


class WukongLayer(nn.Module):
    """LN(concat(FMB(X), LCB(X)) + R): [n, B, d] -> [n_F + n_L, B, d]."""

    def __init__(self, n: int, dim: int, fmb_sizes: Sequence[int], lcb_outputs: int, rank: int) -> None:
        super().__init__()
        out = fmb_sizes[-1] // dim + lcb_outputs
        self.fm = LowRankFm(n, rank)
        self.fm_norm = nn.LayerNorm(n * rank)
        self.mlp = Mlp(fmb_sizes)
        self.lcb = Mix(lcb_outputs, n)
        self.residual = None if n == out else Mix(out, n)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.mlp(self.fm_norm(self.fm(x).flatten(1)))  # B n_F*d
        a = f.view(f.shape[0], -1, x.shape[-1]).transpose(0, 1)  # n_F B d
        mixed = torch.cat([a, self.lcb(x)])
        return self.norm(mixed + (x if self.residual is None else self.residual(x)))


class Wukong(nn.Module):
    """(embedded [B, F, d], dense [B, D]) -> logits [B].

    Args:
      dim: d.
      bottom: Sizes of the MLP on the dense features; it makes one d-vector, the first of X_0.
      layers: For each layer (n_i, sizes of the MLP in its FM block).
      lcb_outputs: n_L.
      rank: k.
      head: Sizes of the MLP that makes the logit.
    """

    def __init__(
        self,
        dim: int,
        bottom: Sequence[int],
        layers: Sequence[tuple[int, Sequence[int]]],
        lcb_outputs: int,
        rank: int,
        head: Sequence[int],
    ) -> None:
        super().__init__()
        self.before = nn.ModuleDict({"bottom": Mlp(bottom)})
        self.layers = nn.ModuleList(WukongLayer(n, dim, sizes, lcb_outputs, rank) for n, sizes in layers)
        self.head = Mlp(head)

    def forward(self, embedded: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.before["bottom"](dense)[None], embedded.transpose(0, 1)])  # n_0 B d
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1).flatten(1))[:, 0]


def mix(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[rows, n], [n, B, d] -> [rows, B, d]."""
    return (weight @ x.flatten(1)).view(-1, *x.shape[1:])
