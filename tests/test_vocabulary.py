"""docs/vocabulary.md and the package speak of the same things by the same names."""

import ast
import collections
import pathlib
import re

import pytest

import scalejax

PACKAGE = pathlib.Path(scalejax.__file__).parent
ROOT = PACKAGE.parent
DOCUMENT = ROOT / "docs" / "vocabulary.md"

TWICE = {"Adam", "Sgd"}
GIVEN_UP = ("take_apart", "put_together", "cluster_rows", "poisoned_rows", "spill", "spilled_ids", "dealt", "turns_of")
"""Words that no public name has any more."""


def sources():
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "bench"
    }


def test_no_public_class_has_the_name_of_another():
    homes = collections.defaultdict(list)
    for file, tree in sources().items():
        own = re.fullmatch(r"kernels/\w+/(blocks|cases)\.py", file)  # each kernel has its own
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not own:
                homes[node.name].append(file)
    twice = {name: files for name, files in homes.items() if len(files) > 1 and name not in TWICE}
    assert not twice


def test_no_name_is_a_word_that_was_given_up():
    for file, tree in sources().items():
        for node in ast.walk(tree):
            defined = isinstance(node, ast.FunctionDef | ast.ClassDef)
            name = node.name if defined else node.arg if isinstance(node, ast.arg) else ""
            assert name not in GIVEN_UP, f"{file}: {name}"


@pytest.mark.skipif(not DOCUMENT.exists(), reason="runs in a checkout")
def test_every_term_stands_once_and_its_file_exists():
    text = DOCUMENT.read_text().partition("## Names that are twice")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(scalejax/[\w/.]+)` \|$", text, re.MULTILINE)
    assert len(rows) > 50
    terms = [term for term, _ in rows]
    assert len(set(terms)) == len(terms)
    for term, file in rows:
        assert (ROOT / file).is_file(), f"{term}: {file}"
        for name in re.findall(r"`([A-Z]\w+)`", term):
            assert re.search(rf"^(class )?{name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{name}: {file}"
