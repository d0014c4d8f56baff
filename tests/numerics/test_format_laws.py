"""Laws that formats of blocks keep, and where blocks may lie."""

import dataclasses

import format_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.numerics import quantize as api
from scalejax.numerics.formats import FORMATS
from scalejax.numerics.packing import pack, unpack

pytestmark = pytest.mark.usefixtures("strict_promotion")

OCP = [name for name in FORMATS if name.startswith(("mxfp", "mxint"))]
EXPONENTS = [name for name, format in FORMATS.items() if format.scale == "exponent"]
SYMMETRIC = ("ties_to_even", "ties_away", "toward_zero")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("name", [*OCP, "bdr_mx9", "bdr_mx6", "bdr_mx4"])
def test_casting_twice_is_casting_once(name, rule):
    once = api.cast(jnp.asarray(format_cases.wide_blocks(FORMATS[name])), name, axis=1, scale_rule=rule)
    np.testing.assert_array_equal(np.asarray(api.cast(once, name, axis=1, scale_rule=rule)), np.asarray(once))


def test_casting_twice_moves_a_few_numbers_of_nvfp4():
    once = api.cast(jnp.asarray(format_cases.wide_blocks(FORMATS["nvfp4"])), "nvfp4", axis=1)
    moved = (np.asarray(api.cast(once, "nvfp4", axis=1)) != np.asarray(once)).mean()
    assert 0 < moved < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        *((name, "ties_to_even") for name in ("bdr_mx9", "int8", "vsq4", "fp8_e5m2", "mxfp6_e3m2", "mxint8")),
        *(("nvfp4", rounding) for rounding in SYMMETRIC),
    ],
)
def test_the_sign_plays_no_part(name, rounding):
    format = format_cases.small(name)
    x = jnp.asarray(format_cases.wide_blocks(format))
    one = api.cast(x, format, axis=1, rounding=rounding)
    np.testing.assert_array_equal(np.asarray(api.cast(-x, format, axis=1, rounding=rounding)), -np.asarray(one))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-7, 1, 20])
@pytest.mark.parametrize("name", EXPONENTS)
def test_powers_of_two_pass_through(name, shift):
    x = format_cases.wide_blocks(FORMATS[name])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    format = format_cases.small(name)
    got = api.quantize(jnp.zeros((format_cases.ROWS, format.k1)), format, axis=1)
    assert not np.asarray(got.codes).any()
    assert int(api.poisoned_blocks(got)) == 0
    np.testing.assert_array_equal(np.asarray(api.dequantize(got)), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_poisons_its_block_and_no_other(name):
    format = format_cases.small(name)
    x = format_cases.wide_blocks(format)
    bad = [1, 500, 1999]
    x[bad] = 0  # so that the scale of a tensor is that of the other blocks
    clean = np.asarray(api.cast(jnp.asarray(x), format, axis=1))
    x[bad, format.k1 - 2] = [np.nan, np.inf, -np.inf]
    got = api.quantize(jnp.asarray(x), format, axis=1)
    values = np.asarray(api.dequantize(got))
    assert np.isnan(values[bad]).all()
    np.testing.assert_array_equal(np.delete(values, bad, 0), np.delete(clean, bad, 0))
    assert int(api.poisoned_blocks(got)) == 3
    assert not np.asarray(got.codes)[bad].any()


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-130, np.inf, np.nan])
def test_a_scale_of_the_tensor_that_no_number_can_be_under_poisons_all_blocks(scale):
    got = api.quantize(jnp.ones(32), "nvfp4", axis=0, tensor_scale=jnp.float32(scale))
    assert int(api.poisoned_blocks(got)) == 2
    assert np.isnan(np.asarray(api.dequantize(got))).all()


def test_both_codes_of_nan_are_counted_as_poison():
    got = api.quantize(jnp.ones(32), "nvfp4", axis=0)
    got = dataclasses.replace(got, scales=got.scales.at[1].set(0xFF))
    assert int(api.poisoned_blocks(got)) == 1
    np.testing.assert_array_equal(np.isnan(np.asarray(api.dequantize(got))), np.arange(32) >= 16)


@pytest.mark.default_cases("bdr_mx9", "msfp12", "mxfp8_e4m3", "mxfp6_e2m3")
@pytest.mark.parametrize("name", EXPONENTS)
def test_subnormal_numbers_keep_what_the_lowest_scale_holds(name):
    """2^-127 is the lowest scale, itself a subnormal float32; neither values nor scales are taken for zero."""
    format = FORMATS[name]
    lowest = -127 - format.max_microexponent + format.element.step_exponent
    x = np.full((1, format.k1), np.float32(2.0 ** max(lowest, -149)))
    got = api.quantize(jnp.asarray(x), name, axis=1)
    assert int(got.scales[0, 0]) == 0
    np.testing.assert_array_equal(np.asarray(api.dequantize(got)).view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("rounding", format_cases.ROUNDINGS)
def test_stochastic_rounding_is_right_on_average_and_the_others_are_not(rounding):
    x = jnp.full((1 << 14,), 1.3).at[::32].set(7.0)
    key = jax.random.key(0) if rounding == "stochastic" else None
    got = np.asarray(api.cast(x, "mxfp4_e2m1", axis=0, rounding=rounding, key=key, scale_rule="rceil"))
    kept = np.delete(got.reshape(-1, 32), 0, axis=1)  # steps of 1 beside 7
    error = abs(kept.mean() - 1.3)
    assert error < 0.02 if rounding == "stochastic" else error > 0.2


@pytest.mark.default_cases(first=4)
@pytest.mark.parametrize(
    ("name", "rule", "mean"),
    [
        ("mxfp4_e2m1", "floor", 6.0),  # between 4 and 8, and 6 is the largest
        ("mxfp4_e2m1", "even", 7.8),
        ("mxfp4_e2m1", "rceil", 7.8),
        ("mxfp4_e2m1", "ceil", 7.8),
        ("bdr_mx4", "floor", 6.0),  # 1.5 * 4
        ("bdr_mx4", "rceil", 7.8),
        ("bdr_mx9", "floor", 7.8),  # between 7.75 and 7.8125
        ("nvfp4", None, 7.8),
    ],
)
def test_the_largest_of_a_block_is_right_on_average_where_its_scale_holds_it(name, rule, mean):
    """Under a rule that saturates the largest element, chance cannot round it up: what docs/numerics.md says."""
    x = np.full((1 << 14,), 1.3, np.float32)
    x[:: FORMATS[name].k1] = 7.8
    key = jax.random.key(0)
    got = np.asarray(api.cast(jnp.asarray(x), name, axis=0, rounding="stochastic", key=key, scale_rule=rule))
    assert got[:: FORMATS[name].k1].mean() == pytest.approx(mean, abs=0.1)


def test_the_same_key_gives_the_same_codes_in_any_layout():
    x = jnp.asarray(format_cases.wide_blocks(FORMATS["bdr_mx6"])[:64])
    first = api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(3))
    again = jax.jit(lambda x: api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(3)))(x)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))
    other = api.cast(x, "bdr_mx6", axis=1, rounding="stochastic", key=jax.random.key(4))
    assert (np.asarray(first) != np.asarray(other)).any()


# Axes, tails, transformations.


@pytest.mark.slow
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


@pytest.mark.slow
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
    stochastic = jax.grad(lambda x: jnp.vdot(weights, api.cast(x, "nvfp4", axis=0, rounding="stochastic", key=key)))
    np.testing.assert_array_equal(np.asarray(stochastic(x)), np.asarray(weights))


@pytest.mark.slow
def test_no_program_gathers_or_takes_logarithms():
    for name in FORMATS:
        format = format_cases.small(name)
        text = str(jax.make_jaxpr(lambda x, f=format: api.cast(x, f, axis=0))(jnp.zeros(64)))
        for primitive in ("gather", "log", "exp2", " exp", "pow", "sort", "while", "scan"):
            assert primitive not in text, (name, primitive)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_blocks_lie_within_shards_or_are_refused(axis_type):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    across = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", None))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((8, 128)), jnp.float32)
    for sharding in (along, across):
        # Blocks of 16: eight shards of one block each, or of one row.
        np.testing.assert_array_equal(
            np.asarray(api.quantize(jax.device_put(x, sharding), "bdr_mx9", axis=1).codes),
            np.asarray(api.quantize(x, "bdr_mx9", axis=1).codes),
        )
    api.quantize(jax.device_put(x, across), "mxint8", axis=1)
    message = r"blocks of 32, and axis 1 of x\[8, 128\] is cut into shards of 16.*number of shards that divides 4"
    with pytest.raises(UserError, match=message):
        api.quantize(jax.device_put(x, along), "mxint8", axis=1)
    ragged = jax.device_put(x[:, :24], along)
    with pytest.raises(UserError, match=r"shards of 3: blocks .* Fill up its last block before, or shard another axis"):
        api.quantize(ragged, "bdr_mx9", axis=1, tail="pad")
    if axis_type == jax.sharding.AxisType.Explicit:
        with pytest.raises(UserError, match=message):
            jax.jit(lambda x: api.cast(x, "mxint8", axis=1))(jax.device_put(x, along))


def test_inside_a_shard_map_an_array_is_what_a_device_holds():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((8, 128)), jnp.float32)
    spec = jax.sharding.PartitionSpec("fsdp")
    got = jax.shard_map(lambda x: api.cast(x, "mxint8", axis=1), mesh=mesh, in_specs=spec, out_specs=spec)(x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(api.cast(x, "mxint8", axis=1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bdr_mx6", "nvfp4", "vsq4"])
def test_arrays_without_entries_have_codes_without_entries(name):
    format = format_cases.small(name)
    for shape in ((0, format.k1), (3, 0)):
        got = unpack(pack(api.quantize(jnp.zeros(shape), format, axis=1)))
        assert got.codes.shape == api.dequantize(got).shape == shape


@pytest.mark.slow
def test_a_stack_of_tensors_has_the_scale_of_each():
    """As many tensors as a block has values: the scales would broadcast along the block, too."""
    x = jnp.asarray(
        np.random.default_rng(5).standard_normal((16, 3, 32)) * np.arange(1, 17)[:, None, None], jnp.float32
    )
    stacked = jax.vmap(lambda one: api.quantize(one, "nvfp4", axis=-1))(x)
    assert stacked.tensor_scale.shape == (16,)
    want = np.stack([np.asarray(api.cast(one, "nvfp4", axis=-1)) for one in x])
    np.testing.assert_array_equal(np.asarray(api.dequantize(stacked)), want)
    np.testing.assert_array_equal(np.asarray(api.dequantize(unpack(pack(stacked)))), want)
