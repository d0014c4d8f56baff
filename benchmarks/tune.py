"""Tries the same number of settings of every click model on the flights, judged on the validation split alone.

python benchmarks/tune.py --json tune.json

For each model 12 trials with seed 0: three shapes (logistic regression has none: three rates of its rows) times four
ways of training. Tables are as wide for every shape: 32 numbers a row.
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

TRAININGS = (
    (),
    ("model.dropout=0.1",),
    ("row_optimizer.weight_decay=3e-5",),
    ("optimizer.learning_rate.peak=4e-3",),
)

SHAPES: dict[str, tuple[tuple[str, ...], ...]] = {
    "wukong-flights": (
        (),
        (
            "model.dim=16",
            "model.feature_vectors=2",
            "model.dense_vectors=2",
            "model.fm_outputs=16",
            "model.lcb_outputs=18",
        ),
        (
            "model.dim=32",
            "model.feature_vectors=1",
            "model.dense_vectors=1",
            "model.fm_outputs=8",
            "model.lcb_outputs=9",
        ),
    ),
    "dcnv2-flights": (
        (),
        ("model.cross_layers=3",),
        ("model.cross_layers=3", "model.deep_hidden=(512,256)"),
    ),
    "dlrm-flights": (
        (),
        ("model.top_hidden=(512,256)",),
        ("model.top_hidden=(512,256,128)",),
    ),
    "logistic-flights": (
        (),
        ("row_optimizer.learning_rate=0.1",),
        ("row_optimizer.learning_rate=1.0",),
    ),
}

NOT_OF_LOGISTIC = {("model.dropout=0.1",): ("row_optimizer.weight_decay=3e-4",)}
"""It has no hidden layer; another L2 takes the trial's place."""


def trial(recipe: str, sets: tuple[str, ...]) -> dict[str, Any]:
    """Trains one setting; its figures on the validation split."""
    experiment = configs.load(recipe, [*sets, "eval_every=0", "final_split=validation", "checkpoints.every=0"])
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
        for shape, training in itertools.product(SHAPES[recipe], TRAININGS):
            training = NOT_OF_LOGISTIC.get(training, training) if recipe == "logistic-flights" else training
            result = trial(recipe, (*shape, *training))
            results[recipe].append(result)
            setting = ", ".join(result["sets"]) or "the recipe"
            figures = f"{result['auc']:.4f} | {result['logloss']:.4f} | {result['wall_s']:.0f}"
            print(f"| {recipe} | {setting} | {figures} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
