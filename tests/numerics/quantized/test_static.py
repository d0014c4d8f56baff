"""Activations under scales that were found beforehand: NumPy's codes of them, and products in those codes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantized_cases import gaussian

from scalejax.errors import UserError
from scalejax.numerics.quantized import static, weights
from scalejax.numerics.quantized.weights import StaticWeight

LARGEST = {"fp8_e4m3": 448, "int8": 127, "nvfp4": 2688}


def theirs(x, scale, format):
    """Units of the scale, by NumPy and ml_dtypes."""
    units = np.asarray(x, np.float32) / np.float32(scale)
    if format == "int8":
        return np.clip(np.rint(units), -128, 127)
    if format == "fp8_e4m3":
        return np.clip(units, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    blocks = units.astype(np.float64).reshape(*units.shape[:-1], -1, 16)
    own = (np.abs(blocks).max(-1, keepdims=True) / 6).clip(max=448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    numbers = np.divide(blocks, own, out=np.zeros_like(blocks), where=own > 0).clip(-6, 6)
    return (numbers.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * own).astype(np.float32).reshape(units.shape)


def every_bfloat16():
    """The 65,280 that are finite."""
    words = np.arange(2**16, dtype=np.uint16)
    return words[(words & 0x7F80) != 0x7F80].view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8"])
def test_codes_are_those_of_numpy(format):
    ties = np.arange(-300, 300, dtype=np.float32) / 2
    for x in (every_bfloat16(), np.float32(3.7) * gaussian(0, 100_000), ties):
        for scale in (np.float32(1), np.float32(0.0123), np.float32(2.0**-20)):
            with np.errstate(over="ignore"):
                want = theirs(x, scale, format)
            np.testing.assert_array_equal(jax.jit(static.encode, static_argnums=2)(x, scale, format), want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("format", static.FORMATS)
def test_units_are_exact_in_the_dtype_of_activations(format, dtype):
    x = jnp.asarray(3 * gaussian(1, 40, 64), dtype)
    scale = static.scale_of(4.1, format)  # below the largest number, so that some saturate
    found = static.encode(x, jnp.float32(scale), format)
    assert found.dtype == dtype
    units = np.asarray(x, np.float32) / scale
    assert np.abs(units).max() > LARGEST[format] >= np.abs(np.asarray(found, np.float32)).max() - (format == "int8")
    np.testing.assert_array_equal(np.asarray(found, np.float32), theirs(x, scale, format))


@pytest.mark.parametrize("format", static.FORMATS)
def test_the_scale_makes_the_largest_number_the_largest_code(format):
    for largest in (1e-3, 1.0, 7.3, 6e4):
        scale = static.scale_of(largest, format)
        x = jnp.asarray([[largest, -largest / 3] + [0.0] * 14], jnp.float32)
        assert float(static.encode(x, scale, format)[0, 0]) == LARGEST[format]
    assert static.scale_of(0.0, format) == 1
    assert static.scale_of(1e-45, format) == np.float32(2.0**-116)


@pytest.mark.parametrize("format", static.FORMATS)
def test_nan_stays_and_infinities_saturate_or_poison_their_block(format):
    x = jnp.asarray([[np.nan, 1.0] + [0.5] * 14, [np.inf, -np.inf] + [0.5] * 14], jnp.float32)
    found = np.asarray(static.encode(x, jnp.float32(0.01), format))
    assert np.isnan(found[0, 0])
    if format == "nvfp4":
        assert np.isnan(found).all()
    else:
        assert np.isfinite(found[0, 1:]).all()
        assert found[1, :2].tolist() == [LARGEST[format], -448 if format == "fp8_e4m3" else -128]


@pytest.mark.parametrize("format", ["int8", *(pytest.param(f, marks=pytest.mark.slow) for f in ("fp8_e4m3", "nvfp4"))])
def test_a_product_is_that_of_codes_times_the_scale(format):
    x, w = gaussian(2, 3, 5, 32), gaussian(3, 32, 6)
    scale = np.float32(0.011 if format != "nvfp4" else 0.0011)
    weight = StaticWeight(array=jnp.asarray(w), scale=jnp.asarray(scale), format=format, path="here")
    want = (theirs(x, scale, format).astype(np.float64) @ w) * scale
    found = jax.jit(weights.dot)(jnp.asarray(x), weight)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(jnp.asarray(x[0]) @ weight, want[0], rtol=0, atol=1e-5)
    heads = jnp.asarray(x).reshape(3, 5, 4, 8)
    four = weight.reshape(4, 8, 6)[...].astype(jnp.float32)
    np.testing.assert_allclose(weights.dot(heads, four, contract=2), want, rtol=0, atol=1e-5)
    half = weights.dot(jnp.asarray(x, jnp.bfloat16), weight.astype(jnp.bfloat16), dtype=jnp.float32)
    assert half.dtype == jnp.float32


def test_a_scale_of_zero_leaves_activations_as_they_are():
    x, w = gaussian(4, 7, 16), gaussian(5, 16, 3)
    weight = StaticWeight(array=jnp.asarray(w), scale=jnp.float32(0), format="fp8_e4m3", path="here")
    np.testing.assert_allclose(jnp.asarray(x) @ weight, x @ w, rtol=0, atol=1e-5)


def test_other_uses_are_errors():
    weight = StaticWeight(array=jnp.ones((32, 4)), scale=jnp.float32(1), format="int8", path="layers/mlp/up")
    with pytest.raises(TypeError, match=r"layers/mlp/up can be read whole \(\[\.\.\.\]\)"):
        weight[0]
    with pytest.raises(TypeError):
        jnp.ones((2, 32)) + weight
    with pytest.raises(UserError, match="must be float32, bfloat16 or float16; got int32"):
        jnp.ones((2, 32), jnp.int32) @ weight
    with pytest.raises(UserError, match="--activations must be one of fp8_e4m3, int8, nvfp4; got 'mxfp4_e2m1'"):
        static.find("mxfp4_e2m1", "--activations")
