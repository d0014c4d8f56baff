"""The planner of embedding tables: a sharding plan and a report, from statistics and a machine's figures.

    topology = planner_machines.topology("v5p:4x4x4")                     # scalejax.plan
    statistics = from_batches(tables, batches)
    planned = plan(tables, statistics, topology, batch_size=65_536)
    planned.report.render(rich.console.Console())

No jax is needed to plan. `evaluate` prices any plan, also one made by hand.
"""

from scalejax.parallel.planner.evaluation import evaluate as evaluate
from scalejax.parallel.planner.options import TableConstraints as TableConstraints
from scalejax.parallel.planner.planner import AnalyticPlanner as AnalyticPlanner
from scalejax.parallel.planner.planner import Planned as Planned
from scalejax.parallel.planner.planner import plan as plan
from scalejax.parallel.planner.report import Report as Report
from scalejax.parallel.planner.statistics import Reuse as Reuse
from scalejax.parallel.planner.statistics import TableStatistics as TableStatistics
from scalejax.parallel.planner.statistics import Zipf as Zipf
from scalejax.parallel.planner.statistics import assumed as assumed
from scalejax.parallel.planner.statistics import from_batches as from_batches
from scalejax.parallel.planner.topology import Constants as Constants
from scalejax.parallel.planner.topology import HostTopology as HostTopology
