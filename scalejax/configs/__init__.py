"""Recipes: complete experiments as functions, found by their return annotation, changed by `--set path=value`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalejax.configs import discovery

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

__all__ = ["load"]


def load(recipe: str, sets: Sequence[str] = ()) -> "Experiment":
    """Builds the experiment of a recipe with its overrides applied.

    Args:
      recipe: A short name (`wukong`, `dlrm-flights`), `module:function`, `path.py:function`, or `path.py` alone for
        the first recipe of a file.
      sets: `path=value` each, applied in order.

    Raises:
      UserError: no such recipe, a broken file of the user, an unknown path or a value of the wrong type.
    """
    from scalejax.configs import overrides

    return overrides.apply(discovery.find(recipe).build(), sets)
