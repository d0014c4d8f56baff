"""Documents name things that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="runs in a checkout; here are no documents")


def _rows() -> list[list[str]]:
    text = (ROOT / "docs" / "systems.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_systems_lists_all_29_in_order():
    assert [int(row[0]) for row in _rows()] == list(range(1, 30))


def test_every_path_in_a_document_exists():
    missing = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if not target.startswith(("http:", "https:")) and not (document.parent / target).exists():
                missing.append(f"{document.name}: {target}")
    assert not missing


def test_a_system_that_is_not_started_claims_no_home():
    for row in _rows():
        if row[4] == "not started":
            assert row[5:] == ["", ""], row


def test_a_system_with_a_home_has_recipe_and_test_under_one_stem():
    for row in _rows():
        for home in re.findall(r"\]\(\.\./(scalejax/models/[^)]+)\.py\)", row[5]):
            stem = home.removeprefix("scalejax/models/")
            assert (ROOT / "scalejax" / "configs" / f"{stem}.py").exists(), stem
            family, name = stem.split("/")
            assert (ROOT / "tests" / "models" / family / f"test_{name}.py").exists(), stem
