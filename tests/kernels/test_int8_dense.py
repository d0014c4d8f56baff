"""Products of 8-bit integers against NumPy's integers, and what saturates, poisons or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.kernels.block_quant import dense

pytestmark = pytest.mark.usefixtures("strict_promotion")


def by_hand(x, weight, low, high):
    """The formula in NumPy: float32 to codes, int64 sums, float64 result."""
    scales = (np.abs(weight).max(axis=0) / np.float32(127)).astype(np.float32)
    q_w = np.rint(weight / scales).astype(np.int64)
    low, high = min(low, 0), max(high, 0)
    scale = np.float32(np.float32(high - low) / np.float32(255))
    zero = int(np.rint(np.float32(-low) / scale))
    q_x = np.clip(np.rint(x * (np.float32(1) / scale)) + zero, 0, 255).astype(np.int64)
    return (((q_x - zero) @ q_w) * (float(scale) * scales.astype(np.float64))), q_w


@pytest.mark.slow
@pytest.mark.parametrize("limits", [None, (-1.5, 2.0), (0.5, 3.0)])
def test_products_are_those_of_integers(limits):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(33, 70)).astype(np.float32), rng.normal(size=(70, 19)).astype(np.float32)
    made = dense.quantize_weight(jnp.asarray(weight))
    given = None if limits is None else tuple(jnp.float32(v) for v in limits)
    found = np.asarray(dense.int8_matmul(jnp.asarray(x), made, limits=given))
    wanted, codes = by_hand(x, weight, *((x.min(), x.max()) if limits is None else np.float32(limits)))
    assert np.array_equal(np.asarray(made.codes), codes)
    assert np.array_equal(np.asarray(made.sums), codes.sum(axis=0))
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    if limits is None:
        assert np.abs(found - x @ weight).max() < 0.02 * np.abs(x @ weight).max()


def test_with_a_range_of_its_own_a_row_does_not_depend_on_the_others():
    x, weight = jnp.asarray([[0.5, -1.0, 0.25], [100.0, 7.0, -50.0]], jnp.float32), jnp.eye(3, dtype=jnp.float32)
    limits = jnp.float32(-1), jnp.float32(1)
    found = jax.jit(lambda x: dense.int8_matmul(x, dense.quantize_weight(weight), limits=limits))(x)
    assert np.allclose(found, np.clip(x, -1, 1), atol=1 / 255)


@pytest.mark.slow
def test_fake_quantization_gives_the_same_products():
    rng = np.random.default_rng(1)
    x, weight = jnp.asarray(rng.normal(size=(8, 40)), jnp.float32), jnp.asarray(rng.normal(size=(40, 6)), jnp.float32)
    limits = jnp.float32(-2), jnp.float32(1.7)
    made = dense.quantize_weight(weight)
    fake = np.asarray(dense.fake_quantize(x, *limits)) @ np.asarray(dense.dequantize_weight(made))
    assert np.allclose(np.asarray(dense.int8_matmul(x, made, limits=limits)), fake, rtol=1e-5, atol=1e-4)


def test_zero_stays_zero_and_what_is_beyond_the_range_saturates():
    x = jnp.asarray([[0.0, -9.0, 9.0, 0.5]], jnp.float32)
    found = np.asarray(dense.fake_quantize(x, jnp.float32(-1), jnp.float32(3)))[0]
    assert found[0] == 0
    assert np.allclose(found[1:3], [-1, 3], atol=4 / 255)
    assert abs(found[3] - 0.5) <= 2 / 255


@pytest.mark.slow
def test_a_row_that_is_not_finite_gives_nan_and_spares_the_others():
    x = np.ones((4, 5), np.float32) * np.arange(5)
    x[1, 2], x[2, 0] = np.nan, np.inf
    weight = dense.quantize_weight(jnp.ones((5, 3), jnp.float32))
    found = np.asarray(dense.int8_matmul(jnp.asarray(x), weight))
    assert np.isnan(found[1:3]).all()
    assert np.allclose(found[[0, 3]], 10, rtol=0.01)
    fake = dense.fake_quantize(jnp.asarray(x), jnp.float32(0), jnp.float32(4)) @ dense.dequantize_weight(weight)
    assert np.array_equal(np.isnan(fake), np.isnan(found))


@pytest.mark.slow
def test_a_range_beyond_float32_spares_all_rows():
    x = np.ones((4, 5), np.float32)
    x[1, :2] = 3e38, -3e38
    found = np.asarray(dense.int8_matmul(jnp.asarray(x), dense.quantize_weight(jnp.full((5, 3), 0.01, jnp.float32))))
    assert np.isfinite(found).all()
    assert (np.abs(found) <= 0.01 * 5 * 6e38 / 255).all()  # a step for each number


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_fit_int32(sign):
    """Every activation is 255 steps above the code of zero, every weight 127 steps: as far out as a sum can be."""
    made = dense.quantize_weight(jnp.full((dense.MOST_INPUTS, 1), sign, jnp.float32))
    x = jnp.ones((1, dense.MOST_INPUTS), jnp.float32)
    found = dense.int8_matmul(x, made, limits=(jnp.float32(0), jnp.float32(1)))
    assert np.allclose(found, sign * dense.MOST_INPUTS, rtol=1e-5)


def test_columns_and_activations_of_zeros():
    weight = dense.quantize_weight(jnp.zeros((5, 3), jnp.float32))
    assert np.array_equal(np.asarray(weight.scales), np.ones(3))
    assert np.array_equal(np.asarray(dense.int8_matmul(jnp.zeros((2, 5), jnp.float32), weight)), np.zeros((2, 3)))


def test_mistakes_are_named():
    with pytest.raises(UserError, match="got int32"):
        dense.quantize_weight(jnp.zeros((3, 3), jnp.int32))
    with pytest.raises(UserError, match="Keep this operator in float16"):
        dense.quantize_weight(jnp.zeros((dense.MOST_INPUTS + 1, 1), jnp.float32))
    for x, got in ((jnp.zeros((2, 4)), r"float32\[2, 4\]"), (jnp.zeros((2, 5), jnp.int32), r"int32\[2, 5\]")):
        with pytest.raises(UserError, match=rf"x must be of floating point, \[B, 5\]; got {got}"):
            dense.int8_matmul(x, dense.quantize_weight(jnp.ones((5, 3))))


def test_a_column_that_is_not_finite_gives_nan_and_spares_the_others():
    weight = np.ones((200, 3), np.float32)
    weight[100, 1], weight[2, 2] = np.nan, -np.inf
    made = dense.quantize_weight(jnp.asarray(weight))
    assert not np.asarray(made.codes)[:, 1:].any()
    for found in (dense.dequantize_weight(made), dense.int8_matmul(jnp.ones((4, 200), jnp.float32), made)):
        assert np.isnan(np.asarray(found)[:, 1:]).all()
        assert np.isfinite(np.asarray(found)[:, 0]).all()


def test_nothing_by_nothing():
    made = dense.quantize_weight(jnp.zeros((0, 3), jnp.float32))
    assert np.array_equal(np.asarray(made.scales), np.ones(3))
    weight = dense.quantize_weight(jnp.ones((5, 3), jnp.float32))
    assert dense.int8_matmul(jnp.zeros((0, 5), jnp.float32), weight).shape == (0, 3)
