"""Planning where tables live: seconds for a plan, and how good it is, against TorchRec's planner.

The unit of work is one plan. Tables are made from published access statistics: `facebookresearch/dlrm_datasets` (MIT),
`embedding_bag/{2021,2022}/locality_stats.txt`, the source of NeuroShard's tasks too. They tell ids per example and ids
per distinct row over all tables of a trace; around them a table's own are drawn log-normal, rows log-uniform (4.1
million on average), widths evenly from NeuroShard's 4 to 128. `--data` takes a CSV with columns mean_pooling and
mean_reuse, a line for each trace.

Both plans are judged by one measure, the busiest device: by our cost formulas (`figures`: ours_max_ms, peer_max_ms,
balance = busiest / mean) and, the other way round, by TorchRec's (..._by_peer).
"""

import csv
import dataclasses
import pathlib
from typing import Any

import numpy as np

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, Effort, OutputsDiffer
from scalejax.errors import UserError
from scalejax.parallel import planner
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan
from scalejax.parallel.planner import HostTopology, Reuse, TableStatistics
from scalejax.parallel.planner.options import MIN_SLICE_WIDTH
from scalejax.plan import planner_machines

CASES = ("t100-d16", "t1000-d128")
PEERS = ("torchrec",)
ON_CPU = True
TAKES_DATA = True

EFFORT = Effort(turns=1, turn_s=0.0, warm_up=0)
"""TorchRec takes minutes for a plan, and neither side has anything to warm up."""

TIMEOUT_S = 120
"""TorchRec is asked to stop proposing after this long and to return the best plan so far."""

_SIZES = {"t100-d16": (100, "a100-40gb:2x8"), "t1000-d128": (1000, "a100-40gb:16x8")}
_BATCH = 65_536
_TRACES = ((15.81, 6.91), (13.6, 12.7))
"""(ids per example, ids per distinct row): fbgemm_t856_bs65536 of 2021; mean of the 16 files of 2022."""
_WIDTHS = (4, 8, 16, 32, 64, 128)
_ROWS = (1e3, 5.4e7)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be planned."""

    tables: tuple[TableConfig, ...]
    statistics: tuple[TableStatistics, ...]
    topology: HostTopology
    batch_size: int


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case.

    Raises:
      UserError: `data` cannot be read.
    """
    task = make_task(case, _TRACES if data is None else read_traces(data))
    sides = _Sides(task, None if against is None else _torchrec(task))
    return Contest(
        ours=sides.ours,
        peer=None if against is None else sides.theirs,
        # Nothing is equal by right: `figures` says how the plans compare.
        examples=len(task.tables),
        device=machine.device_name(None),
        figures=sides.figures,
    )


def make_task(case: str, traces: tuple[tuple[float, float], ...], seed: int = 0) -> Task:
    """Tables drawn around traces of (ids per example, ids per distinct row)."""
    count, name = _SIZES[case]
    rng = np.random.default_rng(seed)
    tables, statistics = [], []
    for number in range(count):
        pooling, reuse = traces[rng.integers(len(traces))]
        # Log-normal with sigma 1 has a mean of exp(1/2) times its median.
        pooling = float(pooling * rng.lognormal(-0.5, 1.0))
        reuse = max(1.0, float(reuse * rng.lognormal(-0.125, 0.5)))
        rows = int(np.exp(rng.uniform(*np.log(_ROWS))))
        table = f"table{number:04d}"
        tables.append(TableConfig(name=table, rows=rows, dim=int(rng.choice(_WIDTHS)), features=(f"{table}_ids",)))
        statistics.append(TableStatistics(table=table, pooling_factors=(pooling,), popularity=Reuse(factor=reuse)))
    return Task(tuple(tables), tuple(statistics), planner_machines.topology(name), _BATCH)


def read_traces(path: pathlib.Path) -> tuple[tuple[float, float], ...]:
    """The columns mean_pooling and mean_reuse of a CSV file.

    Raises:
      UserError: the file cannot be read, lacks a column, or has a value that is no positive number.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data: cannot read {path} ({error}). Give a CSV file.") from error
    try:
        traces = tuple((float(line["mean_pooling"]), float(line["mean_reuse"])) for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--data: {path} must have columns mean_pooling and mean_reuse with numbers; got {error}. Correct the file."
        ) from error
    if not traces or not all(pooling > 0 and reuse >= 1 for pooling, reuse in traces):
        raise UserError(f"--data: {path} must have lines with mean_pooling > 0 and mean_reuse >= 1. Correct the file.")
    return traces


class _Sides:
    """Both planners, and the last plan of each."""

    def __init__(self, task: Task, peer: Any) -> None:
        self._task, self._peer = task, peer
        self._ours: planner.Planned | None = None
        self._theirs: ShardingPlan | None = None

    def ours(self, units: int) -> None:
        for _ in range(units):
            task = self._task
            self._ours = planner.plan(task.tables, task.statistics, task.topology, task.batch_size)

    def theirs(self, units: int) -> None:
        for _ in range(units):
            self._theirs = self._peer.plan()

    def figures(self) -> dict[str, float]:
        assert self._ours is not None
        report = self._ours.report
        if report.lower_bound_s is None or not report.fits:
            raise OutputsDiffer("planner: our plan does not fit the memory that it was made for.")
        found = {
            "ours_max_ms": 1e3 * report.max_s,
            "ours_balance": report.balance,
            "bound_ms": 1e3 * report.lower_bound_s,
            "ours_memory_share": report.memory_bytes / report.topology.memory_bytes,
        }
        if self._theirs is not None:
            task = self._task
            if {entry.table for entry in self._theirs.tables} != {table.name for table in task.tables}:
                raise OutputsDiffer("planner: the peer's plan is not for the same tables.")
            peer = planner.evaluate(self._theirs, task.tables, task.statistics, task.topology, task.batch_size)
            found |= {
                "peer_max_ms": 1e3 * peer.max_s,
                "peer_balance": peer.balance,
                "peer_memory_share": peer.memory_bytes / peer.topology.memory_bytes,
            }
            for side, plan in (("ours", self._ours.plan), ("peer", self._theirs)):
                spent = self._peer.milliseconds(plan)
                found[f"{side}_max_ms_by_peer"] = float(spent.max())
                found[f"{side}_balance_by_peer"] = float(spent.max() / spent.mean())
        return found


def _torchrec(task: Task) -> Any:
    peer = peers.load("torchrec_planner")
    return peer.Planner(task.tables, task.statistics, task.topology, task.batch_size, MIN_SLICE_WIDTH, TIMEOUT_S)
