"""`scalejax report`: which file it writes, and what it refuses."""

import json
import re

import pytest


@pytest.fixture
def runs(tmp_path):
    """Two run folders with the least that a report needs."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, auc in zip(folders, (0.7, 0.8), strict=True):
        folder.mkdir()
        (folder / "summary.json").write_text(
            json.dumps({"recipe": "wukong", "steps": 1, "test_logloss": 0.5, "test_ne": 0.9, "test_auc": auc})
        )
    return folders


def test_one_run_gets_its_report_anew(invoke, runs):
    result = invoke("report", str(runs[0]))
    assert (result.exit_code, result.stdout) == (0, f"{runs[0] / 'report.html'}\n")
    assert "wukong" in (runs[0] / "report.html").read_text()


def test_several_runs_are_put_beside_each_other(invoke, runs):
    result = invoke("report", *map(str, runs))
    assert (result.exit_code, result.stdout) == (0, f"{runs[0].parent / 'comparison.html'}\n")
    page = (runs[0].parent / "comparison.html").read_text()
    assert "first" in page
    assert "second" in page


def test_values_stand_under_their_own_headings(invoke, tmp_path):
    summaries = {
        "best": {"test_loss": 0.5, "test_accuracy": 0.75, "best_step": 26, "test_accuracy_at_best": 0.8125},
        "other": {"test_loss": 0.25, "test_accuracy": 0.625, "best_step": 17, "test_accuracy_at_best": 0.6875},
        "plain": {"test_loss": 0.125, "test_accuracy": 0.5, "samples_per_s": 7},
    }
    for name, values in summaries.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"recipe": name, "steps": 1, **values}))
    assert invoke("report", *(str(tmp_path / name) for name in summaries)).exit_code == 0
    table = re.search(r"<table.*?</table>", (tmp_path / "comparison.html").read_text(), re.DOTALL)[0]
    lines = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
    head, *rows = [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]
    found = [{name: cell for name, cell in zip(head, row, strict=True) if cell} for row in rows]
    accuracy, loss = "accuracy, the best", "loss (mean over examples)"
    assert [row.get(accuracy) for row in found] == ["0.8125", "0.6875", None]
    assert [row.get("accuracy") for row in found] == ["0.7500", "0.6250", "0.5000"]
    assert [row.get(loss) for row in found] == ["0.5000", "0.2500", "0.1250"]
    assert [row.get("samples/s") for row in found] == [None, None, "7"]


@pytest.mark.parametrize("count", [1, 2])
def test_output_names_the_file(invoke, runs, tmp_path, count):
    target = tmp_path / "mine.html"
    result = invoke("report", *map(str, runs[:count]), "--output", str(target))
    assert (result.exit_code, result.stdout) == (0, f"{target}\n")
    assert target.read_text().startswith("<!doctype html>")
    assert not (runs[0] / "report.html").exists()


@pytest.mark.parametrize("output", [[], ["--output", "no/folder/x.html"]])
def test_mistakes_are_one_message(invoke, runs, tmp_path, output):
    folder = runs[0] if output else tmp_path / "nothing"
    result = invoke("report", str(folder), *output)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert ("no/folder/x.html" if output else f"{folder} is not a run folder") in result.stderr
