"""The shared blocks against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax import nn

F64 = nn.Dtypes(jnp.float64, jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "linear"])
def test_mlp_applies_its_activation_after_every_layer_but_the_last(activation, x64):
    mlp = nn.Mlp((3, 5, 4, 2), rngs=nnx.Rngs(0), activation=activation, dtypes=F64)
    x = np.random.default_rng(0).normal(size=(6, 3))
    want = x
    for i, layer in enumerate(mlp.layers):
        layer.bias[...] = jnp.arange(layer.bias[...].size, dtype=jnp.float64) / 7
        want = want @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        want = np.maximum(want, 0) if activation == "relu" and i < 2 else want
    np.testing.assert_allclose(mlp(jnp.asarray(x)), want, rtol=1e-12)


def test_mlp_can_end_with_an_activation():
    mlp = nn.Mlp((3, 4), rngs=nnx.Rngs(0), final_activation="relu")
    assert (mlp(jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)) >= 0).all()


def test_mlp_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, silu, linear; got 'cube'"):
        nn.Mlp((2, 2), rngs=nnx.Rngs(0), activation="cube")  # pyright: ignore[reportArgumentType]


def test_layer_norm_equals_numpy_in_value_and_gradient(x64):
    norm, rng = nn.LayerNorm(7, dtypes=F64), np.random.default_rng(0)
    x, scale, bias = rng.normal(3.0, 5.0, size=(2, 4, 7)), rng.normal(size=7), rng.normal(size=7)
    norm.scale[...], norm.bias[...] = jnp.asarray(scale), jnp.asarray(bias)

    def oracle(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias

    np.testing.assert_allclose(norm(jnp.asarray(x)), oracle(x), rtol=1e-12)
    weight, step = rng.normal(size=x.shape), rng.normal(size=x.shape)
    gradient = jax.grad(lambda x: (norm(x) * weight).sum())(jnp.asarray(x))
    numeric = ((oracle(x + 1e-6 * step) - oracle(x - 1e-6 * step)) * weight).sum() / 2e-6
    np.testing.assert_allclose((gradient * step).sum(), numeric, rtol=1e-7)  # central difference: 1e-12 / 1e-6 and h^2


def test_layer_norm_keeps_float32_statistics_for_bfloat16_input(strict_promotion):
    norm = nn.LayerNorm(512, dtypes=nn.Dtypes(compute=jnp.bfloat16))
    x = jnp.asarray(100 + np.random.default_rng(0).normal(size=(4, 512)), jnp.bfloat16)
    y, exact = norm(x), np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-4)  # one rounding to bfloat16


def test_rms_norm_equals_numpy_in_value_and_gradient(x64):
    norm, rng = nn.RMSNorm((7,), eps=1e-3, dtypes=F64), np.random.default_rng(0)
    x, scale = rng.normal(3.0, 5.0, size=(2, 4, 7)), rng.normal(size=7)
    norm.scale[...] = jnp.asarray(scale)

    def oracle(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale

    np.testing.assert_allclose(norm(jnp.asarray(x)), oracle(x), rtol=1e-12)
    weight, step = rng.normal(size=x.shape), rng.normal(size=x.shape)
    gradient = jax.grad(lambda x: (norm(x) * weight).sum())(jnp.asarray(x))
    numeric = ((oracle(x + 1e-6 * step) - oracle(x - 1e-6 * step)) * weight).sum() / 2e-6
    np.testing.assert_allclose((gradient * step).sum(), numeric, rtol=1e-7)  # central difference: 1e-12 / 1e-6 and h^2


def test_rms_norm_rounds_to_bfloat16_before_it_multiplies(strict_promotion):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 128)).astype(jnp.bfloat16)
    scale = rng.uniform(0.5, 1.5, 128).astype(jnp.bfloat16)
    y = np.asarray(nn.rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-5, jnp.bfloat16))
    wide = x.astype(np.float64)
    normal = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    rounded = normal.astype(jnp.bfloat16).astype(np.float64)
    first = (rounded * scale.astype(np.float64)).astype(jnp.bfloat16)
    last = (normal * scale.astype(np.float64)).astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert (y != first).mean() < 1e-3  # where float32 statistics round to another bfloat16
    assert (y != last).mean() > 0.1  # the other order is another function


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("width", [64, 65])
def test_dropout_keeps_the_mean_and_scales_the_survivors(rate, width):
    x = jnp.ones((2000, width))
    y = nn.dropout(x, rate, jax.random.key(0))
    kept = np.asarray(y)[np.asarray(y) > 0]
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-4)  # the rate is a multiple of 2^-16
    deviation = (rate / (1 - rate) / y.size) ** 0.5
    assert abs(y.mean() - 1) < 5 * deviation
    columns = np.asarray(y).mean(0)  # pairs of columns share one draw of 32 bits and must not share their fate
    assert abs(np.corrcoef(np.asarray(y)[:, 0], np.asarray(y)[:, 1])[0, 1]) < 5 / 2000**0.5
    assert np.abs(columns - 1).max() < 6 * (rate / (1 - rate) / 2000) ** 0.5


def test_dropout_without_key_or_rate_returns_its_input():
    x = jnp.ones((2, 3))
    assert nn.dropout(x, 0.5, None) is x
    assert nn.dropout(x, 0.0, jax.random.key(0)) is x
    with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\); got 1.0"):
        nn.dropout(x, 1.0, jax.random.key(0))


def test_initial_variance_is_gain_over_fan_in():
    kernel = nn.Linear(400, 300, rngs=nnx.Rngs(0), gain=2.0).kernel[...]
    assert float(kernel.var()) == pytest.approx(2 / 400, rel=0.03)  # 5 deviations of 120,000 draws: 0.02


def test_wide_is_float64_only_if_something_is():
    assert nn.wide(jnp.bfloat16, jnp.float32) == jnp.float32
    assert nn.wide(jnp.bfloat16, jnp.dtype("float64")) == jnp.dtype("float64")
