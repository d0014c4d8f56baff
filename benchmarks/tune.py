"""Eight settings of every form of click model on the flights, judged on the validation split alone.

python benchmarks/tune.py --runs FILE                       # every form of the first table
python benchmarks/tune.py --runs FILE --forms "cross + FM"  # some; several processes may append to one file
python benchmarks/tune.py --runs FILE --report > table.md

For each form two shapes times four ways of training, with a seed that is not used again; every shape that was looked at
is among them. All have tables that are 32 wide, batches of 1,024 and two epochs (`configs/recsys/_flights.py`).
Logistic regression, which has no hidden layer, has two rates of its rows times four L2, and gradient boosting eight
settings of its own. FILE has a JSON object a line and keeps runs as they come; those that it holds are not made again.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scalejax.configs import overrides
from scalejax.configs.recsys import _flights, dcnv2, dhen, dlrm, logistic, wukong
from scalejax.data import FlightsData
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.interactions import (
    Convolution,
    DotProduct,
    FactorizationMachine,
    FeatureCross,
    Interaction,
    LinearCompression,
    MlpExperts,
    SecondMoment,
    SelfAttention,
)
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.train import loop
from scalejax.train.metrics import evaluation, exact

TUNING_SEED = 100
_PEAK = "optimizer.learning_rate.peak="
_L2 = "tables.optimizer.weight_decay="
TRAININGS = ((_PEAK + "8e-3",), (_PEAK + "4e-3",), (_PEAK + "2e-3",), (_PEAK + "4e-3", _L2 + "3e-5"))
LOGISTIC = tuple(
    (f"tables.optimizer.learning_rate={rate}", _L2 + l2)
    for rate, l2 in itertools.product(("0.3", "1.0"), ("3e-5", "1e-4", "3e-4", "1e-3"))
)
BOOSTING = tuple(
    (f"learning_rate={rate}", f"max_leaf_nodes={leaves}", f"max_iter={trees}")
    for rate, leaves, trees in itertools.product(("0.05", "0.1"), ("31", "127"), ("250", "500"))
)

MODULES: dict[str, Callable[[int, int], Interaction]] = {
    "dot products": lambda n, d: DotProduct(outputs=n, mixed=64, hidden=(256,)),
    "self-attention": lambda n, d: SelfAttention(outputs=n),
    "convolution": lambda n, d: Convolution(outputs=n, activation="relu"),
    "linear": lambda n, d: LinearCompression(outputs=n),
    "cross": lambda n, d: FeatureCross(outputs=n),
    "second moment": lambda n, d: SecondMoment(outputs=n),
    "FM": lambda n, d: FactorizationMachine(outputs=n, rank=3 * d, hidden=(256,), normalization="none"),
    "MLP module": lambda n, d: MlpExperts(outputs=n, hidden=(256,)),
    "4 experts": lambda n, d: MlpExperts(outputs=n, experts=4, hidden=(256,)),
    "8 experts": lambda n, d: MlpExperts(outputs=n, experts=8, hidden=(256,)),
}
"""By the number of vectors and their width."""


def stacks(*modules: str, repeats: int = 2) -> tuple[Any, ...]:
    """The two shapes of a form of DHEN: 8 vectors of 4 a feature, or 4 of 8."""
    shapes = []
    for dim in (4, 8):
        n = dhen.vectors_on_flights(dim)
        shapes.append(dhen.on_flights(*(MODULES[name](n, dim) for name in modules), dim=dim, repeats=repeats))
    return tuple(shapes)


_WUKONG: Any = wukong.flights().model
_DLRM: Any = dlrm.flights().model
_DCN: Any = dcnv2.flights().model

FIRST: dict[str, tuple[Any, ...]] = {
    "logistic regression": (LogisticConfig(),),
    "gradient boosting": (),
    "MLP": tuple(
        DcnV2Config(dim=32, cross_layers=0, bottom_hidden=(64,), deep_hidden=widths)
        for widths in ((256, 128), (1024, 512))
    ),
    "DLRM": (_DLRM, dataclasses.replace(_DLRM, top_hidden=(1024, 512))),
    "DCNv2": (_DCN, dataclasses.replace(_DCN, cross_layers=2)),
    "Wukong": (
        _WUKONG,
        dataclasses.replace(_WUKONG, dim=8, dense_vectors=4, feature_vectors=4, fm_outputs=32, lcb_outputs=36, rank=24),
    ),
    "cross + FM": stacks("cross", "FM"),
    "cross, 5 layers": stacks("cross", repeats=5),
    "FM, 3 layers": stacks("FM", repeats=3),
}
"""The comparison of DHEN with its baselines and with each of its two modules alone at equal FLOPs."""

SINGLES = {name: stacks(name) for name in list(MODULES)[:8]}
PAIRS = {f"linear + {name}": stacks("linear", name) for name in MODULES if name in SINGLES and name != "linear"}
PAIRS |= {"self-attention + convolution": stacks("self-attention", "convolution")}
DEPTHS = {f"cross + FM, {n} layers": stacks("cross", "FM", repeats=n) for n in (1, 4, 8)}
EXPERTS = {name: stacks(name) for name in ("4 experts", "8 experts")}
FORMS = FIRST | SINGLES | PAIRS | DEPTHS | EXPERTS


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the eight of a form: which shape, and what is set."""

    form: str
    shape: int
    sets: tuple[str, ...]

    def experiment(self, split: str, seed: int) -> Any:
        """Of a split of the flights, see `COLUMNS`."""
        l2 = logistic.L2 if self.form == "logistic regression" else 1e-4
        data = FlightsData(number_bins=64, seed=seed, **COLUMNS[split])
        experiment = _flights.experiment(FORMS[self.form][self.shape], data, l2)
        kept = ("evaluation.every=0", "checkpoints.every=0")
        return dataclasses.replace(overrides.apply(experiment, (*self.sets, *kept)), seed=seed)


COLUMNS: Mapping[str, dict[str, Any]] = {
    "random": {},
    "random-day": {"calendar_day": "include"},
    "time": {"split": "time"},
}


def settings(form: str) -> list[Setting]:
    """All eight of a form."""
    if form == "gradient boosting":
        return [Setting(form, 0, sets) for sets in BOOSTING]
    trainings = LOGISTIC if form == "logistic regression" else TRAININGS
    return [Setting(form, shape, sets) for shape, sets in itertools.product(range(len(FORMS[form])), trainings)]


class Runs:
    """Lines of a file: what was run, and its figures."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All there are."""
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def find(self, setting: Setting, split: str, seed: int, scored: str) -> dict[str, Any] | None:
        """The figures of a run, None = it is not there."""
        wanted = {**dataclasses.asdict(setting), "sets": list(setting.sets), "split": split, "seed": seed}
        wanted["scored"] = scored
        return next((run for run in self.read() if wanted.items() <= run.items()), None)

    def add(self, setting: Setting, split: str, seed: int, scored: str, figures: dict[str, Any]) -> None:
        """Appends a run."""
        key = {**dataclasses.asdict(setting), "split": split, "seed": seed, "scored": scored}
        with self._path.open("a") as file:
            file.write(json.dumps(key | figures) + "\n")


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


def boosting(setting: Setting, split: str, seed: int, scored: str) -> tuple[dict[str, Any], evaluation.Predictions]:
    """scikit-learn's gradient boosting on ids as ordinal numbers, and the numbers as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    data = FlightsData(batch_size=8192, **COLUMNS[split]).build()

    def table(name: str) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for batch in data.eval_batches(name):
            ids = [batch.features[f.name].values.reshape(-1, 1) for f in data.schema.categorical]
            parts.append(np.hstack([*ids, batch.dense, batch.labels])[batch.weights > 0])
        whole = np.concatenate(parts)
        return whole[:, :-1], whole[:, -1]

    given = {name: json.loads(value) for name, value in (text.split("=") for text in setting.sets)}
    model = HistGradientBoostingClassifier(random_state=seed, early_stopping=False, **given)
    model.fit(*table("train"))
    x, y = table(scored)
    p = model.predict_proba(x)[:, 1]
    figures = {"auc": exact.auc(y, p), "logloss": exact.logloss(y, p), "ne": exact.normalized_entropy(y, p)}
    rounded = {metric: round(float(value), 6) for metric, value in figures.items()}
    return rounded, evaluation.Predictions(y[:, None], p[:, None], np.ones(len(y)))


def trials(runs: Runs, form: str) -> list[tuple[Setting, dict[str, Any] | None]]:
    """The settings of a form with the figures of those that were tried."""
    return [(each, runs.find(each, "random", TUNING_SEED, "validation")) for each in settings(form)]


def chosen(runs: Runs, form: str) -> Setting | None:
    """The setting with the best validation AUC, the first of equals; None = not all were tried."""
    tried = trials(runs, form)
    if any(figures is None for _, figures in tried):
        return None
    return max(tried, key=lambda each: each[1]["auc"] if each[1] else 0.0)[0]


def report(runs: Runs) -> None:
    """Every trial; the chosen one of each form in bold."""
    print("| form | shape | setting | validation AUC | LogLoss | MFLOP | s |\n|---|---|---|---|---|---|---|")
    for form in FORMS:
        best = chosen(runs, form)
        for setting, found in trials(runs, form):
            if found is None:
                continue
            auc = f"**{found['auc']:.4f}**" if setting == best else f"{found['auc']:.4f}"
            sets = ", ".join(text.rpartition(".")[2] for text in setting.sets)
            cost = f"{found['mflop']:.2f}" if "mflop" in found else ""
            print(
                f"| {form} | {setting.shape + 1} | {sets} | {auc} | {found['logloss']:.4f} | {cost} "
                f"| {found['wall_s']:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=tuple(FIRST), metavar="FORM")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    runs = Runs(options.runs)
    if options.report:
        return report(runs)
    for form in options.forms:
        for setting in settings(form):
            if runs.find(setting, "random", TUNING_SEED, "validation") is None:
                figures, _ = scored_run(setting, "random", TUNING_SEED, "validation")
                runs.add(setting, "random", TUNING_SEED, "validation", figures)
                print(f"{setting}: {figures}", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
