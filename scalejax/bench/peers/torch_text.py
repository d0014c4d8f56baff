"""Rows of text as PyTorch training scripts read them: windows of a memory-mapped file of tokens, one after another."""

import numpy as np
import torch


class Windows:
    """Batches of windows at random places of a token array.

    Args:
      tokens: uint16[N], mapped from disk.
      length: Tokens of a window.
      batch: Windows of a batch.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch: int) -> None:
        self._tokens, self._length, self._batch = tokens, length, batch

    def at(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets), int64[len(starts), length]."""
        windows = [torch.from_numpy(self._tokens[s : s + self._length + 1].astype(np.int64)) for s in starts]
        return torch.stack([w[:-1] for w in windows]), torch.stack([w[1:] for w in windows])

    def take(self, count: int) -> None:
        """Makes `count` batches."""
        for _ in range(count):
            self.at(torch.randint(self._tokens.size - self._length, (self._batch,)).tolist())
