"""Largest magnitudes, with NaN among many values: XLA's CPU threads, optimised, lose it in maxima of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.kernels.block_quant import dense
from scalejax.kernels.sampled_spmm import features
from scalejax.numerics import bits, float8
from scalejax.parallel.embedding.exchange import wire

CASES = [
    (shape, axes, dtype)
    for shape, axes in (((1000, 128), (1,)), ((7, 3000), (0,)), ((4, 5, 600), (0, 2)), ((3, 0), (1,)))
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.compiled_as_users_do
def test_largest_magnitudes_are_those_of_numpy():
    largest = jax.jit(bits.largest, static_argnums=1)
    for shape, axes, dtype in CASES:
        x = jnp.asarray(np.random.default_rng(0).standard_t(2, shape), dtype)
        wanted = np.abs(np.asarray(x.astype(jnp.float32))).max(axis=axes, initial=0)
        np.testing.assert_array_equal(largest(x, axes), wanted)
        if x.size:
            broken = x.at[tuple(n // 2 for n in shape)].set(jnp.nan).at[(0,) * len(shape)].set(-jnp.inf)
            wanted = np.abs(np.asarray(broken.astype(jnp.float32))).max(axis=axes)
            assert np.isnan(wanted).sum() == 1
            np.testing.assert_array_equal(largest(broken, axes), wanted)


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_largest_magnitudes_of_rows_are_those_of_numpy():
    largest = jax.jit(bits.largest_of_rows)
    for shape in ((1000, 128), (3, 20_001), (2, 5)):
        x = np.random.default_rng(0).standard_t(2, shape).astype(np.float32)
        x[0, 3], x[1, -1] = -np.inf, np.nan
        np.testing.assert_array_equal(np.asarray(largest(x)).view(np.float32), np.abs(x).max(axis=1))
    assert largest(np.zeros((3, 0), np.float32)).tolist() == [0, 0, 0]


def broken_rows():
    rows = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32)
    rows[[3, 400], [60, 2]] = np.nan, np.inf
    return rows


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_rows_with_nan_among_many_are_nan_and_spare_the_others():
    rows = broken_rows()
    codes, scales = jax.jit(lambda x: float8.quantize(x, "fp8_e4m3", axes=(1,)))(rows)
    of_float8 = np.asarray(codes.astype(jnp.float32) * scales)
    of_int8 = np.asarray(jax.jit(features.quantize_rows)(rows).dequantize())
    of_weights = np.asarray(jax.jit(lambda w: dense.dequantize_weight(dense.quantize_weight(w)))(rows.T)).T
    sent = jax.jit(lambda v: wire.decode(wire.encode(v, "int8"), "int8", jnp.float32, dim=64))(rows)
    for found in (of_float8, of_int8, of_weights, np.asarray(sent)):
        assert np.flatnonzero(np.isnan(found).all(axis=1)).tolist() == [3, 400]
        assert np.isfinite(np.delete(found, [3, 400], axis=0)).all()
