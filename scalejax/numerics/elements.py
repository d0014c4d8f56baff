"""Formats of one element, as data, and the way from a number to its code and back.

A code is an unsigned integer of `bits` bits. Its magnitude part c counts representable numbers upwards from zero:

    k = max((c >> mantissa_bits) - 1, 0),    |value| = (c - (k << mantissa_bits)) * 2^(min_exponent + k - mantissa_bits)

which is how sub-byte floats are laid out (exponent field above mantissa field, subnormals at the bottom) and, with one
exponent only, how integers are. So one encoder and one decoder do for all of them.

    E4M3, E5M2           OCP 8-bit floats: NaN only, and infinities and NaN
    E3M2, E2M3, E2M1     OCP 6-bit and 4-bit floats, every code a number
    INT8                 OCP MXINT8: two's complement in steps of 1/64; -2 is left unused
    signed_magnitude(m)  sign and m magnitude bits in steps of 2^(1 - m): below 2, like the significand of a float
    integer(b)           two's complement in steps of 1 from -(2^(b-1) - 1), symmetric; unsigned(b) from 0

Source: OCP Microscaling Formats (MX) v1.0; Rouhani et al., ISCA 2023.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.numerics import bits as float32
from scalejax.numerics.rounding import Rounding, shift_right


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """A format of one element.

    Attributes:
      name: for people and error messages.
      bits: of a code, with its sign.
      mantissa_bits: below the leading bit.
      min_exponent: of the smallest normal number; below it the step stays the same.
      max_code: magnitude part of the largest finite number; larger values saturate to it.
      encoding: what a sign does to a code.
      specials: what magnitudes above max_code are; of "infinity and nan" the infinity comes first. None is ever
        written, as a block with NaN or an infinity is marked in its scale; others write them, and they are decoded.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_code: int
    encoding: Literal["sign and magnitude", "two's complement", "unsigned"] = "sign and magnitude"
    specials: Literal["none", "nan", "infinity and nan"] = "none"

    @property
    def step_exponent(self) -> int:
        """The smallest positive number is 2^step_exponent."""
        return self.min_exponent - self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return self.min_exponent + max((self.max_code >> self.mantissa_bits) - 1, 0)

    @property
    def max_count(self) -> int:
        """max = max_count * 2^(max_exponent - mantissa_bits)."""
        return self.max_code - ((self.max_exponent - self.min_exponent) << self.mantissa_bits)

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self.max_count * 2.0 ** (self.max_exponent - self.mantissa_bits)

    @functools.cached_property
    def magnitudes(self) -> np.ndarray:
        """float64[max_code + 1]: what the codes from 0 to max_code stand for, increasing."""
        codes = np.arange(self.max_code + 1)
        above = np.maximum((codes >> self.mantissa_bits) - 1, 0)
        return (codes - (above << self.mantissa_bits)) * 2.0 ** (self.step_exponent + above)


E4M3 = Element(name="E4M3", bits=8, mantissa_bits=3, min_exponent=-6, max_code=0x7E, specials="nan")
E5M2 = Element(name="E5M2", bits=8, mantissa_bits=2, min_exponent=-14, max_code=0x7B, specials="infinity and nan")
E3M2 = Element(name="E3M2", bits=6, mantissa_bits=2, min_exponent=-2, max_code=0x1F)
E2M3 = Element(name="E2M3", bits=6, mantissa_bits=3, min_exponent=0, max_code=0x1F)
E2M1 = Element(name="E2M1", bits=4, mantissa_bits=1, min_exponent=0, max_code=0x7)
INT8 = Element(name="INT8", bits=8, mantissa_bits=6, min_exponent=0, max_code=0x7F, encoding="two's complement")


def signed_magnitude(magnitude_bits: int) -> Element:
    """A sign and `magnitude_bits` bits without a hidden one, 2^(1 - magnitude_bits) apart: the element of MX9/6/4."""
    return Element(
        name=f"S{magnitude_bits}",
        bits=magnitude_bits + 1,
        mantissa_bits=magnitude_bits - 1,
        min_exponent=0,
        max_code=(1 << magnitude_bits) - 1,
    )


def integer(bits: int) -> Element:
    """Two's complement, symmetric: the integers from -(2^(bits-1) - 1) to 2^(bits-1) - 1."""
    return Element(
        name=f"I{bits}",
        bits=bits,
        mantissa_bits=bits - 2,
        min_exponent=bits - 2,
        max_code=(1 << (bits - 1)) - 1,
        encoding="two's complement",
    )


def unsigned(bits: int) -> Element:
    """The integers from 0 to 2^bits - 1."""
    return Element(
        name=f"U{bits}",
        bits=bits,
        mantissa_bits=bits - 1,
        min_exponent=bits - 1,
        max_code=(1 << bits) - 1,
        encoding="unsigned",
    )


def magnitude_code(
    significand: jax.Array,
    exponent: jax.Array,
    element: Element,
    rounding: Rounding,
    chance: jax.Array | None = None,
) -> jax.Array:
    """The code without its sign of significand * 2^(exponent - 23), saturated.

    Args:
      significand: int32[...] in [2^23, 2^24).
      exponent: int32[...], relative to the scale of the block; ZERO_EXPONENT minus any scale for zero.
      element: the format. Its values may be arrays that broadcast, as in scalejax.numerics.search.
      rounding: how, before values beyond the largest become the largest.
      chance: uint32[...] for stochastic rounding.

    Returns:
      int32[...], at most max_code.
    """
    bounded = jnp.maximum(exponent, element.min_exponent)
    drop = bounded - exponent + (23 - element.mantissa_bits)
    count = shift_right(significand, drop, rounding, chance)
    # A count that was rounded up to the next power of two carries into the exponent by itself.
    return jnp.minimum(((bounded - element.min_exponent) << element.mantissa_bits) + count, element.max_code)


def with_sign(code: jax.Array, negative: jax.Array, element: Element) -> jax.Array:
    """Puts the sign, bool[...], into magnitude codes, int32[...]. Two's complement has no negative zero."""
    if element.encoding == "two's complement":
        return jnp.where(negative, -code, code) & ((1 << element.bits) - 1)
    return jnp.where(negative, code | (1 << (element.bits - 1)), code)


def split_sign(code: jax.Array, element: Element) -> tuple[jax.Array, jax.Array]:
    """Codes int32[...] -> (magnitude codes int32[...], negative bool[...])."""
    if element.encoding == "unsigned":
        return code, jnp.zeros_like(code, bool)
    negative = code >= 1 << (element.bits - 1)
    if element.encoding == "two's complement":
        return jnp.where(negative, (1 << element.bits) - code, code), negative
    return code & ((1 << (element.bits - 1)) - 1), negative


def counts(magnitude: jax.Array, element: Element) -> tuple[jax.Array, jax.Array]:
    """Magnitude codes int32[...] -> (count int32[...], exponent int32[...]): the number is count * 2^exponent."""
    above = jnp.maximum((magnitude >> element.mantissa_bits) - 1, 0)
    return magnitude - (above << element.mantissa_bits), above + (element.min_exponent - element.mantissa_bits)


def encode(
    bits: jax.Array, scale_exponent: jax.Array, element: Element, rounding: Rounding, chance: jax.Array | None = None
) -> jax.Array:
    """Codes of x / 2^scale_exponent: bits of float32, int32[...], and int32 that broadcasts -> int32[...]."""
    significand, exponent = float32.parts(bits)
    code = magnitude_code(significand, exponent - scale_exponent, element, rounding, chance)
    return with_sign(code, bits < 0, element)


def decode(code: jax.Array, scale_exponent: jax.Array, element: Element) -> jax.Array:
    """Bits of the float32 value * 2^scale_exponent: int32[...], int32 that broadcasts -> int32[...]."""
    magnitude, negative = split_sign(code, element)
    count, exponent = counts(magnitude, element)
    bits = float32.compose(count, exponent + scale_exponent)
    if element.specials != "none":
        bits = jnp.where(magnitude > element.max_code, float32.NAN, bits)
    if element.specials == "infinity and nan":
        bits = jnp.where(magnitude == element.max_code + 1, float32.INFINITY, bits)
    return jnp.where(negative, bits | ~float32.MAGNITUDE, bits)


def encode_ratio(
    bits: jax.Array,
    divisor: jax.Array,
    divisor_exponent: jax.Array,
    element: Element,
    rounding: Rounding,
    chance: jax.Array | None = None,
    *,
    extra_bits: int = 0,
) -> jax.Array:
    """Codes of x / d, the exact quotient rounded once.

    Args:
      bits: int32[...], of float32 x.
      divisor: int32 that broadcasts; d = divisor * 2^(divisor_exponent - 23 - extra_bits), where
        2^(23 + extra_bits) <= divisor < 2^(25 + extra_bits); 0 gives code 0.
      divisor_exponent: int32 like it.
      element: the format.
      rounding: how.
      chance: uint32[...] for stochastic rounding, of the quotient cut to 24 bits.
      extra_bits: at most 3.

    Returns:
      int32[...].
    """
    significand, exponent = float32.parts(bits)
    none = divisor == 0
    # Any divisor in range will do where there is none: these codes become 0 at the end.
    divisor = jnp.where(none, 1 << (23 + extra_bits), divisor)
    # The quotient lies between 1/4 and 2, so up to three digits of what follows are zeros in front.
    digits = 26 if rounding == "stochastic" else element.mantissa_bits + 5
    ratio, inexact = float32.quotient(significand << extra_bits, divisor, digits)
    exponent = exponent - divisor_exponent
    if rounding == "stochastic":
        spare = (ratio >= 1 << 24).astype(jnp.int32) + (ratio >= 1 << 25).astype(jnp.int32)  # digits beyond 24
        ratio, exponent = ratio >> spare, exponent + (spare - 2)
    else:
        ratio = ratio << (24 - digits)
        for _ in range(2):
            small = ratio < 0x800000
            ratio, exponent = jnp.where(small, ratio << 1, ratio), jnp.where(small, exponent - 1, exponent)
        ratio |= inexact.astype(jnp.int32)  # what is lost below breaks ties
    code = magnitude_code(ratio, exponent, element, rounding, chance)
    return with_sign(jnp.where(none, 0, code), bits < 0, element)
