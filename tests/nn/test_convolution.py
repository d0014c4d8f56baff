"""Convolutions and GroupNorm against literal sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.nn import Conv, GroupNorm, convolution, counts


def literal(x, filters, stride):
    around = filters.shape[0] // 2
    padded = np.pad(x, ((0, 0), (around, around), (around, around), (0, 0)))
    rows, columns = (-(-size // stride) for size in x.shape[1:3])
    y = np.zeros((len(x), rows, columns, filters.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            seen = padded[:, i * stride : i * stride + len(filters), j * stride : j * stride + len(filters)]
            y[:, i, j] = np.einsum("bhwc,hwcd->bd", seen, filters)
    return y


@pytest.mark.parametrize(
    ("kernel", "stride", "bias"), [(1, 1, None), (3, 1, -2.0), (3, 2, None), (7, 2, 0.5), (1, 2, 0)]
)
def test_is_the_literal_sum(kernel, stride, bias):
    conv = Conv(3, 5, kernel=kernel, stride=stride, bias=bias, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 9, 8, 3)).astype(np.float32)
    wanted = literal(x, np.asarray(conv.kernel[...], np.float64), stride) + (bias or 0)
    # Sums of 147 products of float32.
    np.testing.assert_allclose(nnx.jit(lambda conv, x: conv(x))(conv, jnp.asarray(x)), wanted, atol=1e-5)


def test_an_even_filter_is_refused():
    with pytest.raises(ValueError, match="odd number; got 2"):
        Conv(3, 5, kernel=2, rngs=nnx.Rngs(0))


def test_groups_are_normalised_by_themselves():
    norm = GroupNorm(6, groups=3)
    norm.scale[...], norm.bias[...] = jnp.arange(6.0), jnp.ones(6)
    x = np.random.default_rng(0).normal(3, 2, (2, 4, 5, 6)).astype(np.float32)
    wanted = np.empty_like(x)
    for example in range(2):
        for group in range(3):
            own = x[example, ..., 2 * group : 2 * group + 2].astype(np.float64)
            wanted[example, ..., 2 * group : 2 * group + 2] = (own - own.mean()) / np.sqrt(own.var() + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), wanted * np.arange(6.0) + 1, atol=1e-5)
    assert norm(jnp.asarray(x)).dtype == jax.numpy.float32


def test_groups_must_divide():
    with pytest.raises(ValueError, match="divide the 6 features; got 4"):
        GroupNorm(6, groups=4)


FORMS = {
    # kernel, stride, inputs, outputs, side
    "products": (1, 1, 5, 7, 6),
    "products, stride 2": (1, 2, 5, 7, 7),
    "two at a time": (3, 1, 16, 16, 6),
    "four at a time": (3, 1, 3, 16, 8),
    "a width that does not divide": (3, 1, 3, 16, 7),
    "one channel": (3, 1, 1, 8, 18),
    "row by row": (3, 1, 1, 8, 6),
    "row by row, filters of 5": (5, 1, 2, 3, 7),
    "by parity": (3, 2, 4, 9, 6),
    "stride 2, odd": (3, 2, 4, 9, 7),
    "filters of 5": (5, 1, 4, 4, 6),
    "many channels of a narrow picture": (3, 1, 1, 17, 6),
    "tap by tap": (3, 1, 4, 5, 2),
    "tap by tap, stride 2": (3, 2, 4, 5, 4),
    "tap by tap, one column": (5, 2, 4, 5, 1),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_for_a_cpu_are_xla_s_convolution_with_its_gradients(name, x64):
    kernel, stride, inputs, outputs, side = FORMS[name]
    rng = np.random.default_rng(0)
    x, filters = (
        rng.normal(size=(2, side + 2 * (side > 2), side, inputs)),
        rng.normal(size=(kernel, kernel, inputs, outputs)),
    )
    g = rng.normal(size=jax.eval_shape(lambda x, f: convolution._plain(x, f, stride), x, filters).shape)

    @functools.partial(jax.jit, static_argnums=0)
    def results(of, x, f, g):
        y, pull = jax.vjp(lambda x, f: of(x, f, stride), x, f)
        return y, *pull(g)

    found, wanted = (results(of, x, filters, g) for of in (convolution.convolve, convolution._plain))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_batch_may_be_empty(name):
    kernel, stride, inputs, outputs, side = FORMS[name]
    x, filters = jnp.zeros((0, side, side, inputs)), jnp.ones((kernel, kernel, inputs, outputs))
    y, pull = jax.vjp(lambda x, f: convolution.convolve(x, f, stride), x, filters)
    dx, dfilters = pull(y)
    assert y.shape == (0, -(-side // stride), -(-side // stride), outputs)
    assert dx.shape == x.shape
    assert not np.any(dfilters)


def test_what_is_multiplied_besides_on_a_cpu_is_no_work():
    conv = Conv(16, 16, rngs=nnx.Rngs(0))
    assert counts.macs(conv, jax.ShapeDtypeStruct((2, 8, 6, 16), jnp.float32)) == 2 * 8 * 6 * 9 * 16 * 16


def test_a_program_for_another_platform_has_xla_s_convolution():
    x, filters = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.float32), jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)

    def gradients(x, filters):
        return jax.grad(lambda x, f: convolution.convolve(x, f).sum(), argnums=(0, 1))(x, filters)

    traced = jax.jit(gradients).trace(x, filters)
    for platform, wide in (("tpu", False), ("cpu", True)):
        assert ("3x4x16x32xf32" in traced.lower(lowering_platforms=(platform,)).as_text()) == wide


def inputs_computed_anew(blocks):
    """Loops of a CPU's compiled gradient that turn a picture around and compute a ReLU meanwhile."""
    filters = [Conv(16, 16, rngs=nnx.Rngs(seed)).kernel[...] for seed in range(blocks)]

    def loss(filters, x):
        for own in filters:
            y = convolution.convolve(x, own)
            mean, variance = y.mean((0, 1, 2), keepdims=True), y.var((0, 1, 2), keepdims=True)
            x = jax.nn.relu(x + (y - mean) * jax.lax.rsqrt(variance + 1e-5))
        return x.sum()

    program = jax.jit(jax.grad(loss)).lower(filters, jnp.ones((8, 16, 16, 16))).compile().as_text()
    computations = re.findall(r"^%?fused_computation\S* .*?^}", program, re.MULTILINE | re.DOTALL)
    return sum(" transpose(" in each and " maximum(" in each for each in computations)


def test_a_cpu_s_step_computes_the_inputs_of_convolutions_once_before_it_turns_them_around(monkeypatch):
    # One is left: the gradient of the last ReLU, which asks for its sign.
    assert inputs_computed_anew(4) == 1
    monkeypatch.setattr(convolution, "_computed_once", lambda x, filters: x)
    assert inputs_computed_anew(4) == 4
