"""`plan_rows` in NumPy: which occurrences belong to which row is known with the batch, before a device has seen it.

Row and position share one unsigned integer, row above position, so that one unstable sort of single numbers is a stable
sort of rows that also yields the permutation:

    rows      7  2  7           position_bits = 2
    packed    7<<2|0  2<<2|1  7<<2|2     sorted    2<<2|1  7<<2|0  7<<2|2     order    1  0  2

uint32 where both fit, uint64 otherwise; NumPy sorts either with vector instructions.
"""

import numpy as np

from scalejax.kernels.embedding_bag.api import RowPlan


def plan_rows_host(rows: np.ndarray, num_rows: int, capacity: int) -> RowPlan:
    """The plan that `plan_rows` makes on a device, equal in every entry, as NumPy arrays.

    Args:
      rows: integer[N], row of each occurrence, >= 0; values >= num_rows are left out.
      num_rows: Rows of the table.
      capacity: Room for distinct rows; min(N, num_rows) always suffices.

    Raises:
      ValueError: `rows` is no integer vector, holds a negative number, or has more distinct rows than `capacity`.
    """
    rows = np.asarray(rows)
    if rows.ndim != 1:
        raise ValueError(f"plan_rows_host: rows must be a vector; got shape {rows.shape}. See plan_tables_host.")
    plan = plan_tables_host(rows[None], num_rows, capacity)
    return RowPlan(plan.order[0], plan.slots[0], plan.rows[0])


def plan_tables_host(rows: np.ndarray, num_rows: int, capacity: int) -> RowPlan:
    """`plan_rows_host` for T tables with the same number of occurrences, rows and capacity, in one sort.

    Args:
      rows: integer[T, N], row of each occurrence within its table, >= 0; values >= num_rows are left out.
      num_rows: Rows of each table.
      capacity: Room for distinct rows of each table.

    Returns:
      A plan whose arrays have T as their first axis: order and slots int32[T, N], rows int32[T, capacity].

    Raises:
      ValueError: `rows` is no integer matrix, holds a negative number, or a table has more distinct rows than
        `capacity`.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"plan_tables_host: rows must be an integer matrix; got {rows.dtype}{list(rows.shape)}.")
    if num_rows < 1 or num_rows + capacity > 2**31:
        raise ValueError(
            f"plan_tables_host: num_rows must be positive and num_rows + capacity at most 2**31, the rows that int32 "
            f"tells apart; got {num_rows} and {capacity}. Cut the table into shards."
        )
    tables, count = rows.shape
    if count and rows.min() < 0:
        raise ValueError(
            f"plan_tables_host: rows must not be negative; got {rows.min()}. Mark what has no row by num_rows."
        )
    position_bits = max(1, (count - 1).bit_length())
    wide = num_rows.bit_length() + position_bits > 32
    word = np.uint64 if wide else np.uint32
    packed = np.minimum(rows, num_rows).astype(word)
    packed <<= word(position_bits)
    packed |= np.arange(count, dtype=word)
    packed.sort(axis=1)
    order = (packed & word((1 << position_bits) - 1)).astype(np.int32)
    packed >>= word(position_bits)
    sorted_rows = packed.astype(np.int32)

    first = np.ones((tables, count), bool)
    np.not_equal(sorted_rows[:, 1:], sorted_rows[:, :-1], out=first[:, 1:])
    valid = sorted_rows < num_rows
    first &= valid
    slots = np.cumsum(first, axis=1, dtype=np.int32)
    distinct = slots[:, -1].copy() if count else np.zeros(tables, np.int32)
    if (distinct > capacity).any():
        table = int(distinct.argmax())
        raise ValueError(
            f"plan_tables_host: capacity must hold the distinct rows of a table; table {table} has {distinct[table]}, "
            f"capacity is {capacity}. Pass at least min(N, num_rows) = {min(count, num_rows)}."
        )
    slots -= 1
    np.copyto(slots, np.int32(capacity), where=~valid)
    found = np.empty((tables, capacity), np.int32)
    found[:] = np.arange(num_rows, num_rows + capacity, dtype=np.int64).astype(np.int32)
    # Row-major order of both masks: table by table, rows ascending.
    found[np.arange(capacity) < distinct[:, None]] = sorted_rows[first]
    return RowPlan(order, slots, found)  # pyright: ignore[reportArgumentType] (NumPy in place of jax arrays)


def narrow_plan(plan: RowPlan, capacity: int) -> RowPlan:
    """The plan that `plan_tables_host` makes with less capacity; that must hold the distinct rows, which is not
    checked.

    Args:
      plan: NumPy arrays, order and slots [T, N], rows [T, U].
      capacity: At most U.
    """
    slots = np.minimum(plan.slots, np.int32(capacity))  # what has no row has slot U; all others lie below the capacity
    return RowPlan(plan.order, slots, plan.rows[:, :capacity])  # pyright: ignore[reportArgumentType] (NumPy arrays)
