"""A user's file: a detector of lesions by heatmaps of their outermost points and of their centre, as RECIST-Net has.

scalejax train detector.py
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
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.metrics.sums import add, pair_zeros, ratio
from scalejax.train.task import Batch, Field, Loss, TaskBase

SIDE, BOXES, POINTS = 8, 3, 5  # top, left, bottom, right, centre


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesions:
    """One to three bright crosses in noise, each 3 pixels wide; what fills up the boxes of a picture has presence 0."""

    batch_size: int = 16

    def schema(self) -> dict[str, Any]:
        return {"side": SIDE, "boxes": BOXES}

    def build(self) -> ArrayDataSet:
        rng = np.random.default_rng(0)
        offsets = np.array([[-1, 0], [0, -1], [1, 0], [0, 1], [0, 0]])

        def split(count: int) -> dict[str, np.ndarray]:
            images = rng.normal(0, 0.2, (count, SIDE, SIDE)).astype(np.float32)
            points = rng.integers(1, SIDE - 1, (count, BOXES, 1, 2)) + offsets  # y and x of each of the points
            presence = (np.arange(BOXES) < rng.integers(1, BOXES + 1, (count, 1))).astype(np.float32)
            for image, box in np.argwhere(presence):
                images[image, points[image, box, :, 0], points[image, box, :, 1]] = 1
            return {"images": images, "points": points.astype(np.int32), "presence": presence}

        splits = {"train": split(128), "validation": split(20), "test": split(20)}
        return ArrayDataSet(splits, batch_size=self.batch_size, schema=self.schema())


class Detector(nnx.Module):
    """Two convolutions; a heatmap for each of the points."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtypes: Dtypes):
        def normal(*shape: int) -> jax.Array:
            return 0.3 * jax.random.normal(rngs.params(), shape, dtypes.params)

        self.first = nnx.Param(normal(width, 1, 3, 3), logical_axes=("hidden", None, None, None))
        self.second = nnx.Param(normal(POINTS, width, 3, 3), logical_axes=(None, "hidden", None, None))
        self.bias = nnx.Param(jnp.full((POINTS,), -2, dtypes.params), logical_axes=(None,))

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.lax.conv(images[:, None].astype(self.first[...].dtype), self.first[...], (1, 1), "SAME")
        x = jax.lax.conv(jax.nn.gelu(x), self.second[...], (1, 1), "SAME")
        return x + self.bias[...].reshape(1, POINTS, 1, 1)  # B POINTS H W


def heatmaps(points: jax.Array, presence: jax.Array, dtype: Any) -> jax.Array:
    """A bump of height 1 at each point of each box that is there: dtype[B, POINTS, H, W]."""
    rows = jnp.arange(SIDE).reshape(1, 1, 1, SIDE, 1) - points[..., :1, None]
    columns = jnp.arange(SIDE).reshape(1, 1, 1, 1, SIDE) - points[..., 1:, None]
    bumps = jnp.exp(-2.0 * (rows**2 + columns**2).astype(dtype))  # B BOXES POINTS H W
    return (bumps * presence.astype(dtype)[..., None, None, None]).max(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found(MetricBase):
    """Share of the lesions that are among the three cells of each picture whose centres are the most probable."""

    @property
    def values(self) -> tuple[Value, ...]:
        base = BOXES / SIDE**2
        return (Value(name="found", title="found", unit="share of lesions", better="high", base=base),)

    def zeros(self) -> Any:
        return {"found": pair_zeros(), "boxes": pair_zeros()}

    def update(self, sums: Any, loss: Any, batch: Any) -> Any:
        counts = batch["presence"] * batch["weights"][:, None]
        return {
            "found": add(sums["found"], (loss.outputs["found"] * counts).sum()),
            "boxes": add(sums["boxes"], counts.sum()),
        }

    def compute(self, sums: Any) -> dict[str, float]:
        return {"found": ratio(sums["found"], sums["boxes"]), "boxes": float(sums["boxes"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorTask(TaskBase):
    """Heatmaps by the focal loss of CornerNet (Law and Deng, 2018), a mean over pictures."""

    width: int
    schema: Any

    def fields(self) -> dict[str, Field]:
        side, boxes = self.schema["side"], self.schema["boxes"]
        return {
            "images": Field(shape=(side, side), dtype="float32"),
            "points": Field(shape=(boxes, POINTS, 2), dtype="int32"),
            "presence": Field(shape=(boxes,), dtype="float32"),
            "weights": Field(shape=(), dtype="float32"),
        }

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> Detector:
        return Detector(self.width, rngs, dtypes)

    def loss(self, model: Detector, batch: Batch, *, keys: Any, gather: Any) -> Loss:
        logits = model(batch["images"])
        wanted = heatmaps(batch["points"], batch["presence"], logits.dtype)
        p = jax.nn.sigmoid(logits)
        at, off = -((1 - p) ** 2) * jax.nn.log_sigmoid(logits), -(p**2) * jax.nn.log_sigmoid(-logits)
        losses = jnp.where(wanted == 1, at, (1 - wanted) ** 4 * off).sum((1, 2, 3))
        weights = batch["weights"].astype(losses.dtype)
        best = jax.lax.top_k(logits[:, -1].reshape(-1, SIDE**2), BOXES)[1]
        centres = batch["points"][:, :, -1] @ jnp.array([SIDE, 1])  # the last point is the centre
        found = (centres[:, :, None] == best[:, None]).any(-1).astype(jnp.float32)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"found": found})

    def metrics(self) -> tuple[Any, ...]:
        return (Found(), MeanLoss(unit="pictures"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """Its config."""

    width: int = 8

    def task(self, schema: Any) -> DetectorTask:
        return DetectorTask(width=self.width, schema=schema)


def detector() -> Experiment:
    """Lesions and their outermost points."""
    adam = optim.Adam(learning_rate=optim.Constant(value=3e-2))
    checkpoints = Checkpoints(every=20)
    return Experiment(model=DetectorConfig(), data=Lesions(), steps=40, optimizer=adam, checkpoints=checkpoints)
