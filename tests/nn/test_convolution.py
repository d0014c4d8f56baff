"""Convolutions and GroupNorm against literal sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.nn import Conv, GroupNorm


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
    np.testing.assert_allclose(conv(jnp.asarray(x)), wanted, atol=1e-5)


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
