"""Groups of values as small integers under a scale, and the Hadamard transform that evens them out before.

    format = IntGroups(bits=4, size=128)
    groups = quantize(hadamard(x), format, seed)          # float32[..., n] -> uint8[..., n / 2], float32[..., n / 128]
    hadamard(dequantize(groups, format)) / 32

A group of values has the scale max |x| / (2^(bits - 1) - 1), and each value the integer level nearest to x / scale, or
one of the two around it by chance so that it is right on average. Levels are symmetric, -7 to 7 or -127 to 127: all 16
converged worse at the end of training in the released code of SDP4Bit.

Of 4 bits element i of a group and element i + size / 2 share a byte, the first in the low half: on a TPU neighbours in
one byte would need strided slices, which Mosaic does not have.

Chance comes from a hash of the seed and the place of the value in the array, so that it needs no memory and is the same
on every platform.

Source: Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
NeurIPS 2024.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from scalejax.errors import UserError, check_one_of
from scalejax.kernels.group_quantize import xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, UInt8, UInt32

TRANSFORM = 32
"""Values that a Hadamard transform mixes."""


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
        if self.size < 1 or self.size % TRANSFORM:
            nearest = max(1, round(self.size / TRANSFORM)) * TRANSFORM
            raise UserError(
                f"IntGroups: size must be a positive multiple of {TRANSFORM}, so that a Hadamard transform lies in one "
                f"group; got {self.size}. The nearest is {nearest}."
            )

    @property
    def levels(self) -> int:
        """The largest level: 7 or 127."""
        return 2 ** (self.bits - 1) - 1

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


def quantize(
    x: "Float32[Array, '*rows n']", format: IntGroups, seed: "UInt32[Array, '2'] | None" = None
) -> QuantizedGroups:
    """Values as codes and scales.

    Args:
      x: float32[..., n], n a multiple of the group size.
      format: Of the groups.
      seed: uint32[2] for rounding by chance; None rounds to nearest, ties to even.

    Raises:
      UserError: another dtype, or n does not divide.
    """
    _check("quantize", x, format)
    codes, scales = xla.quantize(x, format.bits, format.size, seed)
    return QuantizedGroups(codes, scales)


def dequantize(groups: QuantizedGroups, format: IntGroups) -> "Float32[Array, '*rows n']":
    """float32[..., n] of what `quantize` gave; NaN in groups whose scale is."""
    return xla.dequantize(groups.codes, groups.scales, format.bits, format.size)


def hadamard(x: "Float32[Array, '*rows n']") -> "Float32[Array, '*rows n']":
    """Each 32 values times the Walsh-Hadamard matrix H of +-1, not normalised: H H = 32 I.

    Raises:
      UserError: n is no multiple of 32.
    """
    if x.shape[-1] % TRANSFORM:
        raise UserError(
            f"hadamard: blocks have {TRANSFORM} values; got a last axis of {x.shape[-1]}. Fill it up with zeros."
        )
    return xla.hadamard(x, TRANSFORM)


def to_bytes(groups: QuantizedGroups) -> "UInt8[Array, '*rows bytes']":
    """Scales and codes in one array, so that they travel in one collective."""
    scales = jax.lax.bitcast_convert_type(groups.scales, jnp.uint8)
    return jnp.concatenate([scales.reshape(*scales.shape[:-2], -1), groups.codes], axis=-1)


def from_bytes(data: "UInt8[Array, '*rows bytes']", n: int, format: IntGroups) -> QuantizedGroups:
    """The inverse of `to_bytes` for n values a row."""
    count = n // format.size
    scales = data[..., : 4 * count].reshape(*data.shape[:-1], count, 4)
    return QuantizedGroups(data[..., 4 * count :], jax.lax.bitcast_convert_type(scales, jnp.float32))


def _check(op: str, x: jax.Array, format: IntGroups) -> None:
    if x.dtype != jnp.float32:
        raise UserError(f"{op}: x must be float32; got {x.dtype}. Cast it.")
    if x.shape[-1] % format.size:
        raise UserError(
            f"{op}: groups have {format.size} values, and the last axis of x{list(x.shape)} is no multiple of it. Fill "
            "it up with zeros, which change no scale."
        )
