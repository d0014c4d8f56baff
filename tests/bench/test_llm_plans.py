"""Committed tables about plans of language models are what their commands print."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PLANS = ROOT / "benchmarks" / "results" / "llm_plans"


def _output(script, *arguments):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_predictions_are_those_of_the_model():
    assert _output("llm_plans.py") == (ROOT / "benchmarks" / "results" / "llm_plans.md").read_text()


@pytest.mark.slow
def test_the_table_of_plans_in_the_documents_is_that_of_the_stored_plans():
    document = (ROOT / "docs" / "parallelism.md").read_text()
    table = document.partition("<!-- benchmarks/plan_table.py -->\n")[2].partition("\n\n")[0]
    arguments = (
        document.partition("python benchmarks/plan_table.py ")[2].partition("\n```")[0].replace("\\\n", " ").split()
    )
    assert len(list(PLANS.glob("*.json"))) == len(arguments) > 0
    assert _output("plan_table.py", *arguments).strip() == table.strip()


@pytest.mark.slow
def test_the_plans_of_serving_are_those_of_the_arithmetic():
    assert _output("llm_serving_plans.py") == (ROOT / "benchmarks" / "results" / "llm_serving_plans.md").read_text()
