"""Error diffusion: a literal oracle, and outputs nearer than those of a direct cast."""

import jax.numpy as jnp
import numpy as np
import pytest
from quantized_cases import gaussian

from scalejax.errors import UserError
from scalejax.numerics import formats
from scalejax.numerics.quantize import dequantize, quantize
from scalejax.surgery.quantize import diffusion
from scalejax.surgery.quantize.calibration import Calibration
from scalejax.surgery.quantize.diffusion import diffuse, factor, output_error


def inputs(seed, columns, tokens=400):
    """float64[tokens, columns], correlated, of very different sizes."""
    mixing = gaussian(seed, columns, columns).astype(np.float64) * np.exp(-np.arange(columns) / columns * 4)
    return gaussian(seed + 1, tokens, columns).astype(np.float64) @ mixing.T


def round_block(block, columns, format):
    """Literal rounding of one number under the scales of its block: (scale of the block), and x -> Q(x)."""
    magnitudes = formats.find(format).element.magnitudes
    largest = np.abs(block).max(1, keepdims=True)
    if format.startswith("int4"):
        scale = (largest / 7).astype(np.float32).astype(np.float64)
    else:  # MXFP4 under the floor rule: the largest power of two of the element is 4
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    return scale, lambda x: np.sign(x) * magnitudes[np.abs(np.abs(x) / scale - magnitudes).argmin(1)][:, None] * scale


def oracle(weight, covariance, format, k1, damping=0.01):
    """Column by column, with the inverse of what is left of H computed anew each time."""
    w = weight.astype(np.float64).copy()
    h = covariance + damping * np.mean(np.diag(covariance)) * np.eye(len(covariance))
    out = np.zeros_like(w)
    for j in range(w.shape[1]):
        if j % k1 == 0:
            _, nearest = round_block(w[:, j : j + k1], k1, format)
        out[:, j : j + 1] = nearest(w[:, j : j + 1])
        inverse = np.linalg.inv(h[j:, j:])
        error = (w[:, j] - out[:, j]) / inverse[0, 0]
        w[:, j + 1 :] -= error[:, None] * inverse[0, 1:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("format", "k1"), [("int4:8", 8), ("int4:32", 32), ("mxfp4_e2m1", 32)])
def test_a_literal_version_gives_the_same(format, k1):
    weight, x = gaussian(3, 6, 64), inputs(4, 64)
    covariance = x.T @ x
    found = dequantize(diffuse(jnp.asarray(weight), factor(covariance), formats.find(format), Calibration()))
    want = oracle(weight, covariance, format, k1)
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-5)


def test_the_factor_is_cholesky_s_of_the_inverse():
    x = inputs(0, 24)
    covariance = x.T @ x
    upper = factor(covariance, 0.02)
    damped = covariance + 0.02 * np.mean(np.diag(covariance)) * np.eye(24)
    np.testing.assert_allclose(upper, np.linalg.cholesky(np.linalg.inv(damped)).T, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(np.tril(upper, -1), 0)


@pytest.mark.default_cases("mxfp4_e2m1-0")
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    "format",
    [
        *("mxfp4_e2m1", "bdr_mx4", "nvfp4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bdr_mx6", "int4:32", "vsq4:32", "mxfp6_e2m3")),
    ],
)
def test_outputs_are_nearer_than_those_of_a_direct_cast(format, seed):
    weight, x = jnp.asarray(gaussian(seed, 16, 64)), inputs(seed + 10, 64)
    covariance = x.T @ x
    found = dequantize(diffuse(weight, factor(covariance), formats.find(format), Calibration()))
    direct = dequantize(quantize(weight, format, axis=-1))
    errors = [output_error(np.asarray(weight), np.asarray(q), covariance) for q in (found, direct)]
    np.testing.assert_allclose(errors[0], ((x @ (np.asarray(weight - found, np.float64)).T) ** 2).sum(), rtol=1e-6)
    assert errors[0] < 0.8 * errors[1]


def test_inputs_that_have_nothing_in_common_leave_a_direct_cast():
    weight = jnp.asarray(gaussian(0, 5, 64))
    found = diffuse(weight, factor(np.diag(np.arange(1.0, 65.0))), formats.find("bdr_mx6"), Calibration())
    want = quantize(weight, "bdr_mx6", axis=-1)
    np.testing.assert_array_equal(found.codes, want.codes)
    np.testing.assert_array_equal(found.scales, want.scales)
    np.testing.assert_array_equal(found.sub_scales, want.sub_scales)


def test_a_text_without_activations_leaves_a_direct_cast():
    weight = jnp.asarray(gaussian(0, 5, 32))
    found = diffuse(weight, factor(np.zeros((32, 32))), formats.find("mxfp4_e2m1"), Calibration())
    np.testing.assert_array_equal(found.codes, quantize(weight, "mxfp4_e2m1", axis=-1).codes)


@pytest.mark.slow
def test_a_last_block_is_padded_and_rows_come_some_at_a_time(monkeypatch):
    weight, x = jnp.asarray(gaussian(1, 7, 40)), inputs(2, 40)
    upper = factor(x.T @ x)
    whole = diffuse(weight, upper, formats.find("mxfp4_e2m1"), Calibration())
    assert (whole.codes.shape, whole.scales.shape, whole.length) == ((7, 64), (7, 2), 40)
    assert dequantize(whole).shape == (7, 40)
    monkeypatch.setattr(diffusion, "_CHUNK", 3 * 40)
    parts = diffuse(weight, upper, formats.find("mxfp4_e2m1"), Calibration())
    np.testing.assert_array_equal(parts.codes, whole.codes)


@pytest.mark.slow
def test_mse_scales_and_diffusion_go_together():
    weight, x = jnp.asarray(gaussian(5, 16, 64)), inputs(6, 64)
    covariance = x.T @ x
    made = [diffuse(weight, factor(covariance), formats.find("int4:32"), Calibration(method=m)) for m in ("max", "mse")]
    errors = [output_error(np.asarray(weight), np.asarray(dequantize(q)), covariance) for q in made]
    assert errors[1] < 1.1 * errors[0]
    assert np.any(np.asarray(made[0].scales) != np.asarray(made[1].scales))


def test_covariances_that_cannot_be_used_are_refused():
    with pytest.raises(UserError, match="not finite"):
        factor(np.full((4, 4), np.nan))
    with pytest.raises(UserError, match="--damping must be above 0; got 0"):
        factor(np.eye(4), 0)
    with pytest.raises(UserError, match=r"not positive definite with a damping of 0\.01"):
        factor(np.diag([1.0, -1.0, 1.0]))
