"""Costs against formulas written out again, number by number."""

import math

import pytest

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import Adagrad, Adam, PartialRowwiseAdam, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.planner import HostTopology, Reuse, TableStatistics
from scalejax.parallel.planner.estimators import estimate, work

# Two hosts of four. Seconds for each byte sent in an exchange, and for each byte that a gather brings:
EXCHANGE = 3 / 8 / 1e11 + 4 / 8 / 1e10
GATHER = 3 / 4 / 1e11 + 4 / (8 * 4) / 1e10
MEMORY = 1e12
PER_ID = 2e-10
MACHINE = HostTopology(
    devices=8,
    devices_per_host=4,
    memory_bytes=2**34,
    memory_bandwidth=MEMORY,
    intra_host_bandwidth=1e11,
    inter_host_bandwidth=1e10,
    row_granule_bytes=64,
    occurrence_s=PER_ID,
)
# 512 examples with 3 + 2 ids each in two features: 2560 ids, 1024 pooled vectors, 640 distinct rows.
BATCH, IDS, VECTORS, DISTINCT = 512, 2560, 1024, 640


def asked(**changes):
    fields = dict(name="t", rows=1001, dim=96, features=("a", "b"), optimizer=RowwiseAdagrad())
    table = TableConfig(**(fields | changes))
    found = TableStatistics(table="t", pooling_factors=(3.0, 2.0), popularity=Reuse(factor=4.0))
    return work(table, found, BATCH)


def parts(seconds):
    return (seconds.forward_compute, seconds.forward_comm, seconds.backward_compute, seconds.backward_comm)


@pytest.mark.parametrize(("kind", "columns"), [("table_wise", 1), ("column_wise", 2), ("table_column_wise", 3)])
def test_whole_rows_or_slices_on_one_device(kind, columns):
    option = estimate(asked(), MACHINE, kind=kind, columns=columns)
    d = 96 // columns
    row = math.ceil(4 * d / 64) * 64
    assert parts(option.shard) == pytest.approx(
        (
            (4 * IDS + row * IDS + 4 * d * VECTORS) / MEMORY + PER_ID * IDS,
            (4 * IDS + 4 * d * VECTORS) * EXCHANGE,
            (4 * d * IDS + 64 * IDS + 2 * (row + 4) * DISTINCT) / MEMORY + PER_ID * IDS,
            4 * d * VECTORS * EXCHANGE,
        ),
        rel=1e-12,
    )
    assert option.everywhere.total == 0
    assert option.shards == columns
    assert (option.rows, option.row_bytes) == (1001, 4 * d + 4)
    # Room twice what is carried: ids, vectors, gradients; and once the gradient of every id in row order.
    assert option.shard_buffers == 2 * (4 * IDS + 8 * d * VECTORS) + 4 * d * IDS
    assert option.everywhere_buffers == 8 * 96 * VECTORS / 8


@pytest.mark.parametrize(("kind", "columns", "n"), [("row_wise", 1, 8), ("table_row_wise", 1, 4), ("grid", 2, 4)])
def test_striped_rows(kind, columns, n):
    option = estimate(asked(), MACHINE, kind=kind, columns=columns, row_parts=n)
    d = 96 // columns
    row, ids = math.ceil(4 * d / 64) * 64, IDS / n
    assert parts(option.shard) == pytest.approx(
        (
            (4 * ids + row * ids + 4 * d * ids) / MEMORY + PER_ID * ids,
            (4 * ids + 4 * d * ids) * EXCHANGE,
            (4 * d * ids + 64 * ids + 2 * (row + 4) * DISTINCT / n) / MEMORY + PER_ID * ids,
            4 * d * ids * EXCHANGE,
        ),
        rel=1e-12,
    )
    # Each of the 8 readers pools its share of the rows, 320 ids into 128 vectors, and spreads gradients again.
    pooling = (4 * 96 * 320 + 4 * 96 * 128) / MEMORY
    assert parts(option.everywhere) == pytest.approx((pooling, 0, pooling, 0), rel=1e-12)
    assert option.shards == columns * n
    assert option.rows == math.ceil(1001 / n)
    assert option.shard_buffers == 2 * (4 * ids + 8 * d * ids) + 4 * d * ids
    assert option.everywhere_buffers == 8 * 96 * 128 + 2 * 8 * 96 * 320


def test_data_parallel():
    option = estimate(asked(), MACHINE, kind="data_parallel")
    assert option.shards == 0
    assert option.shard.total == option.shard_buffers == 0
    assert parts(option.everywhere) == pytest.approx(
        (
            ((4 + 384) * 320 + 384 * 128) / MEMORY + PER_ID * 320,
            0,
            (384 * IDS + 64 * IDS + 2 * (384 + 4) * DISTINCT) / MEMORY + PER_ID * IDS,
            (4 + 384) * IDS * GATHER,
        ),
        rel=1e-12,
    )
    assert option.rows * option.row_bytes == 1001 * (384 + 4)
    assert option.everywhere_buffers == 2 * 384 * 128 + (4 + 2 * 384) * IDS


def test_narrow_dtypes_shrink_rows_at_rest_and_on_their_way_but_not_gradients():
    wide, narrow = asked(), asked(dtype="bfloat16")
    striped = estimate(narrow, MACHINE, kind="row_wise", row_parts=8)
    assert striped.row_bytes == 2 * 96 + 4
    assert striped.shard.forward_comm == pytest.approx((4 + 2 * 96) * IDS / 8 * EXCHANGE)
    assert striped.shard.backward_comm == estimate(wide, MACHINE, kind="row_wise", row_parts=8).shard.backward_comm
    pooled = estimate(narrow, MACHINE, kind="table_wise")  # sums are float32
    assert pooled.shard.forward_comm == estimate(wide, MACHINE, kind="table_wise").shard.forward_comm


def test_without_pooling_every_id_is_a_vector():
    found = asked(pooling="none")
    assert found.vectors == IDS
    assert estimate(found, MACHINE, kind="row_wise", row_parts=8).everywhere.total == 0  # nothing to pool


def test_lists_travel_as_long_as_they_are_and_are_held_as_long_as_they_may_be():
    table = TableConfig(name="t", rows=1001, dim=96, features=("a", "b"), pooling="none")
    lists = TableStatistics(table="t", pooling_factors=(3.0, 2.0), popularity=Reuse(factor=4.0), positions=(20, 5))
    found, plain = work(table, lists, BATCH), asked(pooling="none")
    assert (found.occurrences, found.vectors, found.held) == (IDS, IDS, 25 * BATCH)
    for kind, n in (("row_wise", 8), ("table_wise", 1)):
        option, other = (estimate(asked, MACHINE, kind=kind, row_parts=n) for asked in (found, plain))
        assert (option.shard, option.shard_buffers) == (other.shard, other.shard_buffers)
        # Each of the 8 readers writes 64 examples of 25 positions, of 320 rows, and reads 320 gradients back out.
        spread = 4 * 96 * (320 + 64 * 25) / MEMORY
        assert parts(option.everywhere) == pytest.approx((spread, 0, 2 * 4 * 96 * 320 / MEMORY, 0), rel=1e-12)
        assert option.everywhere_buffers - other.everywhere_buffers == 2 * 4 * 96 * (64 * 25 - 320)
    held = estimate(found, MACHINE, kind="data_parallel").everywhere_buffers
    assert held == 2 * 384 * 64 * 25 + (4 + 2 * 384) * IDS
    with pytest.raises(
        UserError, match=r"positions must be one number, at least 1, for each of the 2 features.*\(3,\)"
    ):
        TableStatistics(table="t", pooling_factors=(3.0, 2.0), popularity=Reuse(factor=4.0), positions=(3,))


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [(Sgd(), 0), (RowwiseAdagrad(), 1), (Adagrad(), 48), (Adam(), 96), (PartialRowwiseAdam(), 49)],
)
def test_state_of_a_slice_of_a_row(optimizer, numbers):
    option = estimate(asked(optimizer=optimizer), MACHINE, kind="column_wise", columns=2)
    assert option.row_bytes == 4 * 48 + 4 * numbers


def test_work_is_shards_and_what_all_devices_pay():
    option = estimate(asked(), MACHINE, kind="grid", columns=2, row_parts=4)
    assert option.work_s(8) == pytest.approx(8 * option.shard.total + 8 * option.everywhere.total)


def test_statistics_for_other_features_are_refused():
    table = TableConfig(name="t", rows=4, dim=4, features=("a", "b"))
    short = TableStatistics(table="t", pooling_factors=(1.0,), popularity=Reuse(factor=1.0))
    with pytest.raises(UserError, match=r"one number for each feature \(a, b\); got \(1.0,\)"):
        work(table, short, 8)
