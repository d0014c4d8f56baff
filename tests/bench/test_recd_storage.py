"""What deduplicated reading rests on: factors as the closed form has them, and fewer bytes."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="runs in a checkout")


@pytest.fixture(scope="module")
def recd_storage():
    spec = importlib.util.spec_from_file_location("recd_storage", ROOT / "benchmarks" / "recd_storage.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_measured_factors_follow_the_closed_form(recd_storage):
    found = list(recd_storage.factors(sessions=2048))
    assert {(samples, repeat) for samples, repeat, *_ in found} == {
        (samples, repeat) for samples in (4, 16) for repeat in (0.0, 0.5, 0.8, 0.9, 0.95)
    }
    for _, _, measured, expected in found:
        assert measured == pytest.approx(expected, rel=0.03)


def test_clustering_and_leaving_repeats_out_save_bytes(recd_storage):
    before, whole, short = recd_storage.storage(30.0, "plain", sessions=256)
    assert short < whole < before
