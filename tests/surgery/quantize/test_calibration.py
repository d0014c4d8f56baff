"""Scales of blocks: which are chosen, and that less error is what mse finds."""

import jax.numpy as jnp
import numpy as np
import pytest
from quantized_cases import gaussian

from scalejax.errors import UserError
from scalejax.numerics import formats
from scalejax.numerics.quantize import dequantize, quantize
from scalejax.surgery.quantize import calibration
from scalejax.surgery.quantize.calibration import Calibration, encode
from scalejax.surgery.quantize.diffusion import diffuse, factor

FORMATS = ("bdr_mx4", "mxfp4_e2m1", "nvfp4", "int4:32")
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("bdr_mx9", "mxfp6_e2m3", "vsq4:32", "fp8_e4m3:64")]


def outliers():
    """Values that a few large ones stand out of."""
    x = gaussian(0, 24, 128)
    x[::5, ::37] *= 9
    return x


def errors(x, format, **chosen):
    made = encode(jnp.asarray(x), formats.find(format), Calibration(**chosen))
    return ((np.asarray(dequantize(made), np.float64) - x) ** 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("format", [*FORMATS, *MORE])
def test_max_is_a_direct_cast(format):
    x = gaussian(1, 5, 128)
    made = encode(jnp.asarray(x), formats.find(format), Calibration())
    want = quantize(jnp.asarray(x), format, axis=-1)
    np.testing.assert_array_equal(made.codes, want.codes)
    np.testing.assert_array_equal(made.scales, want.scales)
    np.testing.assert_array_equal(dequantize(made), dequantize(want))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_mse_never_loses_to_max(format):
    x = outliers()
    assert errors(x, format, method="mse") <= errors(x, format) * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4_e2m1", "int4:32", "nvfp4"])
def test_mse_gains_where_outliers_are(format):
    assert errors(outliers(), format, method="mse") < 0.99 * errors(outliers(), format)


def test_mse_of_exponents_is_the_best_of_three():
    x = outliers()
    floor = quantize(jnp.asarray(x), "mxfp4_e2m1", axis=-1).scales
    made = encode(jnp.asarray(x), formats.find("mxfp4_e2m1"), Calibration(method="mse"))
    steps = set(np.unique(np.asarray(made.scales, int) - np.asarray(floor, int)).tolist())
    assert {0} < steps <= {-1, 0, 1}
    grid = formats.find("mxfp4_e2m1").element.magnitudes
    for row, block in np.ndindex(*floor.shape):
        part = x[row, 32 * block : 32 * block + 32].astype(np.float64)
        found = []
        for step in (0, -1, 1):
            scale = 2.0 ** (int(floor[row, block]) - 127 + step)
            # Ties make no difference to the error.
            nearest = grid[np.abs(np.abs(part)[:, None] / scale - grid).argmin(1)] * scale
            found.append(((np.abs(part) - nearest) ** 2).sum())
        chosen = int(made.scales[row, block]) - int(floor[row, block])
        assert found[(0, -1, 1).index(chosen)] <= min(found) * (1 + 1e-5)


@pytest.mark.slow
def test_a_percentile_of_all_is_the_largest():
    x = outliers()
    for format in FORMATS:
        assert errors(x, format, method="percentile", percentile=100) == errors(x, format)


def test_a_percentile_leaves_out_the_largest():
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None, :].copy()
    x[0, 3] = 50
    made = encode(jnp.asarray(x), formats.find("int8:32"), Calibration(method="percentile", percentile=95))
    np.testing.assert_allclose(made.scales, 1 / 127, rtol=1e-6)
    values = np.asarray(dequantize(made))
    np.testing.assert_allclose(values[0, 3], 1, rtol=1e-6)
    rest = np.arange(32) != 3
    np.testing.assert_allclose(values[0, rest], x[0, rest], atol=0.5 / 127 + 1e-6)


def test_padding_does_not_count_in_a_percentile():
    """Eight values in a block of 32: 5 of them do not exceed the median, and zeros behind them change nothing."""
    x = np.zeros((1, 40), np.float32)
    x[0, 32:] = [1, 2, 3, 4, 5, 6, 7, 8]
    x[0, :32] = 1
    made = encode(jnp.asarray(x), formats.find("int8:32"), Calibration(method="percentile", percentile=60))
    np.testing.assert_allclose(made.scales, [[1 / 127, 5 / 127]], rtol=1e-6)
    upper = factor(np.eye(40))
    found = diffuse(jnp.asarray(x), upper, formats.find("int8:32"), Calibration(method="percentile", percentile=60))
    np.testing.assert_array_equal(found.scales, made.scales)


@pytest.mark.slow
def test_a_percentile_of_zero_is_the_largest():
    """Most values of a pruned weight are zeros, and so are most blocks."""
    x = np.zeros((4, 2048), np.float32)
    x[1, :3], x[2, 40] = [1.5, -2, 6], 3
    for format in ("int8:32", "mxfp4_e2m1", "nvfp4"):
        made = encode(jnp.asarray(x), formats.find(format), Calibration(method="percentile", percentile=50))
        np.testing.assert_allclose(dequantize(made), x, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_rows_are_looked_at_some_at_a_time(monkeypatch):
    x = outliers()
    for format in ("nvfp4", "bdr_mx6"):
        whole = encode(jnp.asarray(x), formats.find(format), Calibration(method="mse"))
        monkeypatch.setattr(calibration, "_CHUNK", 5 * x.shape[1])
        parts = encode(jnp.asarray(x), formats.find(format), Calibration(method="mse"))
        np.testing.assert_array_equal(parts.codes, whole.codes)
        np.testing.assert_array_equal(parts.scales, whole.scales)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "entropy"}, "--calibrate must be one of max, percentile, mse; got 'entropy'"),
        ({"percentile": 0}, "--percentile must be above 0 and at most 100; got 0"),
    ],
)
def test_unknown_methods_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Calibration(**fields)


@pytest.mark.parametrize(
    ("rule", "format", "words"),
    [
        ("nearest", "mxfp4_e2m1", "scale_rule: must be one of floor"),
        ("qwix", "mxfp6_e3m2", "qwix defines its rule for"),
        ("rceil", "int4", "no weight takes a format with exponents as scales"),
    ],
)
def test_scale_rules_that_do_not_fit_are_refused(rule, format, words):
    with pytest.raises(UserError, match=words):
        Calibration(scale_rule=rule).check([formats.find(format)])


def test_a_percentile_that_leaves_nothing_out_is_refused():
    short = [formats.find(name) for name in ("bdr_mx6", "mxfp4_e2m1")]
    with pytest.raises(UserError, match=r"--percentile 99.9 leaves nothing out of the 32 values .* at most 96.875"):
        Calibration(method="percentile").check(short)
    Calibration(method="percentile", percentile=96.875).check(short)
    for longer in ("int4:1000", "nvfp4"):
        Calibration(method="percentile").check([*short, formats.find(longer)])
