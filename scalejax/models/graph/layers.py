"""What the networks have in common."""

from typing import Any

import jax

from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph.aggregation import Graph


def glorot(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Uniform in ± sqrt(6 / (rows + columns)) (Glorot and Bengio, 2010)."""
    limit = (6 / sum(shape)) ** 0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


def widths(schema: GraphSchema, layers: int, hidden: int) -> list[int]:
    """Width of the features, of what lies between layers, and of the logits.

    Raises:
      UserError: there is no layer.
    """
    if layers < 1:
        raise UserError(f"model.layers must be at least 1; got {layers}.")
    return [schema.features, *[hidden] * (layers - 1), schema.classes]


def layer_graphs(graph: Graph | tuple[Graph, ...], layers: int) -> tuple[Graph, ...]:
    """One graph a layer.

    Raises:
      UserError: there are more or fewer than layers.
    """
    graphs = graph if isinstance(graph, tuple) else (graph,) * layers
    if len(graphs) != layers:
        raise UserError(
            f"the model has {layers} layers and got {len(graphs)} graphs. Give data.fanouts one number a layer, "
            "outermost first."
        )
    return graphs
