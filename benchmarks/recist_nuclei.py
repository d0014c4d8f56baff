"""Key points against a centre and a size, on one network and the bundled nuclei: recipe `recist-nuclei`, several seeds.

    python benchmarks/recist_nuclei.py [--seeds 0 1 2] [--json FILE] > benchmarks/results/recist_nuclei.md

Both are trained alike, with the settings of the recipe, and scored after the last step: nothing is chosen among steps.
The least height of peaks is chosen for each seed on the validation tiles, among the same three for both. Tests are
the four tiles of the quadrant that neither saw.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from scalejax import configs
from scalejax.bench import machine
from scalejax.data.images import recist
from scalejax.models.vision import recist_net
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.batches import convert
from scalejax.train.metrics.detection import FALSE_POSITIVES, boxes_of, froc
from scalejax.train.runs.run import Run

READS = ("key-points", "centre-and-size")
THRESHOLDS = (0.02, 0.05, 0.1)
ELONGATED = 1.4


def found_in(config: recist_net.RecistNetConfig, maps: Any, threshold: float, side: int) -> recist_net.Found:
    """What is read out of maps with peaks of this height at least."""
    grouping = dataclasses.replace(config.grouping, threshold=threshold, centre_threshold=threshold)
    config = dataclasses.replace(config, grouping=grouping)
    return jax.tree.map(np.asarray, jax.jit(lambda maps: recist_net.found_in(config, maps, side, side))(maps))


def scores(found: recist_net.Found, ends: np.ndarray) -> dict[str, dict[str, float]]:
    """Sensitivities and overlaps of hits, of all lesions and of those that are elongated."""
    real = [one[np.isfinite(one).all((1, 2))] for one in ends]
    ratios = [recist.lengths(one) for one in real]
    long = [one[:, 0] / one[:, 1] > ELONGATED for one in ratios]
    result = {}
    for name, counted in (("all", None), ("elongated", long)):
        curve = froc(list(found.boxes), list(found.scores), [boxes_of(one) for one in real], counted=counted)
        each = {f"{at:g}": curve.at(at) for at in FALSE_POSITIVES}
        mean = statistics.fmean(each.values())
        result[name] = each | {"mean": mean, "overlap": curve.overlap_of_hits(4.0), "lesions": len(curve.found_at)}
    return result


def measured(read: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Trains one and scores it."""
    experiment: Any = configs.load("recist-nuclei")
    experiment = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, read=read),
        data=dataclasses.replace(experiment.data, seed=seed),
        seed=seed,
        steps=steps or experiment.steps,
    )
    start = time.perf_counter()
    run: Any = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:1]))
    state = run.program.init()
    batches = run.program.task.train_batches(run.data, run.mesh, 0)
    for number, batch in zip(range(experiment.steps), batches, strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        if (number + 1) % 100 == 0:
            print(f"{read} {seed} step {number + 1} loss {float(loss):.3f}", file=sys.stderr, flush=True)
    maps_of = jax.jit(lambda params, variables, x: run.program.model.merge(params, variables)(x, "evaluation")[-1])
    side, found, ends = run.data.schema.height, {}, {}
    for split in ("validation", "test"):
        batches = list(run.data.eval_batches(split))
        real = np.concatenate([batch["weights"] for batch in batches]) > 0
        images, ends[split] = (np.concatenate([batch[name] for batch in batches])[real] for name in ("images", "ends"))
        maps = maps_of(state.params, state.variables, images)
        found[split] = {at: scores(found_in(experiment.model, maps, at, side), ends[split]) for at in THRESHOLDS}
    best = max(THRESHOLDS, key=lambda at: (found["validation"][at]["all"]["mean"], at))
    took = time.perf_counter() - start
    return {"read": read, "seed": seed, "threshold": best, "seconds": took} | {s: found[s][best] for s in found}


def table(rows: list[dict[str, Any]], split: str) -> list[str]:
    """Means over seeds, and the least of them in brackets."""
    points = [f"{at:g}" for at in FALSE_POSITIVES]
    lines = [
        f"| {split} | lesions | " + " | ".join(f"at {at}" for at in points) + " | overlap of hits |",
        "|---" * (len(points) + 3) + "|",
    ]
    for group in ("all", "elongated"):
        for read in READS:
            own = [row[split][group] for row in rows if row["read"] == read]
            if not own:
                continue
            cells = [
                f"{statistics.fmean(one[key] for one in own):.3f} ({min(one[key] for one in own):.3f})"
                for key in (*points, "overlap")
            ]
            lines.append(f"| {read}, {group} | {own[0]['lesions']} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for read in READS:
            rows.append(measured(read, seed, arguments.steps))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows))
    print(report(rows))


def report(rows: list[dict[str, Any]]) -> str:
    """The page."""
    seeds, seconds = sorted({row["seed"] for row in rows}), sum(row["seconds"] for row in rows)
    steps = configs.load("recist-nuclei").steps
    lines = [
        "# Key points against a centre and a size on nuclei",
        "",
        f"Device: {machine.device_name(jax.devices()[0])}, jax {jax.__version__}. Date: {machine.today()}.",
        "",
        "```",
        f"python benchmarks/recist_nuclei.py --seeds {' '.join(map(str, seeds))}",
        "```",
        "",
        f"Recipe `recist-nuclei`, {steps} steps; {len(seeds)} seeds of parameters and of crops: mean over them, and",
        "the least in brackets. Sensitivity at so many false positives a tile of 128 x 128, a hit being an IoU of .5",
        f"or more; elongated: diameters in a ratio above {ELONGATED}. The least height of peaks was chosen on the",
        f"validation tiles among {', '.join(map(str, THRESHOLDS))}:",
        "; ".join(f"{read} {', '.join(str(row['threshold']) for row in rows if row['read'] == read)}" for read in READS)
        + f". All of it took {seconds / 60:.0f} minutes.",
        "",
        *table(rows, "test"),
        "",
        *table(rows, "validation"),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
