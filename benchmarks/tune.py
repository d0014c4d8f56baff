"""Eight settings of every form of click model, judged on the validation split alone.

python benchmarks/tune.py --runs FILE                          # every form of the first table
python benchmarks/tune.py --runs FILE --tables single depths   # of others; several processes may append to one file
python benchmarks/tune.py --runs FILE --forms "cross + FM"
python benchmarks/tune.py --runs FILE --split movielens        # the forms of MovieLens 100K, beside recbole's wheel
python benchmarks/tune.py --runs FILE --report > table.md

The forms and their settings are in `click_forms.py`; every shape that was looked at is among them. All trials have one
seed, which is not used again. FILE has a JSON object a line and keeps runs as they come; those that it holds are not
made again.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import click_forms
import numpy as np
from click_forms import Setting
from kept_runs import KeptRuns

from scalejax.configs import overrides
from scalejax.errors import UserError
from scalejax.train import loop
from scalejax.train.metrics import evaluation, exact

TUNING_SEED = 100


class Runs(KeptRuns):
    """Runs of click models."""

    def find(self, setting: Setting, split: str, seed: int, scored: str) -> dict[str, Any] | None:
        """The figures of a run, None = it is not there."""
        wanted = {**dataclasses.asdict(setting), "sets": list(setting.sets)}
        return self.first({**wanted, "split": split, "seed": seed, "scored": scored})

    def add(self, setting: Setting, split: str, seed: int, scored: str, figures: dict[str, Any]) -> None:
        """Appends a run."""
        self.append({**dataclasses.asdict(setting), "split": split, "seed": seed, "scored": scored, **figures})


def scored_run(setting: Setting, split: str, seed: int, scored: str) -> tuple[dict[str, Any], evaluation.Predictions]:
    """Trains one setting; figures and predictions on the split "validation" or "test"."""
    begun = time.perf_counter()
    if setting.form == "gradient boosting":
        found, predictions = boosting(setting, split, seed, scored)
        return found | {"wall_s": round(time.perf_counter() - begun, 1)}, predictions
    experiment = overrides.apply(setting.experiment(split, seed), (f"evaluation.final_split={scored}",))
    with tempfile.TemporaryDirectory() as folder:
        closing = loop.train(experiment, workdir=pathlib.Path(folder) / "run", recipe="click form")
        name = "val" if scored == "validation" else "test"
        predictions = evaluation.read_predictions(pathlib.Path(folder) / "run", scored)
    assert predictions is not None
    figures = {metric: round(closing[f"{name}_{metric}"], 6) for metric in ("auc", "logloss", "ne")}
    return figures | {
        "mflop": round(closing["flops_per_example"] / 1e6, 3),
        "dense_parameters": closing["dense_parameters"],
        "step_ms": round(1e3 * closing["step_p50_s"], 1),
        "wall_s": round(time.perf_counter() - begun, 1),
    }, predictions


def trial(setting: Setting, split: str) -> dict[str, Any]:
    """Figures on the validation split; of a training that diverged an AUC of 0, so that it is tried but not chosen."""
    try:
        return scored_run(setting, split, TUNING_SEED, "validation")[0]
    except UserError as error:
        if "not finite" not in str(error):
            raise
        return {"auc": 0.0, "diverged": str(error)}


def boosting(setting: Setting, split: str, seed: int, scored: str) -> tuple[dict[str, Any], evaluation.Predictions]:
    """scikit-learn's gradient boosting, on the numbers as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    data = click_forms.data_of(split, batch_size=8192).build()

    def columns(batch: Any, feature: Any) -> np.ndarray:
        """Ids as ordinal numbers; a column for each where an example has several."""
        found = batch.features[feature.name]
        if feature.length == 1:
            return found.values.reshape(-1, 1)
        shown = np.zeros((len(batch.labels), feature.rows), np.float32)
        shown[np.repeat(np.arange(len(shown)), found.lengths.reshape(-1)), found.values] = 1
        return shown

    def table(name: str) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for batch in data.eval_batches(name):
            inputs = [columns(batch, feature) for feature in data.schema.categorical]
            parts.append(np.hstack([*inputs, batch.dense, batch.labels])[batch.weights > 0])
        whole = np.concatenate(parts)
        return whole[:, :-1], whole[:, -1]

    given = {name: json.loads(value) for name, value in (text.split("=") for text in setting.sets)}
    model = HistGradientBoostingClassifier(random_state=seed, early_stopping=False, **given)  # pyright: ignore[reportArgumentType]
    model.fit(*table("train"))
    x, y = table(scored)
    p = model.predict_proba(x)[:, 1]
    figures = {"auc": exact.auc(y, p), "logloss": exact.logloss(y, p), "ne": exact.normalized_entropy(y, p)}
    rounded = {metric: round(float(value), 6) for metric, value in figures.items()}
    return rounded, evaluation.Predictions(y[:, None], p[:, None], np.ones(len(y)))


def tuned_on(split: str) -> str:
    """The split of the trials: all of the flights have their settings from the random one."""
    return "movielens" if split == "movielens" else "random"


def trials(runs: Runs, form: str, split: str) -> list[tuple[Setting, dict[str, Any] | None]]:
    """The settings of a form with the figures of those that were tried."""
    tuned = tuned_on(split)
    return [(each, runs.find(each, tuned, TUNING_SEED, "validation")) for each in click_forms.settings(form, tuned)]


def chosen(runs: Runs, form: str, split: str) -> Setting | None:
    """The setting with the best validation AUC, the first of equals; None = not all were tried."""
    tried = trials(runs, form, split)
    if any(figures is None for _, figures in tried):
        return None
    return max(tried, key=lambda each: each[1]["auc"] if each[1] else 0.0)[0]


def settings_text(setting: Setting) -> str:
    """What is set, without the folders of the fields."""
    return ", ".join(re.sub(r"^.*\.(?=\w+=)", "", text) for text in setting.sets)


def report(runs: Runs, forms: list[str], split: str) -> None:
    """Every trial; the chosen one of each form in bold."""
    print("| form | shape | setting | validation AUC | LogLoss | MFLOP | s |\n|---|---|---|---|---|---|---|")
    for form in forms:
        best = chosen(runs, form, split)
        for setting, found in trials(runs, form, split):
            if found is None:
                continue
            if "diverged" in found:
                print(f"| {form} | {setting.shape + 1} | {settings_text(setting)} | diverged | | | |")
                continue
            auc = f"**{found['auc']:.4f}**" if setting == best else f"{found['auc']:.4f}"
            cost = f"{found['mflop']:.2f}" if "mflop" in found else ""
            print(
                f"| {form} | {setting.shape + 1} | {settings_text(setting)} | {auc} | {found['logloss']:.4f} | {cost} "
                f"| {found['wall_s']:.0f} |"
            )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """The options by which forms are chosen."""
    parser.add_argument("--split", choices=tuple(click_forms.SPLITS), default="random")
    parser.add_argument("--tables", nargs="+", choices=tuple(click_forms.TABLES), default=("first",), metavar="TABLE")
    parser.add_argument("--forms", nargs="+", metavar="FORM")


def choice(options: argparse.Namespace) -> list[str]:
    """The forms that were chosen."""
    known = click_forms.forms_of(options.split)
    unknown = [form for form in options.forms or () if form not in known]
    if unknown:
        sys.exit(f"--forms {', '.join(unknown)}: not known for --split {options.split}; wanted of {', '.join(known)}.")
    if options.forms:
        return options.forms
    return list(known) if known is click_forms.MOVIELENS else [f for t in options.tables for f in click_forms.TABLES[t]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", metavar="FILE", type=pathlib.Path, required=True)
    add_choice(parser)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    runs, split = Runs(options.runs), tuned_on(options.split)
    if options.report:
        return report(runs, choice(options), split)
    for form in choice(options):
        for setting, found in trials(runs, form, split):
            if found is None:
                figures = trial(setting, split)
                runs.add(setting, split, TUNING_SEED, "validation", figures)
                print(f"{setting}: {figures}", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
