"""Files of users, which lie outside of the package, as modules."""

import importlib.util
import pathlib
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).parents[1] / "outside"


def load(name: str) -> Any:
    """The module of a file in `tests/outside`."""
    spec = importlib.util.spec_from_file_location(f"outside_{name.removesuffix('.py')}", FOLDER / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
