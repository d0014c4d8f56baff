"""Tries the same number of settings of every click model on the flights, judged on the validation split alone.

python benchmarks/tune.py --json tune.json

For each model 8 trials with seed 0: two shapes (logistic regression has none: two rates of its rows) times four ways of
training. Tables are as wide for every shape: 32 numbers a row.
"""

import argparse
import datetime
import itertools
import json
import pathlib
import sys
import tempfile
from typing import Any

from scalejax import configs
from scalejax.train import loop

_PEAK = "optimizer.learning_rate.peak="
TRAININGS = (
    (_PEAK + "4e-3",),
    (_PEAK + "2e-3",),
    (_PEAK + "2e-3", "model.dropout=0.1"),
    (_PEAK + "2e-3", "tables.optimizer.weight_decay=3e-5"),
)
LOGISTIC = tuple((f"tables.optimizer.weight_decay={l2}",) for l2 in ("3e-5", "1e-4", "3e-4", "1e-3"))
"""Logistic regression has no hidden layer and no dense rate worth the name: four L2 instead."""

SHAPES: dict[str, tuple[tuple[str, ...], ...]] = {
    "wukong-flights": (
        (),
        (
            "model.dim=8",
            "model.feature_vectors=4",
            "model.dense_vectors=4",
            "model.fm_outputs=32",
            "model.lcb_outputs=36",
            "model.rank=24",
        ),
    ),
    "dcnv2-flights": ((), ("model.cross_layers=2",)),
    "dlrm-flights": ((), ("model.top_hidden=(256,128)",)),
    "logistic-flights": ((), ("tables.optimizer.learning_rate=1.0",)),
}


def trial(recipe: str, sets: tuple[str, ...]) -> dict[str, Any]:
    """Trains one setting; its figures on the validation split."""
    scored = ("evaluation.every=0", "evaluation.final_split=validation", "checkpoints.every=0")
    experiment = configs.load(recipe, [*sets, *scored])
    with tempfile.TemporaryDirectory() as folder:
        closing = loop.train(experiment, workdir=pathlib.Path(folder) / "run", recipe=recipe)
    return {
        "sets": list(sets),
        "auc": closing["val_auc"],
        "logloss": closing["val_logloss"],
        "wall_s": closing["wall_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    print(f"`python {' '.join(sys.argv)}`, {datetime.datetime.now(datetime.UTC).date()}\n")
    print("| model | setting | validation AUC | LogLoss | s |\n|---|---|---|---|---|")
    results = {}
    for recipe in options.models:
        results[recipe] = []
        trainings = LOGISTIC if recipe == "logistic-flights" else TRAININGS
        for shape, training in itertools.product(SHAPES[recipe], trainings):
            result = trial(recipe, (*shape, *training))
            results[recipe].append(result)
            setting = ", ".join(result["sets"]) or "the recipe"
            figures = f"{result['auc']:.4f} | {result['logloss']:.4f} | {result['wall_s']:.0f}"
            print(f"| {recipe} | {setting} | {figures} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
