"""Small pictures of two shapes with masks, and runs on them."""

import dataclasses

import numpy as np

from scalejax import optim
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.train.experiment import Checkpoints, Experiment

SIDE = 16
SCHEMA = ImageSchema(
    height=SIDE,
    width=SIDE,
    channels=1,
    dtype="float32",
    mean=(0.25,),
    std=(0.5,),
    classes=("background", "square", "bar"),
    spacing=(2.0, 1.0),
)


def drawn(count, seed):
    """A bright square and a dim bar in noise; four slices are a case, whose number is in no other draw."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.3, (count, SIDE, SIDE, 1)).astype(np.float32)
    masks = np.zeros((count, SIDE, SIDE), np.int32)
    for image, mask, (y, x, row) in zip(images, masks, rng.integers(0, SIDE - 5, (count, 3)), strict=True):
        mask[row : row + 2] = 2
        mask[y : y + 5, x : x + 5] = 1
        image[..., 0] += np.array([0, 1.5, 0.8])[mask]
    return {"images": images, "masks": masks, "cases": 100 * seed + np.arange(count, dtype=np.int32) // 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Such pictures as the data of a run."""

    batch_size: int = 8
    schema_: ImageSchema = SCHEMA

    def schema(self):
        return self.schema_

    def build(self):
        splits = {"train": drawn(64, 0), "validation": drawn(20, 1), "test": drawn(20, 2)}
        return ImageDataSet(splits, batch_size=self.batch_size, schema=self.schema_, augment=Augment())


def experiment(model, steps=60, **changes):
    """A run of a model on them."""
    fields = {
        "model": model,
        "data": Drawn(),
        "steps": steps,
        "optimizer": optim.Adam(learning_rate=optim.Constant(value=1e-2)),
        "checkpoints": Checkpoints(every=max(1, steps // 2)),
    }
    return Experiment(**(fields | changes))
