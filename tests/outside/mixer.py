"""A user's file: a classifier that the package does not have, MLP-Mixer (Tolstikhin et al., 2021).

scalejax train mixer.py
"""

import dataclasses

import jax
import numpy as np
from flax import nnx

from scalejax import nn, optim
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision.classification import ClassifierTask
from scalejax.models.vision.inputs import standardized
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.self_distillation import AnyLearning, CrossEntropy

PATCH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quadrants:
    """A bright square in one of the four quadrants of a noisy picture."""

    batch_size: int = 16

    def schema(self) -> ImageSchema:
        names = ("top left", "top right", "bottom left", "bottom right")
        sizes = {"height": 12, "width": 12, "channels": 1, "batch_size": self.batch_size}
        return ImageSchema(mean=(80.0,), std=(40.0,), classes=names, **sizes)

    def build(self) -> ImageDataSet:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            images = rng.integers(0, 160, (count, 12, 12, 1)).astype(np.uint8)
            labels = rng.integers(0, 4, count).astype(np.int32)
            for image, label in zip(images, labels, strict=True):
                y, x = 1 + label // 2 * 6, 1 + label % 2 * 6
                image[y : y + 4, x : x + 4] //= 2
                image[y : y + 4, x : x + 4] += 120
            return {"images": images, "labels": labels}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ImageDataSet(splits, batch_size=self.batch_size, schema=self.schema(), augment=Augment(crop=1))


class Mixer(nnx.Module):
    """Patches, one layer that mixes them and their channels, a mean over patches, logits."""

    def __init__(self, width: int, schema: ImageSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        patches = schema.height // PATCH * (schema.width // PATCH)
        self.schema, self.dtypes = schema, dtypes
        self.embed = nn.Linear(PATCH * PATCH * schema.channels, width, rngs=rngs, dtypes=dtypes)
        self.norms = nnx.List([nn.LayerNorm(width, dtypes=dtypes) for _ in range(2)])
        self.of_patches = nn.Mlp((patches, width, patches), activation="gelu", rngs=rngs, dtypes=dtypes)
        self.of_channels = nn.Mlp((width, 2 * width, width), activation="gelu", rngs=rngs, dtypes=dtypes)
        self.head = nn.Linear(width, len(schema.classes), rngs=rngs, dtypes=dtypes, out_dtype=nn.wide(dtypes.compute))

    def __call__(self, images: jax.Array, purpose: str) -> jax.Array:
        x = standardized(images, self.schema, self.dtypes)
        b, h, w, c = x.shape
        x = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH * c).swapaxes(2, 3)
        x = self.embed(x.reshape(-1, PATCH * PATCH * c)).reshape(b, h * w // PATCH**2, -1)  # B patches width
        across = self.norms[0](x).swapaxes(1, 2)
        x = x + self.of_patches(across.reshape(-1, across.shape[2])).reshape(across.shape).swapaxes(1, 2)
        within = self.norms[1](x)
        x = x + self.of_channels(within.reshape(-1, within.shape[2])).reshape(x.shape)
        return self.head(x.mean(1))  # B classes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """Its config."""

    width: int = 16
    learning: AnyLearning = CrossEntropy(smoothing=0.1)

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> Mixer:
        return Mixer(self.width, schema, rngs, dtypes)

    def task(self, schema: ImageSchema) -> ClassifierTask:
        return ClassifierTask(config=self, schema=schema)


def mixer() -> Experiment:
    """Which quadrant is bright."""
    adam = optim.Adam(learning_rate=optim.Constant(value=1e-2))
    return Experiment(
        model=MixerConfig(), data=Quadrants(), steps=60, optimizer=adam, checkpoints=Checkpoints(every=30)
    )
