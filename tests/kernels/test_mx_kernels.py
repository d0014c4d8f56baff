"""Pallas kernels of packed blocks under interpret mode. Oracle: scalejax.numerics, to the bit; products in float64."""

import dataclasses
from fractions import Fraction

import format_cases
import format_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_cases import assert_equal_bits as equal
from format_cases import sparse_numbers as numbers
from mx_cases import CASES, PRODUCTS

from scalejax.errors import UnsupportedError
from scalejax.kernels import mx
from scalejax.numerics.formats import FORMATS, bdr
from scalejax.numerics.packing import pack, unpack
from scalejax.numerics.quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("strict_promotion")

BACKENDS = ["pallas_gpu", "pallas_tpu"]
NAMES = [name for name, format in FORMATS.items() if format.scale != "float32"]


def check(x, format, axis, implementation, **options):
    how = {"implementation": implementation, "interpret": True}
    theirs = quantize(x, format, axis=axis, tail="pad", **options)
    ours = mx.quantize_blocks(x, format, axis=axis, tail="pad", **options, **how)
    equal(ours, pack(theirs))
    equal(mx.dequantize_blocks(pack(theirs), x.dtype, **how), dequantize(theirs, x.dtype))
    return ours


SOME = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "bdr_mx6", "nvfp4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "case", "name"),
    [
        (backend, case, SOME[i % len(SOME)])
        for i, case in enumerate(CASES)
        for backend in (BACKENDS if case.startswith(("no multiples", "shorter")) else [BACKENDS[i % 2]])
    ],
)
def test_every_axis_and_tail_there_and_back(backend, case, name):
    case = CASES[case]
    check(numbers(case.shape, case.dtype), name, case.axis, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_with_a_tail(backend, name):
    """On the first axis by one kernel and on the last by the other, in turn."""
    axis = ("first", "last")[(NAMES.index(name) + BACKENDS.index(backend)) % 2]
    case = CASES[f"tail on the {axis} axis"]
    check(numbers(case.shape, case.dtype), name, case.axis, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "axis"), [("bdr_mx9", 0), ("mxfp6_e3m2", 1), ("mxfp8_e5m2", 1), ("mxint8", 1)])
def test_bit_patterns_of_all_kinds(backend, name, axis):
    x = format_cases.random_bits(512, 64, seed=5)
    check(jnp.asarray(x if axis else x.T), name, axis, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mxfp4_e2m1", {"rounding": "stochastic"}),
        ("mxfp8_e4m3", {"rounding": "ties_away", "scale_rule": "rceil"}),
        ("nvfp4", {"rounding": "toward_zero"}),
    ],
)
def test_roundings_and_rules(backend, name, options):
    if options["rounding"] == "stochastic":
        options = {**options, "key": jax.random.key(1)}
    check(numbers((6, 96), "bfloat16"), name, 1, backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "axis", "dtype", "product"),
    [
        ("mxfp8_e4m3", 0, "bfloat16", "several tiles"),
        ("mxfp6_e2m3", 1, "float32", "several tiles"),
        ("mxfp4_e2m1", 1, "bfloat16", "one row"),
        ("bdr_mx9", 1, "float32", "eight rows"),
        ("nvfp4", 0, "float32", "one row"),
    ],
)
def test_products_decode_their_tile(backend, name, axis, dtype, product):
    rows, depth, columns = PRODUCTS[product]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    matrix = jnp.asarray(rng.standard_normal((depth, columns)), jnp.float32)
    matrix = matrix.at[depth - 1, 3].set(jnp.nan)
    weights = pack(quantize(matrix if axis == 0 else matrix.T, name, axis=axis))
    decoded = np.asarray(dequantize(unpack(weights)), np.float64)
    exact = np.asarray(x, np.float64) @ (decoded if axis == 0 else decoded.T)
    out = mx.matmul(x, weights, dtype=jnp.float32, implementation=backend, interpret=True)
    assert np.isnan(out[:, 3]).all()
    exact[:, 3], out = 0, out.at[:, 3].set(0)
    np.testing.assert_allclose(out, exact, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tail_of_the_summed_axis_and_the_gradient(backend):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 45)), jnp.float32)
    matrix = jnp.asarray(np.random.default_rng(3).standard_normal((45, 8)), jnp.float32)
    weights = mx.quantize_blocks(matrix, "mxfp8_e4m3", axis=0, tail="pad", implementation="xla")
    results = []
    for how in ({"implementation": backend, "interpret": True}, {"implementation": "xla"}):
        out, pull = jax.vjp(lambda x, how=how: mx.matmul(x, weights, **how), x)
        results.append((out, *pull(out)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * float(jnp.abs(theirs).max()))


def fractions_of(rows, name):
    """Each row of float32[n, K] as the fractions that blocks of a format make of it."""
    format = FORMATS[name]

    def numbers_of(block):
        return format_oracle.exact_block(block, format_cases.form(format), "floor", "ties_to_even", block)[0]

    return [[v for block in row.reshape(-1, format.k1) for v in numbers_of(block)] for row in rows]


FITTING = ("bdr_mx6", "bdr_mx4", "mxfp4_e2m1")
"""Formats of which 64 products fit the 24 bits of a float32, so that no sum is rounded."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("bdr_mx6", "xla"),
        *(
            pytest.param(name, backend, marks=pytest.mark.slow)
            for backend, names in {
                "pallas_gpu": ("bdr_mx6", "mxfp4_e2m1", "mxfp8_e4m3"),
                "pallas_tpu": ("bdr_mx4", "bdr_mx9", "mxint8"),
                "reference": ("bdr_mx6", "mxfp6_e3m2"),
            }.items()
            for name in names
        ),
    ],
)
def test_a_product_is_the_rational_one_up_to_its_sums_in_float32(name, backend):
    rng = np.random.default_rng(7)
    x, matrix = (rng.uniform(0.6, 1.9, shape) * rng.choice([-1, 1], shape) for shape in ((3, 64), (2, 64)))
    x, matrix = x.astype(np.float32), matrix.astype(np.float32)
    left, right = fractions_of(x, name), fractions_of(matrix, name)
    how = {"implementation": backend} | ({"interpret": True} if backend in BACKENDS else {})
    packed = [pack(quantize(jnp.asarray(a), name, axis=1)) for a in (x, matrix)]
    out = np.asarray(mx.matmul(*packed, **how))
    for (i, j), found in np.ndenumerate(out):
        products = [a * b for a, b in zip(left[i], right[j], strict=True)]
        size = sum(map(abs, products))
        fits = size * max(p.denominator for p in products) < 2**24
        assert fits or name not in FITTING
        assert abs(Fraction(float(found)) - sum(products)) <= (0 if fits else len(products) * size / 2**24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_kernel_lacks_is_said_and_nothing_else_is_taken(backend):
    x = jnp.ones((4, 1024))
    odd = dataclasses.replace(FORMATS["mxfp8_e4m3"], name="mx96", k1=96, k2=96)
    cases = [("int8", "scales of 8 bits")] + ([(odd, "powers of two")] if backend == "pallas_gpu" else [])
    for format, message in cases:
        with pytest.raises(UnsupportedError, match=message):
            mx.quantize_blocks(x, format, axis=1, tail="pad", implementation=backend, interpret=True)
    weights = mx.quantize_blocks(x.T, bdr(m=6, k1=32, k2=8, d2=2, d1=5), axis=0, implementation="xla")
    with pytest.raises(UnsupportedError, match="exponents of 8 bits"):
        mx.matmul(x, weights, implementation=backend, interpret=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "xla"])
@pytest.mark.parametrize(
    "name", ["mxfp8_e5m2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp8_e4m3", "mxfp4_e2m1"))]
)
def test_products_keep_normal_numbers_under_the_lowest_scale(backend, name):
    """2^-127 is a subnormal number, and hardware takes it for zero; the values under it are normal."""
    matrix = jnp.full((32, 3), 2.0 ** (FORMATS[name].element.max_exponent - 127), jnp.float32)
    weights = mx.quantize_blocks(matrix, name, axis=0, implementation="xla")
    assert not weights.scales.any()
    how = {"implementation": backend} | ({} if backend == "xla" else {"interpret": True})
    out = mx.matmul(jnp.full((1, 32), 2.0**100), weights, **how)
    np.testing.assert_array_equal(out, np.full((1, 3), 32 * 2.0**100 * float(matrix[0, 0])))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*BACKENDS, "xla"])
def test_codes_that_are_no_numbers_are_decoded_as_what_they_are(backend):
    """None is written here; other writers mark NaN and infinities in the codes of FP8, and not in scales."""
    how = {"implementation": backend} | ({} if backend == "xla" else {"interpret": True})
    for name, code, want in (
        ("mxfp8_e4m3", 0x7F, np.nan),
        ("mxfp8_e5m2", 0x7C, np.inf),
        ("mxfp8_e5m2", 0xFC, -np.inf),
        ("mxfp8_e5m2", 0xFE, np.nan),
    ):
        packed = mx.quantize_blocks(jnp.ones((2, 32)), name, axis=1, implementation="xla")
        packed = dataclasses.replace(packed, codes=packed.codes.at[1, 5].set(code))
        expected = np.ones((2, 32))
        expected[1, 5] = want
        np.testing.assert_array_equal(mx.dequantize_blocks(packed, **how), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [*((b, "mxfp8_e5m2") for b in (*BACKENDS, "xla")), ("pallas_gpu", "mxfp8_e4m3"), ("pallas_tpu", "bdr_mx9")],
)
def test_products_meet_codes_and_scales_that_are_no_numbers(backend, name):
    how = {"implementation": backend} | ({} if backend == "xla" else {"interpret": True})
    weights = mx.quantize_blocks(jnp.ones((32, 4)), name, axis=0, implementation="xla")
    scales = weights.scales.at[0, 1].set(255)  # with codes of ones, where this library has zeros
    codes, want = weights.codes, np.full((2, 4), 32.0)
    want[:, 1] = np.nan
    if name != "bdr_mx9":
        codes = codes.at[3, 2].set(0x7F).at[3, 3].set(0xFC if name == "mxfp8_e5m2" else 0xFF)
        want[:, 2], want[:, 3] = np.nan, -np.inf if name == "mxfp8_e5m2" else np.nan
    out = mx.matmul(jnp.ones((2, 32)), dataclasses.replace(weights, codes=codes, scales=scales), **how)
    np.testing.assert_array_equal(out, want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*BACKENDS, "xla"])
def test_scales_of_either_sign_are_decoded(backend):
    """None is written here, but E4M3 has them: a negative one, and the other NaN."""
    weights = mx.quantize_blocks(jnp.ones((32, 2)), "nvfp4", axis=0, implementation="xla")
    scales = weights.scales.at[0, 0].set(weights.scales[0, 0] | 0x80).at[1, 1].set(0xFF)
    how = {"implementation": backend} | ({} if backend == "xla" else {"interpret": True})
    out = mx.matmul(jnp.eye(32), dataclasses.replace(weights, scales=scales), **how)
    want = np.ones((32, 2))
    want[:16, 0], want[:, 1] = -1, np.nan  # the sum over all of a column meets its NaN
    np.testing.assert_allclose(out, want, rtol=1e-6)
