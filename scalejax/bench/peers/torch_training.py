"""One training step in PyTorch: dense Adam, and row-wise AdaGrad on the embedding rows that the batch touched.

Written as somebody who wants PyTorch to be fast on a CPU would write it:
  - the tables of all one-hot features lie under each other in one tensor, so that a batch is one gather;
  - the gather is outside of autograd, which then hands over one gradient per looked-up row and never a table-sized one;
  - duplicates are merged by `torch.unique` and `index_add_`, measured to beat `coalesce()` of sparse gradients,
    sort + segment_reduce, and (from 1,000 examples on) the dense backward of `nn.Embedding`;
  - Adam is the fused implementation; `torch.compile` covers forward, loss and backward.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from scalejax.bench import workloads
from scalejax.data.examples.batch import ClickBatch


@dataclasses.dataclass(frozen=True)
class Tensors:
    """A batch: ids int64[B, F] counted over all tables, dense float32[B, D], labels float32[B]."""

    ids: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides of a contest share.

    Attributes:
      threads: CPU threads.
      learning_rate, eps: Of Adam, with b1 = 0.9, b2 = 0.999.
      row_learning_rate: Of row-wise AdaGrad.
      row_eps: Added to the root of its accumulator.
      compiled: torch.compile instead of eager execution.
    """

    threads: int
    learning_rate: float
    eps: float
    row_learning_rate: float
    row_eps: float
    compiled: bool


class TrainingStep:
    """A model, its tables and their optimizers.

    Args:
      model: (embedded float32[B, F, d], dense float32[B, D]) -> logits float32[B].
      tables: Rows of each feature's table, float32[rows, d], in the order of the features.
      settings: Learning rates, threads, eager or compiled.

    Attributes:
      adam: The dense optimizer.
    """

    def __init__(self, model: nn.Module, tables: Sequence[np.ndarray], settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._model = model
        self._rows = torch.from_numpy(np.concatenate(tables).astype(np.float32))
        self._sums = torch.zeros(len(self._rows))
        self._first = np.cumsum([0, *(len(table) for table in tables[:-1])])
        self.adam = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, eps=settings.eps, fused=True)
        objective: Callable[..., torch.Tensor] = self._objective
        self._loss = torch.compile(objective) if settings.compiled else objective

    def place(self, batch: ClickBatch) -> Tensors:
        """The tensors of a batch."""
        return Tensors(
            ids=torch.from_numpy(workloads.one_hot_ids(batch) + self._first),
            dense=torch.from_numpy(batch.dense),
            labels=torch.from_numpy(np.ascontiguousarray(batch.labels[:, 0])),
        )

    def step(self, batch: Tensors) -> torch.Tensor:
        """One optimizer step; returns the mean loss of the batch before it."""
        embedded = nn.functional.embedding(batch.ids, self._rows).requires_grad_()
        loss = self._loss(embedded, batch.dense, batch.labels)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        assert embedded.grad is not None
        self._update_rows(batch.ids, embedded.grad)
        return loss.detach()

    @torch.no_grad()
    def logits(self, batch: Tensors) -> np.ndarray:
        """float32[B] logits, always eager."""
        return self._model(nn.functional.embedding(batch.ids, self._rows), batch.dense).numpy()

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Dense parameters, as arrays that share their memory."""
        return ((name, value.detach().numpy()) for name, value in self._model.named_parameters())

    def tables(self) -> np.ndarray:
        """float32[all rows, d], the tables under each other."""
        return self._rows.numpy()

    def _objective(self, embedded: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self._model(embedded, dense), labels)

    @torch.no_grad()
    def _update_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        touched, place = torch.unique(ids.view(-1), return_inverse=True)
        grad = torch.zeros(len(touched), grads.shape[-1]).index_add_(0, place, grads.view(-1, grads.shape[-1]))
        sums = self._sums[touched] + grad.square().mean(1)
        self._sums[touched] = sums
        factor = -self._settings.row_learning_rate / (sums.sqrt() + self._settings.row_eps)
        self._rows.index_add_(0, touched, grad * factor[:, None])


class Mlp(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x)


@torch.no_grad()
def set_parameters(model: nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Copies `values` into the parameters of the same names.

    Raises:
      ValueError: names or shapes differ, so the two models are not the same model.
    """
    parameters = dict(model.named_parameters())
    if set(parameters) != set(values):
        raise ValueError(f"set_parameters: names differ: {sorted(set(parameters) ^ set(values))}.")
    for name, value in values.items():
        if tuple(parameters[name].shape) != value.shape:
            raise ValueError(f"set_parameters: {name} is {tuple(parameters[name].shape)} here and {value.shape} there.")
        parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))


def from_jax(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by path of ours ("mlp/layers/0/kernel") as those of a module of the same attributes in PyTorch.

    A matrix that is called kernel multiplies from the right and becomes the transposed weight of `nn.Linear`; the
    scale of a norm is called weight there.
    """
    renamed = {}
    for path, value in parameters.items():
        parent, _, name = path.replace("/", ".").rpartition(".")
        if name == "kernel":
            renamed[f"{parent}.weight"] = value.T
        elif name == "scale":
            renamed[f"{parent}.weight"] = value
        else:
            renamed[path.replace("/", ".")] = value
    return renamed
