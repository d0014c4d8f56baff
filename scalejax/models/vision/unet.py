"""U-Net: an encoder that halves the picture level by level, and a decoder that gets each level's features beside it.

    scalejax train unet

Paper: O. Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015. In the
order of the code (x_l has 1 / 2^l of the height and width):

    x_0     = block(stem(picture))
    x_{l+1} = block(max of each 2 x 2 of x_l)
    y_L     = x_L, the deepest level
    y_l     = block(concat(x_l, up(y_{l+1})))          up: a 2 x 2 transposed convolution of stride 2
    logits  = 1 x 1 convolution of y_0, with deep supervision also of y_1, y_2, ...

A block is two layers, 3 x 3 convolution, normalisation, ReLU. Deviations from the paper, as nnU-Net has them (Isensee
et al., 2021): convolutions see zeros around the picture, so that logits have its size; there is normalisation, by
default of each channel of each picture; no dropout.
"""

import dataclasses
import itertools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.models.vision.inputs import standardized
from scalejax.models.vision.segmentation import SegmentationSettings, SegmentationTask
from scalejax.nn.norm import Purpose
from scalejax.numerics.dtypes import FLOAT32, Dtypes

Normalization = Literal["instance", "group", "batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Architecture, and how its segmentation is taught and scored.

    Attributes:
      widths: Channels of each level, the finest first.
      norm: "instance" = each channel of each picture by itself, "group" = `groups` groups of channels of each picture,
        "batch" = each channel over the batch.
      groups: Of norm="group".
      segmentation: Loss and scores.
    """

    widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    norm: Normalization = "instance"
    groups: int = 8
    segmentation: SegmentationSettings = SegmentationSettings()

    FREE = ("segmentation",)

    def __post_init__(self) -> None:
        check_levels(self)

    def task(self, schema: ImageSchema) -> SegmentationTask:
        """Binds the model to the pictures of a data set.

        Raises:
          UserError: their sizes cannot be halved as often as there are levels, or their masks have no classes.
        """
        check_sizes(schema, len(self.widths))
        return SegmentationTask(config=self, schema=schema)

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> "UNet":
        """The model."""
        return UNet(self, schema, rngs, dtypes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Fields that the model takes."""
        return ("images",)


def check_levels(config: UNetConfig) -> None:
    """Refuses levels that cannot be built.

    Raises:
      UserError: names the field.
    """
    name = type(config).__name__
    check_one_of(f"{name}: norm", config.norm, get_args(Normalization))
    check_at_least(f"{name}: levels, the length of widths,", len(config.widths), 2)
    check_at_least(f"{name}: groups", config.groups, 1)
    for width in config.widths:
        check_at_least(f"{name}: widths", width, 1)
        if config.norm == "group" and width % config.groups:
            raise UserError(
                f"{name}: groups={config.groups} must divide all widths; got {config.widths}. Choose another number."
            )
    if config.segmentation.deep_supervision > len(config.widths) - 2:
        raise UserError(
            f"{name}: segmentation.deep_supervision={config.segmentation.deep_supervision} is too much: of "
            f"{len(config.widths)} levels {len(config.widths) - 2} have a decoder below the finest. Name fewer."
        )


def check_sizes(schema: ImageSchema, levels: int) -> None:
    """Refuses pictures that cannot be halved at each level.

    Raises:
      UserError: names the sizes and what would do.
    """
    step = 2 ** (levels - 1)
    if schema.height % step or schema.width % step:
        near = tuple(max(step, round(size / step) * step) for size in (schema.height, schema.width))
        raise UserError(
            f"Pictures of {schema.height} x {schema.width} pixels cannot be halved at each of {levels} levels. Resize "
            f"or crop them to multiples of {step}, {near[0]} x {near[1]} say, or name fewer model.widths."
        )


class Layer(nnx.Module):
    """Convolution, normalisation, ReLU."""

    def __init__(
        self, in_features: int, features: int, config: UNetConfig, rngs: nnx.Rngs, dtypes: Dtypes, *, kernel: int = 3
    ):
        self.conv = nn.Conv(in_features, features, kernel=kernel, rngs=rngs, dtypes=dtypes)
        if config.norm == "batch":
            self.norm = nn.BatchNorm(features, dtypes=dtypes)
        else:
            groups = config.groups if config.norm == "group" else features
            self.norm = nn.GroupNorm(features, groups=groups, dtypes=dtypes)

    def __call__(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        """x: float[B, H, W, in]. Returns float[B, H, W, features]."""
        x = self.conv(x)
        return jax.nn.relu(self.norm(x, purpose) if isinstance(self.norm, nn.BatchNorm) else self.norm(x))


class UNetEncoder(nnx.Module):
    """All levels behind the stem."""

    def __init__(self, config: UNetConfig, rngs: nnx.Rngs, dtypes: Dtypes):
        first = config.widths[0]
        self.first = Layer(first, first, config, rngs, dtypes)
        self.blocks = nnx.List(
            nnx.List([Layer(above, width, config, rngs, dtypes), Layer(width, width, config, rngs, dtypes)])
            for above, width in itertools.pairwise(config.widths)
        )

    def __call__(self, x: jax.Array, purpose: Purpose) -> list[jax.Array]:
        """What a stem made, float[B, H, W, widths[0]], to features [B, H / 2^l, W / 2^l, widths[l]] of each level."""
        features = [self.first(x, purpose)]
        for block in self.blocks:
            x = halved(features[-1])
            for layer in block:
                x = layer(x, purpose)
            features.append(x)
        return features


def halved(x: jax.Array) -> jax.Array:
    """The largest of each 2 x 2 pixels, [B, H, W, C] -> [B, H / 2, W / 2, C].

    By `maximum` of two at a time: the gradient of `max` divides by how many are equal to it, and was 0 / 0 where XLA
    computed the pixels a second time for it, in another order (jax 0.10.2, CPU).
    """
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width, channels)
    x = jnp.maximum(x[:, :, 0], x[:, :, 1]).reshape(batch, height // 2, width // 2, 2, channels)
    return jnp.maximum(x[..., 0, :], x[..., 1, :])


class Up(nnx.Module):
    """A 2 x 2 transposed convolution of stride 2: each pixel becomes four."""

    def __init__(self, in_features: int, features: int, rngs: nnx.Rngs, dtypes: Dtypes):
        self.kernel = nnx.Param(
            nn.scaled_normal(
                rngs.params(), (in_features, 4 * features), fan_in=in_features, gain=1.0, dtype=dtypes.params
            ),
            logical_axes=("input", "hidden"),
        )
        self.bias = nnx.Param(jnp.zeros(features, dtypes.params), logical_axes=("hidden",))
        self.compute_dtype = dtypes.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: float[B, H, W, in]. Returns float[B, 2 H, 2 W, features]."""
        batch, height, width, _ = x.shape
        y = x @ self.kernel[...].astype(self.compute_dtype)  # B H W 4C
        y = y.reshape(batch, height, width, 2, 2, -1).swapaxes(2, 3)  # B H 2 W 2 C
        y = y.reshape(batch, 2 * height, 2 * width, -1)
        return y + self.bias[...].astype(y.dtype).reshape(1, 1, 1, -1)


class UNetDecoder(nnx.Module):
    """From the features of all levels to logits."""

    def __init__(self, config: UNetConfig, classes: int, rngs: nnx.Rngs, dtypes: Dtypes):
        widths = config.widths
        self.ups = nnx.List(Up(below, width, rngs, dtypes) for width, below in itertools.pairwise(widths))
        self.blocks = nnx.List(
            nnx.List([Layer(2 * width, width, config, rngs, dtypes), Layer(width, width, config, rngs, dtypes)])
            for width in widths[:-1]
        )
        heads = 1 + config.segmentation.deep_supervision
        self.heads = nnx.List(
            nn.Conv(width, classes, kernel=1, bias=0.0, gain=1.0, rngs=rngs, dtypes=dtypes) for width in widths[:heads]
        )

    def __call__(self, features: list[jax.Array], purpose: Purpose) -> tuple[jax.Array, ...]:
        """Features of each level; returns logits in float32 or wider of the levels that have a head, finest first."""
        y, logits = features[-1], []
        for level in reversed(range(len(self.blocks))):
            y = jnp.concatenate([features[level], self.ups[level](y)], -1)
            for layer in self.blocks[level]:
                y = layer(y, purpose)
            if level < len(self.heads):
                logits.insert(0, self.heads[level](y))
        return tuple(one.astype(nn.wide(one.dtype)) for one in logits)


class UNet(nnx.Module):
    """See the file."""

    def __init__(self, config: UNetConfig, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes = FLOAT32):
        self.stem = Layer(schema.channels, config.widths[0], config, rngs, dtypes)
        self.encoder = UNetEncoder(config, rngs, dtypes)
        self.decoder = UNetDecoder(config, len(schema.classes), rngs, dtypes)
        self.schema, self.dtypes = schema, dtypes

    def __call__(self, images: jax.Array, purpose: Purpose = "evaluation") -> tuple[jax.Array, ...]:
        """Stored pixels [B, H, W, C] to logits float[B, H / 2^l, W / 2^l, classes] of each head, finest first."""
        x = self.stem(standardized(images, self.schema, self.dtypes), purpose)
        return self.decoder(self.encoder(x, purpose), purpose)
