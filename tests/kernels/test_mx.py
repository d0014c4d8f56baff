"""Packed blocks by XLA: the bits of scalejax.numerics by another way, refusals, and products with their derivative."""

import dataclasses

import format_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_cases import assert_equal_bits as equal
from format_cases import sparse_numbers as numbers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mx_cases import CASES, PRODUCTS

from scalejax import compat
from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import mx
from scalejax.numerics import formats
from scalejax.numerics.formats import FORMATS, bdr
from scalejax.numerics.packing import pack, unpack
from scalejax.numerics.quantize import dequantize, poisoned_blocks, quantize

pytestmark = pytest.mark.usefixtures("strict_promotion")

EXPONENTS = [name for name, format in FORMATS.items() if format.scale == "exponent"]


def check_all_maxima(name, rule):
    format = format_cases.small(name)
    x = jnp.asarray(format_cases.blocks(format_cases.all_bfloat16(), format, rule, seed=7))
    packed = mx.quantize_blocks(x, format, axis=1, scale_rule=rule, implementation="xla")
    equal(packed, pack(quantize(x, format, axis=1, scale_rule=rule)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPONENTS)
def test_every_bfloat16_as_the_largest_of_a_block_gives_the_codes_of_numerics(name):
    check_all_maxima(name, "floor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mxfp8_e4m3", "rceil"),
        ("mxint8", "ceil"),
        ("bdr_mx6", "even"),
        ("mxfp4_e2m1", "even_fbgemm"),
        ("mxfp8_e5m2", "qwix"),
    ],
)
def test_and_under_another_rule(name, rule):
    check_all_maxima(name, rule)


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxfp6_e3m2", "bdr_mx6"])
def test_bit_patterns_of_all_kinds_give_the_codes_of_numerics(name):
    x = jnp.asarray(format_cases.random_bits(4096, FORMATS[name].k1 * 2, seed=5))
    equal(mx.quantize_blocks(x, name, axis=1, implementation="xla"), pack(quantize(x, name, axis=1)))


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_optimised_programs_give_the_codes_of_numerics_too():
    for name in ("mxfp8_e5m2", "bdr_mx6", "nvfp4"):
        x = jnp.asarray(format_cases.random_bits(4096, 64, seed=5))
        ours, theirs = mx.quantize_blocks(x, name, axis=1, implementation="xla"), quantize(x, name, axis=1)
        equal(ours, pack(theirs))
        equal(mx.dequantize_blocks(ours, implementation="xla"), dequantize(theirs))


@pytest.mark.parametrize(
    "format",
    [
        bdr(m=5, d1=4),
        bdr(m=6, k1=32, k2=8, d2=2),
        bdr(m=3, k1=8, k2=4, d1=5, d2=3),
    ],
    ids=lambda format: format.name,
)
def test_short_scales_and_other_widths_give_the_codes_of_numerics(format):
    x = jnp.asarray(format_cases.random_bits(2048, 4 * format.k1, seed=6))
    equal(mx.quantize_blocks(x, format, axis=1, implementation="xla"), pack(quantize(x, format, axis=1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [(case, ("mxfp6_e2m3", "bdr_mx4")[i % 2]) for i, case in enumerate(CASES)] + [("tail on the last axis", "nvfp4")],
)
def test_every_axis_and_tail_there_and_back(case, name):
    case = CASES[case]
    x = numbers(case.shape, case.dtype)
    theirs = quantize(x, name, axis=case.axis, tail="pad")
    ours = mx.quantize_blocks(x, name, axis=case.axis, tail="pad", implementation="xla")
    equal(ours, pack(theirs))
    equal(mx.dequantize_blocks(ours, x.dtype, implementation="xla"), dequantize(theirs, x.dtype))
    assert poisoned_blocks(unpack(ours)) == poisoned_blocks(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("rounding", "key"), [("ties_away", None), ("toward_zero", None), ("stochastic", 3)])
def test_other_roundings_and_formats_are_those_of_numerics(rounding, key):
    for name in ("mxfp4_e2m1", "vsq4"):
        format = format_cases.small(name)
        options = {"rounding": rounding, "key": None if key is None else jax.random.key(key)}
        x = numbers((6, 4 * format.k1), "bfloat16")
        ours = mx.quantize_blocks(x, format, axis=1, **options, implementation="xla")
        equal(ours, pack(quantize(x, format, axis=1, **options)))
        equal(mx.dequantize_blocks(ours, implementation="xla"), dequantize(unpack(ours)))


def test_a_tail_never_touches_a_scale_and_is_never_silent():
    x = jnp.full((2, 40), -3.0)
    with pytest.raises(UserError, match="Pass tail='pad'"):
        mx.quantize_blocks(x, "mxfp8_e4m3", axis=1)
    packed = mx.quantize_blocks(x, "mxfp8_e4m3", axis=1, tail="pad")
    np.testing.assert_array_equal(packed.scales[:, 0], packed.scales[:, 1])
    assert packed.length == 40
    np.testing.assert_array_equal(mx.dequantize_blocks(packed), x)


@pytest.mark.parametrize(("name", "size"), [("mxfp8_e4m3", 33 / 32), ("mxfp6_e2m3", 25 / 32), ("mxfp4_e2m1", 17 / 32)])
def test_bytes_of_storage(name, size):
    x = numbers((8, 128))
    assert mx.quantize_blocks(x, name, axis=1).nbytes == size * x.size


def test_blocks_on_two_devices_are_refused_and_whole_ones_stay_where_they_are():
    mesh = jax.make_mesh((8,), ("x",))
    x = jax.device_put(numbers((16, 128)), NamedSharding(mesh, P(None, "x")))
    with pytest.raises(UserError, match="blocks would straddle devices"):
        mx.quantize_blocks(x, "mxfp8_e4m3", axis=1)
    x = jax.device_put(x, NamedSharding(mesh, P("x")))
    packed = mx.quantize_blocks(x, "mxfp8_e4m3", axis=1, implementation="xla")
    assert packed.codes.sharding.spec[0] == "x"
    equal(packed, pack(quantize(x, "mxfp8_e4m3", axis=1)))


@pytest.mark.without_a_gpu
@pytest.mark.parametrize(
    ("axis_type", "backend"),
    [
        (AxisType.Auto, "xla"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((AxisType.Explicit, "xla"), (AxisType.Auto, "pallas_gpu"), (AxisType.Explicit, "pallas_tpu"))
        ),
    ],
)
def test_codes_and_scales_are_cut_alike_along_either_axis(axis_type, backend):
    """Columns on eight devices; and rows, whose blocks stay whole, with a sum over the devices."""
    how = {"implementation": backend} | ({} if backend == "xla" else {"interpret": True})
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x = jnp.asarray(np.random.default_rng(3).integers(-2, 3, (4, 256)), jnp.float32)
    weights = mx.quantize_blocks(jnp.nan_to_num(numbers((256, 16), seed=9)), "bdr_mx6", axis=0, implementation="xla")
    wanted = mx.matmul(x, weights, implementation="xla")

    def sums(x, weights):
        own = dataclasses.replace(weights, length=x.shape[1])
        return jax.lax.psum(mx.matmul(x, own, **how), "x")

    def run(function, specs, out):
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, weights), specs, strict=True)]
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))(*args)

    by_columns = run(lambda x, w: mx.matmul(x, w, **how), (P(), P(None, "x")), P(None, "x"))
    by_rows = run(sums, (P(None, "x"), P("x")), P())
    for found in (by_columns, by_rows):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))
    with pytest.raises(UserError, match=r"256 values of bdr_mx6 have 160 codes, 16 scales.*; got 20 codes, 2 scales"):
        run(lambda x, w: mx.dequantize_blocks(w, **how), (P(), P("x")), P("x"))


def exact_product(x, weights):
    """float64 sums of the decoded operands."""
    decoded = np.asarray(mx.dequantize_blocks(weights, implementation="reference"), np.float64)
    return np.asarray(x, np.float64) @ (decoded if weights.axis == -2 else decoded.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "product"),
    [
        ("mxfp8_e4m3", "bfloat16", "several tiles"),
        ("bdr_mx9", "float32", "eight rows"),
        ("nvfp4", "bfloat16", "one row"),
        ("nvfp4", "float32", "several tiles"),
        ("int8", "bfloat16", "eight rows"),
    ],
)
def test_weights_alone_are_decoded_and_summed_in_float32(name, dtype, product):
    rng = np.random.default_rng(1)
    format, (rows, depth, columns) = format_cases.small(name), PRODUCTS[product]
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    matrix = jnp.asarray(rng.standard_normal((depth, columns)), jnp.float32)
    results = []
    for weights in (mx.quantize_blocks(matrix, format, axis=0), mx.quantize_blocks(matrix.T, format, axis=1)):
        out = mx.matmul(x, weights, dtype=jnp.float32, implementation="xla")
        exact = exact_product(x, weights)
        # Values under float32 scales are rounded to the bfloat16 of x, 256 of them here; else only sums are rounded.
        tolerance = 5e-3 if name == "int8" else 2e-6
        np.testing.assert_allclose(out, exact, atol=tolerance * np.abs(exact).max())
        results.append(np.asarray(out))
    np.testing.assert_allclose(*results, atol=2e-6 * np.abs(results[0]).max())


@pytest.mark.slow
def test_both_packed_of_different_formats():
    x, matrix = numbers((6, 96), seed=2), numbers((96, 32), seed=3)
    x, matrix = jnp.nan_to_num(x), jnp.nan_to_num(matrix)
    left, right = mx.quantize_blocks(x, "mxfp8_e5m2", axis=-1), mx.quantize_blocks(matrix, "nvfp4", axis=0)
    exact = exact_product(mx.dequantize_blocks(left), right)
    for implementation in ("xla", "reference"):
        out = mx.matmul(left, right, implementation=implementation)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, exact, atol=1e-6 * np.abs(exact).max())


def test_leading_axes_tails_and_the_dtype_of_x_are_kept():
    x, matrix = jnp.nan_to_num(numbers((2, 3, 45), "bfloat16")), jnp.nan_to_num(numbers((45, 8)))
    weights = mx.quantize_blocks(matrix, "mxfp8_e4m3", axis=0, tail="pad")
    out = jax.jit(mx.matmul)(x, weights)
    assert (out.shape, out.dtype) == ((2, 3, 8), jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), exact_product(x, weights), rtol=2**-8, atol=1e-5 * float(jnp.abs(out).max())
    )


@pytest.mark.default_cases("nvfp4-1")
@pytest.mark.parametrize(("name", "axis"), [("mxfp6_e2m3", 0), ("nvfp4", 1)])
def test_the_gradient_of_x_is_that_of_the_decoded_weights(name, axis):
    x, matrix = jnp.nan_to_num(numbers((4, 5, 64), seed=4)), jnp.nan_to_num(numbers((64, 24), seed=5))
    weights = mx.quantize_blocks(matrix if axis == 0 else matrix.T, name, axis=axis)
    decoded = mx.dequantize_blocks(weights)
    decoded = decoded if axis == 0 else decoded.T
    out, pull = jax.vjp(lambda x: mx.matmul(x, weights, implementation="xla"), x)
    expected, expected_pull = jax.vjp(lambda x: jnp.einsum("abk,kn->abn", x, decoded, precision="highest"), x)
    d_out = jnp.asarray(np.random.default_rng(6).standard_normal(out.shape), jnp.float32)
    for ours, theirs in ((out, expected), (pull(d_out)[0], expected_pull(d_out)[0])):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(jnp.abs(theirs).max()))


def test_poisoned_weights_reach_their_columns_and_no_others():
    matrix = jnp.ones((64, 4)).at[40, 2].set(jnp.inf)
    out = mx.matmul(jnp.ones((1, 64)), mx.quantize_blocks(matrix, "mxfp4_e2m1", axis=0))
    np.testing.assert_array_equal(out, [[64, 64, np.nan, 64]])


@pytest.mark.skipif(not compat.has_scaled_matmul("cpu"), reason="jax.nn.scaled_matmul has no rule for CPUs before 0.12")
@pytest.mark.parametrize(
    ("left", "right"), [("mxfp8_e4m3", "mxfp8_e5m2"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4")]
)
def test_the_native_product_is_that_of_the_decoded_operands(left, right):
    x, matrix = jnp.nan_to_num(numbers((2, 3, 64))), jnp.nan_to_num(numbers((64, 32)))
    x = mx.quantize_blocks(x, left, axis=-1)
    for weights in (mx.quantize_blocks(matrix, right, axis=0), mx.quantize_blocks(matrix.T, right, axis=1)):
        out = mx.matmul(x, weights, implementation="native")
        expected = exact_product(mx.dequantize_blocks(x), weights)
        np.testing.assert_allclose(out, expected, atol=1e-6 * np.abs(expected).max())


def test_what_the_native_product_lacks_is_said():
    x, matrix = jnp.ones((2, 64)), jnp.ones((64, 32))
    for operand, name, message in (
        (x, "mxfp8_e4m3", "multiplies two packed operands; x is float32"),
        (mx.quantize_blocks(x, "mxfp8_e4m3", axis=1), "mxfp4_e2m1", "got mxfp8_e4m3 times mxfp4_e2m1"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            mx.matmul(operand, mx.quantize_blocks(matrix, name, axis=0), implementation="native")


def other_format(packed):
    return dataclasses.replace(packed, format=FORMATS["mxfp6_e2m3"])


def test_mistakes_are_refused_by_name():
    x = jnp.ones((4, 64))
    weights = mx.quantize_blocks(jnp.ones((64, 32)), "mxfp8_e4m3", axis=0)
    for call, message in (
        (lambda: mx.quantize_blocks(x, "mxfp8", axis=1), "there is no 'mxfp8'; the nearest are mxfp8_e4m3"),
        (lambda: mx.quantize_blocks(x.astype(jnp.int32), "mxfp8_e4m3", axis=1), "got int32"),
        (lambda: mx.quantize_blocks(x, "mxfp8_e4m3", axis=2), "x has 2 axes; got axis 2"),
        (lambda: mx.quantize_blocks(x, "mxfp8_e4m3", axis=1, implementation="native"), "must be None or one of"),
        (lambda: mx.dequantize_blocks(weights, jnp.int8), "dtype must be float32, bfloat16 or float16; got int8"),
        (lambda: mx.matmul(jnp.ones((4, 32)), weights), "the last axis of x has 32 values"),
        (lambda: mx.matmul(jnp.ones((4, 64), jnp.int8), weights), "x must be float32"),
        (lambda: mx.matmul(jnp.float32(1), weights), "must have an axis to sum over"),
        (lambda: mx.matmul(x, jnp.ones((64, 32))), "weights must be packed with two axes"),
        (lambda: mx.matmul(x, weights, dtype=jnp.int8), "dtype must be of floating point; got int8"),
        (lambda: mx.matmul(mx.quantize_blocks(x.T, "mxfp8_e4m3", axis=0), weights), "must lie along its last axis"),
        (lambda: mx.matmul(x, other_format(weights)), "64 values of mxfp6_e2m3 have 48 codes, 2 scales along their a"),
        (lambda: mx.dequantize_blocks(other_format(weights)), "; got 64 codes, 2 scales. Was it packed in another for"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_an_empty_array_stays_empty():
    packed = mx.quantize_blocks(jnp.zeros((0, 64)), "mxfp4_e2m1", axis=1)
    assert (packed.codes.shape, packed.scales.shape) == ((0, 32), (0, 2))
    assert mx.dequantize_blocks(packed).shape == (0, 64)
    assert mx.matmul(packed, mx.quantize_blocks(jnp.ones((64, 3)), "mxfp4_e2m1", axis=0)).shape == (0, 3)
    nothing = mx.quantize_blocks(jnp.zeros((0, 3)), "mxfp4_e2m1", axis=0)
    np.testing.assert_array_equal(mx.matmul(jnp.zeros((2, 0)), nothing), np.zeros((2, 3)))


@pytest.mark.slow
def test_a_stack_of_tensors_is_decoded_by_the_scale_of_each_and_multiplied_under_vmap():
    x = numbers((16, 4, 16), seed=8) * jnp.arange(1.0, 17)[:, None, None]
    x = jnp.nan_to_num(x)
    stacked = jax.vmap(lambda one: mx.quantize_blocks(one, "nvfp4", axis=-1, implementation="xla"))(x)
    one_by_one = [mx.quantize_blocks(one, "nvfp4", axis=-1, implementation="xla") for one in x]
    want = jnp.stack([mx.dequantize_blocks(one) for one in one_by_one])
    equal(mx.dequantize_blocks(stacked), want)
    weights = mx.quantize_blocks(jnp.eye(16), "nvfp4", axis=0)
    with pytest.raises(UserError, match=r"a stack of tensors, each with a tensor_scale of its own. Use jax.vmap"):
        mx.matmul(stacked, weights)
    product = jax.vmap(lambda one: mx.matmul(one, weights))(stacked)
    np.testing.assert_allclose(product, want, rtol=1e-6)


def test_formats_exact_in_bfloat16_are_products_of_few_bits():
    exact = {name for name, format in FORMATS.items() if mx.api.exact_in_bfloat16(format)}
    assert exact == set(EXPONENTS) | {"nvfp4"}
    assert not mx.api.exact_in_bfloat16(bdr(m=9))
    assert formats.find("int8").name not in exact
