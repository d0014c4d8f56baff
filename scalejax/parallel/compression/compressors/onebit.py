"""Signs."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from scalejax.errors import check_one_of
from scalejax.parallel.compression.compressors import levels
from scalejax.parallel.compression.compressors.norms import norm
from scalejax.parallel.compression.compressors.protocol import Growth, Payload, Traits, check_count, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit:
    """A bit a value, set where it is negative, and a float32 a row that all its values get with their signs.

    Zero counts as positive, except that a row of zeros stays one. With "mean" ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / n.

    Attributes:
      scale: "mean" of the magnitudes, as BytePS has it; "l2", the root of the mean square, as DeepSpeed has it, which
        is at least as large; "none" for 1, which still travels: it says that a row is zero, or NaN. A row whose
        magnitudes add up to more than a float32 holds decodes to NaN.
    """

    scale: Literal["mean", "l2", "none"] = "mean"

    def __post_init__(self) -> None:
        check_one_of("OneBit: scale", self.scale, ("mean", "l2", "none"))

    @property
    def traits(self) -> Traits:
        """Biased; without a scale a value is no nearer than one away."""
        growth = None
        if self.scale == "none":
            growth = Growth(1, "it sends ones, which never catch up with gradients beyond 1", "scale", "mean")
        return Traits(f"onebit, scale {self.scale}", "none", "biased", growth)

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(self, n)

    def payload_bytes(self, n: int) -> int:
        """A bit a value, filled up to a byte, and four."""
        return levels.packed_bytes(n, 1) + 4

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"signs": uint8[rows, ceil(n / 8)], bit j of byte i that of value 8 i + j; "scale": float32[rows]}."""
        check_values(self, x, key)
        if self.scale == "mean":
            scale = jnp.mean(jnp.abs(x), axis=1)
        elif self.scale == "l2":
            scale = norm(x, "l2") * x.shape[1] ** -0.5
        else:
            largest = norm(x, "max")
            scale = jnp.where(largest > 0, 1, largest)
        return {
            "signs": levels.pack((x < 0).astype(jnp.int32), 1),
            "scale": jnp.where(jnp.isfinite(scale), scale, jnp.nan),
        }

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n], the scale of its row with a sign."""
        del key
        scale = payload["scale"][:, None]
        return jnp.where(levels.unpack(payload["signs"], 1, n) == 1, -scale, scale)
