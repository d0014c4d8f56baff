"""Blocks that try a format: a given largest magnitude, and ties, their neighbours and random numbers beside it."""

import dataclasses

import format_oracle
import ml_dtypes
import numpy as np

from scalejax.numerics.formats import FORMATS, BlockFormat

ROUNDINGS = ("ties_to_even", "ties_away", "toward_zero", "stochastic")
RULES = ("floor", "rceil", "ceil", "even", "even_fbgemm", "qwix")


def small(name: str) -> BlockFormat:
    """The format of a name with blocks of 32 at most."""
    format = FORMATS[name]
    if format.k1 <= 32:
        return format
    return dataclasses.replace(format, k1=32, k2=32 if format.sub_scale == "none" else format.k2)


def rules(format: BlockFormat) -> tuple[str | None, ...]:
    """Those that a format has."""
    if format.scale != "exponent":
        return (None,)
    return tuple(rule for rule in RULES if rule != "qwix" or format.element.name in format_oracle.QWIX)


def form(format: BlockFormat) -> format_oracle.Form:
    """The oracle's description, which knows elements by their names alone."""
    return format_oracle.Form(
        format.element.name,
        format.k1,
        format.scale,
        format.d1,
        format.k2 if format.sub_scale != "none" else None,
        format.d2,
    )


@np.errstate(invalid="ignore")
def all_bfloat16() -> np.ndarray:
    """float32[65536]: every bfloat16, NaNs and infinities too."""
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # signalling NaNs
def blocks(maxima: np.ndarray, format: BlockFormat, rule: str | None, seed: int) -> np.ndarray:
    """float32[len(maxima), k1]: each row has its maximum somewhere, and nothing larger."""
    rng = np.random.default_rng(seed)
    described = form(format)
    rows, columns = len(maxima), format.k1
    largest = np.abs(maxima.astype(np.float64))
    finite = np.where(np.isfinite(largest), largest, 1.0)
    if format.scale == "exponent":
        exponent = np.maximum(format_oracle.scale_exponent(finite, described, rule), 1 - 2 ** (format.d1 - 1))
    else:
        exponent = format_oracle.floor_log2(finite) - int(format_oracle.floor_log2(described.grid[-1]))
    middles = (described.grid[1:] + described.grid[:-1]) / 2
    place = np.arange(rows)[:, None] * columns + np.arange(columns)
    ties = np.ldexp(middles[place % len(middles)], exponent[:, None] - rng.integers(0, 3, (rows, columns)))
    ties = ties.astype(np.float32)
    kinds = rng.integers(0, 5, (rows, columns))
    wide = finite[:, None] * rng.uniform(0, 1, (rows, columns)) * 2.0 ** -rng.integers(0, 14, (rows, columns))
    x = np.select(
        [kinds < 2, kinds == 2, kinds == 3],
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))],
        wide.astype(np.float32),
    )
    x = np.where(x <= finite[:, None], x, 0).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = 0
    # Some sub-blocks are far below the others, so that every microexponent occurs.
    if format.sub_scale == "exponent":
        down = rng.integers(0, 4, (rows, columns // format.k2))
        x = (x * np.repeat(2.0**-down, format.k2, axis=1)).astype(np.float32)
    x = np.where(rng.random(x.shape) < 0.5, -x, x)
    x[np.arange(rows), np.arange(rows) % columns] = maxima
    return x


def random_bits(rows: int, columns: int, seed: int) -> np.ndarray:
    """float32[rows, columns] of any bit patterns, most of them finite: exponents are drawn near one another."""
    rng = np.random.default_rng(seed)
    exponent = np.clip(rng.integers(0, 255, (rows, 1)) - rng.geometric(0.2, (rows, columns)), 0, 254)
    word = (
        (rng.integers(0, 2, (rows, columns), dtype=np.int64) << 31)
        | (exponent << 23)
        | rng.integers(0, 1 << 23, (rows, columns))
    )
    return word.astype(np.uint32).view(np.float32)
