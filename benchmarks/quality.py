"""Test quality of recipes over several seeds, beside gradient boosting on the same columns and split.

python benchmarks/quality.py --split random --models wukong-flights dcnv2-flights dlrm-flights --seeds 3 --json q.json
python benchmarks/quality.py --models wukong-flights "wukong-flights model.normalization=none"
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from scalejax import configs
from scalejax.train import loop
from scalejax.train.metrics import bootstrap, evaluation, exact

METRICS = ("auc", "logloss", "ne")


def run(model: str, split: str, seed: int) -> tuple[dict[str, float], evaluation.Predictions]:
    """Trains "RECIPE [PATH=VALUE ...]" with one seed; its test metrics and predictions."""
    recipe, *sets = model.split()
    experiment = configs.load(recipe, [*sets, "evaluation.every=0"])
    data: Any = dataclasses.replace(experiment.data, seed=seed, **_columns(split))  # pyright: ignore
    experiment = dataclasses.replace(experiment, data=data, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        closing = loop.train(experiment, workdir=pathlib.Path(folder) / "run", recipe=recipe)
        predictions = evaluation.read_predictions(pathlib.Path(folder) / "run", "test")
    assert predictions is not None
    return {metric: closing[f"test_{metric}"] for metric in METRICS}, predictions


def boosting(split: str, seed: int) -> dict[str, float]:
    """scikit-learn's gradient boosting on ids as ordinal numbers, and the numbers as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    from scalejax.data import FlightsData

    data = FlightsData(batch_size=8192, **_columns(split)).build()

    def table(name: str) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for batch in data.eval_batches(name):
            ids = [batch.features[f.name].values.reshape(-1, 1) for f in data.schema.categorical]
            parts.append(np.hstack([*ids, batch.dense, batch.labels])[batch.weights > 0])
        whole = np.concatenate(parts)
        return whole[:, :-1], whole[:, -1]

    model = HistGradientBoostingClassifier(max_iter=500, learning_rate=0.1, max_leaf_nodes=127, random_state=seed)
    model.fit(*table("train"))
    x, y = table("test")
    p = model.predict_proba(x)[:, 1]
    return {"auc": exact.auc(y, p), "logloss": exact.logloss(y, p), "ne": exact.normalized_entropy(y, p)}


def _columns(split: str) -> dict[str, Any]:
    return {
        "random": {},
        "random-day": {"calendar_day": "include"},
        "time": {"split": "time"},
    }[split]


def row(name: str, results: list[dict[str, float]]) -> str:
    """Mean and sample standard deviation of each metric."""
    cells = []
    for metric in METRICS:
        values = np.array([r[metric] for r in results])
        spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
        cells.append(f"{values.mean():.4f}{spread}")
    return f"| {name} | {len(results)} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=("random", "random-day", "time"), default="random")
    parser.add_argument("--models", nargs="+", required=True, help='"RECIPE [PATH=VALUE ...]", or "boosting"')
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    scored: dict[str, evaluation.Predictions] = {}
    for name in options.models:
        results[name] = []
        for seed in range(1 if name == "boosting" else options.seeds):  # boosting is deterministic but for bin edges
            if name == "boosting":
                results[name].append(boosting(options.split, seed))
            else:
                metrics, predictions = run(name, options.split, seed)
                results[name].append(metrics)
                scored.setdefault(name, predictions)
        print(row(name, results[name]), file=sys.stderr, flush=True)
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"`python {' '.join(sys.argv)}`, {today}\n")
    print("| model | seeds | test AUC | LogLoss | NE |\n|---|---|---|---|---|")
    print("\n".join(row(name, values) for name, values in results.items()))
    wukongs = [n for n in scored if n.startswith("wukong")]
    others = [n for n in scored if not n.startswith("wukong")]
    if wukongs and others:
        best = max(others, key=lambda n: np.mean([r["auc"] for r in results[n]]))
        for name in wukongs:
            a, b = scored[best], scored[name]
            auc = bootstrap.compare(a.labels[:, 0], a.predictions[:, 0], b.predictions[:, 0], a.weights)["auc"]
            print(f"\n{name} against {best}, seed 0, paired bootstrap of AUC: {auc.verdict}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
