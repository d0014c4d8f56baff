"""Blocks that try a format: a given largest magnitude, and ties, their neighbours and random numbers beside it."""

import dataclasses

import format_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from scalejax.numerics.formats import FORMATS, BlockFormat, bdr

ROUNDINGS = ("ties_to_even", "ties_away", "toward_zero", "stochastic")
RULES = ("floor", "rceil", "ceil", "even", "even_fbgemm", "qwix")

# dB over 10,000 vectors of 1,024, N(0, sigma^2) with sigma ~ |N(0, 1)|; of a reference in NumPy that
# shares no code with the package, by another seed. None: the format takes no rule, or has one that is not named.
QSNR_TABLE = {
    ("bdr_mx9", None): 46.61,
    ("bdr_mx6", None): 28.37,
    ("bdr_mx4", None): 15.77,
    ("msfp16", None): 43.01,
    ("msfp12", None): 18.85,
    ("fp8_e4m3", None): 31.57,
    ("mxint8", "floor"): 42.03,
    ("mxint8", "rceil"): 41.96,
    ("mxfp8_e4m3", "floor"): 30.47,
    ("mxfp8_e4m3", "rceil"): 31.54,
    ("mxfp8_e4m3", "even"): 31.07,
    ("mxfp8_e5m2", "floor"): 25.33,
    ("mxfp8_e5m2", "rceil"): 25.55,
    ("mxfp8_e5m2", "even"): 25.55,
    ("mxfp6_e2m3", "floor"): 30.98,
    ("mxfp6_e2m3", "rceil"): 30.98,
    ("mxfp6_e2m3", "even"): 31.03,
    ("mxfp6_e3m2", "floor"): 25.33,
    ("mxfp6_e3m2", "rceil"): 25.55,
    ("mxfp6_e3m2", "even"): 25.55,
    ("mxfp4_e2m1", "floor"): 18.74,
    ("mxfp4_e2m1", "rceil"): 18.64,
    ("mxfp4_e2m1", "even"): 18.99,
    ("nvfp4", None): 20.43,
}
QSNR_VARIANTS = {
    "MX9 with d2=2": (bdr(m=7, d2=2), 47.41),
    "MX9 with k2=8": (bdr(m=7, k2=8), 44.16),
    "MX9 with k2=1": (bdr(m=7, k2=1), 47.54),
}


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


ROWS = 2000  # of wide_blocks, the same everywhere so that one program serves many tests


def wide_blocks(format: BlockFormat) -> np.ndarray:
    """float32[ROWS, k1]: normal blocks far from the ends of float32, over 40 binades."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((ROWS, format.k1)) * 2.0 ** rng.integers(-20, 20, (ROWS, 1))).astype(np.float32)


def sparse_numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Over many binades, some zeros, and here and there what poisons a block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    x = np.where(rng.random(shape) < 0.02, 0, x)
    return jnp.asarray(np.where(rng.random(shape) < 0.002, np.nan, x), dtype)


def assert_equal_bits(ours: object, theirs: object) -> None:
    """Two trees of the same structure, dtypes, shapes and bits, NaNs included."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        integers = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
        a, b = (np.asarray(jax.lax.bitcast_convert_type(x, integers)) for x in (a, b))
        np.testing.assert_array_equal(a, b)
