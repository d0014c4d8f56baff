"""How values travel: their format, and codes and scales together."""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax.errors import UserError, check_one_of
from scalejax.kernels.group_quantize.values import TRANSFORM, top_level

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import UInt8


def check_group_size(name: str, size: int) -> None:
    """Refuses sizes of groups in which no whole transforms lie.

    Raises:
      UserError: names the nearest.
    """
    if size < 1 or size % TRANSFORM:
        nearest = max(1, round(size / TRANSFORM)) * TRANSFORM
        raise UserError(
            f"{name} must be a positive multiple of {TRANSFORM}, so that a Hadamard transform lies in one group; got "
            f"{size}. The nearest is {nearest}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntGroups:
    """How values travel.

    Attributes:
      bits: Of a value: 4 or 8.
      size: Values that share a scale; a multiple of 32, so that a transform lies in one group.
    """

    bits: Literal[4, 8]
    size: int

    def __post_init__(self) -> None:
        check_one_of("IntGroups: bits", self.bits, (4, 8))
        check_group_size("IntGroups: size", self.size)

    @property
    def levels(self) -> int:
        """The largest level: 7 or 127."""
        return top_level(self.bits)

    @property
    def bytes_per_value(self) -> float:
        """With scales: 0.53125 for 4 bits in groups of 128."""
        return self.bits / 8 + 4 / self.size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedGroups:
    """Quantized values.

    Attributes:
      codes: uint8[..., n bits / 8].
      scales: float32[..., n / size]; NaN where a group held NaN or infinities.
    """

    codes: jax.Array
    scales: jax.Array


def to_bytes(groups: QuantizedGroups) -> "UInt8[Array, '*rows bytes']":
    """Scales and codes in one array, so that they travel in one collective."""
    scales = jax.lax.bitcast_convert_type(groups.scales, jnp.uint8)
    return jnp.concatenate([scales.reshape(*scales.shape[:-2], -1), groups.codes], axis=-1)


def from_bytes(data: "UInt8[Array, '*rows bytes']", n: int, format: IntGroups) -> QuantizedGroups:
    """The inverse of `to_bytes` for n values a row."""
    count = n // format.size
    scales = data[..., : 4 * count].reshape(*data.shape[:-1], count, 4)
    return QuantizedGroups(data[..., 4 * count :], jax.lax.bitcast_convert_type(scales, jnp.float32))
