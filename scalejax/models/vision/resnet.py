"""ResNet: residual networks for classes of pictures.

Paper: K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv 1512.03385).

    x_0     = relu(norm(conv(pixels)))     "imagenet": filters of 7, stride 2, then the largest of 3 x 3, stride 2
    x_{l+1} = relu(F_l(x_l) + S_l(x_l))    F "basic": filters of 3 and 3; "bottleneck": of 1, 3 and 1, 4 times as wide
    logits  = W mean over pixels(x_L) + b

Every convolution is followed by BatchNorm, and all but the last of a block by a ReLU; the first block of each stage but
the first halves the picture. S is the identity where shapes allow it. Where they do not, "projection" is a convolution
of 1 with BatchNorm (B of the paper), and "padding" takes every other pixel and fills channels up with zeros (A). Small
nets for CIFAR have A, as in section 4.2, with which they have the published parameters; those with bottlenecks, which
widen in their first stage, and all for ImageNet have B. The code of SMC has B everywhere.

Deviation: bottlenecks halve the picture in their filter of 3, not in the first of 1: 4.1 instead of 3.8 billion
multiply-adds for ResNet-50, as in the checkpoints of today.

Axes: B examples, H and W pixels, C channels.
"""

import dataclasses
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.vision.classification import ClassifierTask
from scalejax.models.vision.inputs import standardized
from scalejax.nn.norm import Purpose
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.self_distillation import AnyLearning, CrossEntropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Architecture; `SIZES` has the published ones.

    Attributes:
      stem: "cifar": one convolution at the size of the picture. "imagenet": a quarter of it.
      block: What a block is made of.
      depths: Blocks of each stage.
      widths: Channels of the filters of 3 in each stage; the stem has as many as the first.
      shortcut: Around a block that changes the shape.
      learning: What it learns from.
    """

    stem: Literal["cifar", "imagenet"]
    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    shortcut: Literal["projection", "padding"] = "projection"
    learning: AnyLearning = CrossEntropy()

    FREE = ("learning",)

    def __post_init__(self) -> None:
        for name, known in (("stem", _STEMS), ("block", _BLOCKS), ("shortcut", ("projection", "padding"))):
            if getattr(self, name) not in known:
                raise UserError(f"ResNetConfig: {name} must be {' or '.join(known)}; got {getattr(self, name)!r}.")
        if not self.depths or len(self.depths) != len(self.widths) or min(*self.depths, *self.widths) < 1:
            raise UserError(
                "ResNetConfig: depths and widths must have a positive number a stage each; got "
                f"{self.depths} and {self.widths}."
            )

    @property
    def expansion(self) -> int:
        """Channels that a block gives over its width."""
        return 4 if self.block == "bottleneck" else 1

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ResNet":
        """The model for pictures of a data set."""
        return ResNet(self, schema, rngs, dtypes)

    @staticmethod
    def of_folder(path: pathlib.Path) -> "ResNetConfig | None":
        """The architecture of a folder of Hugging Face; None of one without config.json, as torchvision's are.

        Raises:
          UserError: the file cannot be read, or is of another model.
        """
        from scalejax.models.vision import resnet_checkpoints

        shape = resnet_checkpoints.read_shape(path)
        return None if shape is None else ResNetConfig(stem="imagenet", **shape)

    def task(self, schema: ImageSchema) -> "ResNetTask":
        """Binds it to pictures."""
        return ResNetTask(config=self, schema=schema)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetTask(ClassifierTask):
    """Classes of pictures, and the folders of others; a `train.task.Task`."""

    config: ResNetConfig

    def open_folder(self, path: pathlib.Path) -> Trained:
        """See `resnet_checkpoints.open_folder`."""
        from scalejax.models.vision import resnet_checkpoints

        return resnet_checkpoints.open_folder(path, self.config, self.schema)

    def write_folder(self, path: pathlib.Path, trained: Trained) -> None:
        """See `resnet_checkpoints.write_folder`."""
        from scalejax.models.vision import resnet_checkpoints

        resnet_checkpoints.write_folder(path, self.config, self.schema, {**trained.params, **trained.variables})


_STEMS = ("cifar", "imagenet")
_BLOCKS = ("basic", "bottleneck")


def cifar(layers: int, block: Literal["basic", "bottleneck"] = "basic") -> ResNetConfig:
    """Three stages of n blocks, 16, 32 and 64 wide, at 32, 16 and 8 pixels: section 4.2 of the paper.

    Args:
      layers: 6 n + 2, with bottlenecks 9 n + 2.
      block: What a block is made of.

    Raises:
      UserError: there is no net of so many layers.
    """
    each = 6 if block == "basic" else 9
    n, rest = divmod(layers - 2, each)
    if n < 1 or rest:
        raise UserError(
            f"cifar: a ResNet with {block} blocks has {each} n + 2 layers; got {layers}. Take {each * max(n, 1) + 2}."
        )
    shortcut = "padding" if block == "basic" else "projection"
    return ResNetConfig(stem="cifar", block=block, depths=(n, n, n), widths=(16, 32, 64), shortcut=shortcut)


def _imagenet(block: Literal["basic", "bottleneck"], *depths: int) -> ResNetConfig:
    return ResNetConfig(stem="imagenet", block=block, depths=depths, widths=(64, 128, 256, 512))


SIZES = {
    # Table 6 of the paper: 0.27, 0.46, 0.66, 0.85 and 1.7 million parameters for ten classes.
    **{f"resnet{layers}": cifar(layers) for layers in (20, 32, 44, 56, 110)},
    "resnet164": cifar(164, "bottleneck"),
    # Table 1.
    "resnet18": _imagenet("basic", 2, 2, 2, 2),
    "resnet34": _imagenet("basic", 3, 4, 6, 3),
    "resnet50": _imagenet("bottleneck", 3, 4, 6, 3),
    "resnet101": _imagenet("bottleneck", 3, 4, 23, 3),
    "resnet152": _imagenet("bottleneck", 3, 8, 36, 3),
}
"""Published sizes."""


class ResidualBlock(nnx.Module):
    """relu(F(x) + S(x))."""

    def __init__(
        self, config: ResNetConfig, inputs: int, width: int, *, stride: int, rngs: nnx.Rngs, dtypes: nn.Dtypes
    ):
        def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.ConvNorm:
            return nn.ConvNorm(inputs, outputs, kernel=kernel, stride=stride, rngs=rngs, dtypes=dtypes)

        self.outputs = config.expansion * width
        if config.block == "basic":
            convs = [conv(inputs, width, 3, stride), conv(width, width, 3)]
        else:
            convs = [conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, self.outputs, 1)]
        self.convs = nnx.List(convs)
        changes = stride > 1 or inputs != self.outputs
        self.shortcut = conv(inputs, self.outputs, 1, stride) if changes and config.shortcut == "projection" else None
        self.stride = stride

    def __call__(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        """compute_dtype[B, H, W, C] -> compute_dtype[B, ceil(H / stride), ceil(W / stride), outputs]."""
        y = x
        for conv in self.convs[:-1]:
            y = jax.nn.relu(conv(y, purpose))
        return jax.nn.relu(self.convs[-1](y, purpose) + self._around(x, purpose))

    def _around(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        if self.shortcut is not None:
            return self.shortcut(x, purpose)
        x = x[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.outputs - x.shape[-1])))


class ResNet(nnx.Module):
    """Stored pixels -> a logit a class."""

    def __init__(self, config: ResNetConfig, schema: ImageSchema, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        """Filters start as `nn.Conv` has them, the matrix of the logits normal with deviation 0.01."""
        channels = config.widths[0]
        kernel, stride = (3, 1) if config.stem == "cifar" else (7, 2)
        self.stem = nn.ConvNorm(schema.channels, channels, kernel=kernel, stride=stride, rngs=rngs, dtypes=dtypes)
        stages: list[nnx.List[ResidualBlock]] = []
        for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
            blocks: list[ResidualBlock] = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(ResidualBlock(config, channels, width, stride=stride, rngs=rngs, dtypes=dtypes))
                channels = blocks[-1].outputs
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.head = nn.Linear(
            channels,
            len(schema.classes),
            gain=1e-4 * channels,
            rngs=rngs,
            dtypes=dtypes,
            out_dtype=nn.wide(dtypes.params, dtypes.compute),
        )
        self.config, self.schema, self.dtypes = config, schema, dtypes

    def __call__(self, images: jax.Array, purpose: Purpose) -> jax.Array:
        """uint8 or float32[B, H, W, C] -> float32[B, classes] (float64 where the model computes in float64)."""
        x = standardized(images, self.schema, self.dtypes)
        x = jax.nn.relu(self.stem(x, purpose))
        if self.config.stem == "imagenet":
            x = _largest(x)
        for blocks in self.stages:
            for block in blocks:
                x = block(x, purpose)  # B H W C -> B H/2 W/2 C' in the first of a stage
        return self.head(x.mean((1, 2), dtype=nn.wide(x.dtype)))  # B classes


def _largest(x: jax.Array) -> jax.Array:
    """The largest of 3 x 3 pixels, stride 2, one pixel of nothing around: [B, H, W, C] -> [B, ceil(H / 2), ..., C].

    On a CPU rows, then columns: the gradient of XLA's form took 64 ms of CPU time where this takes 6 ([32, 32, 32, 64],
    AMD EPYC, jax 0.10.2, 2026-11). Of equal pixels one has the gradient in XLA's form, and here each a share; behind a
    ReLU equals are zeros, which pass none on.
    """

    def in_windows(x: jax.Array) -> jax.Array:
        around = ((0, 0), (1, 1), (1, 1), (0, 0))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)

    def along(x: jax.Array, axis: int) -> jax.Array:
        around = [(1, 1) if i == axis else (0, 0) for i in range(4)]
        padded = jnp.pad(x, around, constant_values=-jnp.inf)
        first, middle, last = (
            jax.lax.slice_in_dim(padded, start, start + x.shape[axis] + x.shape[axis] % 2 - 1, 2, axis)
            for start in range(3)
        )
        return jnp.maximum(jnp.maximum(first, middle), last)

    return jax.lax.platform_dependent(x, cpu=lambda x: along(along(x, 1), 2), default=in_windows)
