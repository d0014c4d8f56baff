"""Documents name things that exist."""

import ast
import collections
import importlib
import json
import pathlib
import re
import textwrap

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


STATED = {
    "a date": r"\b20\d\d-\d\d(-\d\d)?\b",
    "a device": r"AMD EPYC|Intel|Apple M\d|NVIDIA \w+|\b[HAB]\d00\b|\bTPU\b|\bv\d[ep]:\d",
}
COMMANDS = {
    r"python (benchmarks/\w+\.py)": "{}",
    r"scalejax bench (\w+)": "scalejax/bench/cases/{}.py",
    r"scalejax (convert|plan|quantize|shard|train|eval|export|precision)\b": "scalejax/cli/commands/{}.py",
    r"pytest [^`\n]*?(tests/[\w/]+(?:\.py)?)": "{}",
}
"""Pattern of a command -> the file that is run."""


def lacking(text):
    """What a file of results does not say of how, when and on what it was measured."""
    found = [what for what, pattern in STATED.items() if not re.search(pattern, text)]
    run = [form.format(name) for pattern, form in COMMANDS.items() for name in re.findall(pattern, text)]
    found += [] if run else ["a command"]
    return found + [path for path in run if not (ROOT / path).exists()]


def test_every_result_says_how_when_and_on_what_it_was_measured():
    documents = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    assert len(documents) > 20
    assert {document.name: lacking(document.read_text()) for document in documents} == {
        document.name: [] for document in documents
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("`scalejax bench recd` on an AMD EPYC, 2026-11-22", []),
        ("`scalejax bench recd` on an AMD EPYC", ["a date"]),
        ("`scalejax bench recd`, 2026-11-22, with the CPU of a laptop", ["a device"]),
        ("measured by scalejax on an AMD EPYC, 2026-11-22", ["a command"]),
        ("`python benchmarks/gone.py` on an AMD EPYC, 2026-11-22", ["benchmarks/gone.py"]),
    ],
)
def test_a_result_that_does_not_say_so_is_found(text, wanted):
    assert lacking(text) == wanted


def test_quality_stands_beside_baselines_that_are_not_deep_and_has_its_spread_over_seeds():
    text = (ROOT / "benchmarks" / "results" / "quality.md").read_text()
    section = text.split("## Random split")[1].split("##")[0]
    rows = {line.split("|")[1].strip(): line for line in section.splitlines() if line.startswith("| ")}
    assert {"cross + FM", "Wukong", "DCNv2", "DLRM", "logistic regression", "gradient boosting"} <= set(rows)
    assert "±" in rows["Wukong"]
    assert "±" in rows["DCNv2"]


def test_the_meaning_of_a_gradient_is_stated():
    text = " ".join(
        (ROOT / "docs" / "parallelism.md").read_text().split("## What a gradient is")[1].split("## ")[0].split()
    )
    for statement in (
        "mean over the global batch",
        "one update with the *sum*",
        "synchronous",
        "times w / L",
        "keep rows and states to the bit",
    ):
        assert statement in text


def test_every_test_in_a_document_exists():
    """FILE::TEST, by the functions of the file; ::TEST is in some file that the document names."""
    files = collections.defaultdict(str)  # several folders have a test_layers.py
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.stem] += path.read_text()
    for document in (ROOT / "docs").glob("*.md"):
        text = document.read_text()
        named = re.findall(r"`(?:tests/[\w/]*?)?(test_\w+)?::(test_\w+)", text)
        known = "".join(files[file] for file, _ in named if file)
        for file, test in named:
            assert f"def {test}(" in (files[file] if file else known), f"{document.name}: {file}::{test}"


def _python_of(path: pathlib.Path) -> list[str]:
    """The code cells of a notebook, the Python blocks of a document, or a script and the code in its strings."""
    text = path.read_text()
    if path.suffix == ".py":
        texts = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return [text, *(code for code in map(textwrap.dedent, texts) if "import" in code and _parses(code))]
    if path.suffix == ".ipynb":
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def _imported(code: str) -> list[tuple[str, str | None]]:
    """(module, name) of each import of scalejax in `code`; name is None for `import module`."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scalejax":
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] == "scalejax"]
    return found


def _exists(module: str, name: str | None) -> bool:
    try:
        package = importlib.import_module(module)
        if name is not None and not hasattr(package, name):
            importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("scalejax")  # a peer that is not installed here
    return True


def _with_python() -> list[pathlib.Path]:
    """Nothing else finds a name that has moved here, before CI executes the notebook or someone runs the benchmark."""
    patterns = ("notebooks/*.ipynb", "docs/*.md", "*.md", "benchmarks/*.py", "tests/**/*.py")
    made_up = ("test_documents.py", "test_affected.py")  # their texts import what never was
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.name not in made_up)


@pytest.mark.slow
@pytest.mark.parametrize("path", _with_python(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_outside_of_the_package_exists(path):
    lacking = [each for code in _python_of(path) for each in _imported(code) if not _exists(*each)]
    assert not lacking


@pytest.mark.parametrize(
    ("code", "exists"),
    [
        ("from scalejax.plan import explain_sharding", True),
        ("from scalejax.train import loop", True),
        ("from scalejax.train import bootstrap", False),
        ("import scalejax.train.loop", True),
        ("import scalejax.train.bootstrap", False),
    ],
)
def test_an_import_of_what_has_moved_is_found(code, exists):
    ((module, name),) = _imported(code)
    assert _exists(module, name) is exists
