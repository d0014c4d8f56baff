"""A user's file: an optimizer that prunes half of the weights of the experts at the start and keeps them at zero.

scalejax train pruner.py
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from scalejax import optim
from scalejax.data.arrays import ArrayDataSet
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.task import Batch, Field, Loss, TaskBase

INPUTS = 8


class Pruned(NamedTuple):
    """State of the optimizer: what stays of each parameter that is pruned, and the state of Adam."""

    masks: dict[str, jax.Array]
    adam: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrunedAdam:
    """Adam on what stays of the experts: the larger half of the weights of each, chosen once, before the first step."""

    learning_rate: optim.Schedule = optim.Constant(value=1e-2)

    def build(self, steps: int) -> optax.GradientTransformation:
        adam = optax.adam(self.learning_rate.build(steps))

        def init(params: Any) -> Pruned:
            sizes = {path: jnp.abs(p) for path, p in params.items() if path.startswith("experts/")}
            masks = {path: size > jnp.median(size, (1, 2), keepdims=True) for path, size in sizes.items()}
            return Pruned(masks, adam.init(params))

        def update(gradients: Any, state: Pruned, params: Any = None) -> tuple[Any, Pruned]:
            updates: Any
            updates, inner = adam.update(gradients, state.adam, params)
            pruned = {path: jnp.where(mask, updates[path], -params[path]) for path, mask in state.masks.items()}
            return updates | pruned, Pruned(state.masks, inner)

        return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """A function of the sign of the first input and of the others."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"inputs": INPUTS}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)
        slopes = rng.normal(size=(2, INPUTS))

        def split(count: int) -> dict[str, np.ndarray]:
            inputs = rng.normal(size=(count, INPUTS)).astype(np.float32)
            values = np.where(inputs[:, 0] > 0, np.tanh(inputs @ slopes[0]), np.tanh(inputs @ slopes[1]))
            return {"inputs": inputs, "values": values.astype(np.float32)}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Experts(nnx.Module):
    """Two matrices of each expert."""

    def __init__(self, count: int, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, dtypes.params) / shape[-2] ** 0.5

        self.up = nnx.Param(normal(count, INPUTS, width), logical_axes=("experts", None, "hidden"))
        self.down = nnx.Param(normal(count, width, 1), logical_axes=("experts", "hidden", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("beh,eho->be", jnp.tanh(jnp.einsum("bi,eih->beh", x, self.up[...])), self.down[...])


class Mixture(nnx.Module):
    """A router, which is not pruned, and experts."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        self.router = nnx.Param(jax.random.normal(rngs.params(), (INPUTS, 4), dtypes.params), logical_axes=(None, None))
        self.experts = Experts(4, width, rngs, dtypes)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = inputs.astype(self.router[...].dtype)
        return (jax.nn.softmax(x @ self.router[...]) * self.experts(x)).sum(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureTask(TaskBase):
    """Regression by the mean square."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        one = Field(shape=(), dtype="float32")
        return {"inputs": Field(shape=(self.schema["inputs"],), dtype="float32"), "values": one, "weights": one}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Mixture:
        return Mixture(self.width, rngs, dtypes)

    def loss(self, model: Mixture, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        losses = jnp.square(model(batch["inputs"]) - batch["values"])
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum())

    def metrics(self) -> tuple[Any, ...]:
        return (MeanLoss(),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> MixtureTask:
        return MixtureTask(width=self.width, schema=schema)


def pruner() -> Experiment:
    """A mixture of four experts with half of their weights."""
    optimizer, checkpoints = PrunedAdam(learning_rate=optim.Constant(value=2e-2)), Checkpoints(every=20)
    return Experiment(model=MixtureConfig(), data=Curves(), steps=40, optimizer=optimizer, checkpoints=checkpoints)
