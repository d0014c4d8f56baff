"""Oracle: literal NumPy loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.kernels import embedding_bag as ops

LENGTHS = np.array([2, 0, 3, 1, 0], np.int32)
IDS = np.array([4, 4, 0, 6, 4, 2, 5], np.int32)  # the last slot belongs to no bag


def numpy_bags(table, ids, lengths, weights, pooling):
    out, slot = np.zeros((len(lengths), table.shape[1])), 0
    for bag, length in enumerate(lengths):
        for _ in range(length):
            out[bag] += table[ids[slot]] * (1.0 if weights is None else weights[slot])
            slot += 1
        if pooling == "mean" and length:
            out[bag] /= length
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_equal_literal_loops(implementation, pooling, weighted, strict_promotion):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(7, 3)).astype(np.float32)
    weights = rng.normal(size=7).astype(np.float32) if weighted else None

    @jax.jit
    def bags(table):
        return ops.embedding_bag(
            table,
            jnp.asarray(IDS),
            jnp.asarray(LENGTHS),
            weights=weights,
            pooling=pooling,
            implementation=implementation,
        )

    expected = numpy_bags(table.astype(np.float64), IDS, LENGTHS, weights, pooling)
    # float32 sums of at most 3 values of size 1
    np.testing.assert_allclose(bags(table), expected, rtol=1e-6, atol=1e-6)


def test_gradient_equals_that_of_the_reference():
    table = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3)), jnp.float32)
    weights = jnp.arange(7, dtype=jnp.float32)

    def loss(implementation):
        def f(table, weights):
            out = ops.embedding_bag(
                table, jnp.asarray(IDS), jnp.asarray(LENGTHS), weights=weights, implementation=implementation
            )
            return (out**2).sum()

        return jax.jit(jax.grad(f, argnums=(0, 1)))(table, weights)

    for ours, theirs in zip(loss("xla"), loss("reference"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_ids_that_are_no_row_give_zeros(implementation):
    table = jnp.ones((4, 2))
    rows = ops.gather_rows(table, jnp.array([-1, 0, 4, 1000]), implementation=implementation)
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 0, 0])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_sums_by_row_equal_literal_sums(data):
    count, num_rows = 16, 6
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows), min_size=count, max_size=count)), np.int32)
    grads = np.random.default_rng(int(rows.sum())).normal(size=(count, 2)).astype(np.float32)
    for summation in ("fold", "tree"):
        distinct, sums = _sum_by_row(jnp.asarray(rows), jnp.asarray(grads), num_rows, summation)
        distinct, sums = np.asarray(distinct), np.asarray(sums)
        used = distinct < num_rows
        np.testing.assert_array_equal(distinct[used], np.unique(rows[rows < num_rows]))
        assert (np.diff(distinct) > 0).all()  # what the scatter promises
        np.testing.assert_array_equal(sums[~used], 0)
        expected = np.stack([grads[rows == row].astype(np.float64).sum(axis=0) for row in distinct[used]] or [[0, 0]])
        np.testing.assert_allclose(sums[used], expected[: used.sum()], rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sum_by_row(rows, grads, num_rows, summation):
    plan = ops.plan_rows(rows, num_rows=num_rows, capacity=num_rows)
    return plan.rows, ops.sum_by_row(grads, plan, summation=summation)


@pytest.mark.parametrize("summation", ["fold", "tree"])
def test_sum_of_a_row_does_not_depend_on_the_rest_of_the_batch(summation):
    rng = np.random.default_rng(2)
    grads = jnp.asarray(rng.normal(size=(16, 2)), jnp.float32)
    rows = np.array([5, 1, 5, 5, 2, 5, 5, 0, 5, 1, 5, 2, 5, 5, 3, 5], np.int32)
    mine = rows == 5
    distinct, sums = _sum_by_row(jnp.asarray(rows), grads, 6, summation)
    # The same occurrences elsewhere, among others.
    order = np.concatenate([np.flatnonzero(~mine)[::-1], np.flatnonzero(mine)])
    moved = np.where(mine, 5, 4)[order]
    distinct2, sums2 = _sum_by_row(jnp.asarray(moved), grads[order], 6, summation)
    first, second = sums[np.asarray(distinct) == 5], sums2[np.asarray(distinct2) == 5]
    np.testing.assert_array_equal(first, second)


def test_wide_keys_are_sorted_like_packed_ones():
    rows = np.random.default_rng(3).integers(0, 60, 40).astype(np.int32)

    def planned(n):
        own = jnp.asarray(np.where(rows < 50, rows, n), jnp.int32)  # some have no row: the largest key
        return jax.jit(lambda r: ops.plan_rows(r, num_rows=n, capacity=40))(own)

    wanted = planned(50)
    for n in (2**25, 2**26, 2**30):  # with 6 bits of position 32, 33 and 37 bits
        plan = planned(n)
        np.testing.assert_array_equal(plan.order, wanted.order)
        np.testing.assert_array_equal(plan.slots, wanted.slots)


def test_rejects_what_is_not_a_table():
    with pytest.raises(ValueError, match="table must be a floating-point matrix"):
        ops.embedding_bag(jnp.zeros(3), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="weights must have the shape of ids"):
        ops.embedding_bag(jnp.zeros((3, 2)), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), weights=jnp.ones(2))
