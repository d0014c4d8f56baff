"""Affine maps against NumPy; their initial variance and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.nn import Linear
from scalejax.nn.linear import project, scaled_normal, wide
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import MeshShape, make_mesh

RNG = np.random.default_rng(0)


def test_the_product_and_its_gradients(x64):
    layer = Linear(5, 3, rngs=nnx.Rngs(0), dtypes=Dtypes(jnp.float64, jnp.float64))
    assert np.array_equal(layer.bias[...], np.zeros(3))
    layer.bias[...] = jnp.asarray(RNG.normal(size=3))
    x, g = RNG.normal(size=(7, 5)), RNG.normal(size=(7, 3))
    kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
    graph, state = nnx.split(layer)
    y, pull = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, jnp.asarray(x))
    np.testing.assert_allclose(y, x @ kernel + bias, rtol=1e-13, atol=1e-13)
    of_layer, of_x = pull(jnp.asarray(g))
    np.testing.assert_allclose(of_x, g @ kernel.T, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(of_layer["kernel"][...], x.T @ g, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(of_layer["bias"][...], g.sum(0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_the_initial_variance_is_the_gain_over_the_inputs(gain):
    kernel = Linear(400, 300, rngs=nnx.Rngs(1), gain=gain).kernel[...]
    # Of n samples of a normal the variance is off by sqrt(2 / n) of itself: 0.4 % here.
    np.testing.assert_allclose(400 * kernel.var() / gain, 1, atol=0.02)
    np.testing.assert_allclose(kernel.mean(), 0, atol=5 * (gain / 400 / kernel.size) ** 0.5)
    stated = scaled_normal(jax.random.key(0), (400, 300), fan_in=300, gain=gain)
    np.testing.assert_allclose(300 * stated.var() / gain, 1, atol=0.02)


def test_operands_are_of_the_compute_dtype_and_sums_of_the_dtype_of_the_result():
    layer = Linear(512, 4, rngs=nnx.Rngs(0), dtypes=Dtypes(compute=jnp.bfloat16), out_dtype=jnp.float32)
    x = jnp.asarray(RNG.normal(size=(3, 512)), jnp.float32)
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, layer.kernel[...])]
    assert layer(x).dtype == jnp.float32
    np.testing.assert_allclose(layer(x), rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)
    narrow = Linear(512, 4, rngs=nnx.Rngs(0), dtypes=Dtypes(compute=jnp.bfloat16))
    assert narrow(x).dtype == jnp.bfloat16
    assert narrow.kernel[...].dtype == jnp.float32


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("mesh", [None, MeshShape(fsdp=4, tensor=2)], ids=["alone", "tensor"])
def test_a_projection_sums_over_the_last_axes(contract, mesh, x64):
    inner = (4, 6)[:contract]
    x, weight = RNG.normal(size=(8, 3, *inner)), RNG.normal(size=(*inner, 5, 2))
    with jax.sharding.use_abstract_mesh((make_mesh(mesh) if mesh else make_mesh(None)).abstract_mesh):
        y = jax.jit(lambda x, w: project(x, w, contract=contract))(x, weight)
    np.testing.assert_allclose(y, np.tensordot(x, weight, contract), rtol=1e-12)
    with pytest.raises(ValueError, match=r"x must be \[B, S, 4.*\]; got \(8, 4"):
        project(jnp.zeros((8, 4)), jnp.asarray(weight), contract=contract)


def test_what_is_summed_in_is_float32_or_wider():
    assert wide(jnp.bfloat16, jnp.float16) == jnp.float32
    assert wide(jnp.bfloat16, jnp.float64) == jnp.float64
