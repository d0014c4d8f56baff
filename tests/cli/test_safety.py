"""A run folder never runs code, whatever its record names, whichever command opens it."""

import json

import pytest

CODE = """import pathlib
pathlib.Path({marker!r}).write_text("this ran")
from scalejax.train.experiment import Experiment

def go() -> Experiment:
    return None
"""

COMMANDS = (
    ("eval", "{run}"),
    ("eval", "{run}", "--text", "{run}/text.txt"),
    ("generate", "{run}", "--prompt", "a"),
    ("export", "{run}", "{run}-out"),
    ("convert", "{run}", "{run}-out"),
    ("quantize", "{run}", "{run}-out", "--format", "mxfp4_e2m1"),
    ("prune", "{run}", "{run}-out", "--share", "0.5"),
    ("grow", "{run}", "{run}-out", "--widths", "top_hidden=[8]"),
    ("precision", "{run}"),
    ("report", "{run}"),
    ("train", "wukong-smoke", "--workdir", "{run}", "--resume", "must"),
)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that exists if the code that the folder names ran; it lies in the working folder and can be imported."""
    marker = tmp_path / "marker"
    (tmp_path / "evil_package").mkdir()
    for path in ("evil.py", "evil_package/__init__.py", "evil_package/evil.py"):
        (tmp_path / path).write_text(CODE.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return marker


@pytest.mark.default_cases(first=23)
@pytest.mark.parametrize("digest", [None, "0" * 64])
@pytest.mark.parametrize("named", ["{here}/evil.py:go", "evil.py:go", "./evil.py", "evil:go", "evil_package.evil:go"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:3:2]).replace("{run}", ""))
def test_no_command_runs_what_a_folder_names(ran, invoke, tmp_path, command, named, digest):
    run = tmp_path / "run"
    run.mkdir()
    (run / "text.txt").write_text("some text")
    record = {"recipe": named.format(here=tmp_path), "sets": [], "file_sha256": digest, "scalejax": "0.1.0"}
    (run / "experiment.json").write_text(json.dumps(record | {"experiment": {"type": "a.B", "fields": {}}}))
    result = invoke(*(word.format(run=run) for word in command))
    assert not ran.exists()
    if command[0] not in ("report", "train"):
        assert result.exit_code == 2
        assert "is no recipe of scalejax" in result.stderr


@pytest.mark.parametrize(
    "changed",
    [
        {"recipe": ["evil.py:go"]},
        {"sets": "steps=3"},
        {"file_sha256": 3},
        {"experiment": []},
        {"experiment": {}},
        {"sets": [3]},
    ],
)
def test_a_record_of_other_types_is_one_message(invoke, tmp_path, changed):
    record = {"recipe": "wukong-smoke", "sets": [], "file_sha256": None, "scalejax": "0.1.0"}
    (tmp_path / "experiment.json").write_text(
        json.dumps(record | {"experiment": {"type": "a.B", "fields": {}}} | changed)
    )
    result = invoke("eval", str(tmp_path))
    assert result.exit_code == 2
    assert "is no record of a run" in result.stderr
