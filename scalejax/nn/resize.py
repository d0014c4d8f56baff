"""Pictures of other sizes, on the device."""

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax.errors import check_one_of
from scalejax.nn.linear import wide

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Num


def resize(
    images: "Num[Array, 'batch height width channels']",
    size: tuple[int, int],
    method: Literal["linear", "cubic"] = "linear",
) -> "Num[Array, 'batch rows columns channels']":
    """Scales pictures, with antialiasing where they become smaller.

    Each pixel is a mean of those that it covers, weighted by a triangle (or a cubic) as wide as they lie apart on the
    coarser side: Pillow's BILINEAR, and PyTorch's `interpolate(..., antialias=True)`. What data sets read from files is
    scaled by Pillow on the host (`size=`); this is for arrays that lie on a device, under `jit` and `grad`.

    Args:
      images: Numbers [B, H, W, C].
      size: Height and width.
      method: "cubic" is sharper and may leave the range of the values.
    Returns:
      The dtype of `images` [B, *size, C]; integers are rounded and kept within their range.
    Raises:
      UserError: an unknown method.
      ValueError: a size below 1, or arrays of another number of axes.
    """
    check_one_of("resize: method", method, ("linear", "cubic"))
    if images.ndim != 4 or min(size) < 1:
        raise ValueError(f"resize: wanted [B, H, W, C] and a size of 1 or more; got {list(images.shape)} and {size}.")
    integral = jnp.issubdtype(images.dtype, jnp.integer)
    values = images.astype(jnp.float32 if integral else wide(images.dtype))
    found = jax.image.resize(values, (len(images), *size, images.shape[-1]), method, antialias=True)
    if integral:
        limits = jnp.iinfo(images.dtype)
        found = jnp.clip(jnp.round(found), limits.min, limits.max)
    return found.astype(images.dtype)
