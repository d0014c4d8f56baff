"""A user's file: a diffusion model of stripes; the noise of an evaluation is drawn by the number of the example.

scalejax train diffusion.py
"""

import dataclasses
from typing import Any, Literal

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
class Stripes:
    """Waves of one length and any phase."""

    batch_size: int = 32

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)

        def split(count: int) -> dict[str, np.ndarray]:
            phases = rng.uniform(0, 2 * np.pi, (count, 1, 1))
            waves = np.sin(phases + np.pi / 4 * np.add.outer(np.arange(SIDE), np.arange(SIDE)))
            return {"images": waves.astype(np.float32)}

        splits = {"train": split(256), "validation": split(44), "test": split(44)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Denoiser(nnx.Module):
    """What is left of a noisy picture without its few components; the level of the noise scales them."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.1 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.encoder = nnx.Param(normal(SIDE**2, width), logical_axes=(None, "hidden"))
        self.decoder = nnx.Param(normal(width, SIDE**2), logical_axes=("hidden", None))
        self.levels = nnx.Param(normal(2, width), logical_axes=(None, "hidden"))

    def __call__(self, noisy: jax.Array, level: jax.Array) -> jax.Array:
        scales = jnp.stack([1 - level, level], 1) @ self.levels[...]  # B width
        return noisy - ((noisy @ self.encoder[...]) * (1 + scales)) @ self.decoder[...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionTask(TaskBase):
    """The noise of a picture of which the share `level` is noise (Ho et al., 2020); predicting none has the loss 1."""

    width: int
    schema: Any
    draws: Literal["training", "evaluation too"] = "evaluation too"

    def fields(self) -> dict[str, Field]:
        side = self.schema["side"]
        return {"images": Field(shape=(side, side), dtype="float32"), "weights": Field(shape=(), dtype="float32")}

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Denoiser:
        return Denoiser(self.width, rngs, dtypes)

    def loss(self, model: Denoiser, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        images = batch["images"].reshape(-1, SIDE**2).astype(model.encoder[...].dtype)

        def drawn(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_level, of_noise = jax.random.split(key)
            return jax.random.uniform(of_level, (), images.dtype, 0.1), jax.random.normal(
                of_noise, (SIDE**2,), images.dtype
            )

        level, noise = jax.vmap(drawn)(keys.of_examples(len(images)))
        noisy = jnp.sqrt(1 - level)[:, None] * images + jnp.sqrt(level)[:, None] * noise
        losses = jnp.square(model(noisy, level) - noise).mean(1)
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum())

    def metrics(self) -> tuple[Any, ...]:
        return (MeanLoss(unit="pictures"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> DiffusionTask:
        return DiffusionTask(width=self.width, schema=schema)


def diffusion() -> Experiment:
    """Stripes out of noise."""
    adam = optim.Adam(learning_rate=optim.Constant(value=2e-2))
    checkpoints = Checkpoints(every=40)
    return Experiment(model=DiffusionConfig(), data=Stripes(), steps=80, optimizer=adam, checkpoints=checkpoints)
