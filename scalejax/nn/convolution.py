"""Convolutions over pictures, [B, H, W, C]."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

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
    """x float[B, H, W, in] with filters [k, k, in, out] of the same dtype, k odd, k // 2 zeros on each side."""
    around = filters.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        filters,
        (stride, stride),
        ((around, around), (around, around)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
