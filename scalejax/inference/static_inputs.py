"""Static scales of activations beside the weights that they meet."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.models.llm.mapping import LAYER, Entry
from scalejax.models.llm.packed import InputScale
from scalejax.numerics.quantized import static
from scalejax.numerics.quantized.rules import module_of
from scalejax.numerics.quantized.weights import StaticWeight


def attach(
    params: Mapping[str, Any],
    entries: Mapping[str, Entry],
    inputs: Mapping[str, InputScale],
    mesh: Mesh,
) -> dict[str, Any]:
    """Parameters by path, those whose inputs have static scales as `StaticWeight`.

    Args:
      params: {path: array, or `PackedWeight`}; of layers, those of all layers.
      entries: The table of parameters, by path.
      inputs: By the names of weights in the folder.
      mesh: On which all devices get the scales.

    Raises:
      UserError: of one matrix, the layers have inputs in several formats.
    """
    made = dict(params)
    for path, entry in entries.items():
        names = [entry.name]
        if entry.stacked:
            layers = jax.tree.leaves(params[path])[0].shape[0]
            names = [entry.name.replace(LAYER, str(layer)) for layer in range(layers)]
        found = [inputs.get(name) for name in names]
        formats: set[static.Format] = {own.format for own in found if own is not None}
        if len(formats) > 1:
            raise UserError(
                f"{path}: its layers multiply activations in {' and '.join(sorted(formats))}, and one program serves "
                "all of them. Quantize the model with one format of activations for all layers."
            )
        if formats:
            # 0 for layers whose inputs stay as they are.
            scales = np.asarray([0 if own is None else own.scale for own in found], np.float32)
            placed = jax.device_put(scales if entry.stacked else scales[0], NamedSharding(mesh, P()))
            made[path] = StaticWeight(array=params[path], scale=placed, format=formats.pop(), path=module_of(path))
    return made
