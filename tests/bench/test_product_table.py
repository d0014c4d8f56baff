"""The table of the embedding product counts what a JUnit report says, and nothing that failed as passed."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "product_table.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout; here are no benchmarks")

NAME = "test_every_kind_equals_one_device_to_the_bit"
REPORT = f"""<testsuites><testsuite timestamp="2026-03-04T05:06:07">
<testcase classname="tests.parallel.embedding.test_kinds" name="{NAME}[row_wise-shard-sgd decoupled-True-8]"/>
<testcase classname="tests.parallel.embedding.test_kinds" name="{NAME}[row_wise-shard-sgd decoupled-False-2]">
<failure message="no"/></testcase>
<testcase classname="tests.parallel.embedding.test_kinds" name="{NAME}[grid-copy-adam-True-4]"/>
<testcase classname="tests.parallel.embedding.test_wire" name="test_a[1]"/>
<testcase classname="tests.parallel.embedding.test_wire" name="test_b"><error message="no"/></testcase>
<testcase classname="tests.parallel.embedding.test_wire" name="test_c"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("product_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_and_totals_are_those_of_the_report(script):
    lines = script.markdown(REPORT, "abc", "a device").splitlines()
    assert "a device, 2026-03-04, commit abc" in lines
    assert "Of 3 cases 2 passed, 1 failed, 0 skipped; cells are passed / all." in lines
    assert "| kind | sgd decoupled | adam |" in lines
    assert "| row_wise | 1 / 2 | - |" in lines
    assert "| grid, copies | - | 1 / 1 |" in lines
    assert "| test_wire | 1 | 1 | 1 |" in lines
    assert any("on 2, 4, 8 devices" in line for line in lines)


def test_a_report_without_the_product_is_refused(script):
    with pytest.raises(ValueError, match="no case"):
        script.markdown('<testsuite><testcase name="test_other"/></testsuite>', "abc", "a device")
