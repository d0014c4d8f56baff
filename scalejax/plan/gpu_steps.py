"""A step of a click model on hosts of GPUs, by arithmetic: strategies of its dense part, routes of its tables.

    work = ClickWork(parameters=3e6, flops=15e6, width=26 * 128)
    found = plan_on_gpus(work, find_gpus("a100-40gb:32x8"), batch_size=65_536)
    found.dense["HYBRID_SHARD"].step_s, found.routes.two_level_s

Both parts by themselves: `dense` is the computation of the dense part and its waits for parameters and gradients, as in
DHEN (`arithmetic.gpu_hosts`: collectives have the rates of A100 on any GPU); `routes` are whole steps in which
gradients of the dense part are hidden, as in DMT (`arithmetic.tower_steps`). All rates are from published figures of
hosts of 8 GPUs; nothing is compiled.
"""

import dataclasses
from typing import get_args

from scalejax.errors import UserError
from scalejax.plan.arithmetic import gpu_hosts, tower_steps
from scalejax.plan.arithmetic.gpu_hosts import DenseLayer, Strategy
from scalejax.plan.arithmetic.tower_steps import IN_HOST, TowerModel, TowerSteps
from scalejax.plan.planner_machines import Gpus

LEAST_S = 1e-3
"""Of a shorter step latencies are most, which the arithmetic does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverTowers:
    """What towers make of a model.

    Attributes:
      count: T.
      flops: Of an example, forward.
      compression: How many times fewer numbers cross between towers than pooled vectors have.
    """

    count: int
    flops: float
    compression: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickWork:
    """A click model, as far as the arithmetic knows it.

    Attributes:
      parameters: Outside the tables.
      flops: Of an example, forward; of the flat model where there are towers.
      width: Numbers of the pooled vectors of an example.
      layers: Equal layers that the dense part is taken to have.
      towers: None = there are none.
    """

    parameters: float
    flops: float
    width: int
    layers: int = 1
    towers: OverTowers | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """Seconds of a step.

    Attributes:
      machine: The hosts.
      examples: Of a GPU.
      work: The model.
      dense: By strategy of the dense part.
      routes: By route of the tables; `towers_s` is of no meaning without towers.
    """

    machine: str
    examples: float
    work: ClickWork
    dense: dict[Strategy, gpu_hosts.Estimate]
    routes: TowerSteps

    def steps_by_route(self) -> dict[str, float]:
        """Seconds by `Exchange.route`."""
        found = {"flat": self.routes.flat_s, "two_level": self.routes.two_level_s}
        return found | ({} if self.work.towers is None else {"towers": self.routes.towers_s})

    def to_json(self) -> dict[str, object]:
        """The result as plain values."""
        return {
            "machine": self.machine,
            "examples": self.examples,
            "work": dataclasses.asdict(self.work),
            "dense": {strategy: dataclasses.asdict(found) for strategy, found in self.dense.items()},
            "step_s": self.steps_by_route(),
        }


def plan_on_gpus(work: ClickWork, machine: Gpus, batch_size: int) -> GpuPlan:
    """Steps of a global batch.

    Raises:
      UserError: hosts that no figures are of, or a batch or towers that do not go evenly on them.
    """
    if machine.in_host != IN_HOST or machine.hosts < 2:
        raise UserError(
            f"topology: a click model on GPUs is planned by figures of two or more hosts of {IN_HOST}; got "
            f"{machine.name}. Try {machine.chip.name}:{max(2, machine.hosts)}x{IN_HOST}."
        )
    hosts, towers = machine.hosts, work.towers
    if towers is not None and towers.count % hosts and hosts % towers.count:
        raise UserError(
            f"topology: {towers.count} towers do not go evenly on {hosts} hosts. Take "
            f"{machine.chip.name}:{towers.count}x{IN_HOST}, or another partition."
        )
    if batch_size % machine.devices:
        near = machine.devices * max(1, round(batch_size / machine.devices))
        raise UserError(
            f"data.batch_size: {batch_size:,} examples do not divide over the {machine.devices} GPUs of "
            f"{machine.name}. Use --set data.batch_size={near}."
        )
    examples = batch_size // machine.devices
    on = tower_steps.generation_of(machine.chip)
    layer = DenseLayer(
        parameters=work.parameters / work.layers,
        compute_s=tower_steps.products_s(work.flops if towers is None else towers.flops, on, examples) / work.layers,
    )
    over = (work.flops, 1.0) if towers is None else (towers.flops, towers.compression)
    model = TowerModel(flops=work.flops, towers={hosts if towers is None else towers.count: over})
    return GpuPlan(
        machine=machine.name,
        examples=examples,
        work=work,
        dense={kind: gpu_hosts.estimate(layer, work.layers, kind, machine) for kind in get_args(Strategy)},
        routes=tower_steps.steps(model, on, hosts, over=over, examples=examples, width=work.width),
    )
