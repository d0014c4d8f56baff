"""Notebooks as they are stored: outputs without traces of a machine, and a first cell that installs from anywhere."""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def public_address(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("public_address")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_name_no_machine(path):
    outputs = [output for cell in code(path) for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in code(path)] == list(range(1, len(code(path)) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
    texts = json.dumps([{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs])
    assert not re.findall(r"/(?:tmp|home|root|work|usr)/[\w.-]+", texts)
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(
    ("source", "installed"),
    [
        ("checkout", f"scalejax[train] @ {ROOT.as_uri()}"),
        ("scalejax", "scalejax[train]"),
        ("dist/own.whl", f"scalejax[train] @ {(ROOT / 'notebooks/dist/own.whl').as_uri()}"),
        ("git+https://example.org/scalejax", "scalejax[train] @ git+https://example.org/scalejax"),
    ],
)  # fmt: skip
def test_the_first_cell_installs_from_a_checkout_a_wheel_or_the_index(source, installed, monkeypatch):
    (cell,) = {"".join(code(path)[0]["source"]) for path in NOTEBOOKS}
    cell = cell.replace('SCALEJAX_INSTALL = "checkout"', f"SCALEJAX_INSTALL = {source!r}")
    called = []
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    exec(cell, {})
    assert called == [[sys.executable, "-m", "pip", "install", "-q", installed]]


def test_away_from_a_checkout_the_first_cell_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="set SCALEJAX_INSTALL above"):
        exec("".join(code(NOTEBOOKS[0])[0]["source"]), {})


def test_badges_and_addresses_follow_the_constant(public_address, tmp_path):
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in NOTEBOOKS:
        shutil.copy(path, tmp_path / "notebooks")

    def files():
        return {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    public_address.write(tmp_path, public_address.ADDRESS)
    assert files() == before, "run python tools/public_address.py"
    for address in ("https://github.com/someone/elsewhere", "https://github.com/me/scalejax"):
        public_address.write(tmp_path, address)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://github.com/me/scalejax"
    for path in NOTEBOOKS:
        first = "".join(json.loads((tmp_path / "notebooks" / path.name).read_text())["cells"][0]["source"])
        assert first.count("Open in Colab") == 1
        assert f"(https://colab.research.google.com/github/me/scalejax/blob/main/notebooks/{path.name})" in first
    public_address.write(tmp_path, "")
    assert "urls" not in tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert not any(
        b"Colab" in content.split(b"SCALEJAX_INSTALL")[0] for name, content in files().items() if name.endswith("ipynb")
    )
