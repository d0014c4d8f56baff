"""Scripts of `benchmarks/` as modules."""

import importlib
import pathlib
import sys

import pytest


@pytest.fixture(scope="module")
def scripts():
    """By name; they import one another."""
    folder = str(pathlib.Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(folder)
