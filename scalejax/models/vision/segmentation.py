"""A class for each pixel: the loss, the scores and the checks that models of segmentation share.

The loss of a picture is cross-entropy, a mean over its pixels, plus 1 - soft Dice, a mean over classes but the
background, as in nnU-Net (Isensee et al., 2021; its code writes minus Dice):

    Dice_k = (2 sum p_k t_k + eps) / (sum p_k + sum t_k + eps)      p probabilities, t truth, eps = 1e-5

The sums go over the pixels of the batch, nnU-Net's choice for slices, or of each picture. Under deep supervision
coarser logits are taught too, with weights that halve from level to level and add up to 1: their loss is that of these
logits repeated to full size, found on truth that is averaged over the pixels which each of theirs covers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.nn import counts
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import sum_over_batch
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Metric
from scalejax.train.metrics.segmentation import Surfaces, VolumeDice
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work

EPS = 1e-5
"""Of Dice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationSettings:
    """How segmentation is taught and scored.

    Attributes:
      dice: Whose pixels the sums of Dice go over: "batch" = of the global batch (of a part where there are
        microbatches), "picture" = of each picture.
      deep_supervision: How many coarser levels have logits that are taught, too.
      surfaces: "hausdorff" = evaluations also give HD95 and draw pictures, for which the masks of a split are collected
        on the host.
    """

    dice: Literal["batch", "picture"] = "batch"
    deep_supervision: int = 0
    surfaces: Literal["hausdorff", "none"] = "hausdorff"

    def __post_init__(self) -> None:
        check_one_of("SegmentationSettings: dice", self.dice, ("batch", "picture"))
        check_one_of("SegmentationSettings: surfaces", self.surfaces, ("hausdorff", "none"))
        check_at_least("SegmentationSettings: deep_supervision", self.deep_supervision, 0)


class SegmentationConfig(Protocol):
    """The part of the config of an architecture that a task knows."""

    @property
    def segmentation(self) -> SegmentationSettings: ...

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> Any: ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """The fields that the model takes, in their order."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationTask(TaskBase):
    """Pictures to masks; a `train.task.Task`.

    Attributes:
      config: Architecture.
      schema: Of the pictures.
    """

    config: SegmentationConfig
    schema: ImageSchema
    unit: str = "images"

    def __post_init__(self) -> None:
        if len(self.schema.classes) < 2:
            raise UserError(
                f"data: a segmentation needs the background and a class at least; the masks have "
                f"{', '.join(self.schema.classes) or 'none'}. Name them in the data's `classes`."
            )

    def fields(self) -> Mapping[str, object]:
        """Pictures, masks, and the number of the case that each picture is a slice of."""
        height, width, _ = self.schema.shape
        return {
            "images": Field(shape=self.schema.shape, dtype=self.schema.dtype),
            "masks": Field(shape=(height, width), dtype="int32"),
            "cases": Field(shape=(), dtype="int32"),
            "weights": Field(shape=(), dtype="float32"),
        }

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """Builds the model."""
        return self.config.build(self.schema, rngs, dtypes)

    def loss(self, model: Any, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """See the file; outputs are "predicted" uint8[B, H, W] and "counts", see `VolumeDice`."""
        del keys, gather
        logits = self.segment(model, batch)
        weights = batch["weights"].astype(logits[0].dtype)
        truth = jax.nn.one_hot(batch["masks"], len(self.schema.classes), dtype=logits[0].dtype)
        shares = 0.5 ** np.arange(len(logits))
        losses = jnp.zeros_like(weights)
        for share, level in zip(shares / shares.sum(), logits, strict=True):
            target = averaged(truth, truth.shape[1] // level.shape[1])
            losses += share * dice_and_cross_entropy(level, target, weights, self.config.segmentation.dice)
        predicted = logits[0].argmax(-1)
        return Loss(
            (losses * weights).sum(),
            weights.sum(),
            outputs={
                "predicted": predicted.astype(jnp.uint8),
                "counts": overlaps(predicted, batch["masks"], len(self.schema.classes)),
            },
        )

    def segment(self, model: Any, batch: Batch) -> Sequence[jax.Array]:
        """Logits of a batch, float[B, H / 2^l, W / 2^l, classes], the finest first."""
        return model(*(batch[name] for name in self.config.inputs), purpose=batch.purpose)

    def metrics(self) -> tuple[Metric, ...]:
        """Dice of volumes; the mean loss; distances of surfaces if they are asked for."""
        names = self.schema.classes[1:]
        found: tuple[Metric, ...] = (VolumeDice(structures=names), MeanLoss(unit="images"))
        if self.config.segmentation.surfaces == "none":
            return found
        return (*found, Surfaces(structures=names, spacing=self.schema.spacing, between=self.schema.slice_spacing))

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """Of the convolutions, forward and twice backward."""
        model = counts.abstract(self.config.build, self.schema)
        fields = self.fields()
        one = (
            jax.ShapeDtypeStruct((1, *field.shape), field.dtype)
            for field in map(fields.__getitem__, self.config.inputs)
            if isinstance(field, Field)
        )
        images = shapes["images"][0]
        return Work(flops=6.0 * images * counts.macs(model, *one), count=images)

    def identity(self) -> dict[str, str]:
        """The units of the pictures and the names of the classes."""
        return self.schema.identity()


def dice_and_cross_entropy(
    logits: jax.Array, truth: jax.Array, weights: jax.Array, dice: Literal["batch", "picture"] = "batch"
) -> jax.Array:
    """float[B], see the file.

    Args:
      logits: float[B, H, W, classes].
      truth: The share that each class has of each pixel, float[B, H, W, classes].
      weights: float[B] of the pictures: those with 0 are in no sum.
      dice: See `SegmentationSettings`.
    """
    likely = jax.nn.log_softmax(logits)
    entropy = -(truth * likely).sum(-1).mean((1, 2))
    return entropy + 1 - soft_dice(jnp.exp(likely), truth, weights, dice)[..., 1:].mean(-1)


def soft_dice(
    probabilities: jax.Array, truth: jax.Array, weights: jax.Array, dice: Literal["batch", "picture"] = "batch"
) -> jax.Array:
    """Soft Dice of each class, float[B, classes], equal for all pictures with dice="batch"; arguments as above."""
    both, either = (probabilities * truth).sum((1, 2)), (probabilities + truth).sum((1, 2))
    if dice == "batch":
        both, either = (sum_over_batch((sums * weights[:, None]).sum(0))[None] for sums in (both, either))
    found = (2 * both + EPS) / (either + EPS)
    return jnp.broadcast_to(found, (len(weights), found.shape[-1]))


def averaged(x: jax.Array, by: int) -> jax.Array:
    """Means of by x by pixels, float[B, H, W, C] -> [B, H / by, W / by, C]."""
    if by == 1:
        return x
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // by, by, width // by, by, channels).mean((2, 4))


def overlaps(predicted: jax.Array, masks: jax.Array, classes: int) -> jax.Array:
    """float32[B, classes - 1, 3]: of each class but the background the pixels of both, predicted and true ones."""
    labels = jnp.arange(1, classes).reshape(1, 1, 1, -1)
    marked, true = (x[..., None] == labels for x in (predicted, masks))  # B H W classes
    return jnp.stack([x.sum((1, 2), dtype=jnp.float32) for x in (marked & true, marked, true)], -1)
