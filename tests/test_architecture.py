"""docs/architecture.md: its answers are where it says, its pictures are those of the imports, which go in no circle."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="runs in a checkout")


def answers():
    rows = re.findall(r"^\| (.+\?) \| `([\w/.]+)` \| `(\w+)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) >= 20
    return rows


def test_every_answer_is_in_its_file():
    for question, file, name in answers():
        text = (ROOT / file).read_text()
        assert re.search(rf"^ *(class|def) {name}\b", text, re.MULTILINE), f"where is {question} Not in {file}"


def test_files_of_the_walks_exist():
    text = DOCUMENT.read_text().partition("## Who imports whom")[0]
    files = {path.relative_to(ROOT / "scalejax").as_posix() for path in (ROOT / "scalejax").rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"tests/test_package.py"}
    assert len(named) > 25
    for name in named:
        assert any(f"/{file}".endswith("/" + name.removeprefix("scalejax/")) for file in files), name


def test_pictures_are_up_to_date_and_show_no_circle():
    pytest.importorskip("grimp")
    command = [sys.executable, "tools/draw_imports.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "architecture.md is up to date\n")
