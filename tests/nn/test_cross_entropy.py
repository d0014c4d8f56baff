"""The loss of a linear head against a plain log-softmax, and the memory that it saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax import nn


def problem(rows=2, length=7, width=5, vocabulary=11):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(rows, length, width))),
        jnp.asarray(rng.normal(size=(width, vocabulary))),
        jnp.asarray(rng.integers(0, vocabulary, (rows, length)), jnp.int32),
        jnp.asarray(rng.choice([0.0, 1.0, 0.25], (rows, length))),
    )


def plain(x, weight, targets, weights):
    log = jax.nn.log_softmax(jnp.einsum("bse,ev->bsv", x, weight))
    return -(jnp.take_along_axis(log, targets[..., None], axis=-1)[..., 0] * weights).sum()


@pytest.mark.slow
@pytest.mark.parametrize("positions", [1, 3, 7, 100])  # 3 does not divide 7
def test_value_and_gradients_are_those_of_a_log_softmax(positions, x64):
    x, weight, targets, weights = problem()

    def ours(x, weight):
        return 3 * nn.linear_cross_entropy(x, weight, targets, weights, positions=positions)

    got, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(x, weight)
    want, expected = jax.value_and_grad(lambda x, w: 3 * plain(x, w, targets, weights), argnums=(0, 1))(x, weight)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(ours)(x, weight), want, rtol=1e-12)  # without gradients it is another program
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


def test_logits_of_any_size_are_safe(x64):
    x, weight, targets, weights = problem()
    ours = nn.linear_cross_entropy(1e4 * x, weight, targets, weights, positions=4)
    np.testing.assert_allclose(ours, plain(1e4 * x, weight, targets, weights), rtol=1e-12)


@pytest.mark.slow
def test_bfloat16_products_are_added_up_in_float32(strict_promotion):
    x, weight, targets, weights = problem(width=64)
    half = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    loss, grads = jax.value_and_grad(nn.linear_cross_entropy, argnums=(0, 1))(
        *half, targets, weights.astype(jnp.float32), positions=3
    )
    assert (loss.dtype, *(g.dtype for g in grads)) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    exact = plain(*(a.astype(jnp.float32) for a in half), targets, weights.astype(jnp.float32))
    np.testing.assert_allclose(loss, exact, rtol=1e-6)  # the operands are exact in float32


def test_memory_is_an_eighth_of_that_of_full_logits():
    vocabulary, tokens, width = 128_256, 8192, 16
    x, weight = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
    )
    targets, weights = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1, tokens), jnp.float32)

    def peak(loss, **more):
        gradient = jax.grad(lambda *arguments: loss(*arguments, **more), argnums=(0, 1))
        return jax.jit(gradient).lower(x, weight, targets, weights).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * tokens * vocabulary
    full = peak(plain)
    assert full >= 2 * logits  # and their gradient
    assert peak(nn.linear_cross_entropy) <= full / 8
    assert peak(nn.linear_cross_entropy, positions=256) <= logits / 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: jnp.zeros((2, 7))}, r"x must be \[B, S, E\] and weight \[E, V\]; got \(2, 7\)"),
        ({1: jnp.zeros((4, 11))}, r"got \(2, 7, 5\), \(4, 11\)"),
        ({2: jnp.zeros((2, 6), jnp.int32)}, r"targets and weights must be \[B, S\] = \(2, 7\); got \(2, 6\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    arguments = [change.get(i, a) for i, a in enumerate(problem())]
    with pytest.raises(ValueError, match=words):
        nn.linear_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="positions must be at least 1; got 0"):
        nn.linear_cross_entropy(*problem(), positions=0)
