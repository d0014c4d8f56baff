"""A user's file: which pixels of a picture are bright; some pixels nobody has labelled.

scalejax train segmenter.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from scalejax import optim
from scalejax.data.arrays import ArrayDataSet
from scalejax.nn import BatchNorm
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regions:
    """A bright square in noise; of the pixels just outside of it nobody knows, and their labels mean nothing."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            y, x = np.mgrid[:SIDE, :SIDE]
            row, column = rng.integers(2, SIDE - 2, (2, count, 1, 1))
            distance = np.maximum(abs(y - row), abs(x - column))
            images = (rng.normal(0, 0.5, distance.shape) + (distance < 2)).astype(np.float32)
            labels = np.where(distance == 2, rng.integers(0, 2, distance.shape), distance < 2).astype(np.int32)
            return {"images": images, "labels": labels, "weights": (distance != 2).astype(np.float32)}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Segmenter(nnx.Module):
    """A convolution, BatchNorm, and a class for each pixel."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.3 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.filters = nnx.Param(normal(3, 3, 1, width), logical_axes=(None, None, None, "hidden"))
        self.norm = BatchNorm(width, dtypes=dtypes)
        self.head = nnx.Param(normal(width, 2), logical_axes=("hidden", None))

    def __call__(self, images: jax.Array, purpose: Any) -> jax.Array:
        x, filters = images[..., None], self.filters[...]  # B H W 1
        x = jax.lax.conv(x.astype(filters.dtype).transpose(0, 3, 1, 2), filters.transpose(3, 2, 0, 1), (1, 1), "SAME")
        return jax.nn.relu(self.norm(x.transpose(0, 2, 3, 1), purpose)) @ self.head[...]  # B H W 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dice(MetricBase):
    """Twice what is marked by both, over what is marked by either: of each case by itself, then the mean over cases."""

    @property
    def values(self) -> tuple[Value, ...]:
        return (Value(name="dice", title="Dice", unit="mean over cases", better="high"),)

    @property
    def collects(self) -> tuple[str, ...]:
        return ("logits", "labels", "weights")

    def zeros(self) -> tuple[()]:
        return ()

    def update(self, sums: Any, loss: Any, batch: Any) -> Any:
        return sums

    def compute(self, sums: Any) -> dict[str, float]:
        return {}

    def exact(self, collected: Any, *, intervals: Any) -> dict[str, float]:
        marked, known = collected["logits"].argmax(-1) == 1, collected["weights"] > 0
        marked, labels = marked & known, (collected["labels"] == 1) & known
        both, either = (marked & labels).sum((1, 2)), marked.sum((1, 2)) + labels.sum((1, 2))
        return {"dice": float(np.mean(2 * both / either)), "cases": len(both)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterTask(TaskBase):
    """A class for each pixel; its loss is the mean over pixels that are labelled."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        shape = (self.schema["side"], self.schema["side"])
        dtypes = {"images": "float32", "labels": "int32", "weights": "float32"}
        return {name: Field(shape=shape, dtype=dtype) for name, dtype in dtypes.items()}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Segmenter:
        return Segmenter(self.width, rngs, dtypes)

    def loss(self, model: Segmenter, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        logits = model(batch["images"], batch.purpose)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"logits": logits.astype(jnp.float32)})

    def metrics(self) -> tuple[Any, ...]:
        return (Dice(), MeanLoss(unit="pixels"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> SegmenterTask:
        return SegmenterTask(width=self.width, schema=schema)


def segmenter() -> Experiment:
    """Bright squares, pixel by pixel."""
    adam = optim.Adam(learning_rate=optim.Constant(value=3e-2))
    checkpoints = Checkpoints(every=20)
    return Experiment(model=SegmenterConfig(), data=Regions(), steps=40, optimizer=adam, checkpoints=checkpoints)
