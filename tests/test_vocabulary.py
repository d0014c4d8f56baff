"""docs/vocabulary.md and the package speak of the same things by the same names."""

import ast
import collections
import json
import pathlib
import re
import subprocess

import pytest

import scalejax

PACKAGE = pathlib.Path(scalejax.__file__).parent
ROOT = PACKAGE.parent
DOCUMENT = ROOT / "docs" / "vocabulary.md"

TWICE = {"Adam", "Lamb", "Sgd"}
GIVEN_UP = {
    *("take_apart", "put_together", "cluster_rows", "poisoned_rows", "spill", "spilled", "spilled_ids", "dealt"),
    *("dealt_by_rows", "stow", "turns_of", "PackedIds", "MappedFeature", "EncodedExchange", "FormattedGather"),
    *("Journey", "journey", "journeys"),
}
"""Names that nothing has any more."""
TELL_OF_THEM = ("docs/vocabulary.md", "CHANGELOG.md", "docs/log.md", "tools/", "benchmarks/results/")
"""Documents that speak of what was."""


def sources():
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "bench"
    }


@pytest.mark.slow
def test_no_public_class_has_the_name_of_another():
    homes = collections.defaultdict(list)
    for file, tree in sources().items():
        own = re.fullmatch(r"kernels/\w+/blocks\.py", file)  # each kernel has its own
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not own:
                homes[node.name].append(file)
    twice = {name: files for name, files in homes.items() if len(files) > 1 and name not in TWICE}
    assert not twice


@pytest.mark.slow
def test_no_name_is_a_word_that_was_given_up():
    for file, tree in sources().items():
        for node in ast.walk(tree):
            defined = isinstance(node, ast.FunctionDef | ast.ClassDef)
            name = node.name if defined else node.arg if isinstance(node, ast.arg) else ""
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            assert name not in GIVEN_UP, f"{file}: {name}"


def code_in(path):
    """What a document or a notebook shows as code: code cells, fenced blocks and text in backticks."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        return "\n".join([*code, code_of(text)])
    return text if path.suffix == ".py" else code_of(text)


def code_of(text):
    fenced = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`[^`\n]+`", text)])


@pytest.mark.skipif(not DOCUMENT.exists(), reason="runs in a checkout")
def test_documents_notebooks_and_benchmarks_show_no_name_that_was_given_up():
    listed = ["git", "ls-files", "*.md", "notebooks/*.ipynb", "benchmarks/*.py", "examples/*.py"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    looked_at = [file for file in files if not file.startswith(TELL_OF_THEM)]
    assert {"README.md", "notebooks/llm.ipynb", "docs/architecture.md"} <= set(looked_at)
    for file in looked_at:
        found = set(re.findall(r"\w+", code_in(ROOT / file))) & GIVEN_UP
        assert not found, f"{file}: {', '.join(sorted(found))}"


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
