"""Formats of blocks, bit for bit: against the oracle, against jax and ml_dtypes, and by their own laws."""

import dataclasses

import format_cases
import format_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, elements
from scalejax.numerics import quantize as api
from scalejax.numerics.formats import FORMATS, BlockFormat, bdr

pytestmark = pytest.mark.usefixtures("strict_promotion")

OCP = [name for name in FORMATS if name.startswith(("mxfp", "mxint"))]
EXPONENTS = [name for name, format in FORMATS.items() if format.scale == "exponent"]
EVERY_RULE = [
    (name, rule, format_cases.ROUNDINGS[(i + j) % 4])
    for i, (name, format) in enumerate(FORMATS.items())
    for j, rule in enumerate(format_cases.rules(format))
]


def covering():
    """Two cases a format, such that each rule and each rounding occurs several times."""
    for i, (name, format) in enumerate(FORMATS.items()):
        rules = format_cases.rules(format)
        yield name, rules[i % len(rules)], format_cases.ROUNDINGS[i % 4]
        yield name, rules[(i + 3) % len(rules)], format_cases.ROUNDINGS[(i + 1 + i // 4 % 3) % 4]


def check(format, rule, rounding, x):
    key = jax.random.key(5) if rounding == "stochastic" else None
    chance = None if key is None else np.asarray(jax.random.bits(key, x.shape, jnp.uint32))
    want = format_oracle.quantize(x, format_cases.form(format), rule, rounding, chance)
    got = api.quantize(jnp.asarray(x), format, axis=1, scale_rule=rule, rounding=rounding, key=key)
    values, poisoned = api.dequantize(got), api.poisoned_blocks(got)
    np.testing.assert_array_equal(np.asarray(got.scales)[:, 0], want.scales)
    if want.sub_scales is not None:
        # Sub-scales of poisoned blocks mean nothing.
        good = np.isfinite(x).all(axis=1)
        np.testing.assert_array_equal(np.asarray(got.sub_scales)[good], want.sub_scales[good])
    else:
        assert got.sub_scales is None
    np.testing.assert_array_equal(np.asarray(got.codes), want.codes)
    nans = np.isnan(want.values)
    np.testing.assert_array_equal(np.isnan(np.asarray(values)), nans)
    np.testing.assert_array_equal(
        np.asarray(values).view(np.uint32)[~nans], want.values.astype(np.float32).view(np.uint32)[~nans]
    )
    assert int(poisoned) == (~np.isfinite(x)).any(axis=1).sum() == nans.all(axis=1).sum() == nans.any(axis=1).sum()


def some_maxima():
    """Bfloat16 of every exponent, of a few mantissas, and all that is special."""
    every = format_cases.all_bfloat16()
    mantissa = np.arange(1 << 16) & 0x7F
    chosen = np.isin(mantissa, [0, 1, 0x40, 0x41, 0x60, 0x61, 0x68, 0x70, 0x7F])
    return every[chosen & (np.arange(1 << 16) % 3 != 1)]


@pytest.mark.default_cases
@pytest.mark.parametrize(("name", "rule", "rounding"), list(covering()))
def test_codes_scales_and_values_are_those_of_the_oracle(name, rule, rounding):
    format = format_cases.small(name)
    x = format_cases.blocks(some_maxima(), format, rule, seed=3)
    check(format, rule, rounding, np.concatenate([x, format_cases.random_bits(1024, format.k1, seed=4)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule", "rounding"), EVERY_RULE)
def test_every_bfloat16_as_the_largest_of_a_block(name, rule, rounding):
    format = format_cases.small(name)
    x = format_cases.blocks(format_cases.all_bfloat16(), format, rule, seed=11)
    check(format, rule, rounding, np.concatenate([x, format_cases.random_bits(8192, format.k1, seed=12)]))


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_optimised_programs_give_the_same_bits():
    for name, rule, rounding in (
        ("bdr_mx6", "floor", "stochastic"),
        ("mxfp8_e4m3", "rceil", "ties_to_even"),
        ("nvfp4", None, "ties_to_even"),
        ("vsq4", None, "ties_to_even"),
        ("int8", None, "stochastic"),
        ("fp8_e5m2", None, "ties_away"),
    ):
        format = format_cases.small(name)
        x = format_cases.blocks(some_maxima(), format, rule, seed=3)
        check(format, rule, rounding, np.concatenate([x, format_cases.random_bits(1024, format.k1, seed=4)]))


FAMILY = [
    bdr(m=15),
    bdr(m=9, d2=0, k1=8),
    bdr(m=6, k1=12, k2=3, d1=5, d2=2),
    bdr(m=3, k1=64, k2=1, d1=2, d2=4),
    bdr(m=12, k1=32, k2=4, d2=8, scale="float32"),
    bdr(m=1, k1=6, k2=2, d2=1, scale="float32"),
    bdr(m=15, k1=4, d2=0, scale="float32"),
    BlockFormat(name="pairs of E2M1", element=elements.E2M1, k1=16, k2=2, d1=6, sub_scale="exponent", d2=3),
    BlockFormat(name="short E5M2", element=elements.E5M2, k1=8, k2=8, d1=4),
    BlockFormat(
        name="E4M3 twice", element=elements.E4M3, k1=32, k2=8, scale="float32", d1=32, sub_scale="integer", d2=4
    ),
    BlockFormat(name="E3M2 of a row", element=elements.E3M2, k1=24, k2=24, scale="float32", d1=32),
]
"""Points of the space without a name: wide and narrow elements, short scales, odd blocks, floats under two scales."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "rounding"),
    [(format, format_cases.ROUNDINGS[(i + j) % 4]) for i, format in enumerate(FAMILY) for j in (0, 3)],
    ids=lambda case: getattr(case, "name", case),
)
def test_any_member_of_the_family_is_that_of_the_oracle(format, rounding):
    rules = format_cases.rules(format)
    rule = rules[FAMILY.index(format) % len(rules)]
    x = format_cases.blocks(some_maxima(), format, rule, seed=5)
    check(format, rule, rounding, np.concatenate([x, format_cases.random_bits(2048, format.k1, seed=6)]))


@pytest.mark.default_cases("bdr_mx6", "nvfp4")
@pytest.mark.parametrize("name", ["bdr_mx6", "mxfp4_e2m1", "fp8_e4m3", "vsq8", "nvfp4"])
def test_the_last_bit_of_chance_decides(name):
    """By bisection, where the oracle begins to round each number up: exactly there the package does so too."""
    format = format_cases.small(name)
    rule = "floor" if format.scale == "exponent" else None
    described = format_cases.form(format)
    x = format_cases.wide_blocks(format)[:64]
    x[0], x[1, 3] = 1, 0  # values that are exact, and stay
    g = np.float32(np.abs(x).max() / np.float32(2688)) if format.scale == "e4m3" else None

    def oracle(half):
        chance = (half << 1).astype(np.uint32)
        return format_oracle.quantize(x, described, rule, "stochastic", chance, tensor_scale=g).codes

    low, high = np.zeros(x.shape, np.int64), np.full(x.shape, 2**31 - 1, np.int64)
    rounded_up = oracle(high)
    for _ in range(31):
        middle = (low + high) // 2
        up = oracle(middle) == rounded_up
        low, high = np.where(up, low, middle + 1), np.where(up, middle, high)
    encode = jax.jit(
        lambda chance: (
            blocks.encode_blocks(
                float32.float_bits(jnp.asarray(x)).reshape(len(x), -1, format.k2),
                format,
                axis=1,
                rule=rule,
                rounding="stochastic",
                chance=chance.reshape(len(x), -1, format.k2),
                tensor_scale=None if g is None else jnp.asarray(g),
            ).codes
        )
    )
    for half in (high, np.maximum(high - 1, 0), np.zeros_like(high), np.full_like(high, 2**31 - 1)):
        got = np.asarray(encode(jnp.asarray((half << 1).astype(np.uint32)))).reshape(x.shape)
        np.testing.assert_array_equal(got, oracle(half))


def test_nvfp4_by_a_given_scale_of_the_tensor():
    format = FORMATS["nvfp4"]
    x = format_cases.random_bits(512, 16, seed=9)[:, :] * np.float32(2.0**-60)
    x[3, 4] = np.nan
    for g in (np.float32(1.2345), np.float32(2.0**-40), np.float32(3e20)):
        want = format_oracle.quantize(x, format_cases.form(format), tensor_scale=g)
        got = api.quantize(jnp.asarray(x), "nvfp4", axis=1, tensor_scale=jnp.asarray(g))
        np.testing.assert_array_equal(np.asarray(got.scales)[:, 0], want.scales)
        np.testing.assert_array_equal(np.asarray(got.codes), want.codes)
        np.testing.assert_array_equal(np.asarray(api.dequantize(got)), want.values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["bdr_mx9", "mxfp4_e2m1", "nvfp4", "int8"])
def test_sixteen_bit_inputs_are_the_same_numbers(name, dtype):
    format = format_cases.small(name)
    every = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype)).reshape(-1, format.k1)
    got = api.quantize(jnp.asarray(every), format, axis=1)
    want = api.quantize(jnp.asarray(every.astype(np.float32)), format, axis=1)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
    back = api.cast(jnp.asarray(every), format, axis=1)
    assert back.dtype == dtype
    values = np.asarray(api.dequantize(want))
    with np.errstate(over="ignore"):
        expected = values.astype(jnp.dtype(dtype))
    nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(np.asarray(back, np.float32)), nan)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


def vector_of(name, **kwargs):
    return dataclasses.replace(FORMATS[name], **kwargs)


def test_the_public_vector_of_microxcaling():
    x = jnp.float32([485, 475, 400, -485, -475, -450, 2**-6, -(2**-6)])
    format = vector_of("mxfp8_e4m3", k1=8, k2=8)
    away = [448, 448, 416, -448, -448, -448, 2**-6, -(2**-6)]
    np.testing.assert_array_equal(np.asarray(api.cast(x, format, axis=0, rounding="ties_away")), away)
    even = [448, 448, 384, -448, -448, -448, 2**-6, -(2**-6)]
    np.testing.assert_array_equal(np.asarray(api.cast(x, format, axis=0)), even)


def test_the_scale_of_150_that_torchao_2035_names():
    """In a block of E4M3 whose largest magnitude is 150: byte 126 under RCEIL, 127 under CEIL (issue 2035)."""
    x = jnp.zeros(32).at[7].set(150.0)
    bytes_ = {rule: int(api.quantize(x, "mxfp8_e4m3", axis=0, scale_rule=rule).scales[0]) for rule in ("rceil", "ceil")}
    assert bytes_ == {"rceil": 126, "ceil": 127}


def test_the_largest_number_below_a_power_of_two_keeps_its_exponent():
    """floor(log2(x)) in float32, as microxcaling's Python has it, gives one too many for nearly all of these."""
    exponents = np.arange(-125, 127)
    largest = np.nextafter(np.float32(2.0) ** exponents.astype(np.float32), np.float32(0))
    x = jnp.zeros((len(exponents), 16)).at[:, 0].set(jnp.asarray(largest))
    np.testing.assert_array_equal(np.asarray(api.quantize(x, "bdr_mx9", axis=1).scales)[:, 0], exponents - 1 + 127)
    with np.errstate(all="ignore"):
        assert (np.floor(np.log2(largest)) != exponents - 1).mean() > 0.9


def test_jax_s_quantizer_for_mxfp8_is_the_rule_rceil():
    jaxs = pytest.importorskip("jax._src.cudnn.scaled_matmul_stablehlo", reason="this jax has it elsewhere")
    config = jaxs.BlockScaleConfig(
        mode="mxfp8", block_size=32, data_type=jnp.float8_e4m3fn, scale_type=jnp.float8_e8m0fnu,
        global_scale=None, infer_only=False,
    )  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 64, 1024)), jnp.float32)
    codes, scales = jaxs.quantize(x, config)
    ours = api.quantize(x, "mxfp8_e4m3", axis=-1, scale_rule="rceil")
    np.testing.assert_array_equal(np.asarray(ours.codes), np.asarray(codes).view(np.uint8))
    np.testing.assert_array_equal(np.asarray(ours.scales), np.asarray(scales).view(np.uint8))
    floor = api.quantize(x, "mxfp8_e4m3", axis=-1)
    assert 0.8 < (np.asarray(floor.scales) == np.asarray(ours.scales)).mean() < 0.86  # mantissa at most 1.75
