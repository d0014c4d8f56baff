"""Signs."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import check_one_of, check_whole
from scalejax.parallel.compression.compressors import levels
from scalejax.parallel.compression.compressors.norms import norm
from scalejax.parallel.compression.compressors.protocol import Growth, Payload, Traits, check_count, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit:
    """A bit a value, set where it is negative, and a float32 a group that all its values get with their signs.

    Zero counts as positive, except that a group of zeros stays one. With "mean" each group of n values has
    ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / n: a row of several parameters, whose gradients differ in size, loses most of
    what is small, which small groups keep (Zheng, Huang, Kwok 2019, arXiv 1905.10936, have blocks for that).

    Attributes:
      scale: "mean" of the magnitudes, as BytePS has it; "l2", the root of the mean square, as DeepSpeed has it, which
        is at least as large; "none" for 1, which still travels: it says that a group is zero, or NaN. A group whose
        magnitudes add up to more than a float32 holds decodes to NaN.
      group: Values that share a scale; None = a row, as in BytePS.
    """

    scale: Literal["mean", "l2", "none"] = "mean"
    group: int | None = None

    def __post_init__(self) -> None:
        check_one_of("OneBit: scale", self.scale, ("mean", "l2", "none"))
        if self.group is not None:
            object.__setattr__(self, "group", check_whole("OneBit: group", self.group, 1))

    @property
    def traits(self) -> Traits:
        """Biased; without a scale a value is no nearer than one away."""
        growth = None
        if self.scale == "none":
            growth = Growth(1, "it sends ones, which never catch up with gradients beyond 1", "scale", "mean")
        groups = "" if self.group is None else f", groups of {self.group}"
        return Traits(f"onebit, scale {self.scale}{groups}", "none", "biased", growth)

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(self, n)

    def payload_bytes(self, n: int) -> int:
        """A bit a value, filled up to a byte, and four a group."""
        return levels.packed_bytes(n, 1) + 4 * math.ceil(n / (self.group or n))

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"signs": uint8[rows, ceil(n / 8)], bit j of byte i of value 8 i + j; "scale": float32[rows, groups]}."""
        check_values(self, x, key)
        (rows, n), size = x.shape, min(self.group or x.shape[1], x.shape[1])
        count = math.ceil(n / size)
        groups = jnp.pad(x, ((0, 0), (0, count * size - n))).reshape(rows * count, size)
        held = np.tile(np.minimum(size, n - size * np.arange(count)), rows).astype(np.float32)  # the last may be short
        if self.scale == "mean":
            scale = jnp.abs(groups).sum(axis=1) / held
        elif self.scale == "l2":
            scale = norm(groups, "l2") * held**-0.5
        else:
            largest = norm(groups, "max")
            scale = jnp.where(largest > 0, 1, largest)
        return {
            "signs": levels.pack((x < 0).astype(jnp.int32), 1),
            "scale": jnp.where(jnp.isfinite(scale), scale, jnp.nan).reshape(rows, count),
        }

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n], the scale of its group with a sign."""
        del key
        scale = jnp.repeat(payload["scale"], min(self.group or n, n), axis=1)[:, :n]
        return jnp.where(levels.unpack(payload["signs"], 1, n) == 1, -scale, scale)
