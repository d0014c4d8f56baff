"""Trials and seeds of click models: what is chosen and made again, and that committed runs are of these forms."""

import importlib
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from scalejax.configs.recsys import _flights
from scalejax.train.metrics.evaluation import Predictions
from scalejax.train.runs import binding

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


@pytest.fixture(scope="module")
def scripts():
    """(click_forms, tune, quality), which import one another by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield tuple(importlib.import_module(name) for name in ("click_forms", "tune", "quality"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def made(scripts, monkeypatch) -> list[tuple[str, tuple[str, ...], int, str]]:
    """What the scripts would train: (form, what is set, seed, split that is scored)."""
    _, tune, _ = scripts
    calls: list[Any] = []

    def run(setting, split, seed, scored):
        calls.append((setting.form, setting.sets, seed, scored))
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 2, 200)
        noise = np.random.default_rng(seed).random(200)
        predictions = np.where(labels, 0.6, 0.4) * 0.5 + 0.5 * noise
        return {"auc": 0.6, "ne": 0.9}, Predictions(labels[:, None], predictions[:, None], np.ones(200))

    monkeypatch.setattr(tune, "scored_run", run)
    return calls


def tried(tune, forms, path: pathlib.Path, form: str, aucs: list[float]):
    """A file that holds the trials of a form with these AUCs."""
    runs = tune.Runs(path)
    for setting, auc in zip(forms.settings(form), aucs, strict=False):
        runs.add(setting, "random", tune.TUNING_SEED, "validation", {"auc": auc})
    return runs


def test_every_form_has_eight_settings_and_none_twice(scripts):
    forms, _, _ = scripts
    for split in ("random", "movielens"):
        for form in forms.forms_of(split):
            found = forms.settings(form, split)
            assert len(found) == len(set(found)) == 8, form


def test_the_best_by_validation_is_chosen_once_all_were_tried(scripts, tmp_path):
    forms, tune, _ = scripts
    runs = tried(tune, forms, tmp_path / "runs.jsonl", "MLP", [0.7, 0.8, 0.0, 0.79, 0.8, 0.1, 0.2])
    assert tune.chosen(runs, "MLP", "random") is None
    last = forms.settings("MLP")[7]
    runs.add(last, "random", tune.TUNING_SEED, "validation", {"auc": 0.0, "diverged": "The loss was not finite"})
    assert tune.chosen(runs, "MLP", "random") == forms.settings("MLP")[1]
    assert tune.chosen(runs, "MLP", "time") == forms.settings("MLP")[1]  # tuned on the random split
    assert tune.chosen(runs, "MLP", "movielens") is None


def test_seeds_that_are_there_are_not_made_again_and_none_is_that_of_the_trials(scripts, made, tmp_path, monkeypatch):
    forms, tune, quality = scripts
    monkeypatch.setattr(quality, "RESAMPLES", tmp_path / "resamples")
    runs = tried(tune, forms, tmp_path / "runs.jsonl", "MLP", [0.1, 0.2, 0.3, 0.4, 0.9, 0.4, 0.3, 0.2])
    quality.run(runs, tmp_path / "predictions", "MLP", "random")
    best = forms.settings("MLP")[4]
    assert made == [("MLP", best.sets, seed, "test") for seed in (1, 2, 3, 4, 5)]
    assert tune.TUNING_SEED not in quality.SEEDS
    quality.run(runs, tmp_path / "predictions", "MLP", "random")
    assert len(made) == 5
    # Without the metrics on resamples, from what is left of the predictions.
    (tmp_path / "resamples" / "MLP-random.npz").unlink()
    (tmp_path / "predictions" / "MLP-random-3.npz").unlink()
    quality.run(runs, tmp_path / "predictions", "MLP", "random")
    assert made[5:] == [("MLP", best.sets, 3, "test")]
    assert len([run for run in runs.read() if run["scored"] == "test"]) == 5


def test_a_report_needs_no_predictions(scripts, made, tmp_path, monkeypatch, capsys):
    forms, tune, quality = scripts
    monkeypatch.setattr(quality, "RESAMPLES", tmp_path / "resamples")
    path = tmp_path / "runs.jsonl"
    for form in ("MLP", "gradient boosting"):
        runs = tried(tune, forms, path, form, [0.9, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2])
        quality.run(runs, tmp_path / form, form, "random")
    quality.report(runs, ["MLP", "DLRM", "gradient boosting"], "random", "MLP")
    table = capsys.readouterr().out
    assert "| MLP | 0.6000" in table
    assert "| gradient boosting | 0.6000 | " in table  # one run
    assert "DLRM" not in table  # has no runs
    assert [call[2] for call in made if call[0] == "gradient boosting"] == [1]


@pytest.mark.slow
def test_a_step_is_timed_once_on_batches_of_the_form_s_own_data(scripts, tmp_path):
    forms, tune, quality = scripts
    runs = tried(tune, forms, tmp_path / "runs.jsonl", "logistic regression", [0.1, 0.2, 0.9, 0.4, 0.5, 0.4, 0.3, 0.2])
    for _ in range(2):
        quality.time(runs, "logistic regression", "random")
    (timed,) = [run for run in runs.read() if run["scored"] == "time"]
    assert timed["step_ms"] > 0
    schema, batches = quality._batches("random")
    assert [len(batch) for batch in batches] == [1024] * 4
    assert schema == forms.data_of("random", number_bins=64).schema()


@pytest.mark.slow
def test_committed_runs_are_of_the_forms_as_they_are(scripts):
    forms, tune, quality = scripts
    lines = tune.Runs(RESULTS / "click_runs.jsonl").read()
    assert len(lines) > 75
    experiment = _flights.experiment(forms.FIRST["MLP"][0])
    schema = experiment.data.build().schema
    known = {
        (setting.form, setting.shape, setting.sets)
        for split in ("random", "movielens")
        for form in forms.forms_of(split)
        for setting in forms.settings(form, split)
    }
    for line in lines:
        assert (line["form"], line["shape"], tuple(line["sets"])) in known, line
    found = {(run["form"], run["shape"]): run for run in lines if "mflop" in run and run["split"] == "random"}
    for (form, shape), run in found.items():
        model = forms.FLIGHTS[form][shape]
        task = binding.bound_task(forms.Setting(form, shape, ()).experiment("random", 0), schema)
        assert run["mflop"] == pytest.approx(task.flops_per_example() / 1e6, abs=6e-4), model
    keys = [json.dumps({k: run[k] for k in ("form", "shape", "sets", "split", "seed", "scored")}) for run in lines]
    assert len(keys) == len(set(keys))
    for path in quality.RESAMPLES.glob("*.npz"):
        with np.load(path) as kept:
            assert kept["samples"].shape == (1000, 3)
            assert np.abs(kept["samples"].mean(axis=0) - kept["values"]).max() < 0.01
