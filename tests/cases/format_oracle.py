"""What formats of blocks mean, in NumPy: grids of numbers, exact comparisons, one pass over int64 and float64.

Written without the package: elements are the numbers of ml_dtypes, or integers; a number is looked up between its
neighbours on the grid. Products with at most 53 bits are exact in float64, whose range holds every float32 by far, and
quotients are int64 with a remainder. `exact_block` says the same again for one block in fractions.Fraction.
"""

import dataclasses
import math
from fractions import Fraction

import ml_dtypes
import numpy as np

HALF = Fraction(1, 2)


def _float_grid(dtype, bits):
    codes = np.arange(1 << (bits - 1), dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


GRIDS = {
    "E4M3": _float_grid(ml_dtypes.float8_e4m3fn, 8),
    "E5M2": _float_grid(ml_dtypes.float8_e5m2, 8),
    "E3M2": _float_grid(ml_dtypes.float6_e3m2fn, 6),
    "E2M3": _float_grid(ml_dtypes.float6_e2m3fn, 6),
    "E2M1": _float_grid(ml_dtypes.float4_e2m1fn, 4),
    "INT8": np.arange(128) / 64,
    **{f"S{m}": np.arange(1 << m) / 2.0 ** (m - 1) for m in range(1, 16)},
    **{f"I{bits}": np.arange(1 << (bits - 1), dtype=np.float64) for bits in range(2, 17)},
}
# Bits of the fraction, of a code; the rest follows from the grid.
MANTISSA = {"E4M3": 3, "E5M2": 2, "E3M2": 2, "E2M3": 3, "E2M1": 1, "INT8": 6}
BITS = {"E4M3": 8, "E5M2": 8, "E3M2": 6, "E2M3": 6, "E2M1": 4, "INT8": 8}
QWIX = {"E4M3": (60, 31), "E5M2": (60, 31), "E2M1": (12, 7)}


@dataclasses.dataclass(frozen=True)
class Form:
    """A format in the oracle's terms."""

    element: str
    k1: int
    scale: str = "exponent"
    d1: int = 8
    k2: int | None = None
    d2: int = 0

    @property
    def grid(self):
        return GRIDS[self.element]

    @property
    def bits(self):
        return BITS.get(self.element) or int(self.element[1:]) + (self.element[0] == "S")

    @property
    def mantissa(self):
        return (
            MANTISSA.get(self.element)
            or {"S": int(self.element[1:]) - 1, "I": int(self.element[1:]) - 2}[self.element[0]]
        )


@dataclasses.dataclass
class Blocks:
    """Quantized blocks: codes [N, k1], scales [N], sub_scales [N, k1/k2] or None, values float32[N, k1]."""

    codes: np.ndarray
    scales: np.ndarray
    sub_scales: np.ndarray | None
    values: np.ndarray


def floor_log2(values):
    """Of positive float64; -1000 for zero."""
    return np.where(values > 0, np.frexp(values)[1].astype(np.int64) - 1, -1000)


def scale_exponent(largest, form, rule):
    """The rule as it is stated, with exact comparisons in float64."""
    top, mantissa = form.grid[-1], form.mantissa
    emax = int(floor_log2(top))
    exponent = floor_log2(largest)
    start = np.ldexp(1.0, np.maximum(exponent, -300))
    if rule == "floor":
        return exponent - emax
    if rule == "rceil":  # the least e with largest <= top 2^e
        return exponent - emax + (largest > top * np.ldexp(1.0, np.maximum(exponent, -300) - emax))
    if rule == "ceil":
        return exponent - emax + (largest > start)
    if rule in ("even", "even_fbgemm"):
        scaled = largest / start * 2.0**mantissa
        rounded = np.floor(scaled + 0.5) if rule == "even" else np.ceil(scaled - 0.5)
        return exponent - emax + (rounded >= 2.0 ** (mantissa + 1))
    if rule == "qwix":  # the greatest e with 2^e <= largest c / top
        up, down = QWIX[form.element]
        return exponent - emax + (largest * up >= top * down * np.ldexp(2.0, np.maximum(exponent, -300) - emax))
    raise AssertionError(rule)


def on_grid(values, inexact, grid, rounding, chance):
    """Indices into a grid of float64 values, of which true ones lie less than one unit above where `inexact`."""
    values = np.minimum(values, 2 * grid[-1])
    low = np.searchsorted(grid, values, side="right") - 1
    high = np.minimum(low + 1, len(grid) - 1)
    gap = np.where(high > low, grid[high] - grid[low], 1)
    middle = grid[low] + gap / 2
    tie = (values == middle) & ~inexact
    above = (values > middle) | ((values == middle) & inexact)
    if rounding == "ties_to_even":
        up = above | (tie & (low % 2 == 1))
    elif rounding == "ties_away":
        up = above | tie
    elif rounding == "toward_zero":
        up = np.zeros_like(above)
    else:
        distance = np.floor((values - grid[low]) / gap * 2.0**31)
        up = np.minimum(distance, 2.0**31).astype(np.int64) + (chance.astype(np.int64) >> 1) >= 1 << 31
    return np.minimum(low + up, len(grid) - 1)


def ratio(values, divisors, digits=None):
    """float64 quotients cut to some 30 bits, or to `digits`, and whether something was cut off.

    Args:
      values: float64, of float32 numbers.
      divisors: float64 with at most 32 significant bits.
    """
    fraction, exponent = np.frexp(values)
    divisor_fraction, divisor_exponent = np.frexp(np.where(divisors > 0, divisors, 1))
    numerator = (fraction * 2.0**24).astype(np.int64) << 38
    denominator = (divisor_fraction * 2.0**32).astype(np.int64)
    whole = numerator // denominator  # between 2^29 and 2^31
    inexact = whole * denominator != numerator
    if digits is not None:
        cut = np.where(whole > 0, floor_log2(whole.astype(np.float64)) + 1 - digits, 0)
        whole = (whole >> cut) << cut
    quotient = np.ldexp(whole.astype(np.float64), exponent - divisor_exponent - 30)
    return np.where(divisors > 0, quotient, 0), inexact & (divisors > 0)


@np.errstate(over="ignore", invalid="ignore")
def quantize(x, form, rule=None, rounding="ties_to_even", chance=None, tensor_scale=None):
    """float32[N, k1] -> Blocks, each row a block."""
    exact = np.abs(x.astype(np.float64))
    grid, top = form.grid, form.grid[-1]
    poisoned = ~np.isfinite(exact).all(axis=1)
    exact = np.where(poisoned[:, None], 0, exact)
    k2 = form.k2 or form.k1
    sub_largest = exact.reshape(len(x), -1, k2).max(axis=2)
    largest = sub_largest.max(axis=1)
    no = np.zeros(exact.shape, bool)
    cut = 24 if rounding == "stochastic" else None
    sub_scales = None
    negative = np.signbit(x)

    def spread(per_sub):
        return np.repeat(per_sub, k2, axis=1)

    if form.scale == "exponent":
        bias = 2 ** (form.d1 - 1) - 1
        shared = np.clip(scale_exponent(largest, form, rule), -bias, bias)
        own = scale_exponent(sub_largest, form, rule)
        sub_scales = np.clip(shared[:, None] - own, 0, 2**form.d2 - 1)
        exponent = spread(shared[:, None] - sub_scales)
        index = on_grid(np.ldexp(exact, -exponent), no, grid, rounding, chance)
        values = np.ldexp(grid[index], exponent)
        scales = np.where(poisoned, 2 * bias + 1, shared + bias)
        sub_scales = sub_scales if form.d2 else None
        values = values.astype(np.float32)
    elif form.scale == "float32":
        lowest = np.float32(2.0 ** (-126 - min(0, int(floor_log2(grid[1])))))
        if form.d2:
            part = largest.astype(np.float32) / np.float32(2**form.d2 - 1)
            part = np.maximum(part, lowest * np.float32(2.0 ** (int(floor_log2(top)) + 1)))
            steps = on_grid(
                *ratio(sub_largest, part[:, None].astype(np.float64)),
                np.arange(2.0**form.d2),
                "ties_to_even",
                None,
            )
            scale = np.maximum(part / np.float32(top), lowest)
            sub_scales = np.where(poisoned[:, None], 0, steps)
        else:
            scale = np.maximum(largest.astype(np.float32) / np.float32(top), lowest)
            steps = np.ones((len(x), 1), np.int64)
        step = spread(steps).astype(np.float64)
        divisor = step.astype(np.float32) * scale[:, None]
        index = on_grid(*ratio(exact, divisor.astype(np.float64), cut), grid, rounding, chance)
        values = grid[index].astype(np.float32) * divisor
        scales = np.where(poisoned, np.float32(np.nan), scale)
    else:
        g = tensor_scale
        if g is None:
            g = max(np.float32(largest.max()) / np.float32(448 * top), np.float32(2.0 ** (-126 + 9 + 1)))
        step = on_grid(*ratio(largest, np.full(len(x), top * np.float64(g))), GRIDS["E4M3"], "ties_to_even", None)
        divisor = np.broadcast_to((GRIDS["E4M3"][step] * np.float64(g))[:, None], exact.shape)
        index = on_grid(*ratio(exact, divisor, cut), grid, rounding, chance)
        values = (grid[index] * GRIDS["E4M3"][step][:, None]).astype(np.float32) * np.float32(g)
        scales = np.where(poisoned, 0x7F, step)
    if form.element[0] == "I":
        codes = np.where(negative, -index, index) & (2**form.bits - 1)
        values = np.where(negative & (index > 0), -values, values)
    else:
        codes = index | (negative.astype(np.int64) << (form.bits - 1))
        values = np.where(negative, -values, values)
    return Blocks(
        np.where(poisoned[:, None], 0, codes),
        scales,
        sub_scales,
        np.where(poisoned[:, None], np.float32(np.nan), values),
    )


def exact_block(x, form, rule, rounding, chance, tensor_scale=None):
    """The values of one block as Fractions, from definitions alone: finite float32[k1] -> (values, exponent or scale).

    NVFP4 takes its tensor scale; float32 scales must not be at the low end of their range.
    """
    magnitudes = [abs(Fraction(float(v))) for v in x]
    grid = [Fraction(float(v)) for v in form.grid]
    top, k2 = grid[-1], form.k2 or form.k1

    def log2_floor(v):
        e = 0
        while Fraction(2) ** (e + 1) <= v:
            e += 1
        while Fraction(2) ** e > v:
            e -= 1
        return e

    def exponent(largest):
        if largest == 0:
            return -1000
        e = log2_floor(largest) - log2_floor(top)
        if rule == "rceil":
            return e if largest <= top * Fraction(2) ** e else e + 1
        if rule == "ceil":
            return e if largest <= Fraction(2) ** log2_floor(largest) else e + 1
        if rule in ("even", "even_fbgemm"):
            units = largest / Fraction(2) ** log2_floor(largest) * 2**form.mantissa
            rounded = math.floor(units + HALF) if rule == "even" else math.ceil(units - HALF)
            return e + (rounded == 2 ** (form.mantissa + 1))
        if rule == "qwix":
            return log2_floor(largest * Fraction(*QWIX[form.element]) / top)
        return e

    def nearest_float32(v):
        e = max(log2_floor(v), -126) - 23
        units = v / Fraction(2) ** e
        low = math.floor(units)
        up = units - low > HALF or (units - low == HALF and low % 2)
        return (low + bool(up)) * Fraction(2) ** e

    def rounded(v, numbers, how, r):
        if v >= numbers[-1]:
            return numbers[-1]
        i = max(j for j, n in enumerate(numbers) if n <= v)
        distance = (v - numbers[i]) / (numbers[i + 1] - numbers[i])
        up = {
            "ties_to_even": distance > HALF or (distance == HALF and i % 2 == 1),
            "ties_away": distance >= HALF,
            "toward_zero": False,
            "stochastic": math.floor(distance * 2**31) + (r >> 1) >= 2**31,
        }[how]
        return numbers[i + up]

    def cut(v):
        """To 24 digits, what stochastic rounding sees of a quotient."""
        if rounding != "stochastic" or v == 0:
            return v
        unit = Fraction(2) ** (log2_floor(v) - 23)
        return math.floor(v / unit) * unit

    largest = max(magnitudes)
    subs = [max(magnitudes[i : i + k2]) for i in range(0, form.k1, k2)]
    if form.scale == "exponent":
        bias = 2 ** (form.d1 - 1) - 1
        shared = min(max(exponent(largest), -bias), bias)
        steps = [Fraction(2) ** (shared - min(max(shared - exponent(s), 0), 2**form.d2 - 1)) for s in subs]
        scale = shared
    elif form.scale == "float32" and form.d2:
        part = nearest_float32(largest / (2**form.d2 - 1))
        integers = [Fraction(i) for i in range(2**form.d2)]
        scale = nearest_float32(part / top)
        steps = [scale * rounded(s / part, integers, "ties_to_even", 0) for s in subs]
        steps = [nearest_float32(step) if step else step for step in steps]
    elif form.scale == "float32":
        scale = nearest_float32(largest / top)
        steps = [scale]
    else:
        g = Fraction(float(tensor_scale))
        e4m3 = [Fraction(float(v)) for v in GRIDS["E4M3"]]
        scale = rounded(largest / (top * g), e4m3, "ties_to_even", 0)
        steps = [scale * g]
    values = []
    for i, v in enumerate(magnitudes):
        step = steps[i // k2]
        seen = v / step if step else Fraction(0)
        if form.scale != "exponent":
            seen = cut(seen)
        values.append(rounded(seen, grid, rounding, int(chance[i])) * step * (-1 if x[i] < 0 else 1))
    return values, scale
