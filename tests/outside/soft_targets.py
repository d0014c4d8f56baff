"""A user's file: a classifier that learns from what it said of the batch one step ago, as well as from its labels.

Each step sees its batch and the next one. What the model says of the next one waits for it in a queue, a variable with
a row for each example; the pass that finds it uses the means of its own batch and leaves the running ones alone.

scalejax train soft_targets.py
"""

import dataclasses
import itertools
from collections.abc import Iterator
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
from scalejax.train.metrics.classification import Accuracy
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE, CLASSES = 8, 3


class WithNext(ArrayDataSet):
    """Batches that have the pictures of the batch after them, too."""

    def train_batches(self, **position: Any) -> Iterator[dict[str, np.ndarray]]:
        for batch, following in itertools.pairwise(super().train_batches(**position)):
            yield batch | {"next_images": following["images"]}

    def eval_batches(self, split: str, **process: Any) -> Iterator[dict[str, np.ndarray]]:
        for batch in super().eval_batches(split, **process):
            yield batch | {"next_images": batch["images"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """A picture is brighter on the left, in the middle or on the right."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE, "classes": CLASSES, "rows": self.batch_size}

    def build(self) -> WithNext:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            labels = rng.integers(0, CLASSES, count).astype(np.int32)
            lit = np.arange(SIDE) * CLASSES // SIDE == labels[:, None, None]
            return {"images": (rng.normal(0, 1, (count, SIDE, SIDE)) + 0.5 * lit).astype(np.float32), "labels": labels}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return WithNext(splits, batch_size=self.batch_size, schema=self.schema())


class Queue(nnx.Variable):
    """What waits for the next step, a row for each example."""


class Classifier(nnx.Module):
    """A matrix, BatchNorm, another matrix; and the queue."""

    def __init__(self, width: int, rows: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.2 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.first = nnx.Param(normal(SIDE**2, width), logical_axes=(None, "hidden"))
        self.norm = BatchNorm(width, dtypes=dtypes)
        self.head = nnx.Param(normal(width, CLASSES), logical_axes=("hidden", None))
        self.queue = Queue(jnp.zeros((rows, CLASSES), dtypes.params), logical_axes=("batch", None))

    def __call__(self, images: jax.Array, purpose: Any) -> jax.Array:
        x = images.reshape(-1, SIDE**2).astype(self.first[...].dtype) @ self.first[...]
        return jax.nn.relu(self.norm(x, purpose)) @ self.head[...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierTask(TaskBase):
    """Labels, and in training the soft targets of the queue; before the first step these are 0, and teach nothing."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        images = Field(shape=(self.schema["side"], self.schema["side"]), dtype="float32")
        rest = {"labels": Field(shape=(), dtype="int32"), "weights": Field(shape=(), dtype="float32")}
        return {"images": images, "next_images": images, **rest}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Classifier:
        rows = self.schema["rows"]
        return Classifier(self.width, rows, rngs, dtypes)

    def loss(self, model: Classifier, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        logits = model(batch["images"], batch.purpose)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        if batch.purpose == "training":
            losses -= (model.queue[...] * jax.nn.log_softmax(logits)).sum(1)
            # Of a copy: what it makes of the running means is dropped with it.
            said = nnx.clone(model)(batch["next_images"], batch.purpose)
            model.queue[...] = jax.nn.softmax(jax.lax.stop_gradient(said))
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"logits": logits.astype(jnp.float32)})

    def metrics(self) -> tuple[Any, ...]:
        return (Accuracy(unit="pictures"), MeanLoss(unit="pictures"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> ClassifierTask:
        return ClassifierTask(width=self.width, schema=schema)


def soft_targets() -> Experiment:
    """Bars, by labels and by what was said of them a step ago."""
    adam = optim.Adam(learning_rate=optim.Constant(value=2e-2))
    checkpoints = Checkpoints(every=20)
    return Experiment(model=ClassifierConfig(), data=Bars(), steps=40, optimizer=adam, checkpoints=checkpoints)
