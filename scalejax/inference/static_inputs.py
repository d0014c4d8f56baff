"""Static scales of activations beside the weights that they meet."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.models.llm.mapping import Entry
from scalejax.models.llm.packed import InputScale
from scalejax.numerics.quantized import static
from scalejax.numerics.quantized.rules import module_of
from scalejax.numerics.quantized.weights import StaticWeight


def attach(
    params: Mapping[str, Any],
    entries: Mapping[str, Entry],
    sizes: Mapping[str, int],
    inputs: Mapping[str, InputScale],
    mesh: Mesh,
) -> dict[str, Any]:
    """Parameters by path, those whose inputs have static scales as `StaticWeight`.

    Args:
      params: {path: array, or `PackedWeight`}; of layers, those of all layers.
      entries: The table of parameters, by path.
      sizes: Of its axes.
      inputs: By the names of weights in the folder.
      mesh: On which all devices get the scales.

    Raises:
      UserError: of one matrix, the layers have inputs in several formats.
    """
    made = dict(params)
    for path, entry in entries.items():
        layers = jax.tree.leaves(params[path])[0].shape[:1] if entry.stacked else ()
        experts = (sizes[entry.ours()[0]],) if entry.spread else ()
        found = [inputs.get(name) for name, _, _ in entry.tensors(layers[0] if layers else 1, sizes)]
        formats: set[static.Format] = {own.format for own in found if own is not None}
        if len(formats) > 1:
            raise UserError(
                f"{path}: its layers multiply activations in {' and '.join(sorted(formats))}, and one program serves "
                "all of them. Quantize the model with one format of activations for all layers."
            )
        if formats:
            # 0 for layers, and experts, whose inputs stay as they are.
            scales = np.asarray([0 if own is None else own.scale for own in found], np.float32)
            placed = jax.device_put(scales.reshape(layers + experts), NamedSharding(mesh, P()))
            made[path] = StaticWeight(array=params[path], scale=placed, format=formats.pop(), path=module_of(path))
    return made
