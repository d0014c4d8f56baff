"""`scalejax precision` and `scalejax export`: a run of a click model searched, exported and scored again; mistakes."""

import json
import shlex
import subprocess
import sys
import unittest.mock

import numpy as np
import pytest
import small_run
from changes import changed

from scalejax.cli.commands import precision
from scalejax.data.examples.dedup import expand_batch
from scalejax.errors import UserError
from scalejax.inference import reload
from scalejax.inference.recommendation import click_model, search, study
from scalejax.train.metrics import evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of a few steps, and its recipe."""
    import typer.testing

    from scalejax.cli.app import app

    folder = tmp_path_factory.mktemp("small")
    recipe = small_run.write_recipe(folder)
    arguments = ("train", recipe, "--set", "steps=6", "--workdir", str(folder / "run"))
    done = typer.testing.CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder / "run", recipe


def one_error(result, words):
    assert result.exit_code == 2, result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert words in line, line


@pytest.mark.slow
def test_an_exported_run_scores_the_test_split_as_the_run_did(invoke, run, tmp_path):
    folder, recipe = run
    done = invoke("export", str(folder), str(tmp_path / "out"), "--recipe", recipe, "--json", str(tmp_path / "m.json"))
    assert done.exit_code == 0, done.stderr
    assert "reloaded, its scores differ from the model's by at most" in done.stdout
    assert "of all 64 examples of split 'validation'." in done.stdout
    measured = json.loads((tmp_path / "m.json").read_text())
    assert measured["scored"] == {"split": "validation", "examples": 64, "of": 64}
    # What it says to do next loads the model without scalejax.
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("  python -c"))
    code = shlex.split(command.rpartition("  load it")[0])[2]
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "'features'" in loaded.stdout, loaded.stderr
    assert measured["reloaded_difference"] < 1e-6
    assert measured["quality"]["gap"] == 0
    data = small_run.data(folder.parent / "rows.parquet").build()
    model, found = reload.load(tmp_path / "out"), []
    for batch in map(expand_batch, data.eval_batches("test")):
        ids = {f.name: batch.features[f.name].values.reshape(-1, f.length) for f in small_run.FEATURES}
        found.append(model(ids, batch.dense)["probabilities"][batch.weights > 0])
    wanted = evaluation.read_predictions(folder, "test")
    assert np.abs(np.concatenate(found) - wanted.predictions).max() < 1e-6


def test_the_search_is_given_the_budget_as_a_share(invoke, monkeypatch):
    asked = []

    def stopped(study, *, budget, log):
        asked.append(budget)
        raise UserError("that will do")

    opened = unittest.mock.MagicMock(), unittest.mock.MagicMock()
    monkeypatch.setattr(precision, "open_run", lambda *given: opened)
    monkeypatch.setattr(precision, "calibrated", lambda model, batches: None)
    for module, name in ((click_model, "sample"), (click_model, "labelled"), (study, "study")):
        monkeypatch.setattr(module, name, unittest.mock.MagicMock())
    monkeypatch.setattr(search, "search", stopped)
    one_error(invoke("precision", "RUN", "--budget", "2"), "that will do")
    assert asked == [0.02]


@pytest.mark.slow
def test_a_search_is_saved_reported_and_exported(invoke, run, tmp_path):
    folder, recipe = run
    chosen, report = tmp_path / "chosen.json", tmp_path / "report.json"
    common = (str(folder), "--recipe", recipe, "--budget", "2")
    done = invoke("precision", *common, "--save", str(chosen), "--json", str(report))
    assert done.exit_code == 0, done.stderr
    for words in ("alone: shop in int4", "SQNR alone", "NE gap", "of 'test': ", "scalejax export"):
        assert words in done.stdout, words
    found = json.loads(report.read_text())
    assert found["search"]["gap"]["high"] <= 0.02
    assert found["bytes"]["share"] < 0.6
    assert {line["name"] for line in found["operators"]} >= {"shop", "head/layers/0", "score"}
    done = invoke("export", str(folder), str(tmp_path / "out"), "--recipe", recipe, "--precision", str(chosen))
    assert done.exit_code == 0, done.stderr
    precisions = json.loads((tmp_path / "out" / "signature.json").read_text())["precisions"]
    assert precisions == {k: v for k, v in json.loads(chosen.read_text()).items() if k != "format"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("precision", "nowhere"), "RUN_FOLDER nowhere does not exist"),
        (("precision", "{run}", "--budget", "-1"), "--budget must be at least 0 percent and finite; got -1"),
        (("precision", "{run}", "--objective", "speed"), "--objective must be one of bytes, latency; got 'speed'"),
        (
            ("precision", "{run}", "--tables", "int3"),
            "--tables must name some of float32, float16, int8, kmeans4, int4",
        ),
        (("precision", "{run}", "--dense", "int8,float32"), "--dense must go from the widest to the narrowest"),
        (("precision", "{run}", "--step", "3"), "--step 3: "),
        (("export", "{run}", "{run}"), "is there already"),
        (("export", "{run}", "x", "--tables", "int3"), "--tables must be one of float32, float16, int8, kmeans4, int4"),
        (("export", "{run}", "x", "--dense", "int4"), "--dense must be one of float32, float16, int8; got 'int4'"),
        (("export", "{run}", "x", "--precision", "p", "--dense", "int8"), "leave --tables and --dense out"),
        (("export", "{run}", "x", "--precision", "p.json"), "--precision p.json: is no file of precisions"),
        (("export", "{run}", "x", "--step", "3"), "--step 3: "),
        (("export", "{run}", "x", "--rows", "3"), "--rows 3: "),
    ],
)
def test_mistakes_are_one_message(invoke, run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    folder, recipe = run
    result = invoke(*(a.format(run=folder) for a in arguments), "--recipe", recipe)
    one_error(result, words)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_runs_of_language_models_and_id_maps_are_refused(run, tmp_path):

    from scalejax import configs
    from scalejax.inference.recommendation import click_model
    from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures

    with pytest.raises(UserError, match="has no embedding tables"):
        click_model.load(tmp_path, configs.load("llama-smoke", []))
    experiment = small_run.experiment(run[0].parent / "rows.parquet")
    maps = (MappedFeatures(features=("shop",), id_map=IdMapConfig(rows=17)),)
    with pytest.raises(UserError, match="features shop have id maps"):
        click_model.load(tmp_path, changed(experiment, tables__id_maps=maps))
    with pytest.raises(UserError, match="holds no checkpoint"):
        click_model.load(tmp_path, experiment)
