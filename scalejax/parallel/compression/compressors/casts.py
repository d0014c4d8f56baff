"""float32 and float16."""

import dataclasses

import jax
import jax.numpy as jnp

from scalejax.numerics import bits as float32
from scalejax.parallel.compression.compressors.protocol import Payload, Traits, check_count, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """float32, lossless. For equality with uncompressed sums."""

    @property
    def traits(self) -> Traits:
        """Unbiased."""
        return Traits("identity", "none", "unbiased")

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(self, n)

    def payload_bytes(self, n: int) -> int:
        """Four a value."""
        return 4 * n

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"values": float32[rows, n]}."""
        check_values(self, x, key)
        return {"values": x}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n], to the bit."""
        del n, key
        return payload["values"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp16:
    """float16, to nearest, ties to even.

    A number that float16 has not, from 65,520 on, becomes NaN: neither an infinity that is taken for one of the
    gradient's, nor the largest float16 with nothing said. A step with it is skipped or fails as one with a gradient
    that is NaN; scale the loss down where it happens. Up to 2^-25 values become zeros.
    """

    @property
    def traits(self) -> Traits:
        """Biased, if little."""
        return Traits("fp16", "none", "biased")

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(self, n)

    def payload_bytes(self, n: int) -> int:
        """Two a value."""
        return 2 * n

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"values": float16[rows, n]}."""
        check_values(self, x, key)
        return {"values": to_float16(x)}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        del n, key
        return from_float16(payload["values"])


def to_float16(x: jax.Array) -> jax.Array:
    """float32[...] -> float16[...]; NaN for numbers that float16 has not."""
    rounded = float32.to_dtype(float32.float_bits(x), jnp.float16)
    return jnp.where(jnp.isinf(rounded) & jnp.isfinite(x), jnp.float16(jnp.nan), rounded)


def from_float16(x: jax.Array) -> jax.Array:
    """float16[...] -> float32[...], exact."""
    return jax.lax.bitcast_convert_type(float32.float_bits(x), jnp.float32)
