"""Products in number formats against products of operands that were cast by hand."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from scalejax.errors import UserError
from scalejax.numerics import float8, formats
from scalejax.numerics.quantize import cast
from scalejax.numerics.quantized import products
from scalejax.numerics.quantized.products import mx_dot_general
from scalejax.numerics.quantized.rules import QuantizationRule

MATRICES = (((1,), (0,)), ((), ()))
THREE = QuantizationRule(weight_qtype="bdr_mx9", act_qtype="bdr_mx6", bwd_qtype="mxfp8_e5m2")
FP8 = QuantizationRule(weight_qtype="fp8_e4m3", act_qtype="fp8_e4m3", bwd_qtype="fp8_e5m2", scales="tensor")


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    # Magnitudes over a few binades, so that blocks along one axis and along another differ.
    return [
        jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, size=shape), jnp.float32) for shape in shapes
    ]


def product(rule, dimensions=MATRICES, **options):
    return jax.jit(lambda x, w: mx_dot_general(x, w, dimensions, rule=rule, **options))


def agree(got, want):
    """To the rounding of float32 sums."""
    want = np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def double(x, name, axis, **options):
    return np.asarray(jax.jit(lambda x: cast(x, name, axis=axis, **options))(x), np.float64)


@pytest.mark.slow
def test_each_of_the_three_products_quantizes_along_the_axis_that_it_sums_over():
    x, w, g = arrays((64, 48), (48, 32), (64, 32))
    y, pull = jax.vjp(product(THREE), x, w)
    dx, dw = pull(g)
    agree(y, double(x, "bdr_mx6", 1) @ double(w, "bdr_mx9", 0))
    agree(dx, double(g, "mxfp8_e5m2", 1) @ double(w, "bdr_mx9", 1).T)
    agree(dw, double(x, "bdr_mx6", 0).T @ double(g, "mxfp8_e5m2", 0))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bdr_mx4", "mxfp4_e2m1"])
def test_a_product_whose_sums_fit_float32_is_that_of_fractions(format):
    """Products of 2 bits by 2 a few binades apart: no sum on the way is rounded, in whatever order."""
    x, w = arrays((6, 64), (64, 5))
    found = product(QuantizationRule(weight_qtype=format, act_qtype=format))(x, w)
    a, b = (
        np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(cast(m, format, axis=axis))
        for m, axis in ((x, 1), (w, 0))
    )
    np.testing.assert_array_equal(np.asarray(found, np.float64), (a @ b).astype(np.float64))


@pytest.mark.slow
def test_the_weight_may_come_first():
    w, x, g = arrays((32, 48), (48, 64), (32, 64))
    y, pull = jax.vjp(product(THREE, weight="lhs"), w, x)
    dw, dx = pull(g)
    agree(y, double(w, "bdr_mx9", 1) @ double(x, "bdr_mx6", 0))
    agree(dw, double(g, "mxfp8_e5m2", 1) @ double(x, "bdr_mx6", 1).T)
    agree(dx, double(w, "bdr_mx9", 0).T @ double(g, "mxfp8_e5m2", 0))


def test_the_scale_rule_is_that_of_the_rule():
    x, w = arrays((64, 64), (64, 32))
    rule = QuantizationRule(weight_qtype="mxfp8_e4m3", act_qtype="bdr_mx9", scale_rule="rceil")
    got = product(rule)(x, w)
    agree(got, double(x, "bdr_mx9", 1, scale_rule="rceil") @ double(w, "mxfp8_e4m3", 0, scale_rule="rceil"))


TURNED = (((0, 2), (2, 0)), ((), ()))
"""Two reduced axes, the later one of the left side first on the right one."""


@pytest.mark.parametrize(
    ("shapes", "dimensions"),
    [(((8, 5), (5, 3), (8, 3)), MATRICES), (((4, 8, 4), (4, 3, 4), (8, 3)), TURNED)],
    ids=["matrices", "turned axes"],
)
def test_without_formats_it_is_dot_general(shapes, dimensions):
    x, w, g = arrays(*shapes)
    y, pull = jax.vjp(product(QuantizationRule(), dimensions), x, w)
    want, expected = jax.vjp(lambda x, w: lax.dot_general(x, w, dimensions), x, w)
    for a, b in zip((y, *pull(g)), (want, *expected(g)), strict=True):
        agree(a, b)


def test_gradients_without_a_format_meet_what_the_forward_product_took():
    """Straight through: the derivative of a product of casts, whose own derivative is one."""
    x, w, g = arrays((64, 48), (48, 32), (64, 32))
    _, pull = jax.vjp(product(QuantizationRule(weight_qtype="bdr_mx4", act_qtype="mxfp6_e2m3", tail="pad")), x, w)
    _, wanted = jax.vjp(lambda x, w: cast(x, "mxfp6_e2m3", axis=1, tail="pad") @ cast(w, "bdr_mx4", axis=0), x, w)
    for a, b in zip(pull(g), wanted(g), strict=True):
        agree(a, b)


@pytest.mark.slow
def test_a_side_without_a_format_stays_as_it_is():
    x, w, g = arrays((64, 48), (48, 32), (64, 32))
    y, pull = jax.vjp(product(QuantizationRule(weight_qtype="bdr_mx6", bwd_qtype="bdr_mx9")), x, w)
    dx, dw = pull(g)
    agree(y, np.asarray(x, np.float64) @ double(w, "bdr_mx6", 0))
    agree(dx, double(g, "bdr_mx9", 1) @ double(w, "bdr_mx6", 1).T)
    agree(dw, np.asarray(x, np.float64).T @ double(g, "bdr_mx9", 0))


DIMENSIONS = [
    ((3, 16, 2, 32), (2, 32, 16, 3), (((2, 3), (0, 1)), ((0,), (3,)))),  # a batch axis, two reduced, in order
    ((2, 16, 32), (32, 2, 48), (((2, 0), (0, 1)), ((), ()))),  # reduced axes in another order on each side
    ((4, 5, 16), (16, 7, 5), (((2,), (0,)), ((1,), (2,)))),
    ((16,), (16,), (((0,), (0,)), ((), ()))),  # nothing is left
]


@pytest.mark.slow
@pytest.mark.parametrize(("left", "right", "dimensions"), DIMENSIONS)
def test_any_dimension_numbers(left, right, dimensions):
    """Against the same product on [batch, rows, reduced] arrays, which blocks along the reduced axes as one make it."""
    (lc, rc), (lb, rb) = dimensions
    x, w = arrays(left, right)
    lf, rf = ([a for a in range(n.ndim) if a not in (*c, *b)] for n, c, b in ((x, lc, lb), (w, rc, rb)))
    y, pull = jax.vjp(product(dataclasses.replace(THREE, tail="pad"), dimensions), x, w)
    assert y.shape == lax.dot_general(x, w, dimensions).shape
    (g,) = arrays(y.shape, seed=1)
    dx, dw = pull(g)

    def flat(a, batch, rows, columns):
        shape = [int(np.prod([a.shape[i] for i in axes])) for axes in (batch, rows, columns)]
        return np.asarray(a).transpose((*batch, *rows, *columns)).reshape(shape)

    def rounded(a, name):
        return double(jnp.asarray(a), name, 2, tail="pad")

    batch, rows = range(len(lb)), range(len(lb), len(lb) + len(lf))
    columns = range(len(lb) + len(lf), y.ndim)
    times = "brk,bck->brc"
    agree(
        flat(y, batch, rows, columns),
        np.einsum(times, rounded(flat(x, lb, lf, lc), "bdr_mx6"), rounded(flat(w, rb, rf, rc), "bdr_mx9")),
    )
    agree(
        flat(dx, lb, lf, lc),
        np.einsum(times, rounded(flat(g, batch, rows, columns), "mxfp8_e5m2"), rounded(flat(w, rb, rc, rf), "bdr_mx9")),
    )
    agree(
        flat(dw, rb, rf, rc),
        np.einsum(times, rounded(flat(g, batch, columns, rows), "mxfp8_e5m2"), rounded(flat(x, lb, lc, lf), "bdr_mx6")),
    )


def test_an_axis_that_blocks_do_not_divide_is_refused_or_padded_by_name():
    x, w = arrays((64, 24), (24, 32))
    rule = QuantizationRule(weight_qtype="bdr_mx9", act_qtype="bdr_mx9", bwd_qtype="bdr_mx9")
    with pytest.raises(UserError, match=r"quantization of top/layers/1: it sums over 24 values.*tail='pad'"):
        product(rule, where="top/layers/1")(x, w)
    agree(
        product(dataclasses.replace(rule, tail="pad"))(x, w),
        double(x, "bdr_mx9", 1, tail="pad") @ double(w, "bdr_mx9", 0, tail="pad"),
    )


def test_the_axes_of_the_backward_pass_are_held_to_blocks_too():
    x, w = arrays((64, 48), (48, 8))
    with pytest.raises(UserError, match="sums over 8 values"):
        jax.grad(lambda x: product(THREE)(x, w).sum())(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_floats_are_added_up_in_float32_and_keep_their_dtype(dtype):
    x, w = (a.astype(dtype) for a in arrays((64, 48), (48, 32)))
    y, pull = jax.vjp(product(THREE, preferred_element_type=jnp.float32), x, w)
    assert y.dtype == jnp.float32
    assert [d.dtype for d in pull(jnp.ones_like(y))] == [dtype, dtype]
    agree(y, double(x, "bdr_mx6", 1) @ double(w, "bdr_mx9", 0))
    assert product(THREE)(x, w).dtype == dtype


@pytest.mark.parametrize("implementation", ["emulated", "native"])
def test_dtypes_without_formats_are_refused_by_name(implementation):
    x, w = arrays((16, 16), (16, 16))
    rule = dataclasses.replace(FP8, implementation=implementation)
    with pytest.raises(UserError, match="must be float32, bfloat16 or float16; got int32"):
        product(rule)(x.astype(jnp.int32), w)
    with jax.enable_x64(True), pytest.raises(UserError, match=r"got float64\. Cast it to float32 first"):
        product(rule)(np.asarray(x, np.float64), np.asarray(w, np.float64))


EMPTY = {
    "blocks": THREE,
    "rows": QuantizationRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", scales="rows"),
    "native": dataclasses.replace(FP8, implementation="native"),
}


@pytest.mark.default_cases("blocks")
@pytest.mark.parametrize("rule", EMPTY.values(), ids=EMPTY)
def test_no_examples_give_no_results_and_a_gradient_of_zero(rule):
    x, w = arrays((0, 32), (32, 32))
    y, pull = jax.vjp(product(rule), x, w)
    dx, dw = pull(y)
    assert (y.shape, dx.shape) == ((0, 32), (0, 32))
    np.testing.assert_array_equal(dw, np.zeros((32, 32)))


def test_nan_stays_in_its_row():
    x, w = arrays((64, 48), (48, 32))
    y = product(THREE)(x.at[3, 20].set(jnp.nan), w)
    assert np.isnan(y[3]).all()
    assert not np.isnan(np.delete(y, 3, axis=0)).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_a_scale_for_each_row_or_for_the_tensor(name):
    x, w = arrays((10, 24), (24, 6))
    format = formats.find(name)

    def whole(a, axis, scales):
        length = a.size if scales == "tensor" else a.shape[axis]
        kind = dataclasses.replace(format, k1=length, k2=length)
        return double(a.reshape(-1), kind, 0).reshape(a.shape) if scales == "tensor" else double(a, kind, axis)

    for scales in ("rows", "tensor"):
        rule = QuantizationRule(weight_qtype=name, act_qtype=name, scales=scales)
        agree(product(rule)(x, w), whole(x, 1, scales) @ whole(w, 0, scales))


NATIVE = [((64, 48), (48, 32), MATRICES), *DIMENSIONS[:3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right", "dimensions", "scales"), [(*case, ("tensor", "rows")[n % 2]) for n, case in enumerate(NATIVE)]
)
def test_native_products_are_those_of_the_emulated_format(left, right, dimensions, scales):
    """To a code of a few values, whose quotients lie within a float32 rounding of a tie."""
    x, w = arrays(left, right)
    found = []
    for implementation in ("native", "emulated"):
        rule = dataclasses.replace(FP8, scales=scales, implementation=implementation)
        y, pull = jax.vjp(product(rule, dimensions), x, w)
        found.append((y, *pull(arrays(y.shape, seed=1)[0])))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * np.abs(b).max())


def test_native_products_take_8_bit_floats():
    """The dot itself, on every platform but CPUs, has FP8 operands and a float32 result."""
    x, w = arrays((64, 48), (48, 32))
    native = dataclasses.replace(FP8, implementation="native")
    seen = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                seen.append(tuple(str(v.aval.dtype) for v in equation.invars))
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(inner, "eqns"):
                        walk(inner)
                    elif hasattr(inner, "jaxpr"):
                        walk(inner.jaxpr)

    walk(jax.make_jaxpr(lambda x, w: jax.vjp(product(native), x, w)[1](x @ w))(x, w).jaxpr)
    assert seen.count(("float8_e4m3fn", "float8_e4m3fn")) == 1
    assert seen.count(("float8_e5m2", "float8_e4m3fn")) == 2


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_codes_are_those_of_ml_dtypes(name):
    x = jnp.concatenate([arrays((4, 999))[0], jnp.zeros((1, 999))])
    codes, scale = float8.quantize(x, name, axes=(1,))
    top = formats.find(name).element.max
    x = np.asarray(x)
    want = np.abs(x).max(1, keepdims=True) / np.float32(top)
    np.testing.assert_allclose(scale[:4], want[:4], rtol=1e-6)
    exact = np.clip(x / np.asarray(scale), -top, top).astype(
        ml_dtypes.float8_e4m3fn if name == "fp8_e4m3" else ml_dtypes.float8_e5m2
    )
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), exact.view(np.uint8))
    assert not np.asarray(codes[4].astype(jnp.float32)).any()


def test_float8_of_nan_and_infinity_is_nan_under_their_scale_alone():
    x = jnp.ones((3, 8)).at[0, 1].set(jnp.nan).at[1, 1].set(jnp.inf)
    codes, scale = float8.quantize(x, "fp8_e4m3", axes=(1,))
    values = np.asarray(codes.astype(jnp.float32) * scale)
    assert np.isnan(values[:2]).all()
    np.testing.assert_array_equal(values[2], 1.0)


def test_rows_of_a_table_are_cast_one_by_one_and_their_gradient_passes_through():
    (rows,) = arrays((5, 3, 32))
    rule = QuantizationRule(weight_qtype="bdr_mx6", act_qtype="bdr_mx4", bwd_qtype="bdr_mx4")
    got, pull = jax.vjp(lambda r: products.read_rows(r, rule), rows)
    np.testing.assert_array_equal(got, cast(rows, "bdr_mx6", axis=2))
    np.testing.assert_array_equal(pull(rows)[0], rows)
    one = products.read_rows(rows, QuantizationRule(weight_qtype="int8", scales="tensor"))
    kind = dataclasses.replace(formats.find("int8"), k1=32, k2=32)
    np.testing.assert_array_equal(one, cast(rows, kind, axis=2))


def test_rows_in_nvfp4_do_not_depend_on_the_rows_beside_them():
    """The float32 that the format has for a tensor is one a row."""
    (rows,) = arrays((4, 3, 32))
    rows = rows.at[0, 0].multiply(1000)
    rule = QuantizationRule(weight_qtype="nvfp4")
    got, alone = products.read_rows(rows, rule), jax.jit(lambda row: cast(row, "nvfp4", axis=0))
    for i, j in np.ndindex(4, 3):
        np.testing.assert_array_equal(got[i, j], alone(rows[i, j]))
    of_rows = jax.jit(jax.grad(lambda r: (products.read_rows(r, rule) * rows).sum()))
    np.testing.assert_array_equal(of_rows(rows), rows)


def test_a_sharding_of_the_result_is_refused():
    x, w = arrays((16, 16), (16, 16))
    with pytest.raises(UserError, match=r"out_sharding must be None; got .*with_sharding_constraint"):
        product(THREE, out_sharding=jax.sharding.PartitionSpec())(x, w)
