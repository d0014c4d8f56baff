"""Networks for pictures in plain PyTorch, and their training step on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """A residual block, named as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, padding: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for i, (before, after, kernel, step) in enumerate(shapes, 1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
        self.count, self.stride, self.missing = len(shapes), stride, outputs - inputs
        self.downsample = None
        if (stride > 1 or inputs != outputs) and not padding:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            if i < self.count:
                y = torch.relu(y)
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride > 1:
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))
        return torch.relu(y + x)


class ResNet(nn.Module):
    """`scalejax.models.vision.resnet`, named as in torchvision."""

    def __init__(self, config: Any, channels: int, classes: int) -> None:
        super().__init__()
        width, cifar = config.widths[0], config.stem == "cifar"
        self.conv1 = nn.Conv2d(channels, width, 3 if cifar else 7, 1 if cifar else 2, 1 if cifar else 3, bias=False)
        self.bn1, self.pool = nn.BatchNorm2d(width), None if cifar else nn.MaxPool2d(3, 2, 1)
        self.stages = len(config.depths)
        for stage, (depth, width_) in enumerate(zip(config.depths, config.widths, strict=True), 1):
            blocks = []
            for number in range(depth):
                stride = 2 if stage > 1 and number == 0 else 1
                bottleneck = config.block == "bottleneck"
                blocks.append(Block(width, width_, stride, bottleneck, config.shortcut == "padding"))
                width = 4 * width_ if bottleneck else width_
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        if self.pool is not None:
            x = self.pool(x)
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


class Layer(nn.Module):
    """Convolution, normalisation of each channel of a picture, ReLU."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, features, 3, padding=1, bias=False)
        self.norm = nn.InstanceNorm2d(features, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """`scalejax.models.vision.unet` with one head, its parts named as there."""

    def __init__(self, config: Any, channels: int, classes: int) -> None:
        super().__init__()
        first, *below = widths = config.widths
        self.stem = Layer(channels, first)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.first = Layer(first, first)
        self.encoder.blocks = nn.ModuleList(
            nn.Sequential(Layer(above, width), Layer(width, width)) for above, width in zip(widths, below, strict=False)
        )
        self.decoder.ups = nn.ModuleList(
            nn.ConvTranspose2d(width, above, 2, 2) for above, width in zip(widths, below, strict=False)
        )
        self.decoder.blocks = nn.ModuleList(
            nn.Sequential(Layer(2 * width, width), Layer(width, width)) for width in widths[:-1]
        )
        self.decoder.heads = nn.ModuleList([nn.Conv2d(first, classes, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.encoder.first(self.stem(x))]
        for block in self.encoder.blocks:
            features.append(block(nn.functional.max_pool2d(features[-1], 2)))
        y = features.pop()
        for up, block in reversed(list(zip(self.decoder.ups, self.decoder.blocks, strict=True))):
            y = block(torch.cat([features.pop(), up(y)], 1))
        return self.decoder.heads[0](y)


def unet_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of our U-Net by path, by the names and in the layouts of the one above."""
    found = {}
    for path, array in arrays.items():
        *parts, last = path.split("/")
        if last == "kernel":
            if parts[-2] == "ups":
                array = array.reshape(len(array), 2, 2, -1).transpose(0, 3, 1, 2)
            else:
                array = array.transpose(3, 2, 0, 1)
        found[".".join([*parts, "bias" if last == "bias" else "weight"])] = array
    return found


def dice_and_cross_entropy(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """`scalejax.models.vision.segmentation.dice_and_cross_entropy` of a batch."""
    truth = nn.functional.one_hot(masks, logits.shape[1]).movedim(-1, 1).float()
    likely, over = torch.softmax(logits, 1), (0, 2, 3)
    dice = (2 * (likely * truth).sum(over) + 1e-5) / (likely.sum(over) + truth.sum(over) + 1e-5)
    return nn.functional.cross_entropy(logits, masks) + 1 - dice[1:].mean()


def load(module: nn.Module, tensors: Mapping[str, np.ndarray]) -> nn.Module:
    """Gives a module all of its parameters and running means."""
    found = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    missing = set(module.state_dict()) - set(found)
    if any(not name.endswith("num_batches_tracked") for name in missing):
        raise ValueError(f"load: {sorted(missing)} are missing.")
    module.load_state_dict(found, strict=False)
    return module


class TrainingStep:
    """Forward, loss, backward, and SGD with momentum.

    Args:
      module: float32[B, C, H, W] -> logits [B, classes, ...].
      schema: Mean and deviation of stored pixels.
      criterion: Of logits and labels.
      compiled: torch.compile of forward and loss, instead of eager execution.
      threads: Of the CPU; None = as they are.
      channels_last: Whether arrays lie as [B, H, W, C].
    """

    def __init__(
        self,
        module: nn.Module,
        schema: Any,
        *,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy,
        learning_rate: float,
        momentum: float = 0.0,
        compiled: bool = False,
        threads: int | None = None,
        channels_last: bool = False,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._criterion = criterion
        self.module = module.train().to(memory_format=self._format)
        self._mean, self._std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in (schema.mean, schema.std))
        self._optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=momentum)
        objective: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._objective
        self._loss = torch.compile(objective) if compiled else objective

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored pixels [B, H, W, C] and labels of a batch."""
        pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        return pixels.contiguous(memory_format=self._format), torch.from_numpy(labels.astype(np.int64))

    def _objective(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.module((images.float() - self._mean) / self._std)
        return self._criterion(logits, labels), logits

    def step(self, batch: Sequence[torch.Tensor]) -> tuple[float, np.ndarray]:
        """One step; the loss and the logits before it."""
        loss, logits = self._loss(*batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach()), logits.detach().numpy()

    def logits(self, batch: Sequence[torch.Tensor]) -> np.ndarray:
        """With the running means."""
        self.module.eval()
        with torch.no_grad():
            found = self._objective(*batch)[1].numpy()
        self.module.train()
        return found
