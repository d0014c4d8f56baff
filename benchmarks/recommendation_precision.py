"""What low precision costs trained click models: bytes, normalised entropy and time, over seeds.

python benchmarks/recommendation_precision.py --models "dlrm-flights model.dim=72" wukong-flights --seeds 3 --json FILE

--json keeps the results as they come, and a seed that FILE holds already is not trained again.

Trains every model on the bundled flights, lowers it in several ways, and scores the test split with packed tables and
integer products. Ranges of activations come from the validation split; so do the choices of the search, which the test
split has not seen. A gap is NE over that of float32, minus 1.
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
from scalejax.inference.recommendation import calibration, click_model, lowering, precision, report, search, study
from scalejax.train import loop

BUDGET = 5e-4
WAYS = {
    "float16 tables and dense": ("float16", "float16", "minmax"),
    "int8 tables": ("int8", "float32", "minmax"),
    "int4 tables, min and max": ("int4", "float32", "minmax"),
    "int4 tables, greedy": ("int4", "float32", "greedy"),
    "int2 tables, greedy": ("int2", "float32", "greedy"),
    "kmeans4 tables": ("kmeans4", "float32", "minmax"),
    "kmeans2 tables": ("kmeans2", "float32", "minmax"),
    "int8 dense": ("float32", "int8", "minmax"),
    "int8 tables and dense": ("int8", "int8", "minmax"),
    "int4 tables, min and max, int8 dense": ("int4", "int8", "minmax"),
}


def run(model: str, seed: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Trains "RECIPE [PATH=VALUE ...]" with one seed and lowers it in every way."""
    recipe, *sets = model.split()
    experiment = configs.load(recipe, [*sets, "evaluation.every=0"])
    data: Any = dataclasses.replace(experiment.data, seed=seed)  # pyright: ignore
    experiment = dataclasses.replace(experiment, data=data, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run"
        loop.train(experiment, workdir=path, recipe=recipe)
        trained = click_model.load(path, experiment)
    built: Any = experiment.data.build()
    validation = click_model.labelled(built.eval_batches("validation"), trained.schema)
    test = click_model.labelled(built.eval_batches("test"), trained.schema)
    limits = calibration.limits(trained, validation.inputs[:8])
    results: dict[str, dict[str, Any]] = {}

    def add(name: str, lowered: lowering.Lowered, **more: Any) -> None:
        results[name] = report.measure(lowered, test, repeats=repeats) | more
        print(f"{model} seed {seed}: {name}: {line(results[name])}", file=sys.stderr, flush=True)

    for name, (tables, dense, rows) in WAYS.items():
        chosen = precision.uniform(trained, tables=tables, dense=dense)  # pyright: ignore[reportArgumentType]
        add(name, lowering.lower(trained, chosen, limits, rows=rows))
    asked = study.study(trained, limits, validation, test)
    found = search.search(asked, budget=BUDGET)
    counts = {c: list(found.precisions.tables.values()).count(c) for c in precision.TABLES}
    dense_counts = {c: list(found.precisions.operators.values()).count(c) for c in precision.DENSE}
    add(
        f"search, budget {BUDGET:.2%}",
        lowering.lower(trained, found.precisions, limits),
        calibration_gap=found.gap._asdict(),
        tables=counts,
        operators=dense_counts,
        steps=len(found.path),
    )
    return results


def line(measured: dict[str, Any]) -> str:
    """Shares of bytes and the gap."""
    size = measured["bytes"]
    return (
        f"tables {size['tables'] / size['tables_float32']:.2%}, dense {size['dense'] / size['dense_float32']:.2%}, "
        f"all {size['share']:.2%}, gap {measured['quality']['gap']:+.4%}"
    )


def row(name: str, results: list[dict[str, Any]]) -> str:
    """Shares of bytes, mean gap of NE with its sample deviation and its worst, AUC, and time."""
    sizes = [r["bytes"] for r in results]
    gaps = np.array([r["quality"]["gap"] for r in results])
    ratio = np.mean([r["latency"]["ratio"] for r in results])
    auc = np.mean([r["quality"]["auc"] - r["quality"]["auc_float32"] for r in results])
    spread = f" ± {gaps.std(ddof=1) * 100:.4f}" if len(gaps) > 1 else ""
    cells = (
        f"{np.mean([s['tables'] / s['tables_float32'] for s in sizes]):.1%}",
        f"{np.mean([s['dense'] / s['dense_float32'] for s in sizes]):.1%}",
        f"{np.mean([s['share'] for s in sizes]):.1%}",
        f"{gaps.mean() * 100:+.4f}{spread}",
        f"{gaps.max() * 100:+.4f}",
        f"{auc:+.6f}",
        f"{ratio:.2f}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["dlrm-flights model.dim=72", "wukong-flights"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each model, in turn")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    everything: dict[str, list[dict[str, dict[str, Any]]]] = {}
    if options.json is not None and options.json.exists():
        everything = json.loads(options.json.read_text())
    print(f"`python {' '.join(sys.argv)}`, {datetime.datetime.now(datetime.UTC).date()}")
    for model in options.models:
        runs = everything.setdefault(model, [])
        for seed in range(len(runs), options.seeds):
            runs.append(run(model, seed, options.repeats))
            if options.json is not None:
                options.json.write_text(json.dumps(everything, indent=1) + "\n")
        runs = runs[: options.seeds]
        ne = [next(iter(r.values()))["quality"]["ne_float32"] for r in runs]
        size = next(iter(runs[0].values()))["bytes"]
        print(f"\n## {model}\n")
        print(
            f"NE in float32 {np.mean(ne):.4f} over {len(runs)} seeds; tables {size['tables_float32']:,} bytes, dense "
            f"part {size['dense_float32']:,}.\n"
        )
        print("| lowered | tables | dense | all | NE gap, % | worst | AUC | time |")
        print("|---|---|---|---|---|---|---|---|")
        for name in runs[0]:
            print(row(name, [r[name] for r in runs]), flush=True)


if __name__ == "__main__":
    main()
