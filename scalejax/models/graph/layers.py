"""What the networks have in common."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
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


class ReluNetwork(nnx.Module):
    """Layers of one kind: dropout before each, relu between them."""

    def __init__(
        self,
        layer: Callable[..., Any],
        sizes: list[int],
        dropout: float,
        rngs: nnx.Rngs,
        *,
        param_dtype: Any = jnp.float32,
        compute_dtype: Any = jnp.float32,
    ):
        self.layers = nnx.List(
            [
                layer(a, b, rngs, param_dtype=param_dtype, compute_dtype=compute_dtype)
                for a, b in itertools.pairwise(sizes)
            ]
        )
        self.dropout = dropout

    def __call__(self, x: jax.Array, graph: Graph | tuple[Graph, ...], *, key: jax.Array | None = None) -> jax.Array:
        """Logits.

        Args:
          x: float[M, F], features of the nodes that the first layer reads.
          graph: What every layer reads, or one graph a layer, outermost first.
          key: Drives dropout; None = evaluation.
        Returns:
          float[N, classes] of the rows of the last graph.
        """
        for l, (layer, read) in enumerate(zip(self.layers, layer_graphs(graph, len(self.layers)), strict=True)):
            x = nn.dropout(x, self.dropout, None if key is None else jax.random.fold_in(key, l))
            x = layer(x, read)  # M F -> N hidden
            if l + 1 < len(self.layers):
                x = jax.nn.relu(x)
        return x
