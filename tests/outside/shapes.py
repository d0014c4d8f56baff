"""A user's file outside of the package: pictures of two shapes, a model with BatchNorm, a metric and a picture.

scalejax train shapes.py
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
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment
from scalejax.train.metrics import evaluation
from scalejax.train.metrics.classification import Accuracy
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.task import Batch, Field, Loss, TaskBase, Work

SIDE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Bright squares and crosses somewhere on a dark ground; gives `ArrayDataSet`."""

    examples: int = 256
    batch_size: int = 32
    seed: int = 0

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE, "classes": 2}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(self.seed)
        images = rng.normal(0, 0.3, (self.examples, SIDE, SIDE)).astype(np.float32)
        labels = rng.integers(0, 2, self.examples).astype(np.int32)
        for image, label, (y, x) in zip(images, labels, rng.integers(0, SIDE - 3, (self.examples, 2)), strict=True):
            if label:
                image[y : y + 3, x : x + 3] += 1
            else:
                image[y + 1, x : x + 3] += 1
                image[y : y + 3, x + 1] += 1
        cut = self.examples * 3 // 4
        arrays = {"images": images, "labels": labels}
        splits = {"train": slice(None, cut), "validation": slice(cut, None), "test": slice(cut, None)}
        return ArrayDataSet(
            {name: {k: a[rows] for k, a in arrays.items()} for name, rows in splits.items()},
            batch_size=self.batch_size,
            seed=self.seed,
            schema=self.schema(),
        )


class Net(nnx.Module):
    """A convolution, BatchNorm, the mean square of each feature, a linear layer."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.3 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.filters = nnx.Param(normal(3, 3, 1, width), logical_axes=(None, None, None, "hidden"))
        self.norm = BatchNorm(width, dtypes=dtypes)
        self.head = nnx.Param(normal(width, 2), logical_axes=("hidden", None))

    def __call__(self, images: jax.Array, purpose: Any) -> jax.Array:
        x = images[..., None].astype(self.filters[...].dtype)  # B H W 1
        x = jax.lax.conv_general_dilated(
            x, self.filters[...], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(jax.nn.relu(self.norm(x, purpose))).mean((1, 2)) @ self.head[...]  # B 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confusions(MetricBase):
    """Share of squares taken for crosses, and a picture of what was predicted."""

    @property
    def values(self) -> tuple[Value, ...]:
        return (Value(name="confused", title="squares taken for crosses", unit="share of squares", better="low"),)

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
        squares = collected["labels"] == 1
        return {"confused": float((collected["logits"][squares].argmax(1) == 0).mean())}

    def keep(self, folder: Any, split: str, collected: Any, sums: Any) -> None:
        right = int((collected["logits"].argmax(1) == collected["labels"]).sum())
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="60" height="20"><text y="15">{right} right</text></svg>'
        picture = evaluation.Picture(split=split, name="right", caption="How many shapes are right.", svg=svg)
        evaluation.save_picture(folder, picture)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetTask(TaskBase):
    """Classification of shapes."""

    width: int
    schema: Any
    unit: str = "images"

    def fields(self) -> dict[str, Field]:
        side = self.schema["side"]
        return {
            "images": Field(shape=(side, side), dtype="float32"),
            "labels": Field(shape=(), dtype="int32"),
            "weights": Field(shape=(), dtype="float32"),
        }

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Net:
        return Net(self.width, rngs, dtypes)

    def loss(self, model: Net, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        logits = model(batch["images"], batch.purpose)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"logits": logits.astype(jnp.float32)})

    def metrics(self) -> tuple[Any, ...]:
        return (Accuracy(unit="images"), MeanLoss(unit="images"), Confusions())

    def work(self, shapes: Any) -> Work:
        images = shapes["images"][0]
        return Work(flops=6 * images * self.width * (36 * 9 + 2), count=images)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> NetTask:
        return NetTask(width=self.width, schema=schema)


def shapes() -> Experiment:
    """Squares and crosses."""
    return Experiment(
        model=NetConfig(),
        data=Shapes(),
        steps=60,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=3e-2)),
        evaluation=Evaluation(every=30),
        checkpoints=Checkpoints(every=30),
        log_every=10,
    )
