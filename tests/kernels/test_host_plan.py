"""The host's plan against the device's, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag.host_row_plan import narrow_plan

COUNT = 24


@jax.jit
def _device_small(rows):
    return ops.plan_rows(rows, num_rows=9, capacity=9)


@jax.jit
def _device_wide(rows):
    return ops.plan_rows(rows, num_rows=2**30, capacity=COUNT)


def _assert_equal(ours, theirs):
    for name in ("order", "slots", "rows"):
        mine, other = getattr(ours, name), np.asarray(getattr(theirs, name))
        assert mine.dtype == other.dtype == np.int32
        np.testing.assert_array_equal(mine, other, err_msg=name)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=COUNT, max_size=COUNT))
def test_equals_the_plan_of_the_device(rows):
    rows = np.array(rows, np.int64)
    _assert_equal(ops.plan_rows_host(rows, 9, 9), _device_small(jnp.asarray(rows, jnp.int32)))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2**29, 2**30 - 1, 2**30, 2**31 - 1]), min_size=COUNT, max_size=COUNT))
def test_equals_the_plan_of_the_device_where_keys_need_64_bits(rows):
    rows = np.array(rows, np.int32)
    _assert_equal(ops.plan_rows_host(rows, 2**30, COUNT), _device_wide(jnp.asarray(rows)))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3 * COUNT, max_size=3 * COUNT))
def test_the_plan_of_many_tables_is_the_plan_of_each(rows):
    rows = np.array(rows, np.int32).reshape(3, COUNT)
    together = ops.plan_tables_host(rows, 9, 9)
    for table in range(3):
        alone = ops.RowPlan(together.order[table], together.slots[table], together.rows[table])
        _assert_equal(alone, _device_small(jnp.asarray(rows[table])))


@pytest.mark.parametrize("count", [1, 2])
def test_short_batches_are_planned(count):
    rows = np.full(count, 3, np.int32)
    device = jax.jit(lambda r: ops.plan_rows(r, num_rows=4, capacity=2))(jnp.asarray(rows))
    _assert_equal(ops.plan_rows_host(rows, 4, 2), device)


def test_a_batch_without_occurrences_has_no_rows():
    plan = ops.plan_rows_host(np.zeros(0, np.int32), 5, 3)
    assert plan.order.shape == plan.slots.shape == (0,)
    np.testing.assert_array_equal(plan.rows, [5, 6, 7])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2 * COUNT, max_size=2 * COUNT), st.integers(0, 9))
def test_a_narrowed_plan_is_the_plan_with_less_room(rows, spare):
    rows = np.array(rows, np.int32).reshape(2, COUNT)
    capacity = min(9, max(1, *(np.unique(one[one < 9]).size for one in rows)) + spare)
    narrow = narrow_plan(ops.plan_tables_host(rows, 9, 9), capacity)
    _assert_equal(narrow, ops.plan_tables_host(rows, 9, capacity))


@pytest.mark.parametrize("num_rows", [2**26, 2**27])
def test_what_has_no_row_comes_last_where_row_and_position_just_fill_a_word_and_where_not(num_rows):
    """`num_rows` itself, which stands for no row, has a bit more than the last row; positions have 5."""
    rows = np.array([0, num_rows, num_rows - 1, 5] * (COUNT // 4))
    plan = ops.plan_rows_host(rows, num_rows, 3)
    order = np.argsort(rows, kind="stable")
    np.testing.assert_array_equal(plan.order, order)
    np.testing.assert_array_equal(plan.slots, np.searchsorted([0, 5, num_rows - 1], rows[order]))
    np.testing.assert_array_equal(plan.rows, [0, 5, num_rows - 1])


def test_rejects_what_a_plan_cannot_hold():
    with pytest.raises(ValueError, match="table 1 has 3, capacity is 2"):
        ops.plan_tables_host(np.array([[1, 1, 1], [0, 1, 2]]), 5, 2)
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        ops.plan_rows_host(np.array([0, -1]), 5, 2)
    with pytest.raises(ValueError, match="must be an integer matrix"):
        ops.plan_rows_host(np.array([0.0]), 5, 1)
    with pytest.raises(ValueError, match="at most 2"):
        ops.plan_rows_host(np.array([0]), 2**31 - 1, 2)
