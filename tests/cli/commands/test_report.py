"""`scalejax report`: which file it writes, and what it refuses."""

import json

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
