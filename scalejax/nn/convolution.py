"""Convolutions over pictures, [B, H, W, C]."""

import functools
import itertools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import compat
from scalejax.nn.linear import scaled_normal
from scalejax.numerics.dtypes import FLOAT32, Dtypes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class Conv(nnx.Module):
    """A convolution with square filters and zeros around the picture, as PyTorch has it: k // 2 on each side.

    "SAME" of XLA is another thing where the stride is 2: it pads the right and the bottom first. Filters start normal
    with variance gain / (k * k * out_features), the "fan out" of He et al., 2015.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        bias: float | None = None,
        gain: float = 2.0,
        rngs: nnx.Rngs,
        dtypes: Dtypes = FLOAT32,
    ):
        """Creates the parameters.

        Args:
          in_features: Channels of x.
          out_features: Channels of y.
          kernel: Side of a filter, an odd number.
          stride: Pixels from one place of the filter to the next.
          bias: What the bias of each channel is at first; None = there is none.
          gain: See the class; 2 before a ReLU, 1 before nothing.
          rngs: Source of the "params" key.
          dtypes: Of the parameters, and of the operands.
        """
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"Conv: kernel must be an odd number; got {kernel}.")
        shape = (kernel, kernel, in_features, out_features)
        filters = scaled_normal(
            rngs.params(), shape, fan_in=kernel * kernel * out_features, gain=gain, dtype=dtypes.params
        )
        self.kernel = nnx.Param(filters, logical_axes=(None, None, "input", "hidden"))
        if bias is None:
            self.bias = None
        else:
            self.bias = nnx.Param(jnp.full(out_features, bias, dtypes.params), logical_axes=("hidden",))
        self.stride = stride
        self.compute_dtype = dtypes.compute

    def __call__(self, x: "Float[Array, 'batch height width inputs']") -> "Float[Array, 'batch rows columns outputs']":
        """x: float[B, H, W, in_features]. Returns compute_dtype[B, ceil(H / stride), ..., out_features]."""
        y = convolve(x.astype(self.compute_dtype), self.kernel[...].astype(self.compute_dtype), self.stride)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype).reshape(1, 1, 1, -1)


def convolve(x: jax.Array, filters: jax.Array, stride: int = 1) -> jax.Array:
    """x float[B, H, W, in] with filters [k, k, in, out] of the same dtype, k odd, k // 2 zeros on each side.

    Elsewhere this is XLA's convolution. On a CPU XLA is slow at some kinds, which are made of others there. CPU
    milliseconds of XLA's form and of ours, one thread of an AMD EPYC, the smallest of 9 in turns (jax 0.10.2, 2026-11):

        filters of 1, [32, 24, 24, 64] to 256       products         7.4 to 6.5, filters' gradient 40.7 to 7.4
        16 to 16 channels, [128, 32, 32]            two at a time    12.3 to 8.8, and so the gradient of x
        3 to 16 channels, [128, 32, 32]             four at a time   8.8 to 3.5 (1 to 16, two at a time: 5.3 to 0.8)
        gradient of x, stride 2, 16 to 32 channels  parity by parity 12.0 to 7.5
        rows of x of 16 numbers, y of 16 channels   row by row       35 to 1.7, both gradients 82 to 6.1
                                                                     ([1024, 136, 4, 1] to 4)
        pictures smaller than the filters           tap by tap       536 to 4.2 ([32, 2, 2, 512], 3 x 3)

    The last are those whose operands XLA exchanges, for which it then has a plain loop. The gradient of other filters
    of 3 was slower as products, by 1.1 to 5 times. For that gradient XLA turns x around, and computes it anew meanwhile
    from what it was made of, block before block of a ResNet, unless that ends in what it holds for expensive: see
    `_computed_once`, with which a step of ResNet-20 took 840 instead of 1130 ms of CPU time. With more channels than
    32 it made no difference.
    """
    if _small(x, filters, stride):
        return jax.lax.platform_dependent(
            x, filters, cpu=functools.partial(_taps, stride=stride), default=functools.partial(_plain, stride=stride)
        )
    if _narrow(x, filters, stride):
        plain = functools.partial(_plain, stride=stride)
        return jax.lax.platform_dependent(x, filters, cpu=_rows, default=plain)
    if filters.shape[0] > 1 and filters.shape[2] <= 32:
        x = jax.lax.platform_dependent(x, filters, cpu=_computed_once, default=lambda x, _: x)
    if filters.shape[0] == 1 or _neighbours(x, filters, stride) > 1 or _by_parity(x, filters, stride):
        return _convolve(x, filters, stride)
    return _plain(x, filters, stride)


def _computed_once(x: jax.Array, filters: jax.Array) -> jax.Array:
    """x over 1, where the compiler cannot know that it is 1 (or 2, of filters that are no numbers anyway).

    Divisions are among what XLA does not compute once for each use. It takes `optimization_barrier` away before.
    """
    unknown = jnp.isnan(jax.lax.stop_gradient(filters[0, 0, 0, 0]))
    return x / jnp.where(unknown, 2, 1).astype(x.dtype)


def _plain(x: jax.Array, filters: jax.Array, stride: int) -> jax.Array:
    around = filters.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        filters,
        (stride, stride),
        ((around, around), (around, around)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@compat.custom_vjp(2)
def _convolve(x: jax.Array, filters: jax.Array, stride: int) -> jax.Array:
    def on_cpu(x: jax.Array, filters: jax.Array) -> jax.Array:
        if filters.shape[0] == 1:
            seen = x[:, ::stride, ::stride]
            return (seen.reshape(-1, seen.shape[-1]) @ filters[0, 0]).reshape(*seen.shape[:-1], filters.shape[3])
        together = _neighbours(x, filters, stride)
        return _several(x, filters, together) if together > 1 else _plain(x, filters, stride)

    plain = functools.partial(_plain, stride=stride)
    return jax.lax.platform_dependent(x, filters, cpu=on_cpu, default=plain)


def _forward(x: jax.Array, filters: jax.Array, stride: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, filters, stride), (x, filters)


def _backward(stride: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    def plain(x: jax.Array, filters: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        (dx,) = jax.linear_transpose(lambda x: _plain(x, filters, stride), x)(g)
        (dfilters,) = jax.linear_transpose(lambda filters: _plain(x, filters, stride), filters)(g)
        return dx, dfilters

    def on_cpu(x: jax.Array, filters: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        if filters.shape[0] > 1:
            dx, dfilters = plain(x, filters, g)
            turned = filters[::-1, ::-1].transpose(0, 1, 3, 2)
            if stride == 1 and (together := _neighbours(g, turned, 1)) > 1:
                dx = _several(g, turned, together)
            elif _by_parity(x, filters, stride):
                dx = _parities(g, filters)
            return dx, dfilters
        seen = x[:, ::stride, ::stride]
        rows = g.reshape(-1, g.shape[-1])
        dseen = (rows @ filters[0, 0].T).reshape(seen.shape)
        gaps = [
            (0, size - stride * (there - 1) - 1, stride - 1)
            for size, there in zip(x.shape[1:3], seen.shape[1:3], strict=True)
        ]
        dx = jax.lax.pad(dseen, jnp.zeros((), x.dtype), ((0, 0, 0), *gaps, (0, 0, 0))) if stride > 1 else dseen
        return dx, (seen.reshape(-1, seen.shape[-1]).T @ rows)[None, None]

    x, filters = saved
    return jax.lax.platform_dependent(x, filters, g, cpu=on_cpu, default=plain)


_convolve.defvjp(_forward, _backward)


def _small(x: jax.Array, filters: jax.Array, stride: int) -> bool:
    """Whether y has fewer pixels than a filter."""
    kernel = filters.shape[0]
    return kernel**2 > math.prod(-(-size // stride) for size in x.shape[1:3]) and kernel > 1


def _taps(x: jax.Array, filters: jax.Array, stride: int) -> jax.Array:
    """The convolution as a sum of products, each of one place of the filter with the pixels that it meets."""
    kernel, around = filters.shape[0], filters.shape[0] // 2
    sizes = [-(-size // stride) for size in x.shape[1:3]]
    total = jnp.zeros((len(x), *sizes, filters.shape[3]), x.dtype)
    for i, j in itertools.product(range(kernel), repeat=2):
        met, gaps = [], []
        for tap, size, places in zip((i, j), x.shape[1:3], sizes, strict=True):
            there = [place for place in range(places) if 0 <= stride * place + tap - around < size]
            if there:
                start = stride * there[0] + tap - around
                met.append(slice(start, stride * there[-1] + tap - around + 1, stride))
                gaps.append((there[0], places - 1 - there[-1]))
        if len(met) == 2:
            seen = x[:, met[0], met[1]]
            y = (seen.reshape(-1, seen.shape[-1]) @ filters[i, j]).reshape(*seen.shape[:-1], filters.shape[3])
            total += jnp.pad(y, ((0, 0), *gaps, (0, 0)))
    return total


def _narrow(x: jax.Array, filters: jax.Array, stride: int) -> bool:
    """Whether a row of x has so few numbers, and y so few channels, that products with zeros cost less."""
    return filters.shape[0] > 1 and stride == 1 and math.prod(x.shape[2:]) <= 16 and filters.shape[3] <= 16


def _rows(x: jax.Array, filters: jax.Array) -> jax.Array:
    """The convolution as one product of the rows that a filter meets, side by side, with a matrix of bands."""
    kernel, _, inputs, outputs = filters.shape
    batch, height, width, _ = x.shape
    around = kernel // 2
    tap = np.arange(width)[:, None] - np.arange(width) + around  # place in x, place in y
    met = ((tap >= 0) & (tap < kernel))[..., None, None]
    bands = jnp.where(met, filters[:, np.clip(tap, 0, kernel - 1)], 0)  # k x y in out
    bands = bands.transpose(0, 1, 3, 2, 4).reshape(kernel * width * inputs, width * outputs)
    padded = jnp.pad(x.reshape(batch, height, width * inputs), ((0, 0), (around, around), (0, 0)))
    seen = jnp.concatenate([padded[:, i : i + height] for i in range(kernel)], axis=-1)
    y = seen.reshape(batch * height, kernel * width * inputs) @ bands
    return y.reshape(batch, height, width, outputs)


def _neighbours(x: jax.Array, filters: jax.Array, stride: int) -> int:
    """How many neighbours in a row of y are best computed together; 1 = each by itself."""
    kernel, _, inputs, outputs = filters.shape
    if kernel != 3 or stride > 1 or outputs > 16 or inputs > 16:
        return 1
    together = 4 if 1 < inputs < 8 else 2
    return together if x.shape[2] % together == 0 else 1


def _several(x: jax.Array, filters: jax.Array, together: int) -> jax.Array:
    """The convolution with neighbours of y side by side in its channels, so that these fill the registers.

    Its filters are wider and have zeros: k + together - 1 of k pixels are multiplied.
    """
    kernel, _, inputs, outputs = filters.shape
    shifted = [jnp.pad(filters, ((0, 0), (i, together - 1 - i), (0, 0), (0, 0))) for i in range(together)]
    wide = jnp.stack(shifted, 3).reshape(kernel, kernel + together - 1, inputs, together * outputs)
    around = kernel // 2
    y = jax.lax.conv_general_dilated(
        x, wide, (1, together), ((around, around), (around, around)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.reshape(*x.shape[:3], outputs)


def _by_parity(x: jax.Array, filters: jax.Array, stride: int) -> bool:
    """Whether the gradient of x is best computed for odd and even rows and columns by themselves."""
    sizes = filters.shape[0], stride, x.shape[1] % 2, x.shape[2] % 2
    return sizes == (3, 2, 0, 0) and filters.shape[2] <= 16


def _parities(g: jax.Array, filters: jax.Array) -> jax.Array:
    """The gradient of x, [B, 2 h, 2 w, in], of filters of 3 and stride 2.

    An even row of x meets the middle of the filter alone, an odd one its end in row u of y and its start in row u + 1.
    With parities side by side in channels that is a convolution of y's gradient with filters of 2.
    """
    batch, height, width, _ = g.shape
    turned = filters.transpose(0, 1, 3, 2)  # 3 3 out in
    ends = turned[:, 0].shape
    # Rows u and u + 1 of y, as a row of x of either parity meets them; then columns likewise.
    rows = jnp.stack([jnp.stack([turned[1], turned[2]]), jnp.stack([jnp.zeros(ends, g.dtype), turned[0]])])  # u a 3 ..
    both = jnp.stack(
        [
            jnp.stack([rows[:, :, 1], rows[:, :, 2]], 2),
            jnp.stack([jnp.zeros_like(rows[:, :, 1]), rows[:, :, 0]], 2),
        ],
        1,
    )  # u v a b out in
    small = both.transpose(0, 1, 4, 2, 3, 5).reshape(2, 2, filters.shape[3], -1)
    y = jax.lax.conv_general_dilated(g, small, (1, 1), ((0, 1), (0, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    inputs = filters.shape[2]
    y = y.reshape(batch, height, width, 2, 2 * inputs).transpose(0, 1, 3, 2, 4)
    return y.reshape(batch, 2 * height, 2 * width, inputs)
