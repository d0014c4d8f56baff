"""Levels under one scale a row, rounded stochastically to one of the two next to a value, unbiased."""

import abc
import dataclasses
from typing import ClassVar, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from scalejax.errors import check_one_of, check_whole
from scalejax.numerics.stochastic import place_bits
from scalejax.parallel.compression.compressors import levels as streams
from scalejax.parallel.compression.compressors.norms import norm
from scalejax.parallel.compression.compressors.protocol import (
    Compressor,
    Growth,
    Payload,
    Traits,
    check_count,
    check_values,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dithering(abc.ABC):
    """What both have; `_MOST`, `_KIND` and `_rows_under_l2` are theirs."""

    _MOST: ClassVar[int]
    _KIND: ClassVar[str]
    levels: int = 7
    scale: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_one_of(f"{owner}: scale", self.scale, ("max", "l2"))
        object.__setattr__(self, "levels", check_whole(f"{owner}: levels", self.levels, 1, self._MOST))

    @property
    def traits(self) -> Traits:
        """Unbiased; each device with a key of its own."""
        name = f"{self._KIND} dithering, {self.levels} levels, scale {self.scale}"
        growth = None
        if self.scale == "l2":
            rows = self._rows_under_l2()
            why = f"its levels lie further apart than the values of rows of {rows} and more"
            growth = Growth(rows, why, "scale", "max")
        elif self.levels == 1:
            # More levels leave at most half of the largest magnitude, of which one can leave all, and on average more
            # than the length of rows of 9.
            growth = Growth(9, "between its levels lies all that rows hold", "levels", 2)
        return Traits(name, "own", "unbiased", growth)

    def check(self, n: int) -> None:
        """Refuses empty rows."""
        check_count(cast("Compressor", self), n)

    def payload_bytes(self, n: int) -> int:
        """Bits of 2 s for each value, and four."""
        return streams.packed_bytes(n, (2 * self.levels).bit_length()) + 4

    @abc.abstractmethod
    def _rows_under_l2(self) -> int:
        """The shortest rows with E ||C(x) - x||^2 >= ||x||^2 for some x, under scale="l2"."""

    def _packed(self, level: jax.Array) -> jax.Array:
        return streams.pack(level + self.levels, (2 * self.levels).bit_length())

    def _unpacked(self, data: jax.Array, n: int) -> jax.Array:
        return streams.unpack(data, (2 * self.levels).bit_length(), n) - self.levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearDithering(_Dithering):
    """Levels -s to s, equally far apart: QSGD's quantizer.

    Attributes:
      levels: s, 1 to 32,767; a value takes as many bits as 2 s has.
      scale: The value of level s: the largest magnitude ("max") or the Euclidean length ("l2") of the row.
    """

    _MOST, _KIND = 2**15 - 1, "linear"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"levels": uint8[rows, bytes], level + s; "unit": float32[rows], the value of level 1}."""
        check_values(self, x, key)
        assert key is not None
        unit = norm(x, self.scale) / self.levels
        # In fixed point: floats would be rounded otherwise where a compiler fuses a product with the sum behind it.
        fraction = 30 - self.levels.bit_length()
        steps = _over(x, unit, 2.0**fraction).astype(jnp.int32)
        chance = (place_bits(key, x.shape) >> (32 - fraction)).astype(jnp.int32)
        level = jnp.clip((steps + chance) >> fraction, -self.levels, self.levels)
        return {"levels": self._packed(level), "unit": unit}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        del key
        return self.signed_levels(payload, n).astype(jnp.float32) * payload["unit"][:, None]

    def signed_levels(self, payload: Payload, n: int) -> jax.Array:
        """int32[rows, n], -s to s."""
        return self._unpacked(payload["levels"], n)

    def _rows_under_l2(self) -> int:
        return 4 * self.levels**2  # all values half-way to the first level


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalDithering(_Dithering):
    """Levels 0, 1, 2, 4, ... 2^(s-1) with both signs, 2^(s-1) standing for the scale: small values keep their size.

    Attributes:
      levels: s, 1 to 30; a value takes as many bits as 2 s has.
      scale: The value of the last level: the largest magnitude ("max") or the Euclidean length ("l2") of the row.
    """

    _MOST, _KIND = 30, "natural"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Payload:
        """{"levels": uint8[rows, bytes], s + j for 2^(j-1) and s - j for -2^(j-1); "scale": float32[rows]}."""
        check_values(self, x, key)
        assert key is not None
        scale, top = norm(x, self.scale), 2.0 ** (self.levels - 1)
        y = jnp.minimum(_over(jnp.abs(x), scale, top), top)
        # Between 1 and 2 the mantissa of a float is how far it is on its way, and a carry out of it the next level.
        # Of what 0 and 1 have between them it is 1 + y; the others are doubled, so that levels are exponents.
        below = 0x3F800000 + (y * 2.0**23).astype(jnp.int32)
        above = jax.lax.bitcast_convert_type(y, jnp.int32) + (1 << 23)
        chance = (place_bits(key, x.shape) >> 9).astype(jnp.int32)
        place = ((jnp.where(y < 1, below, above) + chance) >> 23) - 127
        return {"levels": self._packed(jnp.where(x < 0, -place, place)), "scale": scale}

    def decode(self, payload: Payload, n: int, key: jax.Array | None = None) -> jax.Array:
        """float32[rows, n]."""
        del key
        place = self._unpacked(payload["levels"], n)
        power = jax.lax.bitcast_convert_type((jnp.abs(place) + (127 - self.levels)) << 23, jnp.float32)
        part = jnp.where(place == 0, 0, jnp.where(place < 0, -power, power))
        return part * payload["scale"][:, None]

    def signed_levels(self, payload: Payload, n: int) -> jax.Array:
        """int32[rows, n]: 0 and powers of two up to 2^(s-1), with signs."""
        place = self._unpacked(payload["levels"], n)
        return jnp.sign(place) * ((1 << jnp.abs(place)) >> 1)

    def _rows_under_l2(self) -> int:
        return 4**self.levels * 63 // 64  # one value a third of its way between two levels, all others below the first


def entropy_coded_bytes(levels: npt.ArrayLike) -> int:
    """Bytes of a row of levels, coded as released code codes them under "l2". Nothing travels so: the size is known at
    run time only.

    For each level other than 0, in Elias' delta code the distance to the one before it, counted from place -1, then a
    bit for the sign, then the magnitude in that code. Words of 32 bits, one more for the count of bits, and the scale.

    Args:
      levels: int[n], from `signed_levels`.
    """
    row = np.asarray(levels).astype(np.int64)
    places = np.flatnonzero(row)
    bits = _delta_bits(np.diff(places, prepend=-1)) + 1 + _delta_bits(np.abs(row[places]))
    return 4 * -(-int(bits.sum()) // 32) + 8


def _delta_bits(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bits of Elias' delta code of positive integers."""
    length = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return length - 1 + 2 * np.frexp(length.astype(np.float64))[1].astype(np.int64) - 1


def _over(x: jax.Array, unit: jax.Array, factor: float) -> jax.Array:
    """x / unit * factor, float32[rows, n], from one product that is rounded; 0 where the unit is."""
    # By 2^64 first, exactly, lest the quotient of a small unit overflows.
    lift = jnp.where(unit < 1, jnp.float32(2.0**64), 1)
    quotient = jnp.where(unit > 0, factor / (unit * lift), 0)
    return x * lift[:, None] * quotient[:, None]
