"""A user's file: a supernet; each step trains one path through it, the same on all devices.

scalejax train supernet.py
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
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.metrics.classification import Accuracy
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import add, pair_zeros
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE, LAYERS, CHOICES = 8, 3, (jnp.tanh, jax.nn.relu, jnp.sin, lambda x: x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves:
    """Which half of a picture is brighter."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            labels = rng.integers(0, 2, count).astype(np.int32)
            lit = (np.arange(SIDE) < SIDE // 2) == labels[:, None, None]
            return {"images": (rng.normal(0, 1, (count, SIDE, SIDE)) + 0.5 * lit).astype(np.float32), "labels": labels}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Supernet(nnx.Module):
    """Layers of one matrix for each choice; all of them are evaluated on the path of first choices."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtypes.params) / shape[-2] ** 0.5

        self.stem = nnx.Param(normal(SIDE**2, width), logical_axes=(None, "hidden"))
        self.layers = nnx.Param(normal(LAYERS, len(CHOICES), width, width), logical_axes=(None, None, None, "hidden"))
        self.head = nnx.Param(normal(width, 2), logical_axes=("hidden", None))

    def __call__(self, images: jax.Array, path: jax.Array) -> jax.Array:
        x = images.reshape(-1, SIDE**2).astype(self.stem[...].dtype) @ self.stem[...]
        for layer in range(LAYERS):
            branches = [lambda x, f=f, w=self.layers[layer, i]: x + f(x @ w) for i, f in enumerate(CHOICES)]
            x = jax.lax.switch(path[layer], branches, x)
        return x @ self.head[...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strays(MetricBase):
    """Examples that took another path than the first example of their batch; there must be none."""

    @property
    def values(self) -> tuple[Value, ...]:
        return (Value(name="strays", title="examples on another path"), Value(name="path", title="sum of paths"))

    def zeros(self) -> Any:
        return {"strays": pair_zeros(), "path": pair_zeros()}

    def update(self, sums: Any, loss: Any, batch: Any) -> Any:
        path = loss.outputs["path"]
        return {"strays": add(sums["strays"], (path != path[0]).sum()), "path": add(sums["path"], path[0])}

    def compute(self, sums: Any) -> dict[str, float]:
        return {"strays": float(sums["strays"]), "path": float(sums["path"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupernetTask(TaskBase):
    """Classification of halves along a path that the key of the step draws."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        images = Field(shape=(self.schema["side"], self.schema["side"]), dtype="float32")
        return {"images": images, "labels": Field(shape=(), dtype="int32"), "weights": Field(shape=(), dtype="float32")}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Supernet:
        return Supernet(self.width, rngs, dtypes)

    def loss(self, model: Supernet, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        path = jnp.zeros((LAYERS,), int)
        if keys is not None:
            path = jax.random.randint(keys.step, (LAYERS,), 0, len(CHOICES))
        logits = model(batch["images"], path)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        weights = batch["weights"].astype(losses.dtype)
        number = path @ len(CHOICES) ** jnp.arange(LAYERS)
        outputs = {"logits": logits.astype(jnp.float32), "path": jnp.broadcast_to(number, losses.shape)}
        return Loss((losses * weights).sum(), weights.sum(), outputs=outputs)

    def metrics(self) -> tuple[Any, ...]:
        return (Accuracy(unit="pictures"), MeanLoss(unit="pictures"), Strays())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupernetConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> SupernetTask:
        return SupernetTask(width=self.width, schema=schema)


def supernet() -> Experiment:
    """Paths through three layers of four choices."""
    adam = optim.Adam(learning_rate=optim.Constant(value=1e-2))
    checkpoints = Checkpoints(every=20)
    return Experiment(model=SupernetConfig(), data=Halves(), steps=40, optimizer=adam, checkpoints=checkpoints)
