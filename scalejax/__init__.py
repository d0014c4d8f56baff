"""scalejax: published systems for training and running large models, on TPU, GPU and CPU meshes.

Importing this package imports nothing heavy; each sub-package loads on first use:

    import scalejax
    scalejax.parallel.mesh.make_mesh(...)
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBPACKAGES = (
    *("bench", "cli", "compat", "configs", "data", "inference", "kernels", "models", "nn", "numerics", "optim"),
    *("parallel", "plan", "surgery", "train"),
)

__all__ = ["__version__", *_SUBPACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from scalejax import (
        bench,
        cli,
        compat,
        configs,
        data,
        inference,
        kernels,
        models,
        nn,
        numerics,
        optim,
        parallel,
        plan,
        surgery,
        train,
    )


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"scalejax.{name}")
    raise AttributeError(f"module 'scalejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
