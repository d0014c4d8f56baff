"""Grouped products equal one product a group in NumPy, with gradients, whatever the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.kernels.grouped_matmul import grouped_matmul

INNER, OUTER, BLOCK = 6, 5, 4
SIZES = {
    "even": [8, 8, 8, 8],
    "some are empty": [0, 20, 0, 12],
    "one has all": [0, 0, 0, 32],
    "rows are left": [4, 0, 8, 4],
    "none": [0, 0, 0, 0],
}
IMPLEMENTATIONS = ["reference", "blocks", "ragged_dot"]


def case(sizes, dtype=np.float64, rows=32):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((rows, INNER)), rng.standard_normal((len(sizes), INNER, OUTER))
    g = rng.standard_normal((rows, OUTER))
    return x.astype(dtype), weights.astype(dtype), np.asarray(sizes, np.int32), g.astype(dtype)


def literal(x, weights, sizes, g):
    """Product, and gradients of x and weights, group by group."""
    y, to_x, to_weights = np.zeros_like(g), np.zeros_like(x), np.zeros_like(weights)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        y[rows], to_x[rows] = x[rows] @ weights[group], g[rows] @ weights[group].T
        to_weights[group] = x[rows].T @ g[rows]
        begin += size
    return y, to_x, to_weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients_are_those_of_each_group(x64, sizes, implementation):
    x, weights, sizes, g = case(SIZES[sizes])
    run = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), block=BLOCK, implementation=implementation))
    y, back = jax.vjp(run, jnp.asarray(x), jnp.asarray(weights))
    for found, expected in zip((y, *back(jnp.asarray(g))), literal(x, weights, sizes, g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("implementation", ["blocks", "ragged_dot"])
def test_half_precision_is_summed_in_float32(implementation):
    x, weights, sizes, g = case([4096, 0, 4096], np.float32, rows=8192)
    x, weights, g = (jnp.asarray(a, jnp.bfloat16) for a in (x, weights, np.ones_like(g)))
    run = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), block=64, implementation=implementation))
    y, back = jax.vjp(run, x, weights)
    wide = [np.asarray(a, np.float64) for a in (x, weights, g)]
    expected = literal(*wide[:2], sizes, wide[2])
    for found, want in zip((y, *back(g)), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=2**-7, atol=0.02)


def test_a_cpu_takes_blocks():
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    text = jax.jit(grouped_matmul, static_argnames="block").lower(x, weights, sizes, block=BLOCK).as_text()
    assert "stablehlo.while" in text
    assert "chlo.ragged_dot" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 5}, "block must divide the 32 rows of x; got 5"),
        ({"block": 0}, "block must divide"),
        ({"x": np.zeros((32, INNER + 1), np.float32)}, r"must be \[R, K\], \[n, K, N\] and \[n\]"),
        ({"sizes": np.zeros(3, np.int32)}, r"got .* and \(3,\)"),
        ({"x": np.zeros((32, INNER), jnp.bfloat16)}, "of one float dtype; got bfloat16 and float32"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    given = {"x": x, "weights": weights, "sizes": sizes, "block": BLOCK, **change}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**given)


def test_an_unknown_implementation_names_the_others():
    x, weights, sizes, _ = case(SIZES["even"], np.float32)
    with pytest.raises((ValueError, UserError), match="ragged_dot"):
        grouped_matmul(x, weights, sizes, implementation="cublas")
