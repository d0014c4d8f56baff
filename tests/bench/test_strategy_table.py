"""The table of strategies counts what a JUnit report says, and refuses one without the products."""

import importlib.util
import pathlib
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "strategy_table.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout; here are no benchmarks")

CASES = (
    ("test_every_combination_equals_one_device[local FULL_SHARD-momentum, tied head-in parts-replica]", ""),
    ("test_every_combination_equals_one_device[local FULL_SHARD-momentum, tied head-whole-replica]", "<failure/>"),
    ("test_every_strategy_composes_with_tensor_and_pipeline_parallelism[ddp-whole-stage]", ""),
    ("test_equals_one_device_everywhere[DDP-mode291-replica2-fsdp4-2-clipped momentum]", ""),
    ("test_equals_one_device_for_fifty_steps[NO_SHARD-mode3-adamw]", "<error/>"),
    ("test_another[1]", "<skipped/>"),
)


def report(cases):
    each = "".join(f'<testcase name="{name}">{inner}</testcase>' for name, inner in cases)
    return f'<testsuites><testsuite timestamp="2026-03-04T05:06:07">{each}</testsuite></testsuites>'


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as for a script that is run there
    monkeypatch.delitem(sys.modules, "product_table", raising=False)
    spec = importlib.util.spec_from_file_location("strategy_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_and_totals_are_those_of_the_report(script):
    lines = script.markdown(report(CASES), "abc", "a device").splitlines()
    assert "a device, 2026-03-04, commit abc" in lines
    assert (
        "Of 5 cases 3 passed, 2 failed, 0 skipped; of the other tests of both files 0 passed, 0 failed, 1 skipped."
        in lines
    )
    assert "| local FULL_SHARD | 1 / 2 |" in lines
    assert "| | stage |" in lines
    assert "| DDP | 1 / 1 |" in lines
    assert "| NO_SHARD | 0 / 1 |" in lines


def test_a_report_that_lacks_a_product_is_refused(script):
    with pytest.raises(ValueError, match="no case of test_equals_one_device_for_fifty_steps"):
        script.markdown(report(CASES[:4]), "abc", "a device")


def test_cases_of_another_form_are_refused(script):
    with pytest.raises(ValueError, match="expected identifiers"):
        script.markdown(report([("test_equals_one_device_everywhere[odd]", "")]), "abc", "a device")
