"""Block formats: small integers or floats under a scale for every few values."""

import dataclasses

import jax

from scalejax.numerics import formats
from scalejax.numerics.rounding import Rounding
from scalejax.numerics.scales import ScaleRule
from scalejax.parallel.compression import codec
from scalejax.parallel.compression.compressors.protocol import Payload, Traits, check_count, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Bytes of `parallel.compression.codec`; a row begins a block.

    Attributes:
      format: Name of a format: "int4:128", "int4:2048", "int8:128", "bdr_mx9", "mxfp8_e4m3" and so on, not NVFP4.
      rounding: "stochastic" is unbiased: for formats with float32 scales, or under scale_rule="rceil".
      scale_rule: Of formats whose scales are powers of two; None = "floor".
    """

    format: str = "int4:128"
    rounding: Rounding = "stochastic"
    scale_rule: ScaleRule | None = None

    def __post_init__(self) -> None:
        codec.check_format(formats.find(self.format), scale_rule=self.scale_rule, rounding=self.rounding)

    @property
    def traits(self) -> Traits:
        """Unbiased with stochastic rounding, each device with a key of its own."""
        name = f"{self.format}, {self.rounding}"
        return Traits(name, "own", "unbiased") if self.rounding == "stochastic" else Traits(name, "none", "biased")

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(self, n)

    def payload_bytes(self, n: int) -> int:
        """Of codes and scales of n values, without the padding of the last block."""
        return codec.encoded_bytes(n, self.format)

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"blocks": uint8[rows, bytes]}."""
        check_values(self, x, key)
        own = key if self.rounding == "stochastic" else None
        return {"blocks": codec.encode(x, self.format, scale_rule=self.scale_rule, rounding=self.rounding, key=own)}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        del key
        return codec.decode(payload["blocks"], self.format, length=n)
