"""A user's file: two views of each picture, brought together by one encoder and apart from the others of the batch.

scalejax train pair.py
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import optim
from scalejax.data.arrays import ArrayDataSet
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import BATCH_AXES
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import add, pair_zeros, ratio
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """Pictures of 4 numbers each, seen twice: the second view is noisier and the other way round."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)
        basis = rng.normal(0, 0.5, (4, SIDE, SIDE))

        def split(count: int) -> dict[str, np.ndarray]:
            pictures = np.tensordot(rng.normal(size=(count, 4)), basis, 1)
            first, second = (pictures + rng.normal(0, noise, pictures.shape) for noise in (0.2, 0.4))
            return {"first": first.astype(np.float32), "second": second[:, ::-1].astype(np.float32)}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Encoder(nnx.Module):
    """Both views by the same matrices, on a sphere."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.2 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.hidden = nnx.Param(normal(SIDE**2, 2 * width), logical_axes=(None, "hidden"))
        self.out = nnx.Param(normal(2 * width, width), logical_axes=("hidden", None))

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(-1, SIDE**2).astype(self.hidden[...].dtype)
        x = jax.nn.gelu(x @ self.hidden[...]) @ self.out[...]
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def of_all_devices(x: jax.Array) -> tuple[jax.Array, Any]:
    """The rows of the whole batch, and where those of this device begin; a step may have cut the batch by hand."""
    axes = tuple(axis for axis in BATCH_AXES if axis in jax.sharding.get_abstract_mesh().manual_axes)
    return (jax.lax.all_gather(x, axes, tiled=True), jax.lax.axis_index(axes) * len(x)) if axes else (x, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved(MetricBase):
    """Share of the first views whose nearest second view in the batch is their own."""

    @property
    def values(self) -> tuple[Value, ...]:
        return (Value(name="retrieved", title="own view is the nearest", unit="share of views", better="high"),)

    def zeros(self) -> Any:
        return {"right": pair_zeros(), "all": pair_zeros()}

    def update(self, sums: Any, loss: Any, batch: Any) -> Any:
        right = (loss.outputs["right"] * batch["weights"]).sum()
        return {"right": add(sums["right"], right), "all": add(sums["all"], batch["weights"].sum())}

    def compute(self, sums: Any) -> dict[str, float]:
        return {"retrieved": ratio(sums["right"], sums["all"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTask(TaskBase):
    """Which second view of the batch is that of a first one (Chen et al., 2020); padding is no negative."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        views = Field(shape=(self.schema["side"], self.schema["side"]), dtype="float32")
        return {"first": views, "second": views, "weights": Field(shape=(), dtype="float32")}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Encoder:
        return Encoder(self.width, rngs, dtypes)

    def loss(self, model: Encoder, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        queries, (answers, start) = model(batch["first"]), of_all_devices(model(batch["second"]))
        counts, _ = of_all_devices(batch["weights"])
        own = start + jnp.arange(len(queries))
        logits = jnp.where(counts[None] > 0, queries @ answers.T / 0.2, -1e9)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), own[:, None], 1)[:, 0]
        right = (logits.argmax(1) == own).astype(jnp.float32)
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"right": right})

    def metrics(self) -> tuple[Any, ...]:
        return (Retrieved(), MeanLoss(unit="pairs"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> PairTask:
        return PairTask(width=self.width, schema=schema)


def pair() -> Experiment:
    """Two views of each picture."""
    adam = optim.Adam(learning_rate=optim.Constant(value=2e-2))
    checkpoints = Checkpoints(every=20)
    return Experiment(model=PairConfig(), data=Views(), steps=40, optimizer=adam, checkpoints=checkpoints)
