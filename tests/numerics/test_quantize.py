"""Formats of blocks, bit for bit: against the oracle, against jax and ml_dtypes, and by their own laws."""

import dataclasses

import format_cases
import format_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks, elements, formats
from scalejax.numerics import quantize as api
from scalejax.numerics.formats import FORMATS

pytestmark = pytest.mark.usefixtures("strict_promotion")

OCP = [name for name in FORMATS if name.startswith(("mxfp", "mxint"))]
EXPONENTS = [name for name, format in FORMATS.items() if format.scale == "exponent"]
PRODUCT = [
    (name, rule, rounding)
    for name, format in FORMATS.items()
    for rule in format_cases.rules(format)
    for rounding in format_cases.ROUNDINGS
]


def covering():
    """Two cases a format, such that each rule and each rounding occurs several times."""
    for i, (name, format) in enumerate(FORMATS.items()):
        rules = format_cases.rules(format)
        yield name, rules[i % len(rules)], format_cases.ROUNDINGS[i % 4]
        yield name, rules[(i + 3) % len(rules)], format_cases.ROUNDINGS[(i + 1 + i // 4 % 3) % 4]


def check(name, rule, rounding, x):
    format = format_cases.small(name)
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


@pytest.mark.parametrize(("name", "rule", "rounding"), list(covering()))
def test_codes_scales_and_values_are_those_of_the_oracle(name, rule, rounding):
    format = format_cases.small(name)
    x = format_cases.blocks(some_maxima(), format, rule, seed=3)
    check(name, rule, rounding, np.concatenate([x, format_cases.random_bits(1024, format.k1, seed=4)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule", "rounding"), PRODUCT)
def test_every_bfloat16_as_the_largest_of_a_block(name, rule, rounding):
    format = format_cases.small(name)
    x = format_cases.blocks(format_cases.all_bfloat16(), format, rule, seed=11)
    check(name, rule, rounding, np.concatenate([x, format_cases.random_bits(8192, format.k1, seed=12)]))


@pytest.mark.parametrize("name", ["bdr_mx6", "mxfp4_e2m1", "fp8_e4m3", "vsq8", "nvfp4"])
def test_the_last_bit_of_chance_decides(name):
    """By bisection, where the oracle begins to round each number up: exactly there the package does so too."""
    format = format_cases.small(name)
    rule = "floor" if format.scale == "exponent" else None
    described = format_cases.form(format)
    x = wide_blocks(format)[:64]
    x[0], x[1, 3] = 1, 0  # numbers that are exact, and stay
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


@pytest.mark.parametrize("exponent", range(-125, 127))
def test_the_largest_number_below_a_power_of_two_keeps_its_exponent(exponent):
    """floor(log2(x)) in float32, as microxcaling's Python has it, gives one too many for nearly all of these."""
    largest = np.nextafter(np.float32(2.0**exponent), np.float32(0))
    got = api.quantize(jnp.zeros(16).at[0].set(largest), "bdr_mx9", axis=0)
    assert int(got.scales[0]) == exponent - 1 + 127


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


# Laws.

ROWS = 2000  # everywhere, so that one program serves many tests


def wide_blocks(format, seed=0):
    """Blocks far from the ends of float32, over 40 binades."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, format.k1)) * 2.0 ** rng.integers(-20, 20, (ROWS, 1))).astype(np.float32)


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("name", [*OCP, "bdr_mx9", "bdr_mx6", "bdr_mx4"])
def test_casting_twice_is_casting_once(name, rule):
    once = api.cast(jnp.asarray(wide_blocks(FORMATS[name])), name, axis=1, scale_rule=rule)
    np.testing.assert_array_equal(np.asarray(api.cast(once, name, axis=1, scale_rule=rule)), np.asarray(once))


def test_casting_twice_moves_a_few_numbers_of_nvfp4():
    once = api.cast(jnp.asarray(wide_blocks(FORMATS["nvfp4"])), "nvfp4", axis=1)
    moved = (np.asarray(api.cast(once, "nvfp4", axis=1)) != np.asarray(once)).mean()
    assert 0 < moved < 0.01


@pytest.mark.parametrize("rounding", ["ties_to_even", "ties_away", "toward_zero"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_sign_plays_no_part(name, rounding):
    format = format_cases.small(name)
    x = jnp.asarray(wide_blocks(format))
    one = api.cast(x, format, axis=1, rounding=rounding)
    np.testing.assert_array_equal(np.asarray(api.cast(-x, format, axis=1, rounding=rounding)), -np.asarray(one))


@pytest.mark.parametrize("shift", [-7, 1, 20])
@pytest.mark.parametrize("name", EXPONENTS)
def test_powers_of_two_pass_through(name, shift):
    x = wide_blocks(FORMATS[name])
    one = np.asarray(api.cast(jnp.asarray(x), name, axis=1))
    np.testing.assert_array_equal(
        np.asarray(api.cast(jnp.asarray(x * np.float32(2.0**shift)), name, axis=1)), one * np.float32(2.0**shift)
    )


def test_a_demoted_pair_just_below_the_shared_exponent_saturates():
    x = np.zeros(16, np.float32)
    x[0], x[2], x[3] = 1.0, np.nextafter(np.float32(1), np.float32(0)), -0.999
    got = api.quantize(jnp.asarray(x), "bdr_mx9", axis=0)
    assert got.sub_scales[1] == 1
    assert [int(c) for c in got.codes[2:4]] == [127, 127 | 128]  # 128 would be the nearest, and is none of 7 bits
    np.testing.assert_array_equal(np.asarray(api.dequantize(got))[2:4], [127 / 128, -127 / 128])


def test_numbers_of_a_format_are_themselves():
    x = jnp.float32([1.0, -0.5, 127 / 64, 3 / 64] * 4)
    np.testing.assert_array_equal(np.asarray(api.cast(x, "bdr_mx9", axis=0)), np.asarray(x))
    y = jnp.float32([0, 0.5, 1, 1.5, 2, 3, 4, -6] * 4)
    np.testing.assert_array_equal(np.asarray(api.cast(y, "mxfp4_e2m1", axis=0)), np.asarray(y))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    format = format_cases.small(name)
    got = api.quantize(jnp.zeros((ROWS, format.k1)), format, axis=1)
    assert not np.asarray(got.codes).any()
    assert int(api.poisoned_blocks(got)) == 0
    np.testing.assert_array_equal(np.asarray(api.dequantize(got)), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_poisons_its_block_and_no_other(name, bad):
    format = format_cases.small(name)
    x = wide_blocks(format)
    x[1] = 0  # so that the scale of a tensor is that of the other blocks
    clean = np.asarray(api.cast(jnp.asarray(x), format, axis=1))
    x[1, format.k1 - 2] = bad
    got = api.quantize(jnp.asarray(x), format, axis=1)
    values = np.asarray(api.dequantize(got))
    assert np.isnan(values[1]).all()
    np.testing.assert_array_equal(np.delete(values, 1, 0), np.delete(clean, 1, 0))
    assert int(api.poisoned_blocks(got)) == 1
    assert not np.asarray(got.codes)[1].any()


@pytest.mark.parametrize("name", EXPONENTS)
def test_subnormal_numbers_keep_what_the_lowest_scale_holds(name):
    """2^-127 is the lowest scale, itself a subnormal float32; neither numbers nor scales are taken for zero."""
    format = FORMATS[name]
    lowest = -127 - format.max_microexponent + format.element.step_exponent
    x = np.full((1, format.k1), np.float32(2.0 ** max(lowest, -149)))
    got = api.quantize(jnp.asarray(x), name, axis=1)
    assert int(got.scales[0, 0]) == 0
    np.testing.assert_array_equal(np.asarray(api.dequantize(got)).view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("rounding", format_cases.ROUNDINGS)
def test_rounding_by_chance_is_right_on_average_and_the_others_are_not(rounding):
    x = jnp.full((1 << 14,), 1.3).at[::32].set(7.0)
    key = jax.random.key(0) if rounding == "stochastic" else None
    got = np.asarray(api.cast(x, "mxfp4_e2m1", axis=0, rounding=rounding, key=key, scale_rule="rceil"))
    kept = np.delete(got.reshape(-1, 32), 0, axis=1)  # steps of 1 beside 7
    error = abs(kept.mean() - 1.3)
    assert error < 0.02 if rounding == "stochastic" else error > 0.2


def test_the_same_key_gives_the_same_codes_in_any_layout():
    x = jnp.asarray(wide_blocks(FORMATS["bdr_mx6"])[:64])
    first = api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(3))
    again = jax.jit(lambda x: api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(3)))(x)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))
    other = api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(4))
    assert (np.asarray(first) != np.asarray(other)).any()


# Axes, tails, transformations.


@pytest.mark.parametrize("name", ["bdr_mx6", "vsq4", "nvfp4", "mxfp6_e3m2"])
def test_blocks_lie_along_any_axis(name):
    format = format_cases.small(name)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 2 * format.k1, 5)), jnp.float32)
    want = api.quantize(jnp.moveaxis(x, 1, -1), format, axis=-1)
    for axis in (1, -2):
        got = api.quantize(x, format, axis=axis)
        assert got.axis == -2
        assert got.scales.shape == (3, 2, 5)
        np.testing.assert_array_equal(np.asarray(got.codes), np.moveaxis(np.asarray(want.codes), -1, 1))
        np.testing.assert_array_equal(
            np.asarray(api.dequantize(got)), np.moveaxis(np.asarray(api.dequantize(want)), -1, 1)
        )


@pytest.mark.parametrize("name", ["bdr_mx9", "mxfp8_e4m3", "nvfp4"])
def test_padding_changes_no_scale_and_is_cut_off_again(name):
    k1 = FORMATS[name].k1
    x = -jnp.abs(jnp.asarray(np.random.default_rng(2).standard_normal((4, k1 + 3)), jnp.float32)) - 1
    with pytest.raises(UserError, match=rf"blocks of {k1}, and axis 1 of x\[4, {k1 + 3}\] is no multiple.*tail='pad'"):
        api.quantize(x, name, axis=1)
    got = api.quantize(x, name, axis=1, tail="pad")
    assert got.codes.shape == (4, 2 * k1)
    assert got.length == k1 + 3
    by_hand = api.quantize(jnp.pad(x, ((0, 0), (0, k1 - 3))), name, axis=1)
    np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(by_hand.scales))
    np.testing.assert_array_equal(np.asarray(api.dequantize(got)), np.asarray(api.dequantize(by_hand))[:, : k1 + 3])
    key = jax.random.key(1)
    chance = api.cast(x, name, axis=1, tail="pad", rounding="stochastic", key=key)
    assert chance.shape == x.shape


def test_a_stack_of_arrays_is_quantized_in_a_scan_and_under_vmap():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 4, 32)), jnp.float32)
    want = np.asarray(api.cast(x, "bdr_mx9", axis=-1))
    stacked = jax.vmap(lambda one: api.quantize(one, "bdr_mx9", axis=1))(x)
    np.testing.assert_array_equal(np.asarray(api.dequantize(stacked)), want)
    _, scanned = jax.lax.scan(lambda c, one: (c, api.dequantize(one)), 0, stacked)
    np.testing.assert_array_equal(np.asarray(scanned), want)


def test_the_gradient_of_a_cast_passes_straight_through():
    x = jnp.asarray(np.random.default_rng(2).standard_normal(32), jnp.float32)
    weights = jnp.arange(32.0)
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(weights, api.cast(x, "mxfp4_e2m1", axis=0))))(x)
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(weights))
    key = jax.random.key(0)
    by_chance = jax.grad(lambda x: jnp.vdot(weights, api.cast(x, "nvfp4", axis=0, rounding="stochastic", key=key)))
    np.testing.assert_array_equal(np.asarray(by_chance(x)), np.asarray(weights))


def test_no_program_gathers_or_takes_logarithms():
    for name in FORMATS:
        format = format_cases.small(name)
        text = str(jax.make_jaxpr(lambda x, f=format: api.cast(x, f, axis=0))(jnp.zeros(64)))
        for primitive in ("gather", "log", "exp2", " exp", "pow", " div", "sort"):
            assert primitive not in text, (name, primitive)


# Bad input.


def test_unknown_names_list_the_nearest():
    with pytest.raises(UserError, match=r"no 'mx9'; the nearest are bdr_mx9"):
        formats.find("mx9")
    with pytest.raises(UserError, match=r"the nearest are.*mxfp6_e3m2"):
        formats.find("mxfp6-e3m")
    with pytest.raises(UserError, match="there are bdr_mx9, bdr_mx6, bdr_mx4, msfp16"):
        formats.find("zzz")


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool"])
def test_integers_are_refused_by_name(dtype):
    with pytest.raises(UserError, match=f"float32, bfloat16 or float16; got {dtype}"):
        api.quantize(jnp.zeros(32, dtype), "mxint8", axis=0)


def test_float64_is_refused_by_name(x64):
    with pytest.raises(UserError, match=r"got float64. Cast it to float32 first"):
        api.quantize(jnp.zeros(32, jnp.float64), "mxint8", axis=0)
    assert api.cast(jnp.ones(32, jnp.float32), "bdr_mx4", axis=0).dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 2}, "axis: x has 1 axes; got axis 2"),
        ({"scale_rule": "round"}, "scale_rule: must be one of floor, rceil.*'round'"),
        (
            {"scale_rule": "qwix", "format": "mxint8"},
            "qwix defines its rule for E4M3, E5M2, E2M1; got elements of INT8",
        ),
        ({"scale_rule": "floor", "format": "nvfp4"}, "nvfp4 scales by its largest magnitude and takes no rule"),
        ({"rounding": "up"}, "rounding: must be one of ties_to_even, .*'up'"),
        ({"rounding": "stochastic"}, "key: stochastic rounding needs one"),
        ({"key": 0}, "no other rounding does; got one with rounding 'ties_to_even'"),
        ({"tail": "drop"}, "tail: must be 'refuse' or 'pad'; got 'drop'"),
        ({"tensor_scale": np.float32(1)}, "tensor_scale: mxfp8_e4m3 has none"),
        ({"tensor_scale": np.ones(2, np.float32), "format": "nvfp4"}, r"must be float32\[\]; got float32\[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    arguments = {"format": "mxfp8_e4m3", "axis": 0} | arguments
    with pytest.raises(UserError, match=message):
        api.quantize(jnp.zeros(32), arguments.pop("format"), **arguments)


def test_results_of_other_types_are_refused():
    with pytest.raises(UserError, match="dtype must be float32, bfloat16 or float16; got int8"):
        api.dequantize(api.quantize(jnp.zeros(32), "mxint8", axis=0), jnp.int8)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"k1": 16, "k2": 3, "m": 4}, "k1 must be a multiple of k2"),
        ({"m": 16}, "2 to 16 bits; got S16 with 17"),
        ({"d1": 9, "m": 4}, "has 2 or 3 .* bits; got d1=9"),
        ({"d2": 9, "m": 4}, "d2 must be at most 8"),
        ({"d2": 5, "m": 4}, r"smallest step would be 2\^-161"),
    ],
)
def test_formats_that_cannot_be_are_refused(numbers, message):
    with pytest.raises(UserError, match=message):
        formats.bdr(**numbers)


def test_elements_are_those_of_ml_dtypes():
    """All bfloat16 and a million float32 within the range, and saturation beyond it."""
    x = np.concatenate([format_cases.all_bfloat16(), format_cases.random_bits(1 << 10, 1 << 10, seed=1).ravel()])
    x = x[np.isfinite(x)]
    types = {
        elements.E4M3: ml_dtypes.float8_e4m3fn,
        elements.E5M2: ml_dtypes.float8_e5m2,
        elements.E3M2: ml_dtypes.float6_e3m2fn,
        elements.E2M3: ml_dtypes.float6_e2m3fn,
        elements.E2M1: ml_dtypes.float4_e2m1fn,
    }
    for element, dtype in types.items():
        want = np.clip(x, -element.max, element.max).astype(dtype).view(np.uint8)
        code = elements.encode(float32.float_bits(jnp.asarray(x)), jnp.int32(0), element, "ties_to_even")
        np.testing.assert_array_equal(np.asarray(code), want, err_msg=element.name)
        every = np.arange(element.max_code + 1)
        np.testing.assert_array_equal(element.magnitudes, every.astype(np.uint8).view(dtype).astype(np.float64))
        back = elements.decode(jnp.asarray(every, jnp.int32), jnp.int32(0), element)
        np.testing.assert_array_equal(np.asarray(back).view(np.float32), element.magnitudes.astype(np.float32))


@pytest.mark.parametrize(
    ("element", "largest", "smallest_normal", "smallest", "emax"),
    [
        ("E5M2", 57344, 2.0**-14, 2.0**-16, 15),
        ("E4M3", 448, 2.0**-6, 2.0**-9, 8),
        ("E3M2", 28, 0.25, 0.0625, 4),
        ("E2M3", 7.5, 1, 0.125, 2),
        ("E2M1", 6, 1, 0.5, 2),
        ("INT8", 1 + 63 / 64, None, 1 / 64, 0),
    ],
)
def test_elements_are_those_of_the_specification(element, largest, smallest_normal, smallest, emax):
    found = getattr(elements, element)
    assert (found.max, found.max_exponent, found.magnitudes[1]) == (largest, emax, smallest)
    if smallest_normal is not None:
        assert 2.0**found.min_exponent == smallest_normal
