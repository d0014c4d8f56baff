"""Table 2 of SDP4Bit by bytes: training speeds of five models on two clusters, plain and in 4 bits.

python benchmarks/sdp4bit_plans.py > table.md

A step is its products at a share of the peak, and after them what leaves a host at one effective rate, fitted for each
cluster on the plain run of the 1.3B model; all other figures are predicted. With P parameters, p stages, h hosts that
share a stage and D ranks of data parallelism, a host sends

    plain      (4 + 2) P / p (D - 1) / D       gradients in float32, weights in bfloat16, each around one ring
    SDP4Bit    (.531 (h - 1) / h + .502 (D - 1) / D) P / p, and within it 1.031 B a parameter at the rate of NVLink

Sequences of a GPU are not published. If they are as many for all models they cancel out: twice as many are twice the
products and, at half the fitted rate, twice the time of the links. One is assumed, with which the fitted rate is also
that of Table 4 (1.3B on 8 hosts of 4 A100: 379.3 ms for plain gradients, 45.8 ms for those in two hops). The share of
the peak is that of published runs of Megatron-LM without such waits (43 to 46 % for 1.7B to 39B on A100, SC21).
Quantizing, tensor parallelism and bubbles of the pipeline cost nothing here.
"""

import dataclasses
import statistics
from typing import NamedTuple

from scalejax.bench import machine
from scalejax.plan.planner_machines import Gpus, find_gpus

LENGTH, VOCABULARY, SHARE = 2048, 50_257, 0.44
FAST, SLOW, WEIGHTS = 1 + 4 / 128, 0.5 + 4 / 128, 0.5 + 4 / 2048
"""Bytes a parameter: int8:128, int4:128 and int4:2048 with their scales in float32."""

SHAPES = {"1.3B": (24, 2048), "2.7B": (32, 2560), "6.7B": (32, 4096), "13B": (40, 5120), "18B": (40, 6144)}
"""Layers and width; those of 2.7B are GPT-3's."""

TABLE_4 = (0.3793, 0.0458)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A cell of the table.

    Attributes:
      model: Of `SHAPES`.
      tensor, stages: GPUs over which its matrices and its layers are cut.
      plain, ours: TFLOP/s of a GPU, published.
    """

    model: str
    tensor: int
    stages: int
    plain: float
    ours: float

    @property
    def parameters(self) -> float:
        layers, width = SHAPES[self.model]
        return 12 * layers * width**2 + VOCABULARY * width

    @property
    def flops(self) -> float:
        """Of a GPU, a step of one sequence of each rank; all pairs of attention."""
        layers, width = SHAPES[self.model]
        per_token = 6 * self.parameters + 12 * layers * width * LENGTH
        return per_token * LENGTH / (self.tensor * self.stages)

    def between(self, cluster: Gpus, *, plain: bool) -> float:
        """Bytes that leave a host."""
        hosts = cluster.hosts / self.stages
        ranks = hosts * cluster.in_host / self.tensor
        ring, tree, stage = (ranks - 1) / ranks, (hosts - 1) / hosts, self.parameters / self.stages
        return (6 * ring if plain else SLOW * tree + WEIGHTS * ring) * stage

    def within_s(self, cluster: Gpus) -> float:
        """Seconds of the hop within a host."""
        ranks = cluster.in_host / self.tensor
        sent = FAST * self.parameters / (self.tensor * self.stages) * (ranks - 1) / ranks
        return sent / cluster.chip.link_bytes_per_s

    def products_s(self, cluster: Gpus, share: float) -> float:
        return self.flops / (share * cluster.chip.bf16_flops_per_s)

    def predicted(self, cluster: Gpus, fit: "Fit") -> tuple[float, float, float]:
        """TFLOP/s of a GPU, plain and in 4 bits, and the speed-up."""
        products = self.products_s(cluster, fit.share)
        plain = products + self.between(cluster, plain=True) / fit.rate
        ours = products + self.within_s(cluster) + self.between(cluster, plain=False) / fit.rate
        return self.flops / plain / 1e12, self.flops / ours / 1e12, plain / ours


class Fit(NamedTuple):
    """Of a cluster.

    Attributes:
      rate: Bytes a second that leave a host.
      share: Of the peak, by products.
    """

    rate: float
    share: float

    @classmethod
    def of_plain(cls, run: Run, cluster: Gpus) -> "Fit":
        """The rate alone."""
        waits = run.flops / (run.plain * 1e12) - run.products_s(cluster, SHARE)
        return cls(run.between(cluster, plain=True) / waits, SHARE)

    @classmethod
    def of_both(cls, run: Run, cluster: Gpus) -> "Fit":
        """The rate by what 4 bits save, and the share by what is left."""
        steps = [run.flops / (speed * 1e12) for speed in (run.plain, run.ours)]
        plain, ours = (run.between(cluster, plain=how) for how in (True, False))
        rate = (plain - ours) / (steps[0] - steps[1] + run.within_s(cluster))
        return cls(rate, run.flops / (steps[0] - plain / rate) / cluster.chip.bf16_flops_per_s)


CLUSTERS = {
    "a100-40gb:16x4": (
        Run(model="1.3B", tensor=1, stages=1, plain=24.1, ours=57.6),
        Run(model="2.7B", tensor=1, stages=1, plain=24.0, ours=58.4),
        Run(model="6.7B", tensor=4, stages=1, plain=10.8, ours=37.1),
        Run(model="13B", tensor=4, stages=2, plain=9.7, ours=26.0),
        Run(model="18B", tensor=4, stages=2, plain=10.2, ours=29.8),
    ),
    "h800:16x8": (
        Run(model="1.3B", tensor=1, stages=1, plain=69.1, ours=106.0),
        Run(model="2.7B", tensor=1, stages=1, plain=71.9, ours=116.9),
        Run(model="6.7B", tensor=4, stages=1, plain=26.2, ours=77.9),
        Run(model="13B", tensor=8, stages=1, plain=13.9, ours=53.5),
        Run(model="18B", tensor=8, stages=1, plain=14.5, ours=59.2),
    ),
}
"""Slingshot-10 and InfiniBand."""


def main() -> None:
    print(f"{machine.today()}, commit {machine.commit()}; TFLOP/s of a GPU\n")
    titles = ("cluster", "model", "plain", "predicted", "error", "SDP4Bit", "predicted", "error", "speed-up")
    print(f"| {' | '.join((*titles, 'predicted', 'error', 'share fitted too', 'error'))} |\n|{'---|' * 13}")
    errors: list[tuple[float, float]] = []
    remarks: list[str] = []
    for name, runs in CLUSTERS.items():
        cluster = find_gpus(name)
        assert cluster is not None
        one, both = (make(runs[0], cluster) for make in (Fit.of_plain, Fit.of_both))
        remarks.append(
            f"{name}: {one.rate / 1e9:.1f} GB/s leave a host at {one.share:.0%} of the peak; with both cells of 1.3B "
            f"fitted {both.rate / 1e9:.1f} GB/s at {both.share:.0%}."
        )
        for run in runs:
            cells, found = [name, run.model], run.predicted(cluster, one)
            published, second = (run.plain, run.ours, run.ours / run.plain), run.predicted(cluster, both)[2]
            for shown, value in zip(published, found, strict=True):
                digits = 2 if shown == published[2] else 1
                fitted = run is runs[0] and shown == run.plain
                wrong = "fitted" if fitted else f"{value / shown - 1:+.0%}"
                cells += [f"{shown:.{digits}f}", f"{value:.{digits}f}", wrong]
            wrong = [value / published[2] - 1 for value in (found[2], second)]
            cells += [f"{second:.2f}", "fitted" if run is runs[0] else f"{wrong[1]:+.0%}"]
            if run is not runs[0]:
                errors.append((abs(wrong[0]), abs(wrong[1])))
            print(f"| {' | '.join(cells)} |")
    means = [f"{statistics.mean(each):.0%}" for each in zip(*errors, strict=True)]
    print(f"\nMean size of the errors of a speed-up but 1.3B's: {means[0]}, with the share fitted too {means[1]}.\n")
    print("\n".join(remarks))
    print(f"By Table 4 on a100-40gb:8x4: {_of_table_4()} GB/s with plain gradients and with those in two hops.")


def _of_table_4() -> str:
    cluster, run = find_gpus("a100-40gb:8x4"), CLUSTERS["a100-40gb:16x4"][0]
    assert cluster is not None
    plain = 4 * run.parameters * (cluster.devices - 1) / cluster.devices / TABLE_4[0]
    hops = SLOW * run.parameters * (cluster.hosts - 1) / cluster.hosts / (TABLE_4[1] - run.within_s(cluster))
    return f"{plain / 1e9:.1f} and {hops / 1e9:.1f}"


if __name__ == "__main__":
    main()
