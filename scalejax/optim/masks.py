"""Which parameters weight decay spares."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from scalejax.errors import UserError

NORMS_AND_BIASES = "(.*/)?(scale|bias)"
"""Paths of the scales of norms and of biases; those of scanned layers are stacked, and have two dimensions."""


def matrices(params: optax.Params, spared: str = NORMS_AND_BIASES, stacked: Mapping[str, int] | None = None) -> Any:
    """Whether each parameter is decayed: it has two dimensions or more, and its path is none of `spared`.

    Args:
      params: {path: array}, or any tree whose leaves end in a key.
      spared: Regular expression that names paths whole.
      stacked: {path: leading axes along which tensors lie beside each other}; they are no dimensions of a parameter.

    Returns:
      A tree of bools.
    """

    def is_matrix(path: tuple[object, ...], p: jax.Array) -> bool:
        name = path_of(path)
        return p.ndim >= 2 + (stacked or {}).get(name, 0) and not re.fullmatch(spared, name)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def path_of(keys: tuple[object, ...]) -> str:
    """The path of a parameter: the last key of {path: array}."""
    return str(getattr(keys[-1], "key", "")) if keys else ""


def check_paths(name: str, pattern: str) -> None:
    """Refuses what is no regular expression of paths."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name} must be a regular expression; got {pattern!r} ({error}).") from error
