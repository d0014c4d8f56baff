"""A data-parallel step of a stack of equal layers on hosts of GPUs, by arithmetic: replicated, sharded, or both.

    found = estimate(DenseLayer(parameters=130e6, compute_s=20e-3), 16, "HYBRID_SHARD", find_gpus("a100-40gb:32x8"))
    found.step_s, found.memory_bytes, found.fits

Three strategies, as in section 4 of DHEN (arXiv 2203.11014):

  NO_SHARD      every GPU holds all; gradients are all-reduced over all of them, behind the backward pass.
  FULL_SHARD    parameters are gathered from all GPUs before a layer is used, forward and backward, and nothing hides
                that; gradients are reduce-scattered over all of them, behind the backward pass.
  HYBRID_SHARD  the same within a host, on its fast links; what is left of the gradients, one part in as many as a host
                has GPUs, is all-reduced between hosts, behind the backward pass.

A collective moves its bytes at the bus bandwidth that was measured for so many GPUs (`BUS_BYTES_PER_S`, Fig. 5 of DMT,
arXiv 2403.00877: A100, 8 a host, an all-reduce of 64 MB), which falls with their number far below the links' own. What
is behind the backward pass costs what it takes longer than that pass, two thirds of the compute.
"""

import dataclasses
import itertools
import math
from typing import Literal

from scalejax.errors import check_at_least, check_one_of
from scalejax.plan.planner_machines import Gpus

Strategy = Literal["NO_SHARD", "FULL_SHARD", "HYBRID_SHARD"]

BUS_BYTES_PER_S = {8: 163e9, 16: 134e9, 32: 111e9, 64: 91e9, 128: 81e9, 256: 74e9, 512: 65e9}
"""By the number of GPUs that take part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """One of the equal layers.

    Attributes:
      parameters: Numbers that it learns.
      compute_s: Seconds of its forward and backward pass on a GPU, for the examples of that GPU.
      traffic_bytes: Of a parameter and of its gradient on their way; 2 = in 16 bits.
      state_bytes: Of a parameter at rest with its gradient and its optimizer: 16 = all of Adam in float32.
    """

    parameters: float
    compute_s: float
    traffic_bytes: int = 2
    state_bytes: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step.

    Attributes:
      step_s: Its seconds.
      exposed_s: Of these, what waits for others.
      memory_bytes: Parameters, gradients and optimizer of a GPU; activations and tables are not counted.
      fits: Whether that is within the memory of a GPU.
    """

    step_s: float
    exposed_s: float
    memory_bytes: float
    fits: bool


def bus_bytes_per_s(devices: int) -> float:
    """Bus bandwidth of a collective over so many GPUs, by the logarithm between measured ones; the ends hold beyond."""
    known = sorted(BUS_BYTES_PER_S.items())
    if devices <= known[0][0]:
        return known[0][1]
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if devices <= high:
            return slow + (fast - slow) * math.log(devices / low) / math.log(high / low)
    return known[-1][1]


def estimate(layer: DenseLayer, layers: int, strategy: Strategy, machine: Gpus) -> Estimate:
    """A step of so many layers.

    Raises:
      UserError: no such strategy, or no layer.
    """
    check_at_least("estimate: layers", layers, 1)
    check_one_of("estimate: strategy", strategy, ("NO_SHARD", "FULL_SHARD", "HYBRID_SHARD"))
    payload = layer.parameters * layer.traffic_bytes
    shards = {"NO_SHARD": 1, "FULL_SHARD": machine.devices, "HYBRID_SHARD": machine.in_host}[strategy]
    gather = _one_way(payload, shards, bus_bytes_per_s(shards))
    reduce = gather  # a reduce-scatter moves what a gather does
    if strategy == "NO_SHARD":
        reduce = 2 * _one_way(payload, machine.devices, bus_bytes_per_s(machine.devices))
    if strategy == "HYBRID_SHARD":
        # Each GPU of a host sums its part with its peers, over its own network card.
        network = min(machine.chip.dcn_bytes_per_s, bus_bytes_per_s(machine.hosts))
        reduce += 2 * _one_way(payload / shards, machine.hosts, network)
    behind = max(0.0, reduce - layer.compute_s * 2 / 3)
    exposed = layers * (2 * gather + behind)
    memory = layers * layer.parameters * layer.state_bytes / shards
    # A sharded layer is whole while it computes, and the next one is on its way.
    memory += 0 if shards == 1 else 2 * payload
    return Estimate(
        step_s=layers * layer.compute_s + exposed,
        exposed_s=exposed,
        memory_bytes=memory,
        fits=memory <= machine.chip.usable_hbm_bytes,
    )


def _one_way(payload: float, members: int, bytes_per_s: float) -> float:
    return 0.0 if members == 1 else payload * (members - 1) / members / bytes_per_s
