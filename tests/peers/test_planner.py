"""TorchRec's planner on the same tables: its plans are read right, and ours are no worse."""

import numpy as np
import pytest

pytest.importorskip("torchrec", reason="torchrec is not installed; benchmarks/peers.sh installs it")

from planner_cases import machine, table

from scalejax.bench import harness
from scalejax.bench.cases import planner
from scalejax.bench.peers.torchrec_planner import Planner
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.planner import evaluate

pytestmark = pytest.mark.peers


def test_our_plan_is_no_worse_by_the_cost_that_the_engine_has():
    contest = planner.prepare("t100-d16", "torchrec", None)
    harness.measure(contest, planner.EFFORT)
    figures = contest.figures()
    assert figures["ours_max_ms"] <= figures["peer_max_ms"]
    assert figures["ours_balance"] <= figures["peer_balance"]
    # By its own cost each planner should win; that ours comes near there shows that both price the same machine.
    assert figures["ours_max_ms_by_peer"] <= 1.2 * figures["peer_max_ms_by_peer"]


def test_plans_of_the_peer_are_read_table_by_table():
    pairs = [table(f"t{i}", 10 ** (i % 5 + 2), 64, pooling=5.0) for i in range(12)]
    tables, statistics = [t for t, _ in pairs], [s for _, s in pairs]
    peer = Planner(tables, statistics, machine(), 512, 32, None)
    found = peer.plan()
    assert {entry.table for entry in found.tables} == {t.name for t in tables}
    report = evaluate(found, tables, statistics, machine(), 512)  # refuses what cannot be built
    assert report.max_s > 0
    assert peer.milliseconds(found).shape == (8,)


def test_the_peers_cost_of_whole_tables_is_what_its_constants_say():
    (config, found) = table("t", 1000, 128, pooling=5.0)
    peer = Planner([config], [found], machine(), 512, 32, None)
    spent = peer.milliseconds(ShardingPlan(tables=(TablePlan(table="t", kind="table_wise", ranks=(3,)),)))
    # TorchRec's table-wise formula in its own constants: (8-byte ids + rows + vectors) / memory, backward twice that,
    # exchange of all vectors between hosts, forward and backward.
    ids, vectors = 512 * 5, 512
    compute = (8 * ids + 4 * 128 * ids + 4 * 128 * vectors) / 1e9
    exchange = 4 * 128 * vectors / 1e7
    assert np.flatnonzero(spent).tolist() == [3]
    assert spent[3] == pytest.approx(3 * compute + 2 * exchange, rel=0.05)
