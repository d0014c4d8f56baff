"""Steps of a click model on hosts of GPUs, by arithmetic: rows by one exchange, by two, and with tower modules between.

    found = steps(PUBLISHED_MODELS["dlrm"], GENERATIONS["h100"], hosts=8)
    found.flat_s / found.towers_s, found.flat_s / found.two_level_s

DMT (L. Luo et al., MLSys 2024, arXiv 2403.00877). A device has B examples, whose pooled vectors are W numbers of s
bytes; H hosts of L devices, T towers of K = H / T hosts each. It receives, one way,

    flat             B W s (H-1)/H from other hosts    B W s (L-1)/(H L) from its own
    between towers   B W s (T-1)/T / c
    within one       B W s (K-1)/K                     B W s (L-1)/(K L)

where modules between the last two, the hops, divide what leaves their tower by c; two levels without towers have T = H
and c = 1. With a host each, without latency, and with r the rate between hosts over that within them, the exchange
becomes `exchange_speed_up` times as fast: less than 1 at c = 1. What makes two levels fast all the same is that a
network card reaches the more of its rate the fewer devices of other hosts it talks to (`network_share`, from Fig. 5 of
the paper): (H-1) L of them flat, T-1 and (K-1) L in the hops.

Four numbers are fitted, on the printed breakdown of one step of DCN on 64 H100 (Fig. 1 and section 6): compute 29.4 ms
flat and 21.8 ms over towers, for 96.22 and 62.60 MFLOP an example, which give a share of the peak and a part that does
not depend on FLOPs; the exposed exchange 11.5 ms flat, which gives its bytes, and 2.5 ms over towers, which gives the
share of the two hops that nothing hides: bandwidth alone would take 3.5 times as long. On other GPUs the share of the
peak is taken to be the same, the fixed part to go by the memory, what is left of the step by the network; of other
models and batches, what does not go by FLOPs to go by the numbers of pooled vectors. Not in it: how long shuffles and
launches take, stragglers, and that older GPUs reach a larger share of their peak.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from scalejax import chips
from scalejax.chips import Chip
from scalejax.errors import check_at_least

ALL_TO_ALL_BUS = {8: 155e9, 16: 38e9, 32: 24e9, 64: 16e9, 128: 16e9, 256: 15e9, 512: 13e9}
"""Fig. 5: bus bandwidth of an all-to-all of 256 MB, bytes/s, by the number of A100, 8 a host of 25 GB/s a GPU."""

IN_HOST = 8
"""GPUs of a host."""

LOCAL_BATCH = 16_384
"""Examples of a GPU in the throughput runs."""

WIDTH = 26 * 128
"""Numbers of the pooled vectors of an example there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A GPU, by the paper's table.

    Attributes:
      flops_per_s: Peak.
      network_bytes_per_s: To other hosts, one way.
      link_bytes_per_s: Within a host, one way.
      memory_bytes_per_s: By data sheet.
    """

    flops_per_s: float
    network_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float


GENERATIONS = {
    "v100": Generation(
        flops_per_s=15.7e12, network_bytes_per_s=12.5e9, link_bytes_per_s=150e9, memory_bytes_per_s=900e9
    ),
    "a100": Generation(
        flops_per_s=156e12,
        network_bytes_per_s=25e9,
        link_bytes_per_s=300e9,
        memory_bytes_per_s=chips.A100_40GB.hbm_bytes_per_s,
    ),
    "h100": Generation(
        flops_per_s=989e12,
        network_bytes_per_s=50e9,
        link_bytes_per_s=450e9,
        memory_bytes_per_s=chips.H100.hbm_bytes_per_s,
    ),
}


def generation_of(chip: Chip) -> Generation:
    """The generation of a GPU, with the memory of this one."""
    found = GENERATIONS["a100" if chip.name.startswith("a100") else "h100"]
    return dataclasses.replace(found, memory_bytes_per_s=chip.hbm_bytes_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerModel:
    """A model, flat and over towers.

    Attributes:
      flops: Of an example, flat.
      towers: By the number of towers: FLOPs of an example, and c, how many times fewer numbers leave the towers.
    """

    flops: float
    towers: Mapping[int, tuple[float, float]]


PUBLISHED_MODELS = {
    "dlrm": TowerModel(
        flops=14.74e6,
        towers={2: (8.95e6, 2), 4: (8.95e6, 2), 8: (8.95e6, 2), 16: (8.75e6, 26 / 16), 26: (8.95e6, 2)},
    ),
    "dcn": TowerModel(
        flops=96.22e6,
        towers={2: (43.71e6, 1), 4: (50.01e6, 1), 8: (62.60e6, 1), 16: (87.19e6, 1), 26: (96.22e6, 1)},
    ),
}
"""Section 6; 26 features of width 128, so 26 towers at most. c follows from the modules of section 4."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hops:
    """Bytes that a device receives, one way, from other hosts and from its own."""

    between: float
    within: float

    @property
    def total(self) -> float:
        """Both."""
        return self.between + self.within


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerSteps:
    """Seconds of a step.

    Attributes:
      flat_s: Rows by one all-to-all over all devices.
      two_level_s: By two, the model being the same (SPTT).
      towers_s: With tower modules between the hops (SPTT and TM).
    """

    flat_s: float
    two_level_s: float
    towers_s: float


def flat_bytes(payload: float, hosts: float, in_host: int) -> Hops:
    """Of a device whose examples need `payload` bytes of pooled vectors."""
    return Hops(between=payload * (hosts - 1) / hosts, within=payload * (in_host - 1) / (hosts * in_host))


def two_level_bytes(
    payload: float, towers: int, in_host: int, compression: float = 1.0, *, hosts_each: float = 1
) -> tuple[Hops, Hops]:
    """The same between towers of so many hosts and within one; modules make vectors `compression` times smaller."""
    return flat_bytes(payload / compression, towers, 1), flat_bytes(payload, hosts_each, in_host)


def exchange_speed_up(compression: float, ratio: float, hosts: int, in_host: int) -> float:
    """How much faster the exchange is by two hops, ignoring latency and the flat one's bytes within hosts.

    Args:
      compression: c.
      ratio: r, the rate between hosts over that within them.
      hosts: T, at least 2.
      in_host: L.
    """
    return 1 / (1 / compression + ratio * (in_host - 1) / in_host * hosts / (hosts - 1))


def network_share(remote_peers: float) -> float:
    """Share of its rate that a network card reaches in an all-to-all with so many devices of other hosts.

    By the logarithm between what was measured; the ends hold beyond.
    """
    known = []
    for devices, bus in ALL_TO_ALL_BUS.items():
        remote = devices - IN_HOST
        if remote:
            known.append((remote, bus * remote / (devices - 1) / 25e9))
    if remote_peers <= known[0][0]:
        return known[0][1]
    for (few, high), (many, low) in itertools.pairwise(known):
        if remote_peers <= many:
            return high + (low - high) * math.log(remote_peers / few) / math.log(many / few)
    return known[-1][1]


def steps(
    model: TowerModel,
    on: Generation,
    hosts: int,
    *,
    exposed: float | None = None,
    over: tuple[float, float] | None = None,
    examples: float = LOCAL_BATCH,
    width: float = WIDTH,
) -> TowerSteps:
    """Steps of a model on so many hosts of 8.

    Args:
      model: The model.
      on: The GPUs.
      hosts: At least 2; with more than it has towers, several share one, as if evenly (26 towers on 32 hosts are not),
        and the hop within it crosses the network, too.
      exposed: Share of the two hops that nothing hides; None = as fitted, 1 = bandwidth alone.
      over: FLOPs and c over towers in place of those of the model.
      examples: Of a GPU.
      width: Numbers of the pooled vectors of an example.

    Raises:
      UserError: there is one host.
    """
    check_at_least("steps: hosts", hosts, 2)
    exposed = EXPOSED if exposed is None else exposed
    towers = min(hosts, max(model.towers))
    flops, compression = over or model.towers[towers]
    scale = examples * width / (LOCAL_BATCH * WIDTH)
    payload = scale * PAYLOAD
    flat = _seconds(flat_bytes(payload, hosts, IN_HOST), on, remote_peers=(hosts - 1) * IN_HOST)
    rest = scale * _REST_S * _H100.network_bytes_per_s / on.network_bytes_per_s
    rest += scale * _FIXED_S * _H100.memory_bytes_per_s / on.memory_bytes_per_s
    two_level = exposed * _two_hops_s(payload, on, hosts, hosts)
    over_towers = exposed * _two_hops_s(payload, on, hosts, towers, compression)

    return TowerSteps(
        flat_s=products_s(model.flops, on, examples) + flat + rest,
        two_level_s=products_s(model.flops, on, examples) + two_level + rest,
        towers_s=products_s(flops, on, examples) + over_towers + rest,
    )


def products_s(flops: float, on: Generation, examples: float = LOCAL_BATCH) -> float:
    """Seconds of the forward and backward pass, of `flops` an example forward."""
    return _S_PER_FLOP * flops * examples / LOCAL_BATCH * _H100.flops_per_s / on.flops_per_s


def _two_hops_s(payload: float, on: Generation, hosts: int, towers: int, compression: float = 1.0) -> float:
    each = hosts / towers
    between, within = two_level_bytes(payload, towers, IN_HOST, compression, hosts_each=each)
    return _seconds(between, on, remote_peers=towers - 1) + _seconds(within, on, remote_peers=(each - 1) * IN_HOST)


def _seconds(moved: Hops, on: Generation, *, remote_peers: float) -> float:
    network = on.network_bytes_per_s * network_share(remote_peers)
    return moved.between / network + moved.within / on.link_bytes_per_s


_H100, _HOSTS = GENERATIONS["h100"], 8
_FLAT_COMPUTE_S, _TOWER_COMPUTE_S, _FLAT_EXPOSED_S, _TOWER_EXPOSED_S = 29.4e-3, 21.8e-3, 11.5e-3, 2.5e-3
_REST_S = _FLAT_COMPUTE_S * 0.021 / 0.704

_DCN = PUBLISHED_MODELS["dcn"]
_S_PER_FLOP = (_FLAT_COMPUTE_S - _TOWER_COMPUTE_S) / (_DCN.flops - _DCN.towers[_HOSTS][0])
_FIXED_S = _FLAT_COMPUTE_S - _S_PER_FLOP * _DCN.flops

PEAK_SHARE = 3 * LOCAL_BATCH / _S_PER_FLOP / _H100.flops_per_s
"""Of the peak FLOP/s of an H100, forward and backward pass taken as three times the FLOPs of an example."""

PAYLOAD = _FLAT_EXPOSED_S / _seconds(flat_bytes(1.0, _HOSTS, IN_HOST), _H100, remote_peers=(_HOSTS - 1) * IN_HOST)
"""Bytes of pooled vectors and of their gradients that a device needs, both ways together."""

EXPOSED = _TOWER_EXPOSED_S / _two_hops_s(PAYLOAD, _H100, _HOSTS, _HOSTS)
"""Share of the two hops that nothing hides."""
