"""A small convolutional network, for pictures of some 30 pixels on a laptop.

Stages of a convolution 3 x 3, BatchNorm and ReLU, each but the first of half the resolution; then all pixels and
channels as one row, a hidden layer, and the logits. It has more parameters than small data sets have labels, so that it
can learn labels that are wrong by heart: what methods against noise are compared on.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING

import jax
from flax import nnx

from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision.classification import ClassifierTask
from scalejax.models.vision.inputs import standardized
from scalejax.nn import BatchNorm, Conv, Mlp, wide
from scalejax.nn.norm import Purpose
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.self_distillation import AnyLearning, CrossEntropy

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Num


class Cnn(nnx.Module):
    """(stored pixels, purpose) -> logits."""

    def __init__(self, config: "CnnConfig", schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes):
        """Creates the parameters."""
        widths = (schema.channels, *config.widths)
        self.schema, self.dtypes, self.stride = schema, dtypes, config.stride
        self.convolutions = nnx.List(
            [
                Conv(before, after, stride=config.stride if i == 0 else 2, rngs=rngs, dtypes=dtypes)
                for i, (before, after) in enumerate(itertools.pairwise(widths))
            ]
        )
        self.norms = nnx.List([BatchNorm(width, dtypes=dtypes) for width in config.widths])
        height, width = schema.height, schema.width
        for conv in self.convolutions:
            height, width = (-(-size // conv.stride) for size in (height, width))
        sizes = (height * width * widths[-1], config.hidden, len(schema.classes))
        self.head = Mlp(sizes, rngs=rngs, dtypes=dtypes, out_dtype=wide(dtypes.compute))

    def __call__(
        self,
        images: "Num[Array, 'batch height width channels']",
        purpose: Purpose,
    ) -> "Float[Array, 'batch classes']":
        x = standardized(images, self.schema, self.dtypes)
        for conv, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x), purpose))
        return self.head(x.reshape(len(x), -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """Its sizes.

    Attributes:
      widths: Channels of each stage.
      stride: Of the first convolution.
      hidden: Of the layer before the logits.
      learning: What it learns from.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    stride: int = 1
    hidden: int = 128
    learning: AnyLearning = CrossEntropy()

    FREE = ("learning",)

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> Cnn:
        """The network."""
        return Cnn(self, schema, rngs, dtypes)

    def task(self, schema: ImageSchema) -> ClassifierTask:
        """Binds it to pictures."""
        return ClassifierTask(config=self, schema=schema)
