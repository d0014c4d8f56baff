"""Compressors of gradients in torch on a CPU, op by op or compiled: the same algorithms, as users write them."""

from collections.abc import Callable

import numpy as np
import torch

GROUP = 128


class RoundTrip:
    """There and back.

    Args:
      numbers: float32[rows, n].
      kind: "int4:128" rounded stochastically, "onebit" or "topk".
      k: Share of a row that "topk" keeps.
      compiled: Whether through torch.compile.
      threads: CPU threads.
    """

    def __init__(self, numbers: np.ndarray, kind: str, k: float, compiled: bool, threads: int) -> None:
        torch.set_num_threads(threads)
        self._x = torch.from_numpy(numbers)
        n = numbers.shape[1]
        ways: dict[str, tuple[Callable[..., object], Callable[..., torch.Tensor]]] = {
            "int4:128": (_int4_there, _int4_back),
            "onebit": (_signs_there, _signs_back),
            "topk": (lambda x: _largest_there(x, max(1, int(k * n))), lambda payload: _largest_back(payload, n)),
        }
        self._there, self._back = (torch.compile(f, dynamic=False) if compiled else f for f in ways[kind])

    def run(self) -> None:
        """One encoding, one decoding."""
        self._once()

    def result(self) -> np.ndarray:
        """float32[rows, n] that comes back."""
        return self._once().numpy()

    def _once(self) -> torch.Tensor:
        with torch.no_grad():
            return self._back(self._there(self._x)).view(self._x.shape)


def _int4_there(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.view(-1, GROUP)
    scale = groups.abs().amax(dim=1, keepdim=True) / 7
    factor = torch.where(scale > 0, 1 / scale, 0)
    level = torch.floor(groups * factor + torch.rand_like(groups)).clamp(-7, 7).to(torch.int8)
    low, high = level[:, : GROUP // 2], level[:, GROUP // 2 :]
    return ((low & 15) | (high << 4)).view(torch.uint8), scale


def _int4_back(payload: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    codes, scale = payload[0].view(torch.int8), payload[1]
    return torch.cat([(codes << 4) >> 4, codes >> 4], dim=1).to(torch.float32) * scale


def _signs_there(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = (x < 0).view(x.shape[0], -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(dim=2, dtype=torch.uint8), x.abs().mean(dim=1)


def _signs_back(payload: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    signs, scale = payload
    bits = (signs[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (1 - 2 * bits.to(torch.float32)) * scale[:, None, None]


def _largest_there(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.topk(x.abs(), k, dim=1, sorted=False).indices
    return torch.gather(x, 1, places), places.to(torch.int32)


def _largest_back(payload: tuple[torch.Tensor, torch.Tensor], n: int) -> torch.Tensor:
    found, places = payload
    return torch.zeros(found.shape[0], n).scatter_(1, places.to(torch.int64), found)
