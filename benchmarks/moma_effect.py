"""MoMa against dense models of equal FLOPs a token, on grey images among text: held-out losses of both modalities.

python benchmarks/moma_effect.py tune --json FILE             # the rate of each model, on a seed that is not scored
python benchmarks/moma_effect.py run --json FILE > table.md   # three seeds; exits with 1 if the order does not come out

All runs start from the recipe `moma` without its second phase. A seed draws parameters and takes rows of its own, the
same for every model, so that differences are taken seed by seed. Runs of `SHARES` of the steps, each with a whole
schedule of its own, give the loss of a model as a function of its FLOPs; eta over a base is how many times the FLOPs
(or the CPU seconds) the base needs for the loss at which both have arrived, see `eta`. FILE keeps runs as they come,
and those that it holds are not made again.

Losses of models with experts are those that see later tokens (`loss_topk`): there are no auxiliary routers here.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from kept_runs import half_width

from scalejax import configs, optim
from scalejax.bench import machine
from scalejax.data.text.modalities import ModalityMap
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import ExpertChoice, Experts
from scalejax.models.llm.llama3.parts import GatedMlp
from scalejax.models.llm.moma import ModalityExperts
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.experiment import Experiment
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run

STEPS, LENGTH, LAYERS, DIM, HIDDEN = 400, 128, 2, 64, 256
INIT_SCALE = 0.1
"""About 1 / sqrt(width). With the recipe's 0.02 losses stand still for 100 steps or more, and by when that ends runs of
two seeds differ by more than two models do."""

SHARES = (0.4, 0.6, 1.0)
SEEDS, TUNING_SEEDS = (6, 7, 8), (100,)
RATES = (5e-3, 1e-2, 2e-2)
MODALITIES = ("image", "text")
BASES = ("dense", "8x")
CURVES = (*BASES, "4t4i")
"""Models that run at every share, not only to the end."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"mlp": GatedMlp()},
    "8x": {"mlp": Experts(count=8, router=ExpertChoice(), execution="batched")},
    "4t4i": {"mlp": ModalityExperts(groups=(("text", 4), ("image", 4)))},
    "1t1i": {"mlp": ModalityExperts(groups=(("text", 1), ("image", 1)))},
    "4t4i + MoD": {
        "mlp": ModalityExperts(groups=(("text", 4), ("image", 4))),
        "depth": MixtureOfDepths(capacity=0.25),
        # Layers come in pairs, of which one counts a quarter: two pairs are 2.5 layers.
        "layers": 4,
        "ffn_dim": 192,
    },
}
RATE = {"dense": 2e-2, "8x": 2e-2, "4t4i": 1e-2, "1t1i": 2e-2, "4t4i + MoD": 1e-2}
"""The peak rate that `tune` chose for each."""


def experiment_of(model: str, steps: int, rate: float) -> Experiment:
    """The recipe with a model of this comparison."""
    recipe = configs.load("moma", ["evaluation.every=0"])
    shape = {"layers": LAYERS, "unroll": LAYERS, "dim": DIM, "ffn_dim": HIDDEN, "init_scale": INIT_SCALE}
    shape |= MODELS[model]
    changed = dataclasses.replace(recipe.model, **shape)  # pyright: ignore[reportArgumentType]
    assert isinstance(recipe.optimizer, optim.AdamW)
    schedule = optim.WarmupCosine(peak=rate, warmup=0.05, final=0.02)
    optimizer = dataclasses.replace(recipe.optimizer, learning_rate=schedule)
    return dataclasses.replace(recipe, model=changed, steps=steps, optimizer=optimizer, phases=())


@functools.cache
def data() -> Any:
    """Rows of all runs."""
    return experiment_of("dense", STEPS, 0.0).data.build()


def flops_per_token(model: str) -> int:
    """Of forward and backward, with the head and causal attention."""
    config: Any = experiment_of(model, STEPS, 0.0).model
    return config.bound(data().schema).flops_per_token(LENGTH)


def train(model: str, steps: int, rate: float, seed: int) -> dict[str, float]:
    """Held-out losses after a run, and what a step took."""
    experiment = dataclasses.replace(experiment_of(model, steps, rate), seed=seed)
    built = _bound(model, steps, rate)
    built = dataclasses.replace(built, experiment=experiment)
    state, host = Run(built, data()).begin()
    host = dataclasses.replace(host, examples=seed * STEPS * experiment.data.batch_size)
    wall, cpu = [], 0.0
    with Run(built, data()).feed(host, steps) as feed:
        for step in range(steps):
            if step == 1:  # compiled
                cpu = time.process_time()
            begun = time.perf_counter()
            feed.take()
            state, _ = feed.step(state)
            jax.block_until_ready(state.params)
            wall.append(time.perf_counter() - begun)
    cpu = (time.process_time() - cpu) / (steps - 1)
    scores = scoring.score(built, state, built.task.eval_batches(data(), built.mesh, "validation")).measure()
    losses = {name: scores.get(f"loss/{name}", scores.get(f"loss_topk/{name}")) for name in MODALITIES}
    if not all(loss is not None and math.isfinite(loss) for loss in losses.values()):
        raise SystemExit(f"{model}, seed {seed}: losses are {losses}")
    return {**losses, "cpu_s_per_step": cpu, "wall_s_per_step": statistics.median(wall[1:])}  # pyright: ignore[reportReturnType]


@functools.lru_cache(maxsize=1)
def _bound(model: str, steps: int, rate: float) -> Any:
    """One program for all seeds."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    return binding.bind(experiment_of(model, steps, rate), data().schema, mesh)


def unigrams() -> dict[str, float]:
    """Held-out losses of the frequencies of ids among those of their modality, as in the rows of 200 training steps."""
    program = _bound("dense", STEPS, 0.0)
    of_ids = np.asarray(ModalityMap(ranges=data().schema.ranges).of_ids)
    counts = np.ones(len(of_ids))
    _, host = Run(program, data()).begin()
    batches = program.task.train_batches(data(), program.mesh, host.position)
    for _ in range(200):
        counts += _counts(next(batches), len(of_ids))
    held_out = np.zeros(len(of_ids))
    for batch in program.task.eval_batches(data(), program.mesh, "validation"):
        held_out += _counts(batch, len(of_ids))
    found = {}
    for number, name in enumerate(data().schema.modalities):
        own = of_ids == number
        found[name] = float(-(held_out[own] * np.log(counts[own] / counts[own].sum())).sum() / held_out[own].sum())
    return found


def _counts(batch: Any, size: int) -> np.ndarray:
    return np.bincount(batch.targets.reshape(-1), weights=batch.weights.reshape(-1), minlength=size)


class Kept:
    """Runs in a file, made where they are not there."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.runs: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, model: str, steps: int, rate: float, seed: int) -> dict[str, float]:
        name = f"{model} {steps} {rate:g} {seed}"
        if name not in self.runs:
            begun = time.process_time()
            self.runs[name] = train(model, steps, rate, seed)
            self._path.write_text(json.dumps(self.runs, indent=1) + "\n")
            found = ", ".join(f"{key} {value:.4g}" for key, value in self.runs[name].items())
            print(f"{name}: {found}; CPU {time.process_time() - begun:.0f} s", file=sys.stderr, flush=True)
        return self.runs[name]


def tune(kept: Kept) -> None:
    """Prints the sum of both losses by rate and model, at the least share of the steps; a model's least is its rate."""
    steps = round(SHARES[0] * STEPS)
    for rate in RATES:
        sums = {
            model: statistics.fmean(
                sum(kept.get(model, steps, rate, seed)[name] for name in MODALITIES) for seed in TUNING_SEEDS
            )
            for model in MODELS
        }
        print(f"{rate:g}: {sums}", flush=True)


def eta(base: dict[float, float], ours: dict[float, float]) -> tuple[str, float]:
    """How many times what we spend the base spends for the same loss; curves are {spent: loss}.

    The loss is the higher of the two final ones, which is where both have arrived; what was spent for it is read off
    between the logarithms of neighbouring runs. ">" = the shortest run of the better side is better than that already.
    """
    target = max(base[max(base)], ours[max(ours)])
    (base_at, base_open), (ours_at, ours_open) = _spent(base, target), _spent(ours, target)
    return ("<" if base_open else ">" if ours_open else ""), base_at / ours_at


def _spent(curve: dict[float, float], target: float) -> tuple[float, bool]:
    points = sorted(curve.items())
    if points[0][1] <= target:
        return points[0][0], True
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 <= target:
            return math.exp(math.log(x0) + (y0 - target) / (y0 - y1) * math.log(x1 / x0)), False
    raise AssertionError(f"{curve} does not reach {target}")


def report(kept: Kept, models: Sequence[str], shares: Sequence[float]) -> bool:
    """Prints the tables of these models, dense, 8x and 4t4i among them; whether the order came out."""
    found: dict[float, dict[str, list[dict[str, float]]]] = collections.defaultdict(dict)
    flops = {model: flops_per_token(model) for model in models}
    for model, count in flops.items():
        assert abs(count / flops["dense"] - 1) < 0.05, f"{model} has {count:,} FLOPs a token, dense {flops['dense']:,}"
    for share in sorted(shares, reverse=True):
        for model in models if share == 1 else CURVES:
            found[share][model] = [kept.get(model, round(share * STEPS), RATE[model], seed) for seed in SEEDS]
    final = found[1.0]
    print("| model | FLOPs a token over dense | image loss | text loss | image minus dense | image minus 8x | "
          "CPU s a step | median ms a step |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    trivial = unigrams()
    print(f"| unigrams of a modality | | {trivial['image']:.4f} | {trivial['text']:.4f} | | | | |")
    for model, runs in final.items():
        losses = {name: [run[name] for run in runs] for name in MODALITIES}
        cells = [model, f"{flops[model] / flops['dense']:.4f}"]
        cells += [f"{statistics.fmean(losses[name]):.4f} ± {statistics.stdev(losses[name]):.4f}" for name in MODALITIES]
        for base in BASES:
            differences = [run["image"] - other["image"] for run, other in zip(runs, final[base], strict=True)]
            cells.append("" if model == base else _interval(differences))
        cells.append(f"{statistics.fmean(run['cpu_s_per_step'] for run in runs):.4f}")
        cells.append(f"{1000 * statistics.median(run['wall_s_per_step'] for run in runs):.1f}")
        print(f"| {' | '.join(cells)} |")
    print("\n| model | loss | " + " | ".join(f"{share:g} of the steps" for share in shares) + " | "
          + " | ".join(f"eta over {base}, {of}" for base in BASES for of in ("FLOPs", "CPU s"))
          + " |\n" + "|---" * (2 + len(shares) + 2 * len(BASES)) + "|")  # fmt: skip
    seconds = {model: statistics.fmean(run["cpu_s_per_step"] for run in runs) for model, runs in final.items()}
    for model in CURVES:
        for name in MODALITIES:
            curves = {
                m: {share: statistics.fmean(run[name] for run in runs[m]) for share, runs in found.items() if m in runs}
                for m in models
            }
            cells = [model, name, *(f"{curves[model][share]:.4f}" for share in shares)]
            for base in BASES:
                for cost in (flops, seconds):
                    sign, value = eta(*({cost[m] * s: loss for s, loss in curves[m].items()} for m in (base, model)))
                    cells.append("" if model == base else f"{sign}{value:.2f}")
            print(f"| {' | '.join(cells)} |")
    image = {model: statistics.fmean(run["image"] for run in runs) for model, runs in final.items()}
    return image["4t4i"] < min(image["8x"], image["dense"])


def _interval(values: list[float]) -> str:
    return f"{statistics.fmean(values):+.4f} ± {half_width(values):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run"))
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES)
    options = parser.parse_args()
    if not {*BASES, *CURVES} <= {*options.models} or 1.0 not in options.shares:
        parser.error(f"{', '.join((*BASES, *CURVES))} and the share 1 are needed, to compare with")
    kept = Kept(options.json)
    if options.what == "tune":
        tune(kept)
        return
    print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
    if not report(kept, options.models, options.shares):
        raise SystemExit("The image loss of 4t4i is not below those of dense and 8x.")


if __name__ == "__main__":
    main()
