"""Sums in fixed point: right to float32 rounding, and the same in any order and any number of limbs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.kernels.embedding_bag import plan_rows, sum_by_row
from scalejax.kernels.embedding_bag.fixed_point import sum_by_slot_fixed


def total(rows, grads, count=32):
    plan = plan_rows(jnp.asarray(rows), num_rows=count, capacity=count)
    sums = sum_by_row(jnp.asarray(grads), plan, summation="fixed")
    full = np.zeros((count, grads.shape[1]), np.float32)
    kept = np.asarray(plan.rows) < count
    full[np.asarray(plan.rows)[kept]] = np.asarray(sums)[kept]
    return full


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(-90, 90))
def test_any_order_gives_the_same_bits_near_the_sum_in_double_precision(seed, exponent):
    rng = np.random.default_rng(seed)
    rows = (rng.zipf(1.3, 200) % 32).astype(np.int32)
    grads = (rng.normal(size=(200, 3)) * 2.0**exponent * rng.choice([1, 1e-3], (200, 1))).astype(np.float32)
    got = total(rows, grads)
    shuffled = rng.permutation(200)
    np.testing.assert_array_equal(got, total(rows[shuffled], grads[shuffled]))
    expected = np.zeros((32, 3))
    np.add.at(expected, rows, grads.astype(np.float64))
    most = np.zeros(32)
    np.maximum.at(most, rows, abs(grads).max(axis=1))
    counts = np.bincount(rows, minlength=32)
    # Half of 2^-22 of the power of two at or below the largest, which is never below 2^-100, an occurrence, and one
    # float32 rounding of the sum.
    bound = counts[:, None] * np.maximum(most, 2.0**-100)[:, None] * 2.0**-22 + abs(expected) * 2.0**-23
    assert (abs(got - expected) <= bound).all()


def test_two_limbs_and_three_give_the_same_bits():
    rng = np.random.default_rng(0)
    slots = rng.integers(0, 5, 2**19 + 1).astype(np.int32)
    grads = rng.normal(size=(slots.size, 1)).astype(np.float32)
    slots[-1] = 5  # no row: the first call has one occurrence less
    two = jax.jit(sum_by_slot_fixed, static_argnums=2)(grads[:-1], slots[:-1], 5)
    three = jax.jit(sum_by_slot_fixed, static_argnums=2)(grads, slots, 5)
    np.testing.assert_array_equal(two, three)
    expected = np.zeros(5)
    np.add.at(expected, slots[:-1], grads[:-1, 0].astype(np.float64))
    np.testing.assert_allclose(np.asarray(two)[:, 0], expected, atol=2**19 * 8 * 2.0**-24 / 5)


def test_the_largest_limbs_of_more_occurrences_than_two_limbs_hold_do_not_overflow():
    """1 + 4095 * 2^-22 is an integer whose lowest 12 bits are ones: 2^19 + 129 of them leave int32."""
    value, count = 1 + 4095 * 2.0**-22, 2**19 + 129
    got = jax.jit(sum_by_slot_fixed, static_argnums=2)(
        np.full((count, 1), value, np.float32), np.zeros(count, np.int32), 1
    )
    np.testing.assert_allclose(got, value * count, rtol=2e-7)


@pytest.mark.slow
def test_equal_gradients_do_not_overflow():
    grads = np.full((2**19, 1), -0.99999994, np.float32)
    got = sum_by_slot_fixed(jnp.asarray(grads), jnp.zeros(2**19, jnp.int32), 1)
    np.testing.assert_allclose(got, -0.99999994 * 2**19, rtol=2e-7)


@pytest.mark.slow
def test_what_is_not_finite_shows_in_its_row_only():
    rows = np.int32([0, 0, 1])
    got = total(rows, np.float32([[np.inf], [1], [2]]))
    assert np.isnan(got[0, 0])
    assert got[1, 0] == 2


def test_what_the_limbs_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="takes float32"):
        jax.eval_shape(lambda g: sum_by_slot_fixed(g, jnp.zeros(3, jnp.int32), 2), jnp.zeros((3, 1), jnp.bfloat16))
    with pytest.raises(ValueError, match="at most 8,388,608 occurrences"):
        jax.eval_shape(
            lambda g, s: sum_by_slot_fixed(g, s, 2),
            jax.ShapeDtypeStruct((2**23 + 1, 1), jnp.float32),
            jax.ShapeDtypeStruct((2**23 + 1,), jnp.int32),
        )
