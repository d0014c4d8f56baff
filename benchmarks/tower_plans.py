"""DMT on 16 to 512 GPUs by arithmetic: flat, rows in two hops, tower modules between them; beside the paper's bars.

python benchmarks/tower_plans.py > table.md

Published speed-ups are bar labels over the flat baseline; their GPU follows the order of the legend.
"""

from scalejax.bench import machine
from scalejax.plan.arithmetic import tower_steps
from scalejax.plan.arithmetic.tower_steps import GENERATIONS, PUBLISHED_MODELS, TowerSteps, steps

Bars = tuple[float | None, float, float]
"""V100, A100, H100."""

SPEED_UPS: dict[str, dict[int, Bars]] = {
    "dlrm": {
        16: (1.1, 0.9, 0.9),
        32: (1.2, 1.1, 0.9),
        64: (1.9, 1.9, 1.8),
        128: (1.9, 1.5, 1.8),
        256: (None, 1.6, 1.6),
        512: (None, 1.7, 1.7),
    },
    "dcn": {
        16: (1.9, 1.4, 1.1),
        32: (1.8, 1.4, 1.1),
        64: (1.7, 1.8, 1.6),
        128: (1.2, 1.3, 1.2),
        256: (None, 1.2, 1.3),
        512: (None, 1.3, 1.4),
    },
}
MODULES: dict[int, Bars] = {
    16: (1.4, 1.3, 1.2),
    32: (1.3, 1.2, 1.2),
    64: (1.3, 1.2, 1.2),
    128: (1.4, 1.3, 1.2),
    256: (None, 1.2, 1.2),
    512: (None, 1.2, 1.2),
}
COMPRESSIONS: dict[int, tuple[float, Bars]] = {
    2: (8.95e6, (1.3, 1.2, 1.2)),
    4: (7.93e6, (1.7, 1.4, 1.4)),
    8: (7.41e6, (1.9, 1.6, 1.5)),
    16: (7.16e6, (2.0, 1.7, 1.6)),
}
"""FLOPs of DLRM over 8 towers by the ratio of compression, and its speed over two hops without modules."""


def main() -> None:
    print(f"{machine.today()}, commit {machine.commit()}\n")
    print(
        f"Fitted on DCN, 64 H100: {tower_steps.PAYLOAD / 1e6:.0f} MB of vectors and gradients a GPU, "
        f"{tower_steps.PEAK_SHARE:.0%} of the peak, {tower_steps.EXPOSED:.0%} of the two hops exposed.\n"
    )
    print('ms: flat : two hops : two hops and modules. Speed-up of the last; "all exposed" is bandwidth alone.\n')
    print("| model | GPUs | | ms, fitted | ms, all exposed | published | fitted | error | all exposed | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = {}
    for model, by_size in SPEED_UPS.items():
        for gpus, published in by_size.items():
            for name, bar in zip(GENERATIONS, published, strict=True):
                if bar is None:
                    continue
                fitted, bare = (
                    steps(PUBLISHED_MODELS[model], GENERATIONS[name], gpus // 8, exposed=share) for share in (None, 1.0)
                )
                ups = [found.flat_s / found.towers_s for found in (fitted, bare)]
                wrong = [up / bar - 1 for up in ups]
                errors.setdefault(model, []).append((wrong[0], wrong[1]))
                cells = [f"{up:.2f} | {error:+.0%}" for up, error in zip(ups, wrong, strict=True)]
                print(f"| {model} | {gpus} | {name} | {_ms(fitted)} | {_ms(bare)} | {bar} | {' | '.join(cells)} |")
    print("\n| model | bars | mean size of the error, fitted | all exposed |\n|---|---|---|---|")
    for model, found in errors.items():
        means = [sum(abs(pair[i]) for pair in found) / len(found) for i in (0, 1)]
        print(f"| {model} | {len(found)} | {means[0]:.0%} | {means[1]:.0%} |")
    print("\nModules over two hops without, DLRM; published, fitted and all exposed for v100, a100, h100:\n")
    print("| GPUs | published | fitted | all exposed |\n|---|---|---|---|")
    for gpus, published in MODULES.items():
        print(f"| {gpus} | {_bars(published)} | {_modules(gpus, None)} | {_modules(gpus, 1.0)} |")
    print("\nThe same by compression, 8 towers on 64 GPUs:\n")
    print("| CR | published | fitted | all exposed |\n|---|---|---|---|")
    for ratio, (flops, published) in COMPRESSIONS.items():
        over = (flops, float(ratio))
        print(f"| {ratio} | {_bars(published)} | {_modules(64, None, over)} | {_modules(64, 1.0, over)} |")


def _ms(found: TowerSteps) -> str:
    return " : ".join(f"{1e3 * s:.1f}" for s in (found.flat_s, found.two_level_s, found.towers_s))


def _bars(published: Bars) -> str:
    return " / ".join("-" if bar is None else str(bar) for bar in published)


def _modules(gpus: int, exposed: float | None, over: tuple[float, float] | None = None) -> str:
    found = [steps(PUBLISHED_MODELS["dlrm"], on, gpus // 8, exposed=exposed, over=over) for on in GENERATIONS.values()]
    return " / ".join(f"{each.two_level_s / each.towers_s:.2f}" for each in found)


if __name__ == "__main__":
    main()
