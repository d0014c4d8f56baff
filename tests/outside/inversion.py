"""A user's file: one token of a frozen generator is trained to stand for some pictures (textual inversion).

scalejax train inversion.py
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
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """Noisy pictures of one thing."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)
        y, x = np.mgrid[:SIDE, :SIDE]
        thing = np.where(abs(y - x) < 2, 0.8, -0.8)

        def split(count: int) -> dict[str, np.ndarray]:
            return {"images": (thing + rng.normal(0, 0.1, (count, SIDE, SIDE))).astype(np.float32)}

        splits = {"train": split(32), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Generator(nnx.Module):
    """Draws a picture from a token; the token is 0 at first."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtypes.params) / shape[0] ** 0.5

        self.token = nnx.Param(jnp.zeros((width,), dtypes.params), logical_axes=(None,))
        self.hidden = nnx.Param(normal(width, 64), logical_axes=(None, "hidden"))
        self.out = nnx.Param(normal(64, SIDE**2), logical_axes=("hidden", None))

    def __call__(self) -> jax.Array:
        return jnp.tanh(jnp.tanh(self.token[...] @ self.hidden[...]) @ self.out[...]).reshape(SIDE, SIDE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InversionTask(TaskBase):
    """The mean square of what the picture of the token lacks; of a token of 0 that is 0.65."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        side = self.schema["side"]
        return {"images": Field(shape=(side, side), dtype="float32"), "weights": Field(shape=(), dtype="float32")}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Generator:
        return Generator(self.width, rngs, dtypes)

    def loss(self, model: Generator, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        losses = jnp.square(model()[None] - batch["images"]).mean((1, 2))
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum())

    def metrics(self) -> tuple[Any, ...]:
        return (MeanLoss(unit="pictures"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InversionConfig:
    """Its config."""

    width: int = 24

    def task(self, schema: Any) -> InversionTask:
        return InversionTask(width=self.width, schema=schema)


def inversion() -> Experiment:
    """A token for one thing."""
    return Experiment(
        model=InversionConfig(),
        data=Examples(),
        steps=60,
        trainable="token",
        optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-1)),
        checkpoints=Checkpoints(every=30),
    )
