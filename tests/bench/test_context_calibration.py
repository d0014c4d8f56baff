"""The script that measures pass-KV beside pass-Q, on sizes that take seconds."""

import importlib.util
import json
import pathlib
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("context_calibration", ROOT / "benchmarks" / "context_calibration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["context_calibration"] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_measures_fits_and_writes(bench: Any) -> None:
    results = bench.measure((4, 9), (0, 33), 64, 1)
    found = json.loads(bench.to_json(results, "a test"))
    assert [(m["new"], m["cached"]) for m in found["measurements"]] == [(4, 0), (4, 33), (9, 0), (9, 33)]
    assert found["calibration"]["measured"] == 4
    text = bench.markdown(results, "a test")
    assert text.count("| pass-KV |") + text.count("| pass-Q |") >= 5  # two a row, one in the head
    assert "\n4 rows (" in text


@pytest.mark.skipif(not (ROOT / "benchmarks" / "results" / "context_calibration.json").exists(), reason="not measured")
def test_what_was_written_is_decided_as_it_says(bench: Any) -> None:
    """The line in the file is the fit of the rows in the file, and decides as many of them rightly."""
    written = json.loads((ROOT / "benchmarks" / "results" / "context_calibration.json").read_text())
    rows = [bench.Measurement(**row) for row in written["measurements"]]
    fit = bench.dataclasses.asdict(bench.calibrate(rows))
    if fit["choice"]["pass_kv_from"] == float("inf"):
        fit["choice"]["pass_kv_from"] = None
    assert written["calibration"]["right"] == fit["right"]
    assert written["calibration"]["choice"] == pytest.approx(fit["choice"])
