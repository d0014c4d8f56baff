"""A user's file outside of the package: bars of four directions, classified by a small ResNet.

scalejax train pictures.py
"""

import dataclasses

import numpy as np

from scalejax import optim
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision.resnet import ResNetConfig
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment

SIDE = 16
STEPS = {"row": (0, 1), "column": (1, 0), "down": (1, 1), "up": (-1, 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """Five pixels in a row on a dark ground; gives `ImageDataSet`."""

    examples: int = 256
    batch_size: int = 32
    classes: int = 4
    channels: int = 3
    seed: int = 0

    def schema(self) -> ImageSchema:
        """Of the pictures."""
        return ImageSchema(
            height=SIDE,
            width=SIDE,
            channels=self.channels,
            mean=(60.0, 70.0, 80.0)[: self.channels],
            std=(50.0, 60.0, 70.0)[: self.channels],
            classes=tuple(STEPS)[: self.classes],
            batch_size=self.batch_size,
        )

    def build(self) -> ImageDataSet:
        """The pictures, drawn anew."""
        rng = np.random.default_rng(self.seed)
        labels = rng.integers(0, self.classes, self.examples).astype(np.int32)
        images = rng.integers(0, 100, (self.examples, SIDE, SIDE, self.channels)).astype(np.uint8)
        for image, label, (y, x) in zip(images, labels, rng.integers(4, SIDE - 4, (self.examples, 2)), strict=True):
            down, right = list(STEPS.values())[label]
            for i in range(-2, 3):
                image[y + i * down, x + i * right] = 255
        cut = self.examples * 3 // 4
        arrays = {"images": images, "labels": labels}
        splits = {"train": slice(None, cut), "validation": slice(cut, None), "test": slice(cut, None)}
        return ImageDataSet(
            {name: {k: a[rows] for k, a in arrays.items()} for name, rows in splits.items()},
            batch_size=self.batch_size,
            schema=self.schema(),
            augment=Augment(),
            seed=self.seed,
        )


def pictures() -> Experiment:
    """Bars."""
    return Experiment(
        model=ResNetConfig(stem="imagenet", block="basic", depths=(1, 1), widths=(8, 16)),
        data=Bars(),
        steps=60,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-2)),
        evaluation=Evaluation(every=30),
        checkpoints=Checkpoints(every=30),
        log_every=10,
    )
