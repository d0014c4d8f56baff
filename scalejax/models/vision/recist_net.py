"""RECIST-Net: lesions from the ends of their RECIST diameters, found as key points and grouped.

Xie et al., 2021, arXiv 2107.08715: the extremes of the four ends and their centre are found in heat maps and grouped by
geometry, on one network that is trained on nothing else. What the abstract leaves open is ExtremeNet's (Zhou et al.,
2019): an hourglass network, a map each of tops, lefts, bottoms, rights and centres, offsets within cells, focal loss,
and grouping by the height of the map of centres (`models.vision.keypoints`).

    loss = sum over maps of focal + smooth L1 of offsets + `ends` x smooth L1 of the ends; mean over stacks and objects

What differs from ExtremeNet:
  - Extremes are taken by coordinate and may coincide: of an oblique, elongated lesion one end of the long diameter is
    topmost and rightmost. Its box is right, but its second diameter is in no key point; a head at the centre says where
    the four ends are. `Found.regressed` says of which lesions the short diameter was read from it.
  - A picture without a lesion counts as one object, so that the loss stays finite whichever way a batch is cut.

`read="centre-and-size"` is what it is compared with: a map of centres and the size of the box at each, on the same
network (CenterNet; Zhou, Wang and Krähenbühl, 2019, arXiv 1904.07850).

    B pictures    N objects    h, w cells    M boxes
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.vision import hourglass, keypoints
from scalejax.models.vision.hourglass import STRIDE, HourglassConfig
from scalejax.models.vision.inputs import standardized
from scalejax.models.vision.keypoints import Grouping, Targets
from scalejax.nn import counts
from scalejax.nn.norm import Purpose
from scalejax.train.metrics.detection import Froc
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Metric
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Num

Maps = dict[str, jax.Array]
"""What the heads of a stack say: "heat" float[B, h, w, 5] (1 of centres alone), "offsets", "ends", "size"."""

_RARE = -2.19
"""The bias of heat maps at first: a tenth of the cells."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found:
    """Lesions of pictures.

    Attributes:
      boxes: float[B, M, 4], pixels: left, top, right and bottom of the marks, with padding.
      scores: float[B, M], 0 where there is none.
      diameters: float[B, M, 4, 2], pixels: x and y of the ends of the long and then of the short one.
      regressed: bool[B, M], whether the short one is that of the head at the centre.
    """

    boxes: jax.Array
    scores: jax.Array
    diameters: jax.Array
    regressed: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecistNetConfig:
    """Architecture, and how lesions are read out.

    Attributes:
      backbone: Of the maps.
      read: "key-points": the method. "centre-and-size": what it is compared with.
      head: Channels within heads.
      grouping: See `keypoints.Grouping`.
      ends: Weight of the loss of the ends of diameters, or of the size of a box, in cells.
      padding: Pixels around the marks that belong to a box: 5 in DeepLesion.
      objects: Most lesions of a picture.
    """

    backbone: HourglassConfig = hourglass.SIZES["extremenet"]
    read: Literal["key-points", "centre-and-size"] = "key-points"
    head: int = 256
    grouping: Grouping = Grouping()
    ends: float = 0.1
    padding: float = 0.0
    objects: int = 32

    FREE = ("grouping", "ends", "padding", "objects")

    def task(self, schema: ImageSchema) -> "RecistNetTask":
        """Binds the model to a data set.

        Raises:
          UserError: maps cannot be halved as often as the backbone is deep, or have fewer cells than `peaks`.
        """
        rows, columns = self.backbone.cells(schema.height, schema.width)
        how = self.grouping
        if not 1 <= how.peaks <= rows * columns:
            raise UserError(
                f"model.grouping.peaks={how.peaks} must be from 1 to the {rows * columns} cells of a map of {rows} x "
                f"{columns}. Lower it, or take larger pictures."
            )
        if not 1 <= how.boxes <= how.peaks**4:
            raise UserError(f"model.grouping.boxes={how.boxes} must be from 1 to peaks^4. Change either.")
        return RecistNetTask(config=self, schema=schema)


class RecistNet(nnx.Module):
    """Hourglasses with heads."""

    def __init__(self, config: RecistNetConfig, schema: ImageSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        backbone, stacks = config.backbone, range(config.backbone.stacks)
        self.backbone = hourglass.HourglassNetwork(backbone, schema.channels, rngs, dtypes)

        def heads(outputs: int, bias: float = 0.0) -> list[hourglass.Head]:
            return [hourglass.Head(backbone.features, config.head, outputs, rngs, dtypes, bias=bias) for _ in stacks]

        extremes = len(keypoints.EXTREMES)
        if config.read == "key-points":
            names = {f"heat/{n}": heads(1, _RARE) for n in (*keypoints.EXTREMES, "centre")}
            names |= {f"offsets/{n}": heads(2) for n in keypoints.EXTREMES} | {"ends": heads(2 * extremes)}
        else:
            names = {"heat/centre": heads(1, _RARE), "offsets/centre": heads(2), "size": heads(2)}
        self.heads = nnx.Dict({name.replace("/", "_"): nnx.List(each) for name, each in names.items()})
        self.schema, self.dtypes = schema, dtypes

    def __call__(
        self,
        images: "Num[Array, 'batch height width channels']",
        purpose: Purpose = "evaluation",
    ) -> tuple[Maps, ...]:
        """Stored pixels [B, H, W, C]. Returns the maps of each stack."""
        read = self.backbone(standardized(images, self.schema, self.dtypes), purpose)
        return tuple(self._maps(stack, x) for stack, x in enumerate(read))

    def _maps(self, stack: int, x: jax.Array) -> Maps:
        found: dict[str, list[jax.Array]] = {}
        for name, each in self.heads.items():
            found.setdefault(name.partition("_")[0], []).append(each[stack](x))
        return {name: jnp.concatenate(maps, -1) for name, maps in found.items()}


def losses(config: RecistNetConfig, maps: Maps, wanted: Targets) -> "Float[Array, 'batch']":
    """The loss of each picture, summed over its objects."""
    real = wanted.present[..., None].astype(maps["heat"].dtype)
    if config.read == "centre-and-size":
        centre = wanted.cells[:, :, 4]
        middle = (wanted.ends.max(2) + wanted.ends.min(2)) / 2
        size = (wanted.ends.max(2) - wanted.ends.min(2)) / STRIDE
        away = keypoints.at_cells(maps["offsets"], centre) - (middle / STRIDE - centre.astype(middle.dtype))
        sizes = keypoints.at_cells(maps["size"], centre) - size
        found = keypoints.focal(maps["heat"], wanted.heat[..., 4:])
        found += (keypoints.smooth_l1(away) * real).sum((1, 2))
        return found + config.ends * (keypoints.smooth_l1(sizes) * real).sum((1, 2))
    offsets = maps["offsets"].reshape(*maps["offsets"].shape[:3], 4, 2)
    each = [keypoints.at_cells(offsets[..., n, :], wanted.cells[:, :, n]) for n in range(4)]
    within = wanted.extremes / STRIDE - wanted.cells[:, :, :4].astype(offsets.dtype)
    away = jnp.stack(each, 2) - within  # B N 4 2
    found = keypoints.focal(maps["heat"], wanted.heat)
    found += (keypoints.smooth_l1(away) * real[..., None]).sum((1, 2, 3))
    centre = wanted.cells[:, :, 4]
    ends = keypoints.at_cells(maps["ends"], centre).reshape(*away.shape)
    true = wanted.ends / STRIDE - centre[:, :, None].astype(ends.dtype)
    return found + config.ends * (_unordered(ends, true) * real[..., 0]).sum(1)


def _unordered(ends: "Float[Array, '*batch 4 2']", true: "Float[Array, '*batch 4 2']") -> "Float[Array, '*batch']":
    """Smooth L1 of two diameters, in whichever order they and their ends come nearest."""
    long, short = true[..., :2, :], true[..., 2:, :]

    def of(diameter: jax.Array, other: jax.Array) -> jax.Array:
        def one(other: jax.Array) -> jax.Array:
            return keypoints.smooth_l1(diameter - other).sum((-2, -1))

        return jnp.minimum(one(other), one(other[..., ::-1, :]))

    first, second = ends[..., :2, :], ends[..., 2:, :]
    return jnp.minimum(of(first, long) + of(second, short), of(first, short) + of(second, long))


def found_in(config: RecistNetConfig, maps: Maps, height: int, width: int) -> Found:
    """Reads the lesions of pictures of a size out of the maps of the last stack."""
    how = config.grouping
    heat = jnp.moveaxis(jax.nn.sigmoid(maps["heat"]), -1, 1)  # B 5 h w
    if config.read == "centre-and-size":
        scores, cells = (found[:, 0] for found in keypoints.top(keypoints.peaks(heat), how.peaks))
        scores = jnp.where(scores >= how.centre_threshold, scores, 0)
        middle = (cells.astype(heat.dtype) + keypoints.at_cells(maps["offsets"], cells)) * STRIDE
        half = jnp.maximum(keypoints.at_cells(maps["size"], cells), 0) * (STRIDE / 2)
        boxes = jnp.concatenate([middle - half, middle + half], -1)
        # Diameters it does not know: those of a box.
        level, upright = half.at[..., 1].set(0), half.at[..., 0].set(0)
        outermost = jnp.stack([middle - upright, middle - level, middle + upright, middle + level], 2)
        ends, regressed = keypoints.diameters(outermost, outermost, -1.0)
        return _told(config, boxes, scores, ends, regressed, height, width)
    extremes = heat[:, :4]
    if how.aggregation:
        # Tops and bottoms lie along level edges, lefts and rights along upright ones.
        level = keypoints.aggregated(extremes[:, ::2], 3, how.aggregation)
        upright = keypoints.aggregated(extremes[:, 1::2], 2, how.aggregation)
        extremes = jnp.stack([level, upright], 2).reshape(extremes.shape)
    scores, cells = keypoints.top(jnp.minimum(keypoints.peaks(extremes), 1), how.peaks)
    groups = keypoints.group(scores, cells, heat[:, 4], how)
    each = jnp.arange(len(heat)).reshape(-1, 1, 1)
    where = cells[each, jnp.arange(4).reshape(1, 1, 4), groups.picked]  # B M 4 2
    offsets = maps["offsets"].reshape(*maps["offsets"].shape[:3], 4, 2)
    within = [keypoints.at_cells(offsets[..., n, :], where[:, :, n]) for n in range(4)]
    points = (where.astype(heat.dtype) + jnp.stack(within, 2)) * STRIDE
    boxes = jnp.stack([points[:, :, 1, 0], points[:, :, 0, 1], points[:, :, 3, 0], points[:, :, 2, 1]], -1)
    relative = keypoints.at_cells(maps["ends"], groups.centres).reshape(*points.shape)
    regressed = (relative + groups.centres[:, :, None].astype(heat.dtype)) * STRIDE
    ends, regressed = keypoints.diameters(points, regressed, STRIDE)
    return _told(config, boxes, groups.scores, ends, regressed, height, width)


def _told(
    config: RecistNetConfig,
    boxes: jax.Array,
    scores: jax.Array,
    ends: jax.Array,
    regressed: jax.Array,
    height: int,
    width: int,
) -> Found:
    how, pad = config.grouping, config.padding
    x, y = (jnp.clip(boxes[..., n::2], -0.5, far - 0.5) for n, far in enumerate((width, height)))
    low, high = jnp.stack([x[..., 0], y[..., 0]], -1), jnp.stack([x[..., 1], y[..., 1]], -1)
    boxes = jnp.concatenate([low - pad, jnp.maximum(low, high) + pad], -1)
    scores = keypoints.soft_nms(boxes, scores, sigma=how.sigma, overlap=how.overlap)
    if how.ghosts is not None:
        scores = keypoints.without_ghosts(boxes, scores, how.ghosts)
    return Found(boxes, scores, ends, regressed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecistNetTask(TaskBase):
    """Detection of lesions; see the module.

    Attributes:
      config: Architecture.
      schema: Of the pictures.
    """

    config: RecistNetConfig
    schema: ImageSchema
    unit: str = "images"

    def fields(self) -> dict[str, Field]:
        """Pictures, and x and y of the ends of the long and then of the short diameter of objects, NaN for none."""
        return {
            "images": Field(shape=self.schema.shape, dtype=self.schema.dtype),
            "ends": Field(shape=(self.config.objects, 4, 2), dtype="float32"),
            "weights": Field(shape=(), dtype="float32"),
        }

    def init(self, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> RecistNet:
        """Builds the model."""
        return RecistNet(self.config, self.schema, rngs, dtypes)

    def loss(self, model: RecistNet, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """The loss summed over objects, and how many there are; in evaluations what was found in each picture."""
        del keys, gather
        stacks = model(batch["images"], batch.purpose)
        rows, columns = stacks[-1]["heat"].shape[1:3]
        ends = batch["ends"].astype(stacks[-1]["heat"].dtype)
        wanted = keypoints.targets(ends, rows, columns, STRIDE)
        of_pictures = sum(losses(self.config, maps, wanted) for maps in stacks) / len(stacks)
        total = (of_pictures * batch["weights"].astype(ends.dtype)).sum()
        outputs: dict[str, jax.Array] = {}
        if batch.purpose == "evaluation":
            found = found_in(self.config, stacks[-1], self.schema.height, self.schema.width)
            outputs = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return Loss(total, self.weight(batch).astype(total.dtype), outputs=outputs)

    def weight(self, batch: Batch) -> jax.Array:
        """Objects, one at least of each picture."""
        found = jnp.isfinite(batch["ends"]).all((2, 3)).sum(1)
        return (jnp.maximum(found, 1).astype(batch["weights"].dtype) * batch["weights"]).sum()

    def metrics(self) -> tuple[Metric, ...]:
        """Sensitivities against false positives, and the loss."""
        return (Froc(padding=self.config.padding), MeanLoss(unit="objects"))

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """Pictures, and the FLOPs of their convolutions."""
        count = shapes["images"][0]
        model = counts.abstract(RecistNet, self.config, self.schema)
        macs = counts.macs(model, jax.ShapeDtypeStruct((1, *self.schema.shape), self.schema.dtype))
        return Work(flops=6.0 * macs * count, count=count)

    def describe(self, data: Any) -> dict[str, object]:
        """What reads lesions out."""
        del data
        return {"read": self.config.read, "stacks": self.config.backbone.stacks}

    def identity(self) -> dict[str, str]:
        """Units of the pictures."""
        return self.schema.identity()
