"""scalejax: published systems for training and running large models, on TPU, GPU and CPU meshes.

Importing this package imports nothing heavy; each sub-package loads on first use:

    import scalejax
    scalejax.parallel.mesh.make_mesh(...)
"""

import importlib
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_SUBPACKAGES = (
    *("bench", "cli", "compat", "configs", "data", "inference", "kernels", "models", "nn", "numerics", "optim"),
    *("parallel", "plan", "surgery", "train"),
)

__all__ = ["__version__", *_SUBPACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from scalejax import bench as bench
    from scalejax import cli as cli
    from scalejax import compat as compat
    from scalejax import configs as configs
    from scalejax import data as data
    from scalejax import inference as inference
    from scalejax import kernels as kernels
    from scalejax import models as models
    from scalejax import nn as nn
    from scalejax import numerics as numerics
    from scalejax import optim as optim
    from scalejax import parallel as parallel
    from scalejax import plan as plan
    from scalejax import surgery as surgery
    from scalejax import train as train


def __getattr__(name: str) -> types.ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"scalejax.{name}")
    raise AttributeError(f"module 'scalejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
