"""Layers repeated by a scan: equal to a loop, with parameters fetched one layer at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.nn import scan_layers
from scalejax.nn.layers import apply_layers, remat_policy

L, D = 3, 4


class Block(nnx.Module):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.inner = nnx.Module()
        self.inner.weight = nnx.Param(jnp.asarray(rng.normal(size=(L, D, D)) / 2))
        self.bias = nnx.Param(jnp.asarray(rng.normal(size=(L, D))))


def body(layer, x, scale):
    y = jnp.tanh(x @ layer.inner.weight[...] + layer.bias[...][None, :]) * scale
    return y, y.sum()


SCALES = np.array([1.0, 0.5, 2.0])


def inputs():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, D)))


def loop(weight, bias, x):
    sums = []
    for w, b, scale in zip(weight, bias, SCALES, strict=True):
        x = np.tanh(x @ w + b) * scale
        sums.append(x.sum())
    return x, np.array(sums)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_a_scan_equals_a_loop(remat, x64):
    block = Block()
    y, sums = jax.jit(lambda b, x: scan_layers(b, body, x, SCALES, remat=remat))(block, inputs())
    want, expected = loop(np.asarray(block.inner.weight[...]), np.asarray(block.bias[...]), np.asarray(inputs()))
    np.testing.assert_allclose(y, want, rtol=1e-12)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_parameters_are_fetched_once_a_layer_and_again_for_the_backward_pass(x64):
    seen = []

    def gather(params):
        seen.append({path: p.shape for path, p in params.items()})
        return {path: 2 * p for path, p in params.items()}

    block = Block()
    graph, state = nnx.split(block)

    def run(state, gather_or_not, remat):
        return scan_layers(nnx.merge(graph, state), body, inputs(), SCALES, remat=remat, **gather_or_not)[0].sum()

    got = jax.jit(jax.grad(lambda s: run(s, {"gather": gather, "prefix": "blocks"}, "full")))(state)
    assert seen[0] == {"blocks/bias": (D,), "blocks/inner/weight": (D, D)}
    assert len(seen) == 1  # traced once, whatever the depth; the scan runs it for each layer
    doubled = jax.tree.map(lambda p: 2 * p, state)
    want = jax.grad(lambda s: run(s, {}, "none"))(doubled)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-12)


class Masked(Block):
    """Also a buffer that stays, and one that each turn changes."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(2)
        self.mask = nnx.Variable(jnp.asarray(rng.integers(0, 2, size=(L, D)).astype(float)))
        self.mean = nnx.BatchStat(jnp.asarray(rng.normal(size=(L, D))))


def masked(layer, x, beside):
    del beside
    y = jnp.tanh(x @ layer.inner.weight[...] + layer.bias[...][None]) * layer.mask[...][None]
    y = y - layer.mean[...][None]
    layer.mean[...] = 0.9 * layer.mean[...] + 0.1 * y.mean(0)
    return y


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_has_its_own_buffers_which_come_back_as_it_left_them(remat, x64):
    graph, state = nnx.split(Masked())

    def run(state):
        layers = nnx.merge(graph, state)
        y = apply_layers(layers, masked, inputs(), None, remat=remat, gather=lambda params: params)
        return y.sum(), layers.mean[...]

    (total, means), _ = jax.jit(jax.value_and_grad(run, has_aux=True, allow_int=True))(state)
    block, x = Masked(), np.asarray(inputs())
    arrays = (block.inner.weight, block.bias, block.mask, block.mean)
    for number, (w, b, mask, mean) in enumerate(zip(*(np.asarray(a[...]) for a in arrays), strict=True)):
        x = np.tanh(x @ w + b) * mask - mean
        np.testing.assert_allclose(means[number], 0.9 * mean + 0.1 * x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-12)


@pytest.mark.slow
def test_rematerialisation_keeps_the_input_of_each_layer_only():
    """Bytes that the forward pass of 64 layers leaves for the backward pass."""

    class Deep(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros((64, 32, 32)))

    def chain(layer, x, _):
        for _ in range(4):
            x = jnp.tanh(x @ layer.weight[...])
        return x, None

    graph, state = nnx.split(Deep())

    def peak(remat):
        loss = jax.grad(lambda s, x: scan_layers(nnx.merge(graph, s), chain, x, remat=remat)[0].sum())
        x = jax.ShapeDtypeStruct((1024, 32), jnp.float32)
        return jax.jit(loss).lower(state, x).compile().memory_analysis().temp_size_in_bytes

    inputs = 64 * 1024 * 32 * 4
    assert inputs <= peak("full") <= 1.3 * inputs
    assert peak("none") >= 4 * inputs
    assert peak("full") < peak("dots") < peak("none")


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="remat must be one of none, full, dots; got 'some'"):
        remat_policy("some")  # pyright: ignore[reportArgumentType]
