"""Hourglass networks for key points, in the shape that CornerNet and ExtremeNet gave them.

Newell et al., 2016; the details are those of ExtremeNet's `exkp` (Zhou et al., 2019):

    stem       7x7 convolution of stride 2, BatchNorm, ReLU; a residual of stride 2: maps of a quarter of the size
    hourglass  y = residuals(x) + up(residuals(inner(residuals(x, stride 2)))), inner again an hourglass of less depth;
               up repeats each cell 2 x 2
    stack      hourglass, then a 3x3 convolution: what heads read. The next stack begins at
               residual(relu(BN(1x1 of what this one began at) + BN(1x1 of what heads read)))

A residual is relu(BN(3x3) of relu(BN(3x3, stride)) + shortcut), whose shortcut has a 1x1 convolution and BatchNorm
where shapes change. No convolution but those of heads has a bias.

    B pictures    H, W pixels    h, w cells    C channels
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.nn.norm import Purpose

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

STRIDE = 4
"""Pixels of a side of a cell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HourglassConfig:
    """Architecture.

    Attributes:
      stacks: Hourglasses, one after another; each is supervised.
      widths: Channels of maps of a quarter of the size of pictures, and then of each depth.
      blocks: Residuals of each of them; on the way down, beside it and on the way up.
      stem: Channels after the first convolution.
      features: Channels that heads read.
    """

    stacks: int = 2
    widths: tuple[int, ...] = (256, 256, 384, 384, 384, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2, 2, 4)
    stem: int = 128
    features: int = 256

    def __post_init__(self) -> None:
        """Refuses sizes that do not go together.

        Raises:
          UserError: names them.
        """
        if self.stacks < 1 or len(self.widths) < 2 or len(self.widths) != len(self.blocks):
            raise UserError(
                f"HourglassConfig: wants stacks >= 1 and as many widths as blocks, two or more; got stacks="
                f"{self.stacks}, widths={self.widths}, blocks={self.blocks}."
            )

    @property
    def depth(self) -> int:
        """How often maps are halved within an hourglass."""
        return len(self.widths) - 1

    def cells(self, height: int, width: int) -> tuple[int, int]:
        """Cells of the maps of pictures of a size.

        Raises:
          UserError: maps cannot be halved so often.
        """
        cells = -(-height // STRIDE), -(-width // STRIDE)
        if any(size % 2**self.depth for size in cells):
            raise UserError(
                f"Pictures of {height} x {width} give maps of {cells[0]} x {cells[1]} cells, which an hourglass of "
                f"depth {self.depth} cannot halve {self.depth} times. Use sizes that are multiples of "
                f"{STRIDE * 2**self.depth}, or up to 3 pixels less, or fewer widths and blocks."
            )
        return cells


SIZES = {
    "extremenet": HourglassConfig(),
    "small": HourglassConfig(stacks=1, widths=(24, 36, 48, 64), blocks=(1, 1, 1, 1), stem=16, features=24),
}
"""ExtremeNet's (`exkp.py`, commit 9f501902: hourglass-104), and one for tiles of 128 pixels."""


class Residual(nnx.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, dtypes: nn.Dtypes, *, stride: int = 1):
        self.first = nn.ConvNorm(inputs, outputs, stride=stride, rngs=rngs, dtypes=dtypes)
        self.second = nn.ConvNorm(outputs, outputs, rngs=rngs, dtypes=dtypes)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            None if same else nn.ConvNorm(inputs, outputs, kernel=1, stride=stride, rngs=rngs, dtypes=dtypes)
        )

    def __call__(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        y = self.second(jax.nn.relu(self.first(x, purpose)), purpose)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x, purpose)))


class Residuals(nnx.Module):
    """Residuals one after another, through these numbers of channels; the first may halve the maps."""

    def __init__(self, channels: tuple[int, ...], rngs: nnx.Rngs, dtypes: nn.Dtypes, *, stride: int = 1):
        self.blocks = nnx.List(
            [
                Residual(a, b, rngs, dtypes, stride=stride if number == 0 else 1)
                for number, (a, b) in enumerate(itertools.pairwise(channels))
            ]
        )

    def __call__(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        for block in self.blocks:
            x = block(x, purpose)
        return x


class Hourglass(nnx.Module):
    """Maps to maps of the same size, by way of ever coarser ones."""

    def __init__(self, widths: tuple[int, ...], blocks: tuple[int, ...], rngs: nnx.Rngs, dtypes: nn.Dtypes):
        (width, inner, *_), count = widths, blocks[0]
        self.beside = Residuals((width,) * (count + 1), rngs, dtypes)
        self.down = Residuals((width, *(inner,) * count), rngs, dtypes, stride=2)
        if len(widths) > 2:
            self.inner = Hourglass(widths[1:], blocks[1:], rngs, dtypes)
        else:
            self.inner = Residuals((inner,) * (blocks[1] + 1), rngs, dtypes)
        self.up = Residuals((*(inner,) * count, width), rngs, dtypes)

    def __call__(self, x: jax.Array, purpose: Purpose) -> jax.Array:
        low = self.up(self.inner(self.down(x, purpose), purpose), purpose)
        return self.beside(x, purpose) + low.repeat(2, 1).repeat(2, 2)


class HourglassNetwork(nnx.Module):
    """Stem and stacks."""

    def __init__(self, config: HourglassConfig, channels: int, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        width, stacks = config.widths[0], range(config.stacks)
        self.stem = nn.ConvNorm(channels, config.stem, kernel=7, stride=2, rngs=rngs, dtypes=dtypes)
        self.entry = Residual(config.stem, width, rngs, dtypes, stride=2)
        self.glasses = nnx.List([Hourglass(config.widths, config.blocks, rngs, dtypes) for _ in stacks])
        self.exits = nnx.List([nn.ConvNorm(width, config.features, rngs=rngs, dtypes=dtypes) for _ in stacks])
        between = range(config.stacks - 1)
        self.kept = nnx.List([nn.ConvNorm(width, width, kernel=1, rngs=rngs, dtypes=dtypes) for _ in between])
        self.handed = nnx.List(
            [nn.ConvNorm(config.features, width, kernel=1, rngs=rngs, dtypes=dtypes) for _ in between]
        )
        self.entries = nnx.List([Residual(width, width, rngs, dtypes) for _ in between])

    def __call__(
        self, x: "Float[Array, 'batch height width channels']", purpose: Purpose
    ) -> "tuple[Float[Array, 'batch h w features'], ...]":
        """x: float[B, H, W, channels]. Returns what the heads of each stack read."""
        begin = self.entry(jax.nn.relu(self.stem(x, purpose)), purpose)
        found = []
        for stack, (glass, leave) in enumerate(zip(self.glasses, self.exits, strict=True)):
            found.append(jax.nn.relu(leave(glass(begin, purpose), purpose)))
            if stack < len(self.entries):
                both = self.kept[stack](begin, purpose) + self.handed[stack](found[-1], purpose)
                begin = self.entries[stack](jax.nn.relu(both), purpose)
        return tuple(found)


class Head(nnx.Module):
    """A 3x3 convolution without norm, ReLU, and a 1x1 convolution: some numbers of each cell, in float32 or wider."""

    def __init__(self, inputs: int, hidden: int, outputs: int, rngs: nnx.Rngs, dtypes: nn.Dtypes, *, bias: float = 0.0):
        self.first = nn.Conv(inputs, hidden, bias=0.0, rngs=rngs, dtypes=dtypes)
        self.second = nn.Conv(hidden, outputs, kernel=1, bias=bias, gain=1e-2, rngs=rngs, dtypes=dtypes)

    def __call__(self, x: "Float[Array, 'batch h w features']") -> "Float[Array, 'batch h w outputs']":
        y = self.second(jax.nn.relu(self.first(x)))
        return y.astype(jnp.promote_types(y.dtype, jnp.float32))
