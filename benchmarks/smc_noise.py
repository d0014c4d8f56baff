"""Fashion-MNIST with wrong labels: cross-entropy, smoothed labels, DLB, SAM and SMC, with equal tuning.

python benchmarks/smc_noise.py tune --json FILE             # each method's setting, on a seed that is not used again
python benchmarks/smc_noise.py run --json FILE > table.md
python benchmarks/smc_noise.py run --json LONG --epochs 120 --methods CE SMC-2 --noises 0.4 0.6
python benchmarks/smc_noise.py draw --json LONG --epochs 120 --methods CE SMC-2 --noises 0.4 0.6 > curves.svg

All runs are the recipe `smc-fashion` with another `model.learning`, rate and noise: of the bundled 4,000 training
pictures 400 validate, beside 1,000 test pictures. Labels of training and validation are wrong at the stated rate, those
of the test never. A seed draws parameters, order, crops and wrong labels anew, the same for every method. Settings are
chosen by validation accuracy at the end of a run with 40 % of wrong labels, four trials a method. FILE keeps runs as
they come, and those that it holds are not made again.

Accuracy is that of the test: after the last epoch, where validation was best, and where the test itself was best, which
nobody can choose by. The fall is the latter minus the first.
"""

import argparse
import dataclasses
import functools
import io
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from kept_runs import half_width

from scalejax import configs, optim
from scalejax.bench import machine
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run
from scalejax.train.self_distillation import AnyLearning, CrossEntropy, Dlb, Sam, Smc

EPOCH, EVALUATIONS = 28, 20
"""Steps of an epoch, and evaluations of a run."""

NOISES = (0.4, 0.6, 0.0)
SEEDS, TUNING_SEED, TUNING_NOISE = (1, 2, 3, 4, 5), 100, 0.4
TRIALS: dict[str, tuple[tuple[AnyLearning, float], ...]] = {
    "CE": tuple((CrossEntropy(), rate) for rate in (0.0125, 0.025, 0.05, 0.1)),
    "LSR": tuple((CrossEntropy(smoothing=s), rate) for s in (0.1, 0.3) for rate in (0.025, 0.05)),
    "DLB": tuple((Dlb(alpha=a), rate) for a in (0.5, 1.0) for rate in (0.025, 0.05)),
    "SAM": tuple((Sam(radius=r), rate) for r in (0.05, 0.2) for rate in (0.025, 0.05)),
    "SMC-2": tuple((Smc(temperature=t), rate) for t in (1.5, 3.0) for rate in (0.025, 0.05)),
}
"""Four of each: what it learns from, and the peak learning rate."""


def experiment_of(learning: AnyLearning, rate: float, noise: float, seed: int, epochs: int = 40) -> Any:
    """The recipe with a method, a rate, noise, a seed and a length."""
    recipe: Any = configs.load("smc-fashion")
    wrong = dataclasses.replace(recipe.data.noise, rate=noise, seed=seed)
    schedule = optim.WarmupCosine(peak=rate, warmup=0.0)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, learning=learning),
        data=dataclasses.replace(recipe.data, noise=wrong, seed=seed),
        optimizer=dataclasses.replace(recipe.optimizer, learning_rate=schedule),
        seed=seed,
        steps=epochs * EPOCH,
    )


@functools.lru_cache(maxsize=1)
def _program(learning: AnyLearning, rate: float, epochs: int) -> Any:
    experiment = experiment_of(learning, rate, 0.0, 0, epochs)
    return binding.bind(experiment, experiment.data.build().schema, make_mesh(MeshShape(), jax.devices()[:1]))


def train(learning: AnyLearning, rate: float, noise: float, seed: int, epochs: int) -> dict[str, Any]:
    """Accuracies of a run by evaluation, and its CPU seconds a step."""
    experiment = experiment_of(learning, rate, noise, seed, epochs)
    program = dataclasses.replace(_program(learning, rate, epochs), experiment=experiment)
    run = Run(program, experiment.data.build())
    state, host = run.begin()
    found: dict[str, Any] = {"validation": [], "test": []}
    seconds = 0.0
    with run.feed(host, experiment.steps) as feed:
        for step in range(1, experiment.steps + 1):
            begun = time.process_time()
            feed.take()
            state, _ = feed.step(state)
            jax.block_until_ready(state.params)
            seconds += time.process_time() - begun if step > 1 else 0.0
            if step % (experiment.steps // EVALUATIONS) == 0:
                for split, values in found.items():
                    batches = program.task.eval_batches(run.data, program.mesh, split)
                    values.append(round(scoring.score(program, state, batches).measure()["accuracy"], 4))
    return {**found, "cpu_s_per_step": seconds / (experiment.steps - 1)}


class Kept:
    """Runs of so many epochs in a file, made where they are not there."""

    def __init__(self, path: pathlib.Path, epochs: int) -> None:
        self._path, self._epochs = path, epochs
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, learning: AnyLearning, rate: float, noise: float, seed: int) -> dict[str, Any]:
        name = f"{learning} rate={rate:g} noise={noise:g} seed={seed}"
        if self._epochs != 40:
            name += f" epochs={self._epochs}"
        if name not in self.runs:
            begun = time.perf_counter()
            self.runs[name] = train(learning, rate, noise, seed, self._epochs)
            self._path.write_text(json.dumps(self.runs, indent=1) + "\n")
            last = {split: values[-1] for split, values in self.runs[name].items() if isinstance(values, list)}
            print(f"{name}: {last}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        return self.runs[name]


def chosen(kept: Kept, method: str) -> tuple[AnyLearning, float]:
    """The trial whose validation accuracy is best at the end, the first of equals."""
    return max(TRIALS[method], key=lambda trial: kept.get(*trial, TUNING_NOISE, TUNING_SEED)["validation"][-1])


def forest(noise: float, seed: int) -> float:
    """Test accuracy of 100 trees on pixels and the same labels: what needs no network."""
    from sklearn.ensemble import RandomForestClassifier

    data = experiment_of(CrossEntropy(), 0.05, noise, seed).data.build()
    train, test = data.splits["train"], data.splits["test"]
    model = RandomForestClassifier(100, random_state=seed, n_jobs=1)
    model.fit(train["images"].reshape(len(train["images"]), -1), train["labels"])
    return float((model.predict(test["images"].reshape(len(test["images"]), -1)) == test["labels"]).mean())


def at_best(run: dict[str, Any]) -> float:
    """Test accuracy where validation is best, the first of equals."""
    return run["test"][int(np.argmax(run["validation"]))]


def report(kept: Kept, methods: list[str], noises: list[float]) -> bool:
    """Prints the table; whether SMC-2 ends above cross-entropy by half a point or more under noise, and falls less."""
    holds = True
    print("| noise | method | setting | last epoch | best on validation | best on test | fall | last minus CE |\n"
          "|---|---|---|---|---|---|---|---|")  # fmt: skip
    for noise in noises:
        trees = [forest(noise, seed) for seed in SEEDS]
        print(f"| {noise:.0%} | random forest | 100 trees | {_mean(trees)} | | | | |")
        base: list[dict[str, Any]] = []
        for method in methods:
            learning, rate = chosen(kept, method)
            runs = [kept.get(learning, rate, noise, seed) for seed in SEEDS]
            base = base or runs
            last, falls = [run["test"][-1] for run in runs], [max(run["test"]) - run["test"][-1] for run in runs]
            gains = [a - run["test"][-1] for a, run in zip(last, base, strict=True)]
            cells = [f"{noise:.0%}", method, f"{learning}, rate {rate:g}".replace("|", "/"), _mean(last)]
            cells += [_mean([at_best(run) for run in runs]), _mean([max(run["test"]) for run in runs]), _mean(falls)]
            cells.append("" if method == "CE" else f"{_mean(gains)} ± {half_width(gains):.4f}")
            print(f"| {' | '.join(cells)} |")
            if noise and method == "SMC-2":
                of_base = [max(run["test"]) - run["test"][-1] for run in base]
                holds &= statistics.fmean(gains) >= 0.005 and statistics.fmean(falls) < statistics.fmean(of_base)
    return holds


def draw(kept: Kept, methods: list[str], noises: list[float], epochs: int) -> str:
    """Test accuracy by epoch as an SVG: means of the seeds, between the least and the largest."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "smc", "font.size": 9}
    figure, axes = plt.subplots(1, len(noises), figsize=(4 * len(noises), 2.6), squeeze=False, layout="constrained")
    for axis, noise in zip(axes[0], noises, strict=True):
        for method in methods:
            curves = np.array([kept.get(*chosen(kept, method), noise, seed)["test"] for seed in SEEDS])
            at = epochs / EVALUATIONS * np.arange(1, EVALUATIONS + 1)
            axis.plot(at, curves.mean(0), label=method)
            axis.fill_between(at, curves.min(0), curves.max(0), alpha=0.2)
        axis.set(title=f"{noise:.0%} of labels wrong", xlabel="epoch", ylabel="test accuracy")
        axis.legend(loc="lower left")
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None})
    return made.getvalue()


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "draw"))
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--methods", nargs="+", choices=TRIALS, default=list(TRIALS), help="CE first")
    parser.add_argument("--noises", nargs="+", type=float, default=NOISES)
    options = parser.parse_args()
    kept = Kept(options.json, options.epochs)
    if options.what == "tune":
        for method in options.methods:
            print(f"{method}: {chosen(kept, method)}", flush=True)
        return
    if options.what == "draw":
        print(draw(kept, options.methods, options.noises, options.epochs), end="")
        return
    print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
    if not report(kept, options.methods, options.noises):
        raise SystemExit("SMC-2 does not end half a point above cross-entropy under noise, or falls as far.")


if __name__ == "__main__":
    main()
