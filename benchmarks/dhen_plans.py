"""Strategies of sharding a deep DHEN on 32 hosts of 8 A100, by arithmetic, beside the bars of the paper's Fig. 6.

python benchmarks/dhen_plans.py > table.md

A layer has 130 million parameters: .78 GFLOP an example by the paper's Table 3 (1.44 GFLOP for 2 layers, 3 for 4, 4.6
for 6), 6 a parameter. The seconds of its computation, for a batch that is not published, are the one fitted number: 20
ms, by which a replicated layer is 1.35 times as fast as a sharded one. Bars are read to .02.
"""

from scalejax.bench import machine
from scalejax.plan.arithmetic.gpu_hosts import DenseLayer, Strategy, estimate
from scalejax.plan.planner_machines import find_gpus

LAYER = DenseLayer(parameters=130e6, compute_s=20e-3)
PUBLISHED = {1: ("1.35", "1.16"), 8: ("1.33", "1.14"), 16: ("1.36", "1.18"), 24: ("out of memory", "1.33")}
PUBLISHED[32] = ("out of memory", "1.20")


def main() -> None:
    cluster = find_gpus("a100-40gb:32x8")
    assert cluster is not None
    print(f"{machine.today()}, commit {machine.commit()}; speeds over FULL_SHARD\n")
    print("| layers | NO_SHARD | published | HYBRID_SHARD | published | GB of NO_SHARD, HYBRID_SHARD, FULL_SHARD |")
    print("|---|---|---|---|---|---|")
    for layers, (replicated, hybrid) in PUBLISHED.items():
        strategies: tuple[Strategy, ...] = ("NO_SHARD", "HYBRID_SHARD", "FULL_SHARD")
        found = {strategy: estimate(LAYER, layers, strategy, cluster) for strategy in strategies}
        base = found["FULL_SHARD"].step_s
        cells = [f"{base / each.step_s:.2f}" if each.fits else "out of memory" for each in found.values()]
        memory = ", ".join(f"{each.memory_bytes / 1e9:.1f}" for each in found.values())
        print(f"| {layers} | {cells[0]} | {replicated} | {cells[1]} | {hybrid} | {memory} |")
    most = max(n for n in range(1, 64) if estimate(LAYER, n, "NO_SHARD", cluster).fits)
    print(f"\nNO_SHARD ends after {most} layers (published: about 22).")


if __name__ == "__main__":
    main()
