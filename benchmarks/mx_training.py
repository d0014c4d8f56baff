"""Small models trained in number formats and in float32: losses after the same steps, over several seeds.

python benchmarks/mx_training.py [--seeds 3] [--models llama dlrm wukong] [--formats ...] [--json FILE] > table.md

--json keeps the losses as they come, and what FILE holds already for as many seeds is not trained again.

All products with weights, forward and backward, and all tables of embeddings are in the format; activations between
products, optimizers and master parameters are float32. A seed draws parameters and takes examples of its own, the same
for every format, so that differences are taken seed by seed. The table has the mean over seeds and their standard
deviation, and of the differences from float32 the mean and the standard error. "float32, nudged" is float32 from
parameters that are off by about 2^-20 of themselves: how far two runs part that differ by rounding alone, which is what
no difference can be told from. The rate of the Llama falls to nearly nothing, so that its last steps add no noise.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

from scalejax import configs
from scalejax.bench import machine
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.experiment import Experiment
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run

MODELS: dict[str, tuple[str, ...]] = {
    "llama": (
        "llama-tiny", "model.layers=2", "model.dim=64", "model.ffn_dim=192", "model.unroll=1",
        "data.length=128", "data.batch_size=8", "data.split.validation=0.003", "steps=200",
        "optimizer.learning_rate.peak=1e-3", "optimizer.learning_rate.final=0.01",
    ),
    "dlrm": ("dlrm-smoke", "data.batch_size=1024", "steps=120", "gradients.microbatch=1024"),
    "wukong": ("wukong-smoke", "data.batch_size=1024", "steps=120", "gradients.microbatch=1024"),
}  # fmt: skip
NUDGED = "float32, nudged"
FORMATS = ("float32", NUDGED, "bdr_mx9", "bdr_mx6", "bdr_mx4")


def experiment_of(model: str, format: str) -> Experiment:
    """The recipe of a model, with one rule for everything."""
    name, *sets = MODELS[model]
    named = None if format in ("float32", NUDGED) else format
    rule = QuantizationRule(weight_qtype=named, act_qtype=named, bwd_qtype=named, tail="pad")
    rules = () if named is None else (rule,)
    experiment = configs.load(name, [*sets, "evaluation.every=0"])
    return dataclasses.replace(experiment, quantization=rules)


def losses(model: str, format: str, seeds: int, data: Any) -> list[float]:
    """Final losses by seed on a data set. One program is compiled for all seeds."""
    experiment = experiment_of(model, format)
    mesh = make_mesh(experiment.placement.mesh or MeshShape(), jax.devices()[:1])
    built = binding.bind(experiment, data.schema, mesh)
    split, measured = ("validation", "loss") if built.collection is None else ("test", "logloss")
    found = []
    for seed in range(seeds):
        begun = time.perf_counter()
        seeded = dataclasses.replace(built, experiment=dataclasses.replace(experiment, seed=seed))
        state, host = Run(seeded, data).begin()
        if format == NUDGED:
            state = dataclasses.replace(state, params=nudged(state.params, seed))
        host = dataclasses.replace(host, examples=seed * experiment.steps * experiment.data.batch_size)
        with Run(built, data).feed(host, experiment.steps) as feed:
            for _ in range(experiment.steps):
                feed.take()
                state, _ = feed.step(state)
        # Without intervals, which take longer than the training.
        scores = scoring.score(built, state, built.task.eval_batches(data, mesh, split))
        found.append(float(scores.measure()[measured]))
        if not math.isfinite(found[-1]):
            raise SystemExit(f"{model} in {format}, seed {seed}: the loss is {found[-1]}")
        seconds = time.perf_counter() - begun
        print(f"{model} {format} seed {seed}: {found[-1]:.5f} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return found


def nudged(params: dict[str, jax.Array], seed: int) -> dict[str, jax.Array]:
    """Parameters a few units in the last place away."""
    keys = dict(zip(params, jax.random.split(jax.random.key(seed), len(params)), strict=True))
    return {path: p * (1 + 2.0**-20 * jax.random.normal(keys[path], p.shape, p.dtype)) for path, p in params.items()}


def row(model: str, format: str, values: list[float], plain: list[float]) -> str:
    """One line of the table."""
    got, base = np.array(values), np.array(plain)
    cells = [model, format, f"{got.mean():.5f} ± {got.std(ddof=1):.5f}"]
    if format == "float32":
        return f"| {' | '.join(cells)} | | |"
    difference = got - base
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    relative = 100 * difference.mean() / base.mean()
    return f"| {' | '.join(cells)} | {difference.mean():+.5f} ± {error:.5f} | {relative:+.2f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args()
    if options.seeds < 2 or options.formats[0] != "float32":
        parser.error("--seeds must be at least 2, and --formats begin with float32, to compare with")
    print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
    print("| model | format | final loss | minus float32 | of the loss |\n|---|---|---|---|---|")
    found: dict[str, dict[str, list[float]]] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    for model in options.models:
        of_model = found.setdefault(model, {})
        data = None
        for format in options.formats:
            if len(of_model.get(format, ())) != options.seeds:
                data = data or experiment_of(model, "float32").data.build()
                of_model[format] = losses(model, format, options.seeds, data)
                if options.json is not None:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
            print(row(model, format, of_model[format], of_model["float32"]), flush=True)


if __name__ == "__main__":
    main()
