"""Scales of blocks: the exponent rules in use, E8M0 bytes and float32 scales, all by integers.

A power-of-two scale is 2^(e - emax), where emax is the exponent of the element's largest number and e that of the
block's largest magnitude a = (1 + f) 2^E, one higher where f reaches a threshold. The rules differ in nothing else:

    floor         never: the largest element saturates where 1 + f > max / 2^emax  OCP MX v1.0, microxcaling, torchao
    ceil          f > 0: a power of two at least a                                 torchao
    rceil         1 + f > max / 2^emax: the smallest scale that saturates nothing  jax.nn, cuBLAS, torchao
    even          a rounded to the element's mantissa, half an ulp goes up         torchao
    even_fbgemm   the same, half an ulp goes down                                  FBGEMM (MX4)
    qwix          a c / max >= 2^(E - emax + 1), c = 60/31 (fp8), 12/7 (fp4)       qwix

`even` and `qwix` are one rule for E2M1. torchao and qwix compute some of these in floating point, where a block whose
largest magnitude lies within an ulp of the threshold may come out otherwise; torchao takes subnormal maxima for less
than they are. Here the thresholds are exact fractions.

E8M0 holds 2^-127 to 2^127 as a byte, the exponent plus 127, and NaN as 255. A scale below 2^-127 becomes 2^-127, which
is a *subnormal* float32: nothing here ever multiplies by it (see bits.compose), so hardware that takes subnormal
values for zero gives the same results, except where results are subnormal themselves and it computes on with them.
"""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp

from scalejax.errors import UserError
from scalejax.numerics import bits as float32
from scalejax.numerics.elements import Element

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Int32, UInt8

ScaleRule = Literal["floor", "rceil", "ceil", "even", "even_fbgemm", "qwix"]

# qwix's c: how far above the largest number a block's maximum may lie before the scale doubles.
_QWIX_BIAS = {"E4M3": Fraction(60, 31), "E5M2": Fraction(60, 31), "E2M1": Fraction(12, 7)}


def threshold(element: Element, rule: ScaleRule) -> int:
    """From which 23-bit fraction of a block's largest magnitude on the exponent is one higher; 2^23 for never.

    Raises:
      UserError: an unknown rule, or one that is not defined for this element.
    """
    one = 1 << 23
    top = Fraction(element.max) / Fraction(2) ** element.max_exponent  # in [1, 2)
    if rule == "floor":
        return one
    if rule == "ceil":
        return 1
    if rule == "rceil":
        return math.floor((top - 1) * one) + 1
    if rule in ("even", "even_fbgemm"):
        # Half a unit of the element's mantissa below 2.
        return one - (one >> (element.mantissa_bits + 1)) + (rule == "even_fbgemm")
    if rule == "qwix":
        if element.name not in _QWIX_BIAS:
            raise UserError(
                f"scale_rule: qwix defines its rule for {', '.join(_QWIX_BIAS)}; got elements of {element.name}. "
                "Use 'even' or 'rceil', which are near it."
            )
        return math.ceil((2 * top / _QWIX_BIAS[element.name] - 1) * one)
    raise UserError(f"scale_rule: must be one of {', '.join(get_args(ScaleRule))}; got {rule!r}.")


def saturates(element: Element, rule: ScaleRule) -> bool:
    """Whether the largest magnitude of a block can lie above the largest element under this rule.

    What is rounded stochastically is then no longer unbiased. "rceil" and "ceil" saturate nothing below 2^127; the
    largest number of every element with exponents lies below the next power of two, so "floor" always does.

    Raises:
      UserError: see `threshold`.
    """
    return threshold(element, rule) > threshold(element, "rceil")


def scale_exponent(largest: "Int32[Array, '*shape']", element: Element, rule: ScaleRule) -> "Int32[Array, '*shape']":
    """Exponents of the scales of blocks, not yet clamped to what a format can store.

    Args:
      largest: int32[...], bits of the largest magnitudes (as integers these are ordered like the values).
      element: the format of the elements.
      rule: one of the above.

    Returns:
      int32[...]; far below any stored exponent for blocks of zeros.
    """
    significand, exponent = float32.parts(largest)
    above = (significand & 0x7FFFFF) >= threshold(element, rule)
    return exponent + above.astype(jnp.int32) - element.max_exponent


def exponent_range(bits: int) -> tuple[int, int]:
    """The lowest and highest exponent of a scale of so many bits; the code above the highest means NaN."""
    bias = (1 << (bits - 1)) - 1
    return -bias, bias


def store_exponent(
    exponent: "Int32[Array, '*shape']", poisoned: "Bool[Array, '*shape']", bits: int = 8
) -> "UInt8[Array, '*shape']":
    """Exponents int32[...], bool[...] of blocks that hold NaN or infinities -> codes uint8[...]; E8M0 for 8 bits."""
    low, high = exponent_range(bits)
    code = jnp.where(poisoned, (1 << bits) - 1, jnp.clip(exponent, low, high) - low)
    return code.astype(jnp.uint8)


def load_exponent(
    codes: "UInt8[Array, '*shape']", bits: int = 8
) -> tuple["Int32[Array, '*shape']", "Bool[Array, '*shape']"]:
    """Codes uint8[...] -> exponents int32[...] and bool[...], whether the scale is NaN."""
    code = codes.astype(jnp.int32)
    return code + exponent_range(bits)[0], code == (1 << bits) - 1


def float_scale(largest: jax.Array, divisor: int, divisor_exponent: int, lowest_exponent: int) -> jax.Array:
    """Bits of float32(a / d), rounded to nearest, ties to even, and at least 2^lowest_exponent.

    Division by floating point is not the same on all hardware; this one is.

    Args:
      largest: int32[...], bits of a.
      divisor: d = divisor * 2^divisor_exponent; positive, below 2^24.
      divisor_exponent: of d.
      lowest_exponent: -126 or more, so that no scale and no product with it is a subnormal number.

    Returns:
      int32[...].
    """
    length = divisor.bit_length()
    significand, exponent = float32.parts(largest)
    normalised = jnp.full_like(significand, divisor << (24 - length))
    count, inexact = float32.quotient(significand, normalised, 27)
    exponent = exponent - (divisor_exponent + length - 1)
    # 26 or 27 digits: to 26, what is lost sticks.
    long = count >= 1 << 26
    count = jnp.where(long, (count >> 1) | (count & 1), count) | inexact.astype(jnp.int32)
    exponent = jnp.where(long, exponent, exponent - 1) - 23
    rounded = (count + 1 + ((count >> 2) & 1)) >> 2
    low = exponent + 23 < lowest_exponent
    return jnp.where(low, (lowest_exponent + 127) << 23, float32.compose(rounded, jnp.where(low, 0, exponent)))
