"""Deep structures of a head from some labelled slices of another: templates against plain U-Nets, with equal tuning.

python benchmarks/pairwise_brain.py tune --json FILE             # each model's rate, on a seed that is not used again
python benchmarks/pairwise_brain.py run --json FILE              # all runs, few and many slices first
python benchmarks/pairwise_brain.py report --json FILE > table.md
python benchmarks/pairwise_brain.py picture --json FILE --out docs/images/pairwise_brain.svg

All runs are the recipe `pairwise-two-heads` with another `model.comparison`, rate and number of slices: of Colin27
(Debian's mricron-data) to learn from, ICBM 152 to test on. Target and template are turned, scaled and shifted, each by
itself, in training; tests are of pictures as they are, and again with noise and with other contrast. A seed draws
parameters, order, pairs and augmentations anew, the same for every model, so that differences are taken seed by seed.
Rates are chosen by validation Dice, on slices of Colin, with 8 slices to learn from. FILE keeps runs as they come, and
those that it holds are not made again.

Numbers are Dice of the volume of ICBM 152 after the last step, the mean over four structures. Two heads are a check of
the mechanism, and no result about people.
"""

import argparse
import dataclasses
import functools
import itertools
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
from scalejax.data.images import pictures
from scalejax.data.images.augment import Augment
from scalejax.models.vision.segmentation import SegmentationSettings
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run

MODELS = {"none": "U-Net", "early": "early concatenation", "concatenation": "attention off", "attention": "pairwise"}
RATES = (3e-3, 1e-2, 3e-2)
SLICES = (4, 8, 16, 32)
SEEDS, TUNING_SEED, TUNING_SLICES = (1, 2, 3), 100, 8
STEPS = 1000
TESTS = {
    "as they are": Augment(),
    "noise": Augment(noise=0.1),
    "contrast": Augment(contrast=(0.5, 1.5)),
}
"""What is done to test pictures, whose brightest is about 1."""


def experiment_of(model: str, rate: float, slices: int, seed: int, surfaces: Any = "none") -> Any:
    """The recipe with a comparison, a rate, a number of slices and a seed; masks are collected for surfaces alone."""
    recipe: Any = configs.load("pairwise-two-heads")
    schedule = optim.WarmupCosine(peak=rate, warmup=0.05)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(
            recipe.model,
            comparison=model,
            unet=dataclasses.replace(recipe.model.unet, segmentation=SegmentationSettings(surfaces=surfaces)),
        ),
        data=dataclasses.replace(recipe.data, slices=slices, seed=seed),
        optimizer=optim.Adam(learning_rate=schedule),
        steps=STEPS,
        seed=seed,
    )


@functools.lru_cache(maxsize=len(MODELS) * len(RATES))
def _program(model: str, rate: float, surfaces: Any) -> Any:
    """Compiled once a model and rate: of the number of slices only the templates of evaluations know."""
    experiment = experiment_of(model, rate, TUNING_SLICES, 0, surfaces)
    data = experiment.data.build()
    return binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:1]), data)


def trained(model: str, rate: float, slices: int, seed: int, surfaces: Any = "none") -> tuple[Any, Any, Any]:
    """(Run, state, CPU seconds a step) after the last step."""
    experiment = experiment_of(model, rate, slices, seed, surfaces)
    program, data = _program(model, rate, surfaces), experiment.data.build()
    constants = program.task.constants(data, program.mesh)
    run = Run(dataclasses.replace(program, experiment=experiment, constants=constants), data)
    state, host = run.begin()
    seconds = 0.0
    with run.feed(host, STEPS) as feed:
        for step in range(1, STEPS + 1):
            begun = time.process_time()
            feed.take()
            state, _ = feed.step(state)
            jax.block_until_ready(state.params)
            seconds += time.process_time() - begun if step > 1 else 0.0
    return run, state, seconds / (STEPS - 1)


def scores(run: Any, state: Any, test: Augment, split: str = "test") -> Any:
    """Of a split, whose test pictures are changed in a way."""
    data = dataclasses.replace(run.experiment.data, test_change=test).build()
    return scoring.score(run.program, state, run.program.task.eval_batches(data, run.mesh, split))


def measured(model: str, rate: float, slices: int, seed: int) -> dict[str, Any]:
    """Dice of a run."""
    run, state, seconds = trained(model, rate, slices, seed)
    found: dict[str, Any] = {"cpu_s_per_step": round(seconds, 4)}
    found["validation"] = round(scores(run, state, Augment(), "validation").measure()["dice"], 4)
    for name, test in TESTS.items():
        values = scores(run, state, test).measure()
        found[name] = round(values["dice"], 4)
        if name == "as they are":
            found |= {key: round(value, 4) for key, value in values.items() if "/" in key}
    return found


class Kept:
    """Runs in a file, made where they are not there."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, model: str, rate: float, slices: int, seed: int) -> dict[str, Any]:
        name = name_of(model, rate, slices, seed)
        if name not in self.runs:
            begun = time.perf_counter()
            self.runs[name] = measured(model, rate, slices, seed)
            self._path.write_text(json.dumps(self.runs, indent=1) + "\n")
            print(f"{name}: {self.runs[name]}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        return self.runs[name]


def name_of(model: str, rate: float, slices: int, seed: int) -> str:
    return f"{model} rate={rate:g} slices={slices} seed={seed}"


def chosen(kept: Kept, model: str) -> float:
    """The rate whose validation Dice is best, the first of equals."""
    return max(RATES, key=lambda rate: kept.get(model, rate, TUNING_SLICES, TUNING_SEED)["validation"])


def report(kept: Kept) -> None:
    """Prints what there is: rows of fewer than three seeds say so."""
    header = ["slices", "model", "rate", "Dice", "over U-Net", "over early concatenation"]
    header += ["fall with noise", "fall with contrast", "seeds"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for slices in SLICES:
        runs = {
            model: {
                seed: kept.runs[name]
                for seed in SEEDS
                if (name := name_of(model, chosen(kept, model), slices, seed)) in kept.runs
            }
            for model in MODELS
        }
        for model, title in MODELS.items():
            own = runs[model]
            if not own:
                continue
            plain = [run["as they are"] for run in own.values()]
            cells = [str(slices), title, f"{chosen(kept, model):g}", _interval(plain)]
            for base in ("none", "early"):
                both = [seed for seed in own if seed in runs[base]]
                gains = [own[seed]["as they are"] - runs[base][seed]["as they are"] for seed in both]
                cells.append("" if model == base or not gains else _interval(gains, sign=True))
            for test in ("noise", "contrast"):
                cells.append(_interval([run["as they are"] - run[test] for run in own.values()]))
            cells.append(str(len(own)))
            print(f"| {' | '.join(cells)} |")


def _interval(values: list[float], *, sign: bool = False) -> str:
    mean = f"{statistics.fmean(values):{'+' if sign else ''}.3f}"
    if len(values) < len(SEEDS):
        return mean
    return f"{mean} ± {half_width(values):.3f}"


def grey(images: np.ndarray) -> np.ndarray:
    """The first channel of [N, H, W, C] as uint8[N, H, W], from the darkest pixel of each picture to its brightest."""
    x = images[..., 0].astype(np.float64)
    low, high = (f(x, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
    return (255 * (x - low) / np.maximum(high - low, 1e-9)).astype(np.uint8)


def levels(masks: np.ndarray, structures: int) -> np.ndarray:
    """Labels as shades of grey, uint8[N, H, W]."""
    return (masks.astype(np.int64) * 255 // structures).astype(np.uint8)


def picture(kept: Kept, path: pathlib.Path, slices: int, seed: int) -> None:
    """Slices of ICBM 152, their labels, and what the U-Net and the pairwise model make of them."""
    rows = None
    for model in ("none", "attention"):
        run, state, _ = trained(model, chosen(kept, model), slices, seed, "hausdorff")
        found = scores(run, state, Augment()).collected
        shown = np.linspace(2, len(found["masks"]) - 3, 8).round().astype(int)
        if rows is None:
            rows = [grey(run.data.splits["test"]["images"][shown]), levels(found["masks"][shown], 4)]
        rows.append(levels(found["predicted"][shown], 4))
    assert rows is not None
    path.write_text(pictures.svg(pictures.sheet(np.concatenate(rows), 8), scale=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "run", "report", "picture"))
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, default=pathlib.Path("pairwise_brain.svg"))
    options = parser.parse_args()
    kept = Kept(options.json)
    for model in MODELS:
        print(f"{MODELS[model]}: rate {chosen(kept, model):g}", file=sys.stderr, flush=True)
    if options.what == "run":
        # Few and many slices first: a beginning shows the direction.
        order = (SLICES[0], SLICES[-1], *SLICES[1:-1])
        for seed, slices, model in itertools.product(SEEDS, order, MODELS):
            kept.get(model, chosen(kept, model), slices, seed)
    elif options.what == "report":
        print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
        report(kept)
    elif options.what == "picture":
        picture(kept, options.out, 16, SEEDS[0])


if __name__ == "__main__":
    main()
