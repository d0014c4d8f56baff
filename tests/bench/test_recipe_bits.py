"""What compares recipes with another commit finds every planted difference, and never passes for want of something."""

import importlib.util
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "recipe_bits.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout; here are no benchmarks")


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("recipe_bits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(**changes: Any) -> dict[str, Any]:
    """A run of three steps; `changes` are of the record of its second window, or replace "arrays" or "records"."""
    arrays = {
        "params.layers/0/kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "tables.item.rows_body": np.arange(8, dtype=ml_dtypes.bfloat16).reshape(4, 2),
        "optimizer.count": np.int32(3),
        "key": np.array([7, 8], np.uint32),
    }
    windows = [
        {"kind": "window", "step": step, "split": "train", "logloss": 0.7 / step, "auc": None, "nonfinite": 0}
        for step in (1, 2, 3)
    ]
    evaluation = {"kind": "evaluation", "step": 3, "split": "test", "logloss": 0.25}
    result = {"records": [*windows, evaluation], "arrays": arrays, "mesh": "fsdp=8"}
    result |= {name: changes.pop(name) for name in ("arrays", "records") if name in changes}
    windows[1] |= changes
    return result


def with_array(name: str, change: Any) -> dict[str, Any]:
    """A run with one array changed in place, or replaced by what `change` returns."""
    arrays = ran()["arrays"]
    array = np.array(arrays[name])
    replaced = change(array)
    return ran(arrays=arrays | {name: array if replaced is None else replaced})


def flip(index: int) -> Any:
    """Changes the last bit of an element."""

    def change(array: np.ndarray) -> None:
        array.reshape(-1).view(f"u{array.dtype.itemsize}")[index] ^= 1

    return change


def test_equal_runs_are_equal(script: Any) -> None:
    found = script.compare(ran(), ran())
    assert (found["verdict"], found["notes"], found["steps"]) == ("equal", [], 3)
    assert found["records"]["differing"] == found["arrays"]["differing"] == {}
    assert "window train: logloss" in found["records"]["common"]
    row = {"recipe": "a", "devices": 8, **found}
    assert script.succeeded([row])
    assert "| a | 8 | fsdp=8 | 3 | 6 / 6 | 4 / 4 | 0 | equal |" in script.markdown([row])


@pytest.mark.parametrize("name", ["params.layers/0/kernel", "tables.item.rows_body", "optimizer.count", "key"])
def test_one_bit_of_an_array_is_found(script: Any, name: str) -> None:
    last = np.size(ran()["arrays"][name]) - 1
    found = script.compare(ran(), with_array(name, flip(last)))
    assert found["verdict"] == "differs"
    assert list(found["arrays"]["differing"]) == [name]
    difference = found["arrays"]["differing"][name]
    assert difference["what"].startswith(f"1 of {last + 1} elements of ")
    assert difference["what"].endswith(f"the first at index {last}")
    assert 0 < difference["largest"] < 0.1 or name in ("optimizer.count", "key")
    elsewhere = {"recipe": "a", "devices": 8, **script.compare(ran(), ran())}
    assert not script.succeeded([{"recipe": "a", "devices": 1, **found}, elsewhere])


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"logloss": np.nextafter(0.35, 1).item()}, "window train: logloss"),
        ({"auc": 0.5}, "window train: auc"),
        ({"nonfinite": 1}, "window train: nonfinite"),
        ({"nonfinite": 0.0}, "window train: nonfinite"),
        ({"step": 4}, "window train: step"),
    ],
)
def test_one_value_of_a_record_is_found(script: Any, changes: dict[str, Any], differing: str) -> None:
    found = script.compare(ran(), ran(**changes))
    assert found["verdict"] == "differs"
    assert list(found["records"]["differing"]) == [differing]
    row = {"recipe": "a", "devices": 8, **found}
    assert not script.succeeded([row])
    assert f"- {differing}: " in script.markdown([row])


def test_zeros_of_two_signs_and_other_dtypes_or_shapes_differ(script: Any) -> None:
    zero = {"x": np.zeros(2, np.float32)}
    for other in (-zero["x"], zero["x"].astype(np.float16), zero["x"][:1], zero["x"][None], np.zeros(2, np.int32)):
        assert list(script.compare_arrays(zero, {"x": other})["differing"]) == ["x"]
        (difference,) = script.compare_arrays({"x": other}, zero)["differing"].values()
        assert not difference["allowed"]


def test_not_a_number_equals_itself_and_no_number(script: Any) -> None:
    nan, one = {"x": np.array([np.nan, 1.0])}, {"x": np.array([2.0, 1.0])}
    assert not script.compare_arrays(nan, nan)["differing"]
    (difference,) = script.compare_arrays(nan, one, allowed=0.9)["differing"].values()
    assert difference["largest"] is None
    assert not difference["allowed"]


def test_names_on_one_side_are_listed_and_not_compared(script: Any) -> None:
    arrays = ran()["arrays"]
    old, new = {**arrays, "before": np.ones(1)}, {**arrays, "after": np.ones(1)}
    found = script.compare(ran(arrays=old), ran(arrays=new, ratio=1.0))
    assert found["verdict"] == "equal"
    assert (found["arrays"]["only_base"], found["arrays"]["only_here"]) == (["before"], ["after"])
    assert found["records"]["only_here"] == ["window train: ratio"]
    page = script.markdown([{"recipe": "a", "devices": 1, **found}])
    assert "- only base: before" in page
    assert "- only here: after" in page


def test_renamed_arrays_are_compared(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "RENAMED", {r"^tables\.(\w+)\.rows_body$": r"rows/\1"})
    arrays = ran()["arrays"]
    renamed = {name.replace("tables.item.rows_body", "rows/item"): array for name, array in arrays.items()}
    assert script.compare(ran(), ran(arrays=renamed))["arrays"]["common"] == sorted(renamed)
    found = script.compare(ran(), ran(arrays=renamed | {"rows/item": renamed["rows/item"] + 1}))
    assert list(found["arrays"]["differing"]) == ["rows/item"]
    monkeypatch.setattr(script, "RENAMED", {".*": "all"})
    with pytest.raises(ValueError, match="same name"):
        script.compare(ran(), ran())


def test_nothing_in_common_is_no_success(script: Any) -> None:
    arrays = script.compare(ran(arrays={"before": np.ones(1)}), ran())
    assert (arrays["verdict"], arrays["notes"]) == ("differs", ["no array is on both sides"])
    renamed = [{key.replace("logloss", "bce"): x for key, x in record.items()} for record in ran()["records"]]
    losses = script.compare(ran(), ran(records=renamed))
    assert (losses["verdict"], losses["notes"]) == ("differs", ["no loss of every step is on both sides"])
    once = ran(records=[*renamed[:2], *ran()["records"][2:]])
    assert script.compare(once, once)["notes"] == ["no loss of every step is on both sides"]
    fewer = script.compare(ran(), ran(records=ran()["records"][1:]))
    assert fewer["verdict"] == "differs"
    assert not script.succeeded([])


def test_an_allowance_is_of_the_largest_element_and_of_floats(script: Any) -> None:
    def smaller(array: np.ndarray) -> None:
        array[0, 1] *= 1 + 1e-4  # of -0.82, where the largest is 1

    near = with_array("params.layers/0/kernel", smaller)
    (difference,) = script.compare(ran(), near)["arrays"]["differing"].values()
    assert difference["relative"] == pytest.approx(0.82e-4, rel=0.01)
    allowed = script.compare(ran(), near, 1e-4)
    assert allowed["verdict"] == "allowed"
    assert "allowed" in script.markdown([{"recipe": "a", "devices": 1, **allowed}]).splitlines()[-1]
    assert script.succeeded([{"recipe": "a", "devices": 1, **allowed}])
    assert script.compare(ran(), near, 0.8e-4)["verdict"] == "differs"
    assert script.compare(ran(), ran(logloss=0.35 * (1 + 1e-6)), 1e-6)["verdict"] == "allowed"
    assert script.compare(ran(), ran(logloss=0.35 * (1 + 1e-5)), 1e-6)["verdict"] == "differs"
    assert script.compare(ran(), with_array("key", flip(0)), 0.9)["verdict"] == "differs"
    assert script.compare(ran(), with_array("tables.item.rows_body", flip(7)), 0.01)["verdict"] == "allowed"


def test_a_run_that_fails_on_one_side_is_a_difference_and_one_refused_on_both_is_not(script: Any) -> None:
    refused = {"error": "UserError: batch_size 9 does not divide", "refused": True}
    crashed = {"error": "Aborted (exit status -6)", "refused": False}
    assert script.compare(refused, refused)["verdict"] == "refused"
    for pair in ((refused, ran()), (ran(), refused), (crashed, crashed), (refused, crashed), (ran(), crashed)):
        assert script.compare(*pair)["verdict"] == "failed"
    one, eight = ({"recipe": "a", "devices": count} for count in (1, 8))
    assert script.succeeded([one | script.compare(ran(), ran()), eight | script.compare(refused, refused)])
    assert not script.succeeded([eight | script.compare(refused, refused)])
    assert not script.succeeded([one | script.compare(ran(), ran()), eight | script.compare(refused, ran())])
    page = script.markdown([eight | script.compare(refused, refused)])
    assert "- base: UserError: batch_size 9 does not divide" in page
